"""Verdicts on the hangs and healthy look-alikes of tests/data/hangs.toml."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.verdict import judge
from hangwatch.words import name_ranks
from tests import robustness
from tests.daemon_and_dump import main
from tests.hangs import CASES, judged


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_known_hang_gets_its_verdict(case: dict[str, Any]) -> None:
    _, verdict = judged(case)
    said = "\n".join([verdict.message, *(f"  {vote.kind}: {vote.message}" for vote in verdict.evidence)])
    print(said)
    assert (verdict.kind, [rank.rank for rank in verdict.named]) == (case["kind"], case.get("named", [])), said
    assert [rank.rank for rank in verdict.check_first] == case.get("check_first", []), said
    assert verdict.confidence.value == case.get("confidence", verdict.confidence.value), said
    assert verdict.action.kind == case.get("action", "investigate"), f"state `action` in the case: {verdict.action}"
    for words in case.get("mentions", ()):
        assert words in said, f"{words!r} is not in:\n{said}"
    assert "{" not in verdict.message and "  " not in verdict.message
    assert not verdict.named or name_ranks(verdict.named).lower() in verdict.message.lower(), (
        "the sentence gives the named ranks"
    )


@pytest.mark.parametrize(
    "name",
    [
        "a lock in the program's own code, by stacks alone",
        "a lock behind a context manager of the program, by stacks alone",
    ],
)
def test_rank_at_a_possible_lock_is_named_if_the_kernel_was_read(name: str) -> None:
    (case,) = (case for case in CASES if case["name"] == name)
    grouping, _ = judged(case)
    asked = replace(
        grouping,
        groups=tuple(
            replace(
                group,
                members=tuple(
                    replace(member, usage=replace(member.usage, main_cpu_ratio=0.0)) for member in group.members
                ),
            )
            for group in grouping.groups
        ),
    )
    assert [rank.rank for rank in judge.judge(asked).named] == [1]


def test_server_is_to_be_investigated() -> None:
    servers = [case for case in robustness.known_cases() if case.processes]
    assert len(servers) >= 5
    for case in servers:
        first = next(robustness.vary(case))
        assert first.after.action.kind == "investigate", case.name


def test_there_are_enough_cases() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) >= 50


@pytest.mark.parametrize("name", ["lightest job hangs", "victims that ask in Python", "evaluation on one rank"])
def test_dump_names_no_rank_that_the_daemon_does_not_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual", name]) == 0, capsys.readouterr().out
    assert not capsys.readouterr().out.startswith("0 comparisons")
