"""The verdict on the ranks of a selftest, and the bisection that finds the bad device."""

import math
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hangwatch import words
from hangwatch.tools.selftest import launch
from hangwatch.tools.selftest.halving import halve
from hangwatch.tools.selftest.outcome import Event, Finding, judge
from hangwatch.tools.selftest.rank import NO_TORCH, groups_of, late
from tests.commands import write_program

ALL = (0, 1, 2, 3)


def steps(
    rank: int, *ended: tuple[str, tuple[int, ...], float], inside: tuple[str, tuple[int, ...]] | None = None
) -> list[Event]:
    said = [Event(event="here", rank=rank, pid=100 + rank)]
    for what, group, seconds in ended:
        said.append(Event(event="begin", rank=rank, what=what, group=group))
        said.append(Event(event="end", rank=rank, what=what, group=group, seconds=seconds))
    if inside is not None:
        said.append(Event(event="begin", rank=rank, what=inside[0], group=inside[1]))
    return said


def done(rank: int, *ended: tuple[str, tuple[int, ...], float]) -> list[Event]:
    return [*steps(rank, *ended), Event(event="done", rank=rank)]


def judged(events: Iterable[Iterable[Event]], exits: dict[int, int | None] | None = None) -> tuple[Finding, ...]:
    return judge([one for rank in events for one in rank], exits or dict.fromkeys(ALL, 0), len(ALL), 0.2)


def only(findings: tuple[Finding, ...]) -> tuple[str, tuple[int, ...]]:
    assert len(findings) == 1, findings
    return findings[0].kind, findings[0].ranks


def test_all_that_have_ended_well_have_passed() -> None:
    assert judged(done(rank, ("barrier", ALL, 0.01)) for rank in ALL) == ()


def test_rank_that_has_not_joined_is_named_with_its_last_step() -> None:
    waits = [steps(rank, ("compute", (), 0.1), inside=("all_reduce 1", ALL)) for rank in (0, 1, 3)]
    found = judged([*waits, steps(2, ("compute", (), 0.1))], dict.fromkeys(ALL))
    assert only(found) == ("hung", (2,))
    assert found[0].message == "Rank 2 has not joined all_reduce 1 of 4 ranks: rank 2 is after compute"


def test_only_the_rank_outside_all_waits_is_hung() -> None:
    # Only rank 1 is in its own code. The other ranks wait in a barrier of all ranks or in a pair with rank 1.
    events = [
        steps(0, inside=("barrier", ALL)),
        steps(1, inside=("compute", ())),
        steps(2, inside=("barrier", ALL)),
        steps(3, inside=("all_reduce 1", (1, 3))),
    ]
    assert only(judged(events, dict.fromkeys(ALL))) == ("hung", (1,))


def test_smallest_group_that_cannot_talk_is_reported() -> None:
    events = [steps(rank, inside=("all_reduce 1", (2, 3) if rank > 1 else ALL)) for rank in ALL]
    found = judged([*events[:2], *(steps(r, ("x", ALL, 0.1), inside=("all_reduce 1", (2, 3))) for r in (2, 3))])
    assert found[0].kind == "hung"
    both = [steps(rank, inside=("barrier", ALL)) for rank in ALL]
    assert only(judged(both, dict.fromkeys(ALL))) == ("cannot_talk", ALL)


def test_a_rank_that_dies_is_the_cause_of_what_its_peers_complain_of() -> None:
    complain = [Event(event="error", rank=rank, what="RuntimeError: Connection closed by peer") for rank in (0, 1, 3)]
    events = [*(steps(rank, inside=("barrier", ALL)) for rank in ALL), complain]
    found = judged(events, {0: 1, 1: 1, 2: -9, 3: 1})
    assert only(found) == ("died", (2,))
    assert "SIGKILL in barrier of 4 ranks" in found[0].message


def test_a_wrong_sum_is_a_finding_of_the_smallest_group_that_has_it() -> None:
    wrong = [Event(event="wrong", rank=rank, what="all_reduce", group=(2, 3), result=7, wanted=6) for rank in (2, 3)]
    everybody = [Event(event="wrong", rank=rank, what="all_reduce", group=ALL, result=9, wanted=10) for rank in ALL]
    found = judged([*(done(rank) for rank in ALL), everybody, wrong])
    assert only(found) == ("wrong", (2, 3))


def test_a_rank_that_said_nothing_has_not_started() -> None:
    assert only(judged((steps(rank, inside=("rendezvous", ALL)) for rank in (0, 1, 2)), {3: None})) == (
        "not_started",
        (3,),
    )


def test_rank_that_ended_before_its_first_step_is_the_error() -> None:
    found = judge(steps(0), {0: None, 1: 1, 2: None, 3: None}, 4, 0.2, {1: "no CUDA"})
    assert only(found) == ("error", (1,))
    assert found[0].message == "Rank 1 ended with status 1 before its first step: no CUDA"


