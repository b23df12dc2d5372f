"""The state of a node on which all ranks wait for other nodes, by flight recorders, or by stacks and world size."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.detector.watch_parts import CollectiveTimeout
from hangwatch.model import (
    CheckFirst,
    CheckResult,
    CheckStatus,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    Member,
    Motion,
    RankId,
    Signature,
    Verdict,
)
from hangwatch.model.flight_records import GroupMembers, Progression
from hangwatch.state import steps
from hangwatch.verdict.judge import judge
from hangwatch.verdict.remote_wait import waits_for_other_nodes
from tests.unit.test_progress import RULES, Life, job, quiet, result
from tests.unit.test_waitfor import WORLD, done, member, record, recorder, standing, waits

ALL_WAIT = Verdict(kind="AllWaiting", message="all wait")
TWO = (Member(id=RankId(node="a", rank=0)), Member(id=RankId(node="a", rank=1)))


def grouping(*members: Member, waits_for: str = "ranks", world_size: int | None = 4, **given: Any) -> Grouping:
    group = Group(key="k", activity="collective_wait", waits_for=waits_for, members=members, **given)
    return Grouping(groups=(group,), world_size=world_size)


def judge_remote_wait(seen: Grouping, *, is_elsewhere_too: bool = True) -> bool:
    """Return whether all ranks of this node wait for other nodes, with the verdict of the rules on `seen`."""
    return waits_for_other_nodes(
        seen, judge(seen, ranks_here=len(seen.members)), has_ranks_on_other_nodes=is_elsewhere_too
    )


@pytest.mark.parametrize("waits_for", ["ranks", "gpu"])
def test_without_recorders_the_size_of_the_world_tells(waits_for: str) -> None:
    seen = grouping(*TWO, waits_for=waits_for)
    assert waits_for_other_nodes(seen, ALL_WAIT, has_ranks_on_other_nodes=True)
    assert not waits_for_other_nodes(seen, ALL_WAIT, has_ranks_on_other_nodes=False), (
        "all its ranks are here, or this is unknown"
    )


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(kind="AllWaiting", message="m", named=(RankId(rank=1),)),
        Verdict(kind="AllWaiting", message="m", check_first=(CheckFirst(rank=1, why="w", settle="s"),)),
        Verdict(kind="Mismatch", message="two collectives: the program took two paths"),
        Verdict(kind="AllAlike", message="all in one place that is not a wait"),
    ],
)
def test_suspect_on_this_node_means_no_remote_wait(verdict: Verdict) -> None:
    assert not waits_for_other_nodes(grouping(*TWO), verdict, has_ranks_on_other_nodes=True)


@pytest.mark.parametrize(
    "odd",
    [
        grouping(*TWO, waits_for="lock"),
        grouping(*TWO, waits_for="nothing"),
        grouping(*TWO, waits_for="unknown"),
        grouping(*TWO, gone=True),
        grouping(TWO[0], replace(TWO[1], signature=Signature.STOPPED, kernel=replace(TWO[1].kernel, state="T"))),
        grouping(TWO[0], replace(TWO[1], waits=replace(TWO[1].waits, frozen_cgroup="/job"))),
        grouping(),
    ],
    ids=["lock", "busy", "unknown", "gone", "stopped", "cgroup", "nobody"],
)
def test_all_of_them_must_wait_for_ranks(odd: Grouping) -> None:
    assert not waits_for_other_nodes(odd, ALL_WAIT, has_ranks_on_other_nodes=True)


def test_joined_local_ranks_wait_for_other_nodes() -> None:
    assert judge_remote_wait(grouping(standing(0, waits(6)), standing(1, waits(6))))


def test_members_that_a_group_lists_are_known_without_the_size_of_the_world() -> None:
    listed = (GroupMembers(name="1", description="dp", ranks=(Progression(0, 3),)),)
    of_four = [
        member(rank, recorder(record(6, "1", state="open"), library="nccl", members=listed)) for rank in range(2)
    ]
    assert judge_remote_wait(grouping(*of_four, world_size=None), is_elsewhere_too=False)
    two = (GroupMembers(name="1", description="tp", ranks=(Progression(0, 1),)),)
    of_two = [member(rank, recorder(record(6, "1", state="open"), library="nccl", members=two)) for rank in range(2)]
    assert not judge_remote_wait(grouping(*of_two)), (
        "all members are here and have joined: the cause is this node's GPUs, links or NCCL"
    )


def test_local_rank_that_waits_for_another_node_is_a_remote_wait() -> None:
    behind = grouping(standing(0, waits(6)), standing(1, done(5)))
    assert not judge_remote_wait(behind), "rank 1 has not joined, and shows no wait for another rank"
    listed = (
        GroupMembers(name="1", description="dp", ranks=(Progression(0, 2, 2),)),
        GroupMembers(name="2", description="tp", ranks=(Progression(0, 1),)),
    )
    first = recorder(record(6, "1", id=1, state="open"), record(3, "2", id=2), library="nccl", members=listed)
    second = recorder(record(4, "2", id=1, state="open"), library="nccl", members=listed)
    assert judge_remote_wait(grouping(member(0, first), member(1, second))), (
        "rank 1 waits for rank 0, which waits for rank 2"
    )


def test_cycle_or_mismatch_on_this_node_is_no_remote_wait() -> None:
    cycle = grouping(standing(0, {WORLD: (10, 10), "1": (10, 11)}), standing(1, {WORLD: (9, 10), "1": (11, 11)}))
    assert not judge_remote_wait(cycle)
    other = member(1, recorder(record(6, operation="gloo:all_gather", state="open")))
    assert not judge_remote_wait(grouping(standing(0, waits(6)), other))


def wide() -> Job:
    return replace(job(), world_size=4, local_world_size=2)


def waiting(motion: Motion = Motion.FROZEN, waits_for: str = "ranks") -> Grouping:
    return grouping(*(replace(one, motion=motion) for one in TWO), waits_for=waits_for)


def at_the_hold(seen: Grouping | None = None, *checks: CheckResult) -> Life:
    """Return the state of a job with two of four ranks here, when the capture at the hold finds `seen`."""
    life = Life()
    life.discover(wide())
    life.power(600, 60)
    life.power(110, 26)
    for check in checks:
        life.snapshot = steps.record_check(life.snapshot, check, now=life.now)
        life.power(110, 1)
    life.look(seen or waiting())
    return life


def test_it_says_so_and_pages_when_the_collective_is_about_to_end() -> None:
    life = at_the_hold()
    entry = life.snapshot.jobs["42"]
    assert (entry.watch.state, entry.page) == (JobState.WAITS_ELSEWHERE, False)
    incident = entry.incident
    assert isinstance(incident, Incident)
    assert incident.state is JobState.WAITS_ELSEWHERE
    assert (
        incident.timeline[-1].message == "all 2 ranks wait for ranks of other nodes: this node does not cause the hang"
    )
    assert life.snapshot.captures == {"waits_elsewhere": 1}
    life.power(110, 600 - 120 - 30)
    assert not life.snapshot.jobs["42"].page
    life.power(110, 10)
    assert life.snapshot.jobs["42"].page


def test_it_pages_after_the_stalled_hold_where_a_collective_waits_for_ever() -> None:
    life = at_the_hold()
    entry = life.snapshot.jobs["42"]
    watch = replace(entry.watch, timeout=CollectiveTimeout())
    life.snapshot = life.snapshot.with_job(replace(entry, watch=watch))
    life.power(110, int(RULES.stalled_hold_seconds) - 1)
    assert not life.snapshot.jobs["42"].page
    life.power(110, 1)
    assert life.snapshot.jobs["42"].page


def test_a_job_on_one_node_and_one_of_unknown_size_hang_here() -> None:
    life = quiet()
    life.look(waiting())
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.HUNG, True)


def test_where_a_gpu_of_this_node_has_shown_errors_it_hangs_here() -> None:
    life = at_the_hold(None, result("nvlink_status", CheckStatus.WARNING))
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.HUNG, True)


def test_a_page_does_not_come_and_go() -> None:
    life = at_the_hold(waiting(waits_for="nothing"))
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.HUNG, True)
    life.power(110, 60)
    life.look(waiting())
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.HUNG, True), "hung once"
    life = at_the_hold()
    life.power(110, 60)
    life.look(waiting(waits_for="nothing"))
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.HUNG, True), "it is of this node after all"


def test_the_hold_counts_through_looks_in_which_something_moves() -> None:
    life = at_the_hold()
    since = life.snapshot.jobs["42"].watch.open_incident.stalled_since
    life.power(110, 60)
    moving = grouping(replace(TWO[0], motion=Motion.MOVING), replace(TWO[1], motion=Motion.FROZEN))
    life.look(moving)
    assert life.state is JobState.STALLED
    life.look(waiting())
    life.look(waiting())
    watch = life.snapshot.jobs["42"].watch
    assert (watch.state, watch.open_incident.stalled_since) == (JobState.WAITS_ELSEWHERE, since)


def test_power_that_comes_back_ends_it() -> None:
    life = at_the_hold()
    life.power(600, 5)
    assert life.state is JobState.RECOVERED


def test_a_daemon_that_is_started_again_goes_on_with_it() -> None:
    before = at_the_hold()
    left = before.snapshot.jobs["42"].incident
    assert isinstance(left, Incident)
    life = Life()
    life.now = before.now + 100
    life.discover(wide())
    life.resume(left, living=wide())
    assert (life.state, life.snapshot.jobs["42"].page) == (JobState.WAITS_ELSEWHERE, False)
