"""The configuration, the state folder and the alert rules of an older release still work.

Commit fa48916 made tests/data/fa48916. `hangwatch.toml` has every key of that release with a non-default value, and
a rule for each of its activities; its `config --check` accepts the file. `state.tar.gz` is its state folder after
three hangs of real torchrun jobs: one job recovered, one ended, and one was still hung when the daemon was killed.
Paths and the node's name were replaced, and so were the words that were renamed before the first publication. The
incidents were rewritten in form 4, the first form of a release.
`hangwatch.rules.yaml.gz` contains its alert rules.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.checks.framework import registry
from hangwatch.formats import incident_file
from hangwatch.model import JobState
from hangwatch.stacks import activity, activity_table
from hangwatch.store.incident_folders import Store
from tests.commands import hangwatch, write_config
from tests.deploy import promql
from tests.deploy.test_names import exported_by

DATA = Path(__file__).parents[1] / "data/fa48916"
CONFIG = (DATA / "hangwatch.toml").read_text()
NODE = "gpu-07"

RENAMED: dict[str, str] = {}
"""Old name -> new name of renamed keys, sections and activities. The error about an old name gives the new name."""


def keys(table: dict[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each key of a configuration, except the rules of activities."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from keys(value, *path, key)
        elif (*path, key) != ("activities", "rules"):
            yield (*path, key), value


OLD_KEYS = dict(keys(msgspec.toml.decode(CONFIG)))
OLD_ACTIVITIES = [rule["activity"] for rule in msgspec.toml.decode(CONFIG)["activities"]["rules"]]


def test_configuration_of_old_release_is_accepted_as_a_whole() -> None:
    if RENAMED:
        pytest.skip("each key is tested alone: some have a new name")
    settings = config.parse(CONFIG, "hangwatch.toml")
    assert len(registry.settings_for(settings, "hangwatch.toml", CONFIG)) >= 20
    activity.load(settings.activities.rules)


@pytest.mark.parametrize("path", OLD_KEYS, ids=".".join)
def test_key_of_old_release_has_its_effect_or_names_its_successor(path: tuple[str, ...]) -> None:
    value, name = OLD_KEYS[path], ".".join(path)
    text = f"[{'.'.join(path[:-1])}]\n{path[-1]} = {json.dumps(value)}\n"
    if name in RENAMED:
        with pytest.raises(config.ConfigError, match=f"did you mean '{RENAMED[name]}'"):
            registry.settings_for(config.parse(text, "hangwatch.toml"), "hangwatch.toml", text)
        return
    settings = config.parse(text, "hangwatch.toml")
    section: Any = registry.settings_for(settings, "hangwatch.toml", text) if path[0] == "checks" else settings
    for step in path[1:] if path[0] == "checks" else path:
        section = section[step] if isinstance(section, dict) else getattr(section, step)
    assert msgspec.to_builtins(section) in (value, tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("name", OLD_ACTIVITIES)
def test_activity_of_old_release_is_known_or_names_its_successor(name: str) -> None:
    """If a rule has an unknown activity, it defines a new activity."""
    rule = config.ActivityRule(activity=name, function="ours")
    if name in RENAMED:
        with pytest.raises(config.ConfigError, match=RENAMED[name]):
            activity.load((rule,))
        return
    assert name in activity_table.built_in().activities
    activity.load((rule,))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fa48916")
    shutil.unpack_archive(DATA / "state.tar.gz", folder)
    return folder / "state"


def printed(*arguments: object) -> str:
    done = hangwatch(*arguments, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_incidents_of_old_release_are_listed_with_their_verdicts(state: Path, tmp_path: Path) -> None:
    settings = write_config(tmp_path, state)
    rows = json.loads(printed("incidents", "--config", settings, "--json"))["incidents"]
    assert [(row["state"], row["problem"], bool(row["message"])) for row in rows] == [
        ("hung", "", True),
        ("ended", "", True),
        ("recovered", "", True),
    ]


def test_incident_of_old_release_is_shown_and_explained(state: Path) -> None:
    for folder in sorted((state / "incidents").iterdir()):
        old = json.loads((folder / "incident.json").read_text())
        assert old["verdict"]["message"][:40] in " ".join(printed("report", folder).split())
        verdict = json.loads(printed("explain", folder, "--json"))["verdict"]
        assert verdict["named"] == [rank | {"title": None} for rank in old["verdict"]["named"]]
        assert len(verdict["check_first"]) == len(old["verdict"]["check_first"])


def leaves(value: object) -> Iterator[object]:
    """Yield the numbers and strings of a JSON value. true, false and null are too common to prove anything."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        yield value


def test_no_value_of_old_incident_is_lost(state: Path) -> None:
    for folder in sorted((state / "incidents").iterdir()):
        old = json.loads((folder / "incident.json").read_text())
        del old["schema_version"]
        today = set(leaves(json.loads(msgspec.json.encode(incident_file.load(folder)))))
        lost = [value for value in leaves(old) if value not in today]
        assert lost == []


def test_learned_baselines_of_old_release_are_kept(state: Path) -> None:
    for folder in sorted((state / "incidents").iterdir()):
        old = json.loads((folder / "incident.json").read_text())
        lines = [series.low_power_threshold_watts for series in incident_file.load(folder).power]
        assert lines == [series["low_power_threshold_watts"] for series in old["power"]]
        assert all(lines)


def test_incident_that_old_daemon_left_open_is_taken_up(state: Path) -> None:
    (incident,) = Store(state).left_open(NODE)
    assert incident.state is JobState.HUNG
    assert incident.captures[-1].ranks[1].rounds[-1].recorders


def test_store_of_old_release_can_be_written(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    store = Store(copy)
    store.make_writable()
    (incident,) = store.left_open(NODE)
    closed = replace(incident, state=JobState.ENDED, closed_unix_seconds=incident.opened_unix_seconds + 60)
    folder = store.save(closed, {})
    assert incident_file.load(folder).state is JobState.ENDED
    assert store.left_open(NODE) == ()
    assert len(store.summaries()) == 3


def test_alert_rules_of_old_release_find_their_metrics(tmp_path: Path) -> None:
    rules = gzip.decompress((DATA / "hangwatch.rules.yaml.gz").read_bytes()).decode()
    assert promql.unknown_names(exported_by(promql.ROOT, tmp_path), rules, []) == []
