"""Dumps of processes with changed titles, such as inference servers and Ray. A launcher or server is not a rank."""

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
    assert [rank.pid for rank in verdict.check_first] == case.get("check", []), verdict.message
    titles = {process["pid"]: process["title"] for process in case["processes"]}
    for rank in (*verdict.named, *verdict.check_first):
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


def test_dumps_of_servers_alone_ask_for_their_workers() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    servers = [source for source in sources(case) if source[0] in ("dumps/4100.txt", "dumps/4110.txt")]
    verdict, text = explained(traces.collect(servers))
    assert verdict.kind == "CannotTell"
    assert verdict.message.startswith("No rank can be named: none of these 2 processes is in a collective: pid 4100 ")
    assert "two paths" not in text
    assert "on an inference server, the workers of the GPUs" in verdict.next_step


def test_rank_to_check_first_in_text_is_not_settled_by_one_dump() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    once, text = explained(traces.collect(sources(case)))
    assert "on its host" in once.next_step
    assert "second dump" in once.next_step
    assert "or a rank is late" in text
    twice, _ = explained(traces.collect([*sources(case), *((f"later/{name}", text) for name, text in sources(case))]))
    assert [rank.pid for rank in twice.check_first] == [4122]
    assert "second dump" not in twice.next_step


def test_single_dump_of_a_waiting_rank_asks_for_the_other_dumps() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    alone = [source for source in sources(case) if source[0] == "dumps/4120.txt"]
    verdict, _ = explained(traces.collect(alone))
    assert verdict.next_step.startswith("give the dumps of all ranks of the job")


def test_ranks_that_no_text_has_are_not_in_the_input() -> None:
    """A text does not show if the other ranks are on another node, did not respond, or were not given."""
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    some = [source for source in sources(case) if source[0] in ("dumps/4120.txt", "dumps/4122.txt")]
    verdict, text = explained(traces.collect(some, world_size=6))
    assert "\nNot in the input  4 ranks: 1,3-5\n" in text
    assert verdict.next_step == "give the dumps of all ranks of the job"
    assert "respond" not in text
    assert "other nodes" not in text.casefold()


def test_group_of_titled_processes_lists_titles_and_pids() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    _, text = explained(traces.collect(sources(case)))
    assert "\n  3 ranks: VLLM::Worker_TP0-1,3 (pid 4120-4121,4123)  wait in all_reduce\n" in text


def test_stack_of_a_single_group_is_printed_once() -> None:
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    _, alone = explained(traces.collect([source for source in sources(case) if source[0] == "dumps/4122.txt"]))
    assert alone.count("read_table (lookup.py:41)\n") == 1
    _, several = explained(traces.collect(sources(case)))
    assert several.count("read_table (lookup.py:41)\n") == 2, "the tree shows where the stacks part"
