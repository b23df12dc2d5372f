"""`stuck_on` and `next_step` of a verdict: the blocked call with its file, and the step for it."""

import pytest

from hangwatch.model import (
    CallTarget,
    Fault,
    FileLock,
    Frame,
    Group,
    Grouping,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    RankId,
    Stack,
    StackFacts,
    Verdict,
    Waits,
    WorkerCall,
)
from hangwatch.verdict.judge import judge
from tests import hangs

LINE = Frame(function="save", file="train.py", line=48)
OPEN = KernelCall(name="openat", says="openat() on", rounds=2, path="data/shard-3")
LOCK = FileLock(path="/data/x.lock", holder_pid=44, holder_comm="rsync")
PIPE = CallTarget(kind="pipe", what="pipe:[7]", other_pid=55, other_comm="tokenizer")
PEER = CallTarget(kind="connection", what="10.0.0.7 port 443")
STORAGE = "look at data/shard-3: does its storage respond (`hangwatch check storage`)? A FIFO needs a writer"


def call(**given: object) -> KernelCall:
    return KernelCall(**{"name": "read", "says": "read() on", "rounds": 2, **given})  # type: ignore[arg-type]


def judged(*, activity: str = "storage_io", motion: Motion = Motion.FROZEN, **facts: object) -> Verdict:
    """Return the verdict on rank 3, while three other ranks wait for it in a collective."""
    stack = StackFacts(user_frames=(LINE,))
    stuck = Member(id=RankId(node="a", rank=3, pid=160), motion=motion, rounds=3, stack=stack, **facts)  # type: ignore[arg-type]
    others = tuple(Member(id=RankId(node="a", rank=n, pid=n + 10), motion=Motion.FROZEN, rounds=3) for n in range(3))
    waiting = Group(key="w", activity="collective_wait", operation="all_reduce", waits_for="ranks", members=others)
    frames = (Frame(function="write", file="io.py", line=3), LINE)
    suspect = Group(key="s", activity=activity, waits_for="nothing", members=(stuck,), frames=frames)
    return judge(Grouping(groups=(waiting, suspect)))


CASES: dict[str, tuple[dict[str, object], str, str]] = {
    "a file of its worker": (
        {"kernel": KernelFacts(worker_call=WorkerCall(pid=161, call=OPEN)), "activity": "data_loading"},
        'open("data/shard-3") in pid 161, data-loader worker of rank 3 (a)',
        STORAGE,
    ),
    "a FIFO": (
        {"kernel": KernelFacts(call=OPEN, wchan="wait_for_partner")},
        'open("data/shard-3") in rank 3 (a, pid 160)',
        "look at data/shard-3: it is a FIFO, and no process has opened its other end",
    ),
    "a file that is no FIFO": (
        {"kernel": KernelFacts(call=OPEN, wchan="rpc_wait_bit_killable")},
        'open("data/shard-3") in rank 3 (a, pid 160)',
        STORAGE.removesuffix(" A FIFO needs a writer"),
    ),
    "a file": ({"kernel": KernelFacts(call=OPEN)}, 'open("data/shard-3") in rank 3 (a, pid 160)', STORAGE),
    "a lock": (
        {"kernel": KernelFacts(call=call(name="flock", says="flock() on", file_lock=LOCK))},
        "flock() on /data/x.lock, held by pid 44 (rsync) in rank 3 (a, pid 160)",
        "look at pid 44 (rsync), which holds the lock of /data/x.lock",
    ),
    "a lock without its call": (
        {"waits": Waits(file_lock=FileLock(path="/data/x.lock"))},
        "the lock of /data/x.lock in rank 3 (a, pid 160)",
        "look at /data/x.lock: `fuser -v` shows which processes have it open; its holder may be elsewhere",
    ),
    "a pipe": (
        {"kernel": KernelFacts(call=call(descriptors=1, behind=(PIPE,)))},
        "read() on a pipe connected to pid 55 (tokenizer) in rank 3 (a, pid 160)",
        "look at pid 55 (tokenizer), at the other end: `hangwatch dump --pid 55`",
    ),
    "a peer": (
        {"kernel": KernelFacts(call=call(descriptors=1, behind=(PEER,)))},
        "read() on 10.0.0.7 port 443 in rank 3 (a, pid 160)",
        "look at 10.0.0.7 port 443: does it respond?",
    ),
    "a child": (
        {"kernel": KernelFacts(call=call(name="wait4", says="wait4() for", child_pid=77, child_comm="ninja"))},
        "wait4() for its child 77 (ninja) in rank 3 (a, pid 160)",
        "look at its child 77 (ninja): `hangwatch dump --pid 77`",
    ),
    "state D": (
        {"kernel": KernelFacts(state="D", wchan="rpc_wait")},
        "rpc_wait in the kernel (state D) in rank 3 (a, pid 160)",
        "`hangwatch check storage xid` on its node shows if a mount does not respond or a driver has failed",
    ),
    "a line": (
        {},
        "write(), called by save (train.py:48) in rank 3 (a, pid 160)",
        "find out why write(), called by save (train.py:48) does not return: `hangwatch dump --native --pid 160` on a",
    ),
    "a rank that works": (
        {"motion": Motion.MOVING},
        "",
        "wait: a checkpoint, an evaluation or a compilation ends without help",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_both_lines_name_the_object_of_the_blocked_call(name: str) -> None:
    facts, stuck_on, next_step = CASES[name]
    verdict = judged(**facts)  # type: ignore[arg-type]
    assert [rank.rank for rank in verdict.named] == [3]
    assert (verdict.stuck_on, verdict.next_step) == (stuck_on, next_step)


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
    ended = Group(
        key="e", activity="unknown", members=members, gone=how == "gone", fault=None if how == "gone" else fault
    )
    verdict = judge(Grouping(groups=(ended,), world_size=2))
    assert verdict.message == "Both ranks have ended: no hang is shown."
    assert verdict.next_step == "read the end of the job's log: it shows if the job ended as planned"
    assert "no rank has a stack" in judge(Grouping(groups=(ended,), world_size=4)).message, "two ranks are unknown"
    here = judge(Grouping(groups=(ended,), world_size=4), ranks_here=2).message
    assert here.endswith("no hang is shown. This verdict is on the 2 ranks of this node; the job has 4.")
