"""The rank to check first and the recommended action, by measurements. The groups are made by hand."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hangwatch.jobs.likely_ranks import describe, find_likely_ranks, find_ranks_below
from hangwatch.model import (
    CRASHED,
    Awaited,
    CallTarget,
    Confidence,
    Died,
    EnqueuedOperation,
    Fault,
    FileLock,
    Frame,
    GpuReadings,
    Group,
    Grouping,
    GroupRecords,
    KernelCall,
    KernelFacts,
    KernelLine,
    Member,
    Motion,
    PastHang,
    PortUse,
    Process,
    ProcessId,
    RankId,
    RecorderFacts,
    RecorderState,
    Signature,
    Sleep,
    Stack,
    StackFacts,
    Store,
    Usage,
    Verdict,
    Waits,
    WorkerCall,
)
from hangwatch.report import phrases
from hangwatch.stacks import activity_table
from hangwatch.verdict import recommendation
from hangwatch.verdict.judge import judge
from hangwatch.verdict.recommendation import History, with_action
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.guidance import where_to_look
from hangwatch.verdict.wording.next_steps import describe_action, next_step
from tests import hangs
from tests.conftest import load_table
from tests.samples import change_parts
from tests.unit.test_waitfor import Numbers, done, standing, waits

BACKWARD = (Frame(function="backward", file="torch/_tensor.py", line=581), Frame(function="train", file="a.py", line=9))
OWN = (Frame(function="reserve", file="buffers.py", line=31), Frame(function="train", file="a.py", line=5))
REDUCE = (Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=9), *OWN)
NEXT = (REDUCE[0], *BACKWARD[1:])
RECV = (Frame(function="recv", file="torch/distributed/distributed_c10d.py", line=1), *BACKWARD[1:])


def group(
    ranks: range, frames: tuple[Frame, ...], activity: str, waits_for: str, waited_before: bool = False, **parts: Any
) -> Group:
    own_frames = tuple(frame for frame in frames if "torch" not in frame.file)
    members = tuple(
        Member(
            stack=StackFacts(user_frames=own_frames, waited_before=waited_before),
            **{"id": RankId(node="n1", rank=rank, pid=100 + rank), "motion": Motion.FROZEN, "rounds": 3, **parts},
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


def with_numbers(groups: tuple[Group, ...], numbers: list[Numbers]) -> Grouping:
    records = [standing(rank, each).recorder for rank, each in enumerate(numbers)]
    return Grouping(groups=groups).change_members(lambda _, one: replace(one, recorder=records[one.id.rank or 0]))


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
        ({"signature": Signature.BLOCKED, "kernel": KernelFacts(call=KernelCall(name="read", says="read() on", rounds=3, descriptors=1, behind=(CallTarget(kind="file", what="/data/x"),)))}, {}, ([], [0], Confidence.MEDIUM)),
        ({"signature": Signature.BLOCKED, "kernel": KernelFacts(call=KernelCall(name="poll", says="poll() on", rounds=3, descriptors=2, behind=(CallTarget(kind="file", what="/data/x"),)))}, {}, FIRST),
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


def test_rank_behind_its_gpu_is_checked_first_beside_one_that_may_wait_for_it() -> None:
    reduces = group(range(3, 9), REDUCE, "all_reduce", "ranks")
    waits_for_lock = group(range(1), OWN, "lock", "lock")
    assert says(waits_for_lock, reduces) == ([], [0], Confidence.MEDIUM)
    alike = (waits_for_lock, behind(range(2, 3)), reduces)
    assert says(*alike) == ([0, 2], [], Confidence.NONE)
    by_numbers = judge(with_numbers(alike, [done(5), waits(6), done(6), *[waits(6)] * 6]))
    assert [rank.rank for rank in by_numbers.check_first] == [0, 2]
    assert "To decide: check what it does there" in by_numbers.message


@pytest.mark.parametrize(("is_awaited", "expected"), [(False, []), (True, [3])])
def test_rank_for_which_nobody_waits_is_not_checked_first(is_awaited: bool, expected: list[int]) -> None:
    """Ranks 0 to 2 wait in a ring of groups, and rank 3 for them. None of the groups of the ring was used before."""
    newest = 4 if is_awaited else 5
    ring = [done(4) | waits(1, f"{rank}-{(rank + 1) % 3}") for rank in range(3)]
    groups = (group(range(3), REDUCE, "all_reduce", "ranks"), group(range(3, 4), NEXT, "all_reduce", "ranks"))
    assert says(*with_numbers(groups, [*ring, waits(newest)]).groups)[0] == expected


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
    """Show the line of the named rank, and no stacks of another rank. The lowest rank of its group is elsewhere."""
    frames = [(Frame(function="read_part", file="shards.py", line=line),) for line in (10, 20)]
    alike = group(range(2), frames[0], "unknown", "unknown")
    members = tuple(
        change_parts(member, user_frames=own, state=state)
        for member, own, state in zip(alike.members, frames, "ST", strict=True)
    )
    verdict = judge(Grouping(groups=(behind(range(2, 8)), replace(alike, members=members))))
    assert [rank.rank for rank in verdict.named] == [1]
    told = next(one.message for one in verdict.evidence if one.kind == "activity")
    assert "shards.py:20" in told and "shards.py:10" not in told
    both = group_text.describe_suspects([replace(alike, members=members)])
    assert "shards.py:10 or 20" in both
    stack = Stack(name="1 x pt_data_worker", frames=frames[0], activity="unknown")
    whole = Grouping(groups=(replace(alike, members=members, threads=(stack,), workers=(stack,)),))
    parts, _ = phrases.split_groups(whole, verdict)
    assert [(part.threads, part.workers) for part in parts] == [((stack,), (stack,)), ((), ())]


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
def test_native_frames_are_asked_for_if_the_call_is_unknown(seen: dict[str, object], *, is_asked_for: bool) -> None:
    verdict = judge(Grouping(groups=(behind(range(1, 4)), group_in_own_code(range(1), **seen))))
    assert [one.rank for one in verdict.check_first] == [0]
    told = (verdict.message, next_step(verdict))
    assert ["--native" in one for one in told] == [is_asked_for] * 2
    assert ["look at /data/x: does it respond?" in one for one in told] == [not is_asked_for] * 2


def test_rank_to_check_first_that_sleeps_needs_no_native_frames() -> None:
    odd = group_in_own_code(range(1))
    stack = replace(odd.members[0].stack, sleep=Sleep(NOW, 3000.0, "p"))
    asleep = replace(odd, members=(replace(odd.members[0], stack=stack),))
    first = judge(Grouping(groups=(behind(range(1, 4)), asleep))).check_first[0]
    assert first.settle.startswith("find out why reserve (buffers.py:31) sleeps until")


def test_rank_with_unknown_call_needs_native_frames() -> None:
    odd = group_in_own_code(range(2))
    odd = replace(odd, members=(change_parts(odd.members[0], call=READ), odd.members[1]))
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
def test_rank_waiting_for_thread_is_judged_by_that_thread(thread: str, parts: dict[str, Any], expected: object) -> None:
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
    assert says(group_in_own_code(range(1)), locked, group(range(4, 7), NEXT[1:], "forward", "nothing"))[0] == []


def test_lock_holder_with_the_same_pid_on_another_node_is_distinct() -> None:
    here = group(range(1, 3), STORE, "lock", "lock", waits=Waits(file_lock=FileLock(path="/data/here", holder_pid=100)))
    lock = FileLock(path="/data/there", holder_pid=100)
    there = group(range(1), STORE, "lock", "lock", id=RankId(node="n2", rank=3, pid=103), waits=Waits(file_lock=lock))
    message = judge(Grouping(groups=(group_in_own_code(range(1)), there, here))).message
    assert "and holds the lock of /data/here, for which ranks 1-2 on n1 wait" in message


LINE = Frame(function="save", file="train.py", line=48)
OPEN = KernelCall(name="openat", says="openat() on", rounds=2, path="data/shard-3")
STORAGE = "ask what blocks it: `hangwatch check storage --path data/shard-3` on a"


def call(**given: object) -> KernelCall:
    return KernelCall(**{"name": "read", "says": "read() on", "rounds": 2, **given})  # type: ignore[arg-type]


def judged(*, activity: str = "storage_io", motion: Motion = Motion.FROZEN, **facts: object) -> Verdict:
    """Return the verdict on rank 3, while three other ranks wait for it in a collective."""
    facts = {"stack": StackFacts(user_frames=(LINE,)), **facts}
    stuck = Member(id=RankId(node="a", rank=3, pid=160), motion=motion, rounds=3, **facts)  # type: ignore[arg-type]
    others = tuple(Member(id=RankId(node="a", rank=n, pid=n + 10), motion=Motion.FROZEN, rounds=3) for n in range(3))
    waiting = Group(key="w", activity="collective_wait", operation="all_reduce", waits_for="ranks", members=others)
    frames = (Frame(function="write", file="io.py", line=3), LINE)
    suspect = Group(key="s", activity=activity, waits_for="nothing", members=(stuck,), frames=frames)
    return judge(Grouping(groups=(waiting, suspect)))


BLOCKED = load_table("blocked_calls.toml")
PARTS = {"kernel": KernelFacts, "waits": Waits, "stack": StackFacts, "motion": Motion, "activity": str}


@pytest.mark.parametrize("case", BLOCKED.values(), ids=BLOCKED)
def test_both_lines_name_the_object_of_the_blocked_call(case: dict[str, Any]) -> None:
    facts = {name: msgspec.convert(case[name], part) for name, part in PARTS.items() if name in case}
    verdict = judged(**facts)
    assert [rank.rank for rank in verdict.named or verdict.check_first] == [3]
    assert (verdict.stuck_on, verdict.next_step) == (case["stuck_on"], case["next_step"])


def test_step_for_ranks_at_one_place_names_the_object_of_their_call() -> None:
    ranks = [
        Member(id=RankId(node="a", rank=n), kernel=KernelFacts(call=call(name="write", path="/x"))) for n in (0, 1)
    ]
    assert "--path /x" in judge(Grouping(groups=(unnamed_group("storage", *ranks),))).next_step


def test_a_long_path_keeps_the_name_of_its_file() -> None:
    path = f"/mnt/{'deep/' * 40}shard-3"
    stuck_on = judged(kernel=KernelFacts(call=call(name="openat", path=path))).stuck_on
    assert stuck_on.startswith('open("/mnt/deep/') and '/shard-3") in rank 3' in stuck_on
    assert len(stuck_on) < 120


@pytest.mark.parametrize("case", hangs.CASES, ids=[case["name"] for case in hangs.CASES])
def test_every_known_hang_has_both_lines_and_no_healthy_job_is_stuck(case: dict[str, object]) -> None:
    _, verdict = hangs.judged(case)
    assert verdict.next_step
    is_healthy = verdict.kind in {"Moving", "Serving", "Suspended", "Over"} or "still progress" in verdict.message
    assert not (is_healthy and verdict.stuck_on)
    assert is_healthy or verdict.stuck_on or verdict.kind == "CannotTell"
    assert "\n" not in verdict.stuck_on + verdict.next_step


NATIVE = Frame(function="PyThread_acquire_lock_timed", file="libpython3.11.so.1.0")


def alone(rank: int | None = None, kernel: KernelFacts = KernelFacts(), **given: object) -> Verdict:  # noqa: B008
    """Return the verdict on one process, which was dumped alone."""
    member = Member(id=RankId(node="a", rank=rank, pid=160), stack=StackFacts(user_frames=(LINE,)), kernel=kernel)
    group = Group(**{"key": "k", "members": (member,), "frames": (NATIVE, LINE), **given})  # type: ignore[arg-type]
    return judge(Grouping(groups=(group,)))


def test_one_process_is_described_alone_with_its_threads() -> None:
    """Say nothing about other ranks, nodes or file locks: only this process was captured."""
    sleeps = Stack(name="holder", frames=(Frame(function="hold", file="train.py", line=5),), activity="sleep")
    operation = "PyThread_acquire_lock_timed"
    verdict = alone(activity="lock", operation=operation, waits_for="lock", threads=(sleeps,))
    assert verdict.message == (
        "Pid 160 (a) waits for a lock (PyThread_acquire_lock_timed) in save at train.py:48; "
        "its thread (holder) sleeps in hold (train.py:5)."
    )
    assert verdict.stuck_on == "PyThread_acquire_lock_timed(), called by save (train.py:48) in pid 160 (a)"
    assert verdict.next_step == "look at the other threads of pid 160 (a): `hangwatch dump --stacks --pid 160`"


def test_rank_that_was_dumped_alone_is_described_by_its_call() -> None:
    unknown = alone(3, KernelFacts(call=OPEN), activity="unknown", operation="save", waits_for="unknown")
    assert unknown.message == (
        "Rank 3 (a, pid 160) is in the function save at train.py:48. It is blocked in openat() on data/shard-3."
    )
    assert (unknown.stuck_on, unknown.next_step) == ('open("data/shard-3") in rank 3 (a, pid 160)', STORAGE)
    waiting = alone(3, KernelFacts(state="S"), activity="collective_wait", operation="all_reduce", waits_for="ranks")
    assert waiting.message == "Rank 3 (a, pid 160) waits in all_reduce in save at train.py:48."
    assert waiting.next_step == "dump all ranks of its job: they show which rank it waits for: `hangwatch dump`"


def test_process_that_may_not_be_dumped_is_dumped_with_more_rights_first() -> None:
    fault = Fault(subject="pid 160", reason="PermissionDenied", detail="denied", remedy="run hangwatch as root")
    verdict = alone(activity="unknown", frames=(), fault=fault)
    assert verdict.next_step == "run hangwatch as root"
    group = Group(key="k", activity="unknown", members=(Member(id=RankId(node="a", rank=0, pid=1)),), fault=fault)
    known = Group(key="x", activity="unknown", members=(Member(id=RankId(node="a", rank=1, pid=2)),), frames=(LINE,))
    assert judge(Grouping(groups=(group, known))).next_step != "run hangwatch as root"


@pytest.mark.parametrize("how", ["gone", "ProcessGone"])
def test_ranks_that_have_all_ended_show_no_hang(how: str) -> None:
    fault = Fault(subject="pid 1", reason=how, detail="no such process", about="target")
    members = tuple(Member(id=RankId(node="a", rank=number, pid=number + 1)) for number in range(2))
    ended = Group("e", "unknown", members, gone=how == "gone", fault=None if how == "gone" else fault)
    verdict = judge(Grouping(groups=(ended,), world_size=2))
    assert verdict.message == "Both ranks have ended: no hang is shown."
    assert verdict.next_step == "read the end of the job's log: it shows if the job ended as planned"
    assert "no rank has a stack" in judge(Grouping(groups=(ended,), world_size=4)).message, "two ranks are unknown"
    here = judge(Grouping(groups=(ended,), world_size=4), ranks_here=2).message
    assert here.endswith("no hang is shown. This verdict is on the 2 ranks of this node; the job has 4.")


NOW = 1_800_000_000.0
OPERATION = EnqueuedOperation(7, "all_reduce", 7, NOW - 600, stays_open=True, timeout_seconds=599.0)
RECORDS = GroupRecords("gloo", "0", "", 7, operations=(OPERATION,))
TIMES_OUT = RecorderFacts(libraries=(RecorderState(library="gloo", groups=(RECORDS,)),))
IDS = [RankId(node="gpu-07", rank=rank, local_rank=rank, pid=100 + rank) for rank in range(4)]
ON_NFS = CallTarget(kind="file", what="/mnt/nfs/shard-3", mount="/mnt/nfs (nfs4)", is_remote=True)
ON_DISK = CallTarget(kind="file", what="/scratch/a", mount="/scratch (ext4)", is_local_device=True)
ON_PROC = CallTarget(kind="file", what="/proc/7/maps", mount="/proc (proc)")
GPU_FILE = CallTarget(kind="file", what="/dev/nvidia3")
ON_FUSE = CallTarget(kind="file", what="/home/user/mnt/a", mount="/home/user/mnt (fuse)", is_remote=True)
OTHER_PEER = CallTarget(kind="connection", what="10.0.0.9 port 443")
GONE_HERE = CallTarget(kind="connection", what="127.0.0.2 port 443", is_lost=True)
LOCAL_PEER = CallTarget(kind="connection", what="127.0.0.1 port 8080", other_pid=77, other_comm="server")


def line(text: str, name: str = "xid", subject: str = "0000:3b:00") -> KernelLine:
    return KernelLine(name=name, text=text, unix_seconds=NOW, subject=subject, is_recent=True)


def xid(code: int) -> KernelLine:
    return line(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1234, text")


def reads(target: CallTarget) -> KernelCall:
    return KernelCall(name="read", says="read() from", rounds=3, descriptors=1, behind=(target,))


OOM_IN_CGROUP = line("Memory cgroup out of memory: Killed process", "oom_kill")


def died(text: str) -> Died:
    return Died(text="an exception", detail=text, unix_seconds=NOW)


IN_LOCK = KernelFacts(state="S", rests="thread")


def recommend(
    kind: str = "OutsideCollective",
    *,
    named: bool = True,
    waits_for: str = "unknown",
    kernel: KernelFacts | None = None,
    rest: KernelFacts | None = None,
    history: History | None = None,
    is_known_pause: bool = False,
    **odd: Any,
) -> Verdict:
    """Recommend an action after a hang in which ranks 1 to 3 wait for rank 0. Without `named`, no rank is a suspect."""
    odd = {"motion": Motion.FROZEN, "kernel": kernel or IN_LOCK, "rounds": 3, **odd}
    suspect = Member(id=IDS[0], **odd)
    others = tuple(Member(id=one, motion=Motion.FROZEN, kernel=rest or IN_LOCK, rounds=3) for one in IDS[1:])
    groups = (
        Group("b", "collective_wait", others, waits_for="ranks", frames=(Frame("all_reduce", "c10d.py", 1),)),
        Group("a", "unknown", (suspect,), waits_for=waits_for, frames=(Frame("step", "train.py", 7),)),
    )
    verdict = Verdict(
        kind=kind,
        message="m",
        named=(IDS[0],) if named else (),
        confidence=Confidence.HIGH if named else Confidence.NONE,
    )
    return with_action(verdict, Grouping(groups=groups), history, is_known_pause=is_known_pause)


def kernel(
    state: str = "S", *lines: KernelLine, call: KernelCall | None = None, mount: str | None = None
) -> KernelFacts:
    return KernelFacts(state=state, lines=lines, call=call, silent_mount=mount)


@pytest.mark.parametrize(
    ("expected", "facts"),
    [
        ("wait", {"kind": "Moving", "named": False}),
        ("wait", {"motion": Motion.MOVING}),
        ("wait", {"kind": "Serving", "named": False}),
        ("wait", {"is_known_pause": True, "kernel": kernel(call=reads(ON_NFS))}),
        ("wait", {"stack": StackFacts(sleep=Sleep(until_unix_seconds=NOW, seconds=60.0, place="p"))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 60.0, "p", is_polling=True))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 1.0, "p"))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 2 * 86400.0, "p"))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 60.0, "p")), "recorder": TIMES_OUT}),
        ("investigate", {"kind": "Suspended", "named": False, "rest": kernel("T", xid(79))}),
        ("restart_elsewhere", {"kernel": kernel("S", xid(79))}),
        ("restart_elsewhere", {"kernel": kernel("S", xid(79), call=reads(ON_NFS))}),
        ("restart_elsewhere", {"kind": "AllJoined", "named": False, "rest": kernel("S", xid(48))}),
        ("restart_elsewhere", {"kind": "GpuBehind"}),
        ("investigate", {"rest": kernel("S", xid(79))}),
        ("investigate", {"kernel": kernel("S", replace(xid(79), is_recent=False))}),
        *(("investigate", {"kernel": kernel("S", xid(code))}) for code in (13, 31, 43, 45, 63)),
        ("restart_elsewhere", {"kernel": kernel("D", call=reads(ON_DISK))}),
        ("restart_elsewhere", {"kernel": kernel("D", call=reads(GPU_FILE))}),
        ("investigate", {"kernel": kernel("D", call=reads(ON_PROC))}),
        ("investigate", {"kernel": kernel("D", call=replace(reads(ON_DISK), descriptors=4))}),
        ("fix_storage", {"kernel": kernel("D", call=reads(ON_DISK), mount="/mnt/nfs")}),
        ("investigate", {"kernel": kernel("S", call=reads(ON_DISK))}),
        ("fix_storage", {"kernel": kernel("D", call=reads(ON_FUSE))}),
        ("fix_storage", {"kernel": kernel("S", call=reads(ON_NFS))}),
        ("fix_storage", {"kind": "MountSilent", "named": False, "rest": kernel("D", mount="/mnt/nfs")}),
        ("fix_storage", {"kernel": kernel("D", line("nfs: server a not responding", "nfs_server_silent", "a"))}),
        ("investigate", {"kernel": kernel("S", line("nfs: server a not responding", "nfs_server_silent", "a"))}),
        ("fix_network", {"kind": "WrongInterface", "named": False}),
        ("fix_network", {"kernel": kernel(call=reads(OTHER_PEER)), "waits": Waits(awaited=Awaited(name="10.0.0.9"))}),
        ("investigate", {"kernel": kernel(call=reads(GONE_HERE)), "waits": Waits(awaited=Awaited(name="a server"))}),
        ("investigate", {"kernel": kernel(call=reads(LOCAL_PEER)), "waits": Waits(awaited=Awaited(name="a server"))}),
        ("restart", {"kind": CRASHED, "died": died("torch.distributed.DistNetworkError: Broken pipe")}),
        ("investigate", {"kind": CRASHED, "died": died("ValueError: Connection reset")}),
        ("restart", {"kind": "RankGone", "kernel": kernel("S", line("Out of memory: Killed process 1", "oom_kill"))}),
        (
            "investigate",
            {"kind": "RankGone", "kernel": kernel("S", OOM_IN_CGROUP)},
        ),
        ("fix_program", {"waits_for": "lock"}),
        ("investigate", {"waits_for": "lock", "named": False}),
        ("investigate", {"waits_for": "lock", "waits": Waits(object="file")}),
        ("investigate", {"waits_for": "lock", "kernel": KernelFacts()}),
        ("investigate", {"waits_for": "lock", "kernel": kernel("S")}),
        ("investigate", {"waits_for": "lock", "motion": Motion.UNKNOWN}),
        ("investigate", {"motion": Motion.UNKNOWN, "kernel": kernel("S", xid(79))}),
        ("investigate", {}),
    ],
)
def test_first_row_that_holds_decides(expected: str, facts: dict[str, Any]) -> None:
    assert recommend(**facts).action.kind == expected, facts


def test_adapter_error_counts_only_if_all_ranks_wait() -> None:
    failed = kernel("S", line("mlx5_core 0000:5e:00.0: device's health compromised", "mlx5_fatal", "0000:5e:00.0"))
    assert recommend("AllJoined", named=False, rest=failed).action.kind == "restart_elsewhere"
    cable = kernel("S", line("mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged", "mlx5_cable"))
    assert recommend("AllJoined", named=False, rest=cable).action.kind == "investigate"
    assert recommend(rest=failed, kernel=failed).action.kind == "investigate"


def test_restart_elsewhere_excludes_only_the_node_of_the_fault() -> None:
    action = recommend(kernel=kernel("S", xid(79))).action
    assert action.exclude_nodes == ("gpu-07",) and action.confidence is Confidence.HIGH
    assert describe_action(action).startswith(
        "restart the job without gpu-07: the kernel reports XID 79 of GPU 0000:3b"
    )
    assert recommend(kernel=kernel(call=reads(ON_NFS))).action.exclude_nodes == ()


def hang(hours: float = 2.0, node: str = "gpu-07", uid: int | None = 1000, **more: Any) -> PastHang:
    fields = {"incident_id": "i", "fingerprint": recommend().fingerprint, "action": "investigate", **more}
    return PastHang(node=node, opened_unix_seconds=NOW - hours * 3600, uid=uid, **fields)


def after(*hangs: PastHang) -> History:
    return History(hangs, "gpu-07", 1000, unix_seconds=NOW)


STORE_LOST = {"kind": CRASHED, "died": died("DistStoreError: timed out")}


def test_restart_is_recommended_once_a_day_for_a_fingerprint() -> None:
    mark = recommend(**STORE_LOST).fingerprint
    for hours, action, expected in [
        (-1, "restart", "investigate"),
        (2, "restart", "investigate"),
        (30, "restart", "restart"),
        (2, "wait", "restart"),
    ]:
        history = after(hang(hours, fingerprint=mark, action=action))
        assert recommend(**STORE_LOST, history=history).action.kind == expected
    other = after(hang(fingerprint="other", action="restart"))
    assert recommend(**STORE_LOST, history=other).action.kind == "restart"


def test_hang_of_another_owner_on_the_node_is_to_be_investigated() -> None:
    action = recommend(waits_for="lock", history=after(hang(uid=1001, fingerprint=""))).action
    assert (action.kind, action.target, action.exclude_nodes) == ("investigate", "gpu-07", ())
    assert recommend(waits_for="lock", history=after(hang(uid=1001, node="gpu-08"))).action.kind == "fix_program"
    assert recommend(waits_for="lock", history=after(hang(30, uid=1001))).action.kind == "fix_program"
    assert recommend(waits_for="lock", history=after(hang(uid=None), hang(uid=1000))).action.kind == "fix_program"
    assert recommend(kernel=kernel("S", xid(79)), history=after(hang(uid=1001))).action.kind == "restart_elsewhere"


def test_same_place_on_other_nodes_points_at_the_program() -> None:
    assert recommend(history=after(hang(node="gpu-11"))).action.kind == "fix_program"
    assert recommend(history=after(hang())).action.kind == "investigate"
    assert (
        recommend(kernel=kernel(call=reads(ON_DISK)), history=after(hang(node="gpu-11"))).action.kind == "investigate"
    )


def test_evidence_lists_the_hangs_at_the_same_place() -> None:
    hangs = (hang(), hang(50), hang(3, node="gpu-11"), hang(8 * 24), hang(fingerprint="other"))
    said = [one.message for one in recommend(history=after(*hangs)).evidence]
    assert said == ["blocked at the same place 3 times in the last 7 days: gpu-07 (2 times), gpu-11 (1 time)"]
    assert recommend().evidence == ()


def test_fingerprint_ignores_lines_and_nodes_and_follows_the_stack() -> None:
    first = recommend()
    assert len(first.fingerprint) == 12 and first.fingerprint == recommend(waits_for="lock").fingerprint
    assert recommend(named=False).fingerprint != first.fingerprint


def test_table_and_conditions_are_the_same() -> None:
    assert list(recommendation.load()) == list(recommendation.CONDITIONS)
    order = list(dict.fromkeys(row.action for row in recommendation.load().values() if row.action != "investigate"))
    assert order == ["wait", "restart_elsewhere", "fix_storage", "fix_network", "restart", "fix_program"]


LINKS = "Check for XIDs, NVLink and network errors"


def unnamed_group(name: str, *members: Member, first: int = 0, count: int = 2, waits_for: str = "") -> Group:
    ranks = members or tuple(Member(id=RankId(node="n1", rank=first + i)) for i in range(count))
    known = activity_table.find_activity(name)
    return Group(key=f"{name}{first}", activity=name, members=ranks, waits_for=waits_for or known.waits_for)


def look(*groups: Group, world_size: int | None = None) -> str:
    return where_to_look(Grouping(groups=groups, world_size=world_size))


def at_store(*uses: PortUse) -> Group:
    members = (Member(id=RankId(rank=i), waits=Waits(store=Store("10.0.0.1:29500", use))) for i, use in enumerate(uses))
    return unnamed_group("rendezvous", *members)


def member(waits: Waits = Waits()) -> Member:  # noqa: B008 - frozen
    return Member(id=RankId(rank=0), waits=waits)


MEASURED = {
    "a lock with a known holder": unnamed_group(
        "lock", member(waits=Waits(file_lock=FileLock("/data/a.lock", 4711, "python")))
    ),
    "a lock with an unknown holder": unnamed_group("lock", member(waits=Waits(file_lock=FileLock("/data/a.lock")))),
    "a peer outside the job": unnamed_group("network", member(waits=Waits(awaited=Awaited("10.0.0.7 port 8000")))),
    "a sleep": unnamed_group("lock", Member(id=RankId(rank=0), stack=StackFacts(sleep=Sleep(1e9, 60.0, "")))),
    "a peer that is gone": unnamed_group("network", member(waits=Waits(awaited=Awaited("10.0.0.7 port 8000", "lost")))),
    "a store that rank 0 serves": at_store("serving", "connected", "connected"),
    "a store on another node": at_store("connected", "connected"),
    "a store that does not answer": at_store("silent", "silent", "connected"),
    "a store that some have not reached": at_store("serving", "none", "none", "silent"),
    "a store that refuses some": at_store("connected", "retries", "none"),
}


@pytest.mark.golden
def test_every_sentence(golden: Callable[[str, str], None]) -> None:
    lines = [f"{name}:{look(unnamed_group(name))}" for name in activity_table.built_in().activities]
    lines += [f"{name}:{look(one)}" for name, one in MEASURED.items()]
    alone = unnamed_group("collective_wait", count=1)
    lines += [
        f"one rank that is the job:{look(alone, world_size=1)}",
        f"one rank of several:{look(alone, world_size=2)}",
        f"several nodes:{look(unnamed_group('backward'), world_size=8)}",
        f"ranks between others without an answer:{look(unnamed_group('backward'), unnamed_group('lock', first=4), world_size=6)}",
        f"a dump that failed:{look(unnamed_group('backward'), Group('f', 'unknown', (member(),), fault=Fault('0', 'X', 'x')))}",
    ]
    golden("guidance.txt", "\n".join(lines) + "\n")


def test_links_and_sequence_numbers_only_where_all_wait_for_ranks_or_gpus() -> None:
    assert LINKS in look(unnamed_group("collective_wait"), unnamed_group("gpu_sync", first=2))
    assert "sequence numbers" in look(unnamed_group("collective_wait"))
    for name, known in ((name, activity_table.find_activity(name)) for name in activity_table.built_in().activities):
        if known.waits_for not in ("ranks", "gpu"):
            assert LINKS not in look(
                unnamed_group("collective_wait", count=4), unnamed_group(name, first=4, count=4)
            ), name


def test_what_the_largest_groups_wait_for_is_said_first_and_once() -> None:
    many = look(
        *(unnamed_group(name, first=2 * i) for i, name in enumerate(("storage", "checkpoint", "lock", "storage")))
    )
    assert many.startswith(" Check the file system: ") and "checkpoint" in many and "lock" not in many


def test_next_step_is_in_the_verdict() -> None:
    verdict = judge(Grouping(groups=(unnamed_group("checkpoint", count=4),), world_size=4))
    assert not verdict.named and "Check the file system of the checkpoint" in verdict.message


@pytest.mark.parametrize(("has_device", "checks"), [(None, "xid nvlink_status infiniband network"), (False, "network")])
def test_next_step_without_devices_checks_no_gpu(has_device: bool | None, checks: str) -> None:
    group = unnamed_group("collective_wait", count=4)
    members = tuple(replace(member, waits=Waits(has_device=has_device)) for member in group.members)
    verdict = judge(Grouping(groups=(replace(group, members=members),), world_size=4))
    assert verdict.next_step == f"`hangwatch check {checks}` on each of its nodes"


@pytest.mark.parametrize(
    ("names", "step"), [(("storage", "lock"), "dump all nodes"), (("collective_wait",), "on every node of the job")]
)
def test_next_step_for_a_whole_job_asks_for_no_other_dump(names: tuple[str, ...], step: str) -> None:
    groups = tuple(unnamed_group(name, first=2 * n) for n, name in enumerate(names))
    whole, part = (judge(Grouping(groups=groups, world_size=len(names) * size)) for size in (2, 4))
    assert step in part.next_step
    assert step not in whole.next_step and whole.next_step


def process(pid: int, title: str, parent: int = 1, comm: str = "", state: str = "S") -> Process:
    cmdline = tuple(title.split()) if title else ()
    identity = ProcessId(pid=pid, start_ticks=pid)
    return Process(id=identity, parent_pid=parent, comm=comm or title[:15], state=state, cmdline=cmdline)


VLLM = [
    process(10, "python serve.py", comm="python"),
    process(11, "VLLM::EngineCore", parent=10),
    *(process(12 + rank, f"VLLM::Worker_TP{rank}", parent=11) for rank in range(4)),
]
SGLANG = [
    process(10, "sglang::server"),
    process(11, "sglang::detokenizer", parent=10),
    *(process(12 + rank, f"sglang::scheduler_TP{rank}", parent=10) for rank in range(2)),
]
RAY = [
    process(10, "ray::TaskRunner.run"),
    *(process(20 + number, "ray::IDLE", parent=2) for number in range(3)),
    *(process(30 + number, "ray::WorkerDict.update", parent=2) for number in range(2)),
]
PLAIN = [process(10, "/usr/sbin/nginx"), process(11, "/usr/sbin/nginx", parent=10), process(12, "agetty tty1")]


@pytest.mark.parametrize(
    ("processes", "gpu_pids", "expected"),
    [
        (VLLM, (), [12, 13, 14, 15]),
        (SGLANG, (), [12, 13]),
        (RAY, (), [30, 31]),
        (PLAIN, (), []),
        (PLAIN, (11,), [11]),
        ([process(5, "", comm="VLLM::Worker_TP"), process(6, "", comm="VLLM::Worker_TP")], (), [5, 6]),
        ([process(5, "VLLM::Worker_TP0", state="Z")], (5,), []),
    ],
)
def test_likely_ranks_hold_gpus_or_have_the_title_of_a_worker(
    processes: list[Process], gpu_pids: tuple[int, ...], expected: list[int]
) -> None:
    assert [found.id.pid for found in find_likely_ranks(processes, gpu_pids)] == expected


def test_pid_of_a_server_means_its_workers_but_a_rank_stays_alone() -> None:
    assert find_ranks_below(10, VLLM, ()) == [12, 13, 14, 15]
    assert find_ranks_below(12, VLLM, ()) == []
    assert find_ranks_below(10, [*VLLM, process(20, "VLLM::Worker_TP0")], (10,)) == []
    assert find_ranks_below(99, VLLM, ()) == []
    assert [describe(found) for found in VLLM[:2]] == ["python", "VLLM::EngineCore"]
