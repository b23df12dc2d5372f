"""Dumps of processes with changed titles, such as inference servers and Ray. A launcher or server is not a rank."""

from __future__ import annotations

from typing import Any

import pytest

from hangwatch import words
from hangwatch.explain import traces
from tests.titled_processes import CASES, sources
from tests.unit.test_explain_stacks import explained


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


def test_one_dump_of_a_server_says_nothing_about_its_job() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    alone = [source for source in sources(case) if source[0] == "dumps/4122.txt"]
    verdict, text = explained(traces.collect(alone))
    assert verdict.message.startswith("VLLM::Worker_TP2 (pid 4122) is in the forward pass (read_table) at ")
    assert not [line for line in text.splitlines() if line.startswith(("Verdict", "Named", "Ranks", "Other nodes"))]
