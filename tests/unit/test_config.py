"""The configuration: errors name file, line, section, key and permitted values. Settings are frozen."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.formats import toml_file


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
def test_config_error_names_section_key_and_allowed_values(text: str, expected: list[str]) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.parse(text, "f.toml")
    for word in expected:
        assert word in str(error.value)


WRONG = """\
[detector]
hold_secs = 3  # no hold_seconds
quorum = 3

[hooks]
# per_minute = 5
on_hung = [
  "/bin/true",
  "per_minute",
]
per_minute = 0
[http]
external_url = "hangwatch.example.org"
[[activities.rules]]
activity = "a"
function = "f"
[[activities.rules]]
activity = "b"
"""


def refusal(text: str) -> config.ConfigError:
    with pytest.raises(config.ConfigError) as error:
        config.parse(text, "f.toml")
    return error.value


def test_all_config_errors_are_reported_with_their_lines() -> None:
    told = [line for line in str(refusal(WRONG)).splitlines() if not line.startswith("  ")]
    assert [line.split(": ")[0] for line in told] == [f"f.toml:{line}" for line in (2, 3, 11, 13, 17)]
    assert any("[detector]: unknown key 'hold_secs'" in line for line in told)
    assert any(line.startswith("f.toml:11: [hooks]: per_minute: ") for line in told)


def test_config_error_keeps_the_valid_settings() -> None:
    error = refusal("[detector]\nhold_seconds = 7\nquorum = 3\n[gpu]\nsample_seconds = 'x'\n")
    assert error.valid_settings.detector == config.Detector(hold_seconds=7.0)
    assert error.sections == {"detector", "gpu"}


def test_very_many_config_errors_are_cut() -> None:
    error = refusal("[detector]\n" + "".join(f"wrong_{number} = 1\n" for number in range(100)))
    assert len(error.problems) == toml_file.MOST_PROBLEMS + 1
    assert "more errors follow" in error.problems[-1]


def test_large_config_with_one_key_on_every_line_is_fast() -> None:
    text = "[activities]\nrules = [\n" + "# quorum\n{ quorum = 1 },\n" * 3000 + "]\n[detector]\nquorum = 3\n"
    assert toml_file.line_of(text, ("detector", "quorum")) is None
    assert "quorum" in str(refusal(text))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[gpu]\nhold_seconds = 3", "hold_seconds is a key of [detector]"),
        ("[http]\nweb_port = 3", "did you mean 'port'?"),
        ("[store]\ndir = 'x'", "did you mean 'directory'?"),
        ("[checks]\nxid = 3", "f.toml:2: [checks]: xid: Expected `object`"),
    ],
)
def test_unknown_key_gets_a_suggestion(text: str, hint: str) -> None:
    assert hint in str(refusal(text))


def test_config_error_shows_no_regular_expression() -> None:
    told = str(refusal("[http]\nexternal_url = 'node7:9836'"))
    assert "regex" not in told and "^" not in told
    assert "beginning with http:// or https://" in told and '"http://{node}:9836"' in told


@given(
    st.lists(
        st.sampled_from(["", "# a = 1", "a = 1", "b = [", "]", "[a]", "[c]", "a.b = 1", 'b = """', '"""']), max_size=12
    )
)
def test_line_of_key_is_where_the_key_begins(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        table = toml_file.parse(text, "f")
    except toml_file.TomlError:
        return
    for key in table:
        line = toml_file.line_of(text, (key,))
        assert line is not None
        assert key in lines[line - 1] and not lines[line - 1].startswith("#")


def test_unreadable_config_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"none\.toml.*cannot be read"):
        config.load(tmp_path / "none.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[log]\nlevel = "\xe9"')
    with pytest.raises(config.ConfigError, match="UTF-8"):
        config.load(latin)


def test_sample_limits_are_plain_numbers() -> None:
    text = config.sample()
    assert re.search(r"^max_bytes = .* from 1048576$", text, re.MULTILINE)
    assert re.search(r"^motion_cpu_ratio = .* from 0, to 1$", text, re.MULTILINE)
    assert re.search(r"^scan_budget_seconds = .* from 0\.1, to 60$", text, re.MULTILINE)
    assert re.findall(r"\d[eE][-+]?\d", text) == []


KEY_PARTS = st.sampled_from(["a", "-9_", '"b.c"', '"d\\"e"', "'f.g'"])


@given(
    st.integers(1, 3 * toml_file.MOST_PARTS).flatmap(lambda size: st.lists(KEY_PARTS, min_size=size, max_size=size)),
    st.sampled_from([".", " . ", "\t.", ". "]),
    st.sampled_from(["{} = 1", "[{}]", " [[ {} ]]", "x = {{{} = 1}}", "x = {{y = 1, {} = 1}}", "x = [{{ {} = 1}}]"]),
)
def test_key_of_many_parts_is_refused_in_every_form(parts: list[str], dot: str, form: str) -> None:
    keys = [f'"{number}"' if part == "a" else part for number, part in enumerate(parts)]
    text = "# first\n" + form.format(dot.join(keys))
    if len(parts) <= toml_file.MOST_PARTS:
        assert toml_file.parse(text, "f.toml")
        return
    with pytest.raises(toml_file.TomlError, match=r"^f\.toml:2: a key has more than 16 parts"):
        toml_file.parse(text, "f.toml")


@pytest.mark.parametrize(
    "text", ['x = "' + "a." * 40 + '"', "# " + "a." * 40, "x = [1" + ", 1.5" * 40 + "]", "x = 1" + "0" * 40]
)
def test_dots_outside_of_keys_are_not_counted(text: str) -> None:
    assert isinstance(toml_file.parse(text, "f.toml"), dict)


def test_sample_config_equals_the_defaults() -> None:
    assert config.parse(config.sample(), "sample") == config.Settings()


def test_every_setting_has_a_description() -> None:
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
def test_any_text_gives_settings_or_config_error(text: str) -> None:
    try:
        settings = config.parse(text, "fuzz")
    except config.ConfigError as error:
        assert str(error).startswith("fuzz:")
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
