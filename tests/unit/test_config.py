"""Bad configuration is told by file, section, key and what is allowed; good configuration is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[detector]\nhold_secs = 3", ["f.toml", "[detector]", "'hold_secs'", "did you mean 'hold_seconds'?"]),
        ('[detector]\nhold_seconds = "x"', ["[detector]", "hold_seconds", "a number, from 1, to 86400"]),
        ("[detector]\nquorum = 3", ["[detector]", "quorum", "above 0, to 1"]),
        ("[detector]\nhold_seconds = true", ["[detector]", "hold_seconds", "a number"]),
        ("[http]\nport = 99999", ["[http]", "port", "a whole number, from 0, to 65535"]),
        ('[log]\nlevel = "LOUD"', ["[log]", "level", "'DEBUG' | 'INFO' | 'WARNING' | 'ERROR'"]),
        ("[detecter]\nx = 1", ["'detecter'", "did you mean 'detector'?"]),
        ("gpu = 3", ["gpu", "object"]),
        ("[detector", ["not valid TOML"]),
        ('[[activities.rules]]\nactivity = "a"', ["activities.rules", "function"]),
        (
            '[[activities.rules]]\nactivity = "a"\nfunction = "f"\nfille = "g"',
            ["activities.rules", "'fille'", "'file'"],
        ),
    ],
)
def test_errors_teach(text: str, expected: list[str]) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.parse(text, "f.toml")
    for word in expected:
        assert word in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"none\.toml.*cannot be read"):
        config.load(tmp_path / "none.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[log]\nlevel = "\xe9"')
    with pytest.raises(config.ConfigError, match="UTF-8"):
        config.load(latin)


def test_the_sample_is_the_defaults() -> None:
    assert config.parse(config.sample(), "sample") == config.Settings()


def test_every_setting_says_what_it_is_for() -> None:
    bare = [
        line
        for line in config.sample().splitlines()
        if " = " in line
        and not line.startswith("#")
        and line.split("# ")[1].startswith(("a number", "a whole", "a text"))
    ]
    assert bare == []


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        config.Settings().detector.hold_seconds = 3  # type: ignore[misc]


@given(st.text(max_size=200))
def test_any_text_is_settings_or_a_config_error(text: str) -> None:
    try:
        settings = config.parse(text, "fuzz")
    except config.ConfigError as error:
        assert str(error).startswith("fuzz: ")
    else:
        assert isinstance(settings, config.Settings)


values = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.booleans(), st.just([]), st.just({})
)


@given(
    st.sampled_from(["gpu", "detector", "capture", "store", "http", "log", "nothing"]),
    st.one_of(st.sampled_from(["port", "hold_seconds", "quorum", "rounds", "directory", "level"]), st.text(max_size=6)),
    values,
)
def test_any_value_is_taken_or_explained(section: str, key: str, value: object) -> None:
    try:
        config.decode({section: {key: value}}, config.Settings, "fuzz", ())
    except config.ConfigError as error:
        assert "fuzz: " in str(error)
        assert section in str(error)
