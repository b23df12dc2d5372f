"""Dumps of processes with changed titles, such as inference servers and Ray. A launcher or server is not a rank."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hangwatch import words
from hangwatch.explain import traces
from tests.conftest import DATA
from tests.unit.test_explain_stacks import explained

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = tomllib.loads((DATA / "servers.toml").read_text())
CASES = TABLE["case"]


def pyspy_text(process: dict[str, Any]) -> list[str]:
    return [
        f"Process {process['pid']}: {process['title']}",
        "Python v3.12.4 (/usr/bin/python3.12)",
        "",
        f'Thread {process["pid"]} (idle): "MainThread"',
        *(f"    {frame}" for frame in TABLE["stacks"][process["stack"]]),
        "",
    ]


def sources(case: dict[str, Any]) -> list[tuple[str, list[str]]]:
    texts = [(process["pid"], pyspy_text(process)) for process in case["processes"]]
    if case.get("files"):
        return [(f"dumps/{pid}.txt", text) for pid, text in texts]
    return [("dump.txt", [line for _, text in texts for line in text])]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_of_servers_toml_is_explained(case: dict[str, Any]) -> None:
    found = traces.collect(sources(case))
    verdict, _ = explained(found)
    assert [rank.pid for rank in verdict.named] == case.get("named", []), verdict.message
    assert [rank.pid for rank in verdict.first_look] == case.get("check", []), verdict.message
    titles = {process["pid"]: process["title"] for process in case["processes"]}
    for rank in (*verdict.named, *verdict.first_look):
        if "--" not in titles[rank.pid]:
            name = f"{titles[rank.pid]} (pid {rank.pid})"
            assert words.name_ranks([rank]) == name
            assert name in verdict.message
    notes = " ".join(found.notes)
    for pid in case.get("not_ranks", ()):
        assert f"pid {pid} (" in notes
        assert pid not in {rank.id.pid for rank in found.ranks}