def test_rank_that_only_started_is_hung() -> None:
    events = [*(steps(rank, inside=("rendezvous", ALL)) for rank in (0, 1, 2)), steps(3)]
    assert only(judged(events, dict.fromkeys(ALL))) == ("hung", (3,))


def test_ranks_stuck_in_rendezvous_cannot_connect() -> None:
    found = judged((steps(rank, inside=("rendezvous", ALL)) for rank in ALL), dict.fromkeys(ALL))
    assert found[0].kind == "cannot_talk"
    assert "cannot connect" in found[0].message


def test_without_torch_nothing_else_is_said() -> None:
    assert only(judged([], dict.fromkeys(ALL, NO_TORCH)))[0] == "no_torch"


def test_rank_that_is_late_repeatedly_is_named() -> None:
    def repeats(late_rank: int, times: int) -> list[list[Event]]:
        return [
            done(
                rank,
                *((f"all_reduce {n + 1}", ALL, 0.01 if n >= times or rank == late_rank else 0.5) for n in range(5)),
            )
            for rank in ALL
        ]

    assert only(judged(repeats(1, 5))) == ("late", (1,))
    assert judged(repeats(1, 1)) == ()


def test_rank_with_much_longer_compute_time_is_slow() -> None:
    assert only(judged(done(rank, ("compute", (), 4.0 if rank == 3 else 1.0)) for rank in ALL)) == ("slow", (3,))
    assert judged(done(rank, ("compute", (), 0.04 if rank == 3 else 0.01)) for rank in ALL) == ()


@given(st.integers(1, 64))
def test_tested_groups_include_all_ranks_and_all_neighbors(world_size: int) -> None:
    groups = groups_of(world_size)
    assert groups[-1] == tuple(range(world_size))
    assert len(set(groups)) == len(groups)
    assert {(rank, rank + 1) for rank in range(world_size - 1)} <= set(groups)


@given(st.lists(st.dictionaries(st.integers(0, 7), st.floats(0, 10), max_size=8), max_size=8), st.floats(0.01, 5))
def test_only_participating_ranks_can_be_late(waits: list[dict[int, float]], seconds: float) -> None:
    found = late(waits, seconds)
    assert all(by > seconds for by in found.values())
    assert set(found) <= {rank for one in waits for rank in one}


@given(st.integers(2, 200), st.data())
def test_one_bad_device_is_found_by_halves(count: int, data: st.DataObject) -> None:
    bad = str(data.draw(st.integers(0, count - 1)))
    found = halve([str(number) for number in range(count)], lambda tried: bad not in tried)
    assert (found.suspects, found.is_sure) == ((bad,), True)
    assert found.tries <= math.ceil(math.log2(count)) + 1


@given(st.integers(2, 50), st.data())
def test_two_that_fail_only_together_are_not_blamed_one_for_the_other(count: int, data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(0, count - 1).map(str), min_size=2, max_size=2, unique=True))
    found = halve([str(number) for number in range(count)], lambda tried: not {first, second} <= set(tried))
    assert not found.is_sure or {*found.suspects} & {first, second}


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=40))
def test_a_list_of_numbers_is_read_as_it_is_written(numbers: list[int]) -> None:
    assert words.unfold(words.fold(numbers)) == tuple(sorted(set(numbers)))


def test_what_is_no_list_of_numbers_is_refused() -> None:
    for text in ("", "x", "3-1", "1-", "0-99999", "1,,2", "-1", "1-2-3", "0-3/2"):
        assert words.unfold(text) is None, text


def test_silent_rank_is_reported_with_its_exit_status() -> None:
    (finding,) = judged([done(0), done(1)], {0: 0, 1: 0, 2: 0, 3: 0})
    assert (finding.kind, finding.ranks) == ("not_started", (2, 3))
    assert finding.message == "The process of ranks 2-3 ended with status 0, but printed nothing"
    (finding,) = judged([done(0), done(1)], {0: 0, 1: 0, 2: 0})
    assert finding.message == "The process of ranks 2-3 was started, but printed nothing", "its state is unknown"


def test_what_nccl_complains_of_is_said_in_words_once_and_what_it_chose_is_not(tmp_path: Path) -> None:
    warns = "node:1:2 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes"
    chose = "node:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.2.0.1<0>"
    python = write_program(tmp_path / "python", f"echo '{chose}'\necho '{warns}' >&2\necho '{warns}' >&2")
    said: list[str] = []
    launch.run(["cpu"], launch.Plan(python=str(python), timeout_seconds=60.0), said.append)
    assert [line for line in said if "this means:" in line] == [
        "rank 0: this means: /dev/shm is full or too small; `hangwatch check shared_memory`; docker --shm-size, an emptyDir of "
        "medium Memory at /dev/shm"
    ]
