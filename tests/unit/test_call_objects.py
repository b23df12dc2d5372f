"""The object of a rank's system call, such as a file or a connection.

A call that another thread or a GPU may complete has no object. A rank in such a call has not joined.
"""

import pytest
from msgspec import structs

from hangwatch import config
from hangwatch.capture.connections import find_object
from hangwatch.model import (
    CallObject,
    Frame,
    ProcessDump,
    RankDump,
    RankId,
    Signature,
    SystemCall,
    Thread,
    ThreadCounters,
)
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict.judge import judge
from tests.samples import change_dump

READ = SystemCall(number=0, name="read", kind="receives", descriptors=(5,))
FLOCK = SystemCall(number=73, name="flock", kind="locks", descriptors=(5,))
OPEN = SystemCall(number=257, name="openat")


@pytest.mark.parametrize(
    ("call", "link", "expected"),
    [
        (READ, "/data/shard-3", "file"),
        (READ, "pipe:[77]", "pipe"),
        (READ, "socket:[78]", "socket"),
        (READ, "anon_inode:[eventfd]", None),
        (READ, "/dev/nvidia0", None),
        (READ, "/dev/shm/psm_1", None),
        (READ, "/memfd:ring (deleted)", None),
        (READ, "", None),
        (FLOCK, "/data/lock", "lock"),
        (OPEN, "", "file"),
        (SystemCall(number=61, name="wait4", kind="awaits_child"), "", "child"),
        (SystemCall(number=74, name="fsync", kind="writes", descriptors=(5,)), "/data/x", "file"),
        (SystemCall(number=42, name="connect", kind="receives", descriptors=(5,)), "socket:[78]", "socket"),
        (SystemCall(number=16, name="ioctl", descriptors=(5,)), "/data/x", None),
        (SystemCall(number=202, name="futex"), "", None),
        (SystemCall(number=7, name="poll", kind="receives", descriptors=(5,)), "socket:[78]", None),
        (SystemCall(number=9999), "", None),
    ],
    ids=lambda value: value.name or "unknown call" if isinstance(value, SystemCall) else value or "-",
)
def test_object_of_a_call(call: SystemCall, link: str, expected: CallObject | None) -> None:
    assert find_object(call, link, is_own=False) == expected
    assert find_object(call, link, is_own=True) is None


def rank(number: int, call: SystemCall | None, *frames: Frame) -> RankDump:
    """Return a rank that is in `call` in all three rounds. Its GPU is at 100 % but draws little power."""
    main = Thread("MainThread", "1", (*frames, Frame("train_step", "train.py", 30)), is_main=True, installed_frames=0)
    main = structs.replace(main, installed_frames=sum("/" in frame.file for frame in frames))
    counters = ThreadCounters(read_monotonic_seconds=0.0, cpu_seconds=0.0, voluntary_switches=0)
    rounds = tuple(
        change_dump(
            ProcessDump(taken_monotonic_seconds=5.0 * at, threads=(main,)),
            state="S",
            cpu_seconds=0.0,
            io_bytes=0,
            call=call,
            before=structs.replace(counters, read_monotonic_seconds=5.0 * at),
            after=structs.replace(counters, read_monotonic_seconds=5.0 * at),
        )
        for at in range(3)
    )
    identity = RankId(node="n1", rank=number, pid=100 + number)
    return change_dump(RankDump(id=identity, rounds=rounds), utilization_ratio=1.0, busy_power_ratio=0.1)


def test_rank_blocked_in_open_is_named_despite_a_busy_gpu() -> None:
    collective = Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2800)
    others = [rank(number, None, collective) for number in range(3)]
    for call, named in ((structs.replace(OPEN, object="file"), [3]), (SystemCall(number=202, name="futex"), [])):
        seen = group_ranks([*others, rank(3, call)], activity.load(), config.Capture(), world_size=4)
        (member,) = (one for one in seen.members if one.id.rank == 3)
        assert member.signature is (Signature.BLOCKED if named else Signature.BEHIND_GPU)
        assert [one.rank for one in judge(seen, 4).named] == named
