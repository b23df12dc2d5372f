"""The output of each command with --json matches its schema in docs/json.md."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest

from hangwatch import cli, store
from tests import samples
from tests.commands import hangwatch
from tests.conftest import wait_for
from tests.integration import targets
from tests.real_daemon import RealDaemon
from tests.schemas import DOCS

PAGE = (DOCS / "json.md").read_text()
SCHEMA_OF = dict(re.findall(r"^\| `hangwatch (\w+) --json` .*\(([\w.]+\.schema\.json)\)", PAGE, re.MULTILINE))

VERSIONS = {"report": 4, "status": 3, "dump": 2, "explain": 2, "merge": 2}  # versions other than 1


def printed(*arguments: str, code: int = 0) -> Any:
    """Run a command with --json and check its output against the schema. Return the decoded output."""
    done = hangwatch(*arguments, "--json", LD_LIBRARY_PATH="")
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    schema = json.loads((DOCS / SCHEMA_OF[arguments[0]]).read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    assert found["schema_version"] == VERSIONS.get(arguments[0], 1)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of an incident. The configuration `tmp_path/hangwatch.toml` names its store."""
    (tmp_path / "hangwatch.toml").write_text(f'[store]\ndirectory = "{tmp_path}"\n')
    yield store.open_writable(tmp_path).save(samples.loader_hang(), {})


def test_the_page_names_every_command_that_prints_json() -> None:
    context = click.Context(cli.hangwatch)
    commands = {name: cli.hangwatch.get_command(context, name) for name in cli.hangwatch.list_commands(context)}
    printing = {
        name for name, command in commands.items() if any("--json" in parameter.opts for parameter in command.params)
    }
    assert set(SCHEMA_OF) == printing


def test_explain_and_merge_print_answers(folder: Path) -> None:
    explained, merged = printed("explain", str(folder)), printed("merge", str(folder))
    assert [rank["rank"] for rank in explained["verdict"]["named"]] == [7]
    assert explained["job"] == merged["job"]
    assert merged["job"]["job_id"] == "2180718"


def test_dump_prints_an_answer_for_each_job(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        dumped = printed("dump", "--pid", str(pid))
    (job,) = dumped["jobs"]
    assert job["groups"][0]["members"][0]["pid"] == pid
    assert any("asleep" in frame for frame in job["groups"][0]["frames"])
    (rank,) = job["capture"]["ranks"]
    assert rank["rounds"][0]["threads"]


def test_report_and_incidents_print_what_is_kept(folder: Path, tmp_path: Path) -> None:
    assert printed("report", str(folder))["incident_id"] == folder.name
    listed = printed("incidents", "--config", str(tmp_path / "hangwatch.toml"))
    assert [row["folder"] for row in listed["incidents"]] == [folder.name]


def test_check_prints_its_results(tmp_path: Path) -> None:
    assert [row["check"] for row in printed("check", "memory_pressure", "--fail-on", "critical")["checks"]] == [
        "memory_pressure"
    ]


def test_status_prints_what_the_daemon_sees(tmp_path: Path) -> None:
    with RealDaemon(tmp_path / "hw", {**os.environ, "LD_LIBRARY_PATH": ""}) as daemon:
        wait_for(lambda: daemon.samples("hangwatch_check_status", check="fd_limit"), "a check")
        seen = printed("status", "--url", f"http://127.0.0.1:{daemon.port}")
    assert {check["check"] for check in seen["checks"]} >= {"fd_limit"}
