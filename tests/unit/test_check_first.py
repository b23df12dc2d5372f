"""The rank to check first, by measurements. The groups are made by hand, so that only this rule decides."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.model import (
    Awaited,
    CallTarget,
    Confidence,
    FileLock,
    Frame,
    GpuReadings,
    Group,
    Grouping,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    RankId,
    Signature,
    Stack,
    StackFacts,
    Usage,
    Verdict,
    Waits,
    WorkerCall,
)
from hangwatch.verdict.judge import judge
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import next_step
from tests.unit.test_waitfor import done, standing, waits

BACKWARD = (Frame(function="backward", file="torch/_tensor.py", line=581), Frame(function="train", file="a.py", line=9))
OWN = (Frame(function="reserve", file="buffers.py", line=31), Frame(function="train", file="a.py", line=5))
REDUCE = (Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=9), *OWN)
NEXT = (REDUCE[0], *BACKWARD[1:])
RECV = (Frame(function="recv", file="torch/distributed/distributed_c10d.py", line=1), *BACKWARD[1:])


def group(
    ranks: range,
    frames: tuple[Frame, ...],
    activity: str,
    waits_for: str,
    waited_before: bool = False,
    **parts: Any,
) -> Group:
    own_frames = tuple(frame for frame in frames if "torch" not in frame.file)
    members = tuple(
        Member(
            id=RankId(node="n1", rank=rank, pid=100 + rank),
            stack=StackFacts(user_frames=own_frames, waited_before=waited_before),
            **{"motion": Motion.FROZEN, "rounds": 3, **parts},
        )
        for rank in ranks
    )
    return Group(
        key=f"{activity}-{ranks.start}", activity=activity, waits_for=waits_for, members=members, frames=frames
    )


def behind(ranks: range, **parts: Any) -> Group:
    return group(ranks, BACKWARD, "backward", "gpu", **parts)


def group_in_own_code(ranks: range, **parts: Any) -> Group:
    return group(ranks, OWN, "unknown", "unknown", **parts)


def says(*groups: Group) -> tuple[list[int | None], list[int | None], Confidence]:
    verdict = judge(Grouping(groups=groups))
    return [one.rank for one in verdict.check_first], [one.rank for one in verdict.named], verdict.confidence


FIRST, LOW = ([0], [], Confidence.NONE), ([], [0], Confidence.LOW)


@pytest.mark.parametrize(
    ("suspect", "others", "expected"),
    [
        ({}, {}, FIRST),
        # A GPU that is idle and draws less power. Both are needed.
        ({"gpu": GpuReadings(power_watts=70.0, utilization_ratio=0.0)}, {"gpu": GpuReadings(power_watts=118.0, utilization_ratio=1.0)}, LOW),
        ({"gpu": GpuReadings(power_watts=70.0)}, {"gpu": GpuReadings(power_watts=118.0)}, FIRST),
        ({"gpu": GpuReadings(power_watts=110.0, utilization_ratio=0.0)}, {"gpu": GpuReadings(power_watts=118.0, utilization_ratio=1.0)}, FIRST),
        ({"gpu": GpuReadings(power_watts=129.0, utilization_ratio=0.0)}, {"gpu": GpuReadings(power_watts=118.0, utilization_ratio=1.0)}, FIRST),
        ({"gpu": GpuReadings(power_watts=70.0, utilization_ratio=1.0)}, {"gpu": GpuReadings(power_watts=118.0, utilization_ratio=0.0)}, FIRST),
        ({"usage": Usage(cpu_ratio=0.0)}, {"usage": Usage(cpu_ratio=1.0)}, LOW),
        ({"usage": Usage(cpu_ratio=1.0)}, {"usage": Usage(cpu_ratio=0.0)}, FIRST),
        ({"usage": Usage(cpu_ratio=0.6)}, {"usage": Usage(cpu_ratio=1.0)}, FIRST),
        ({"waits": Waits(awaited=Awaited(name="10.0.0.9:443"))}, {}, LOW),
        ({"waits": Waits(stuck_on="/data/number")}, {}, LOW),
        ({"waits": Waits(stuck_on="/data/number"), "signature": Signature.BEHIND_GPU}, {}, ([], [], Confidence.NONE)),
        # A rank that moves, waits for its GPU, or came out of a wait is not later than the others.
        ({"motion": Motion.MOVING}, {}, ([], [], Confidence.NONE)),
        ({"signature": Signature.BEHIND_GPU}, {}, ([], [], Confidence.NONE)),
        ({"waited_before": True}, {}, ([], [], Confidence.NONE)),
    ],
)  # fmt: skip
def test_own_code_against_the_gpu(
    suspect: dict[str, Any], others: dict[str, Any], expected: tuple[list[int], list[int], Confidence]
) -> None:
    assert says(group_in_own_code(range(1), **suspect), behind(range(1, 8), **others)) == expected


@pytest.mark.parametrize(("is_awaited", "expected"), [(False, []), (True, [3])])
def test_rank_for_which_nobody_waits_is_not_checked_first(is_awaited: bool, expected: list[int]) -> None:
    """Ranks 0 to 2 wait in a ring of groups, and rank 3 for them. None of the groups of the ring was used before."""
    newest = 4 if is_awaited else 5
    ring = [done(4) | waits(1, f"{rank}-{(rank + 1) % 3}") for rank in range(3)]
    records = [standing(rank, numbers).recorder for rank, numbers in enumerate([*ring, waits(newest)])]
    groups = [group(range(3), REDUCE, "all_reduce", "ranks"), group(range(3, 4), NEXT, "all_reduce", "ranks")]
    read = [
        replace(one, members=tuple(replace(member, recorder=records[member.id.rank or 0]) for member in one.members))
        for one in groups
    ]
    assert says(*read)[0] == expected


@pytest.mark.parametrize(("few", "many", "pointed"), [(1, 3, 1), (1, 2, 0), (2, 6, 2), (2, 5, 0), (4, 12, 4)])
def test_at_most_a_quarter_of_the_ranks_is_checked_first(few: int, many: int, pointed: int) -> None:
    assert len(says(group_in_own_code(range(few)), behind(range(few, few + many)))[0]) == pointed


PJIT = (
    Frame(function="_pjit_call_impl", file="jax/_src/pjit.py", line=1200),
    Frame(function="train", file="train.py", line=31),
)


@pytest.mark.parametrize(
    ("frozen", "motion", "first"),
    [(2, Motion.FROZEN, [0]), (1, Motion.FROZEN, [0]), (2, Motion.UNKNOWN, []), (2, Motion.MOVING, [])],
)
def test_own_code_beside_frozen_jax_programs_is_checked_first(frozen: int, motion: Motion, first: list[int]) -> None:
    others = group(range(1, 1 + frozen), PJIT, "forward", "gpu", motion=motion)
    looks, named, _ = says(group_in_own_code(range(1)), others)
    assert (looks, named) == (first, [])


def test_rank_behind_gpu_without_power_history_supports_no_name() -> None:
    """Without a power history, name no rank by its GPU: a GPU with little work has the same readings as a hung one."""
    at_lock = group(range(1), OWN, "lock", "lock", signature=Signature.BLOCKED)

    def seen(busy_power_ratio: float | None) -> Group:
        gpu = GpuReadings(power_watts=118.0, utilization_ratio=1.0, busy_power_ratio=busy_power_ratio)
        return group(range(1, 8), OWN, "unknown", "gpu", signature=Signature.BEHIND_GPU, gpu=gpu)

    assert says(at_lock, seen(0.1))[:2] == ([], [0])
    assert says(at_lock, seen(None))[:2] == ([0], [])


def test_line_is_that_of_the_rank_of_which_it_is_said() -> None:
    """Show the line of the named rank. The lowest rank of its group is at another line."""
    frames = [(Frame(function="read_part", file="shards.py", line=line),) for line in (10, 20)]
    alike = group(range(2), frames[0], "unknown", "unknown")
    members = tuple(
        replace(member, stack=replace(member.stack, user_frames=own), kernel=KernelFacts(state=state))
        for member, own, state in zip(alike.members, frames, "ST", strict=True)
    )
    verdict = judge(Grouping(groups=(behind(range(2, 8)), replace(alike, members=members))))
    assert [rank.rank for rank in verdict.named] == [1]
    told = next(one.message for one in verdict.evidence if one.kind == "activity")
    assert "shards.py:20" in told and "shards.py:10" not in told
    both = group_text.describe_suspects([replace(alike, members=members)])
    assert "shards.py:10 or 20" in both


def test_groups_that_do_the_same_are_described_once() -> None:
    def at(rank: int, line: int) -> Group:
        return group(
            range(rank, rank + 1), (Frame(function="save", file="train.py", line=line),), "checkpoint", "nothing"
        )

    place = "writing or reading a checkpoint at train.py:142"
    assert group_text.describe_suspects([at(0, 142)]) == f"it is {place}"
    assert group_text.describe_suspects([at(0, 142), at(1, 142)]) == f"they are {place}"
    said = group_text.describe_suspects([at(0, 142), at(1, 9)])
    assert said == f"rank 0 (n1, pid 100) is {place}; rank 1 (n1, pid 101) is {place.replace('142', '9')}"


def test_half_of_a_pipeline_draws_less_than_the_half_that_works() -> None:
    stuck = group(
        range(4), RECV, "point_to_point", "ranks", gpu=GpuReadings(power_watts=95.0), signature=Signature.BLOCKED
    )
    working = {"motion": Motion.MOVING, "signature": Signature.GPU_WORKS}
    assert says(stuck, behind(range(4, 8), gpu=GpuReadings(power_watts=410.0), **working))[0] == [0, 1, 2, 3]
    assert says(stuck, behind(range(4, 8), gpu=GpuReadings(power_watts=90.0), **working))[0] == []
    assert says(stuck, behind(range(4, 8), gpu=GpuReadings(power_watts=120.0)))[0] == []


def test_rank_to_check_first_says_why_and_what_would_settle_it() -> None:
    verdict: Verdict = judge(Grouping(groups=(behind(range(1, 4)), group_in_own_code(range(1)))))
    (first,) = verdict.check_first
    assert (first.node, first.rank, first.pid) == ("n1", 0, 100)
    assert "reserve (buffers.py:31)" in first.why
    assert "--pid 100" in first.settle
    assert first.why in verdict.message
    assert first.settle in verdict.message
    assert not any(vote.supports for vote in verdict.evidence)


FUTEX = KernelCall(name="futex", says="futex", rounds=3)
READ = KernelCall(
    name="read", says="read() on", rounds=3, descriptors=1, behind=(CallTarget(kind="file", what="/data/x"),)
)


@pytest.mark.parametrize(
    ("seen", "is_asked_for"),
    [
        ({}, True),
        ({"kernel": KernelFacts(call=FUTEX)}, True),  # native frames show the lock
        ({"kernel": KernelFacts(call=FUTEX, worker_call=WorkerCall(pid=9, call=FUTEX))}, True),
        ({"kernel": KernelFacts(call=READ)}, False),
        ({"kernel": KernelFacts(call=FUTEX, worker_call=WorkerCall(pid=9, call=READ))}, False),
    ],
)
def test_native_frames_are_asked_for_where_the_kernel_has_not_told_the_call(
    seen: dict[str, object], *, is_asked_for: bool
) -> None:
    verdict = judge(Grouping(groups=(behind(range(1, 4)), group_in_own_code(range(1), **seen))))
    assert [one.rank for one in verdict.check_first] == [0]
    told = (verdict.message, next_step(verdict))
    assert ["--native" in one for one in told] == [is_asked_for] * 2
    assert ["look at /data/x: does it respond?" in one for one in told] == [not is_asked_for] * 2


def test_rank_with_unknown_call_needs_native_frames() -> None:
    odd = group_in_own_code(range(2))
    odd = replace(
        odd, members=(replace(odd.members[0], kernel=replace(odd.members[0].kernel, call=READ)), odd.members[1])
    )
    assert "--native --pid 101" in judge(Grouping(groups=(behind(range(2, 8)), odd))).check_first[0].settle


def test_more_than_eight_lines_are_those_of_ranks_that_run() -> None:
    def at(rank: int) -> Group:
        frames = (Frame(function="loop", file="a.py", line=rank),)
        return group(range(rank, rank + 1), frames, "unknown", "unknown")

    def verdict(lines: int) -> Verdict:
        members = tuple(member for rank in range(lines) for member in at(rank).members)
        whole = Group(key="k", activity="unknown", members=members, frames=at(0).frames)
        return judge(Grouping(groups=(whole,)))

    assert "but at different lines" in verdict(8).message
    assert "but at different lines" not in verdict(9).message


STORE = (Frame(function="read_vocabulary", file="vocabulary.py", line=12), Frame(function="train", file="a.py", line=3))
BARRIER = (Frame(function="barrier", file="torch/distributed/distributed_c10d.py", line=4), *BACKWARD[1:])


def joined(thread: str, **parts: Any) -> Group:
    """Return a group of one rank. Its main thread waits for a thread that does `thread`, a name of activities.toml."""
    alone = group(range(1), OWN, "thread_wait", "thread", **parts)
    return replace(alone, threads=(Stack(name="writer", frames=OWN, activity=thread),))


@pytest.mark.parametrize(
    ("thread", "parts", "expected"),
    [
        ("lock", {}, ([], [0], Confidence.MEDIUM)),
        ("unknown", {}, ([0], [], Confidence.NONE)),
        ("unknown", {"waits": Waits(awaited=Awaited(name="10.0.0.9 port 443"))}, ([], [0], Confidence.LOW)),
        ("unknown", {"waits": Waits(awaits_store="thread")}, ([], [], Confidence.NONE)),
    ],
)
def test_rank_waiting_for_a_thread_is_judged_by_the_threads_activity(
    thread: str, parts: dict[str, Any], expected: object
) -> None:
    others = group(range(1, 4), BARRIER, "collective_wait", "ranks")
    assert says(joined(thread, **parts), others) == expected


def test_rank_without_thread_in_collective_is_checked_first() -> None:
    inside = Stack(name="step", frames=BARRIER, activity="collective_wait")
    others = replace(group_in_own_code(range(1, 4)), threads=(inside,), key="inside")
    verdict = judge(Grouping(groups=(group_in_own_code(range(1)), others)))
    assert (verdict.named, [one.rank for one in verdict.check_first]) == ((), [0])
    assert "it has no thread in a collective, but ranks 1-3 on n1 have (barrier)" in verdict.message
    assert judge(Grouping(groups=(replace(group_in_own_code(range(1)), threads=(inside,)), others))).check_first == ()


@pytest.mark.parametrize(("holder", "first"), [(100, [0]), (None, [0]), (999, [])])
def test_rank_in_own_code_is_checked_first_while_others_wait_for_a_lock(holder: int | None, first: list[int]) -> None:
    """Check the rank in its own code first, unless the kernel shows that another process holds the lock."""
    locked = group(
        range(1, 4), STORE, "lock", "lock", waits=Waits(file_lock=FileLock(path="/data/l", holder_pid=holder))
    )
    assert says(group_in_own_code(range(1)), locked) == (first, [], Confidence.NONE)


def test_lock_holder_with_the_same_pid_on_another_node_is_distinct() -> None:
    here = group(range(1, 3), STORE, "lock", "lock", waits=Waits(file_lock=FileLock(path="/data/here", holder_pid=100)))
    there = group(
        range(3, 4), STORE, "lock", "lock", waits=Waits(file_lock=FileLock(path="/data/there", holder_pid=100))
    )
    moved = tuple(replace(member, id=replace(member.id, node="n2")) for member in there.members)
    message = judge(Grouping(groups=(group_in_own_code(range(1)), replace(there, members=moved), here))).message
    assert "and holds the lock of /data/here, for which ranks 1-2 on n1 wait" in message
