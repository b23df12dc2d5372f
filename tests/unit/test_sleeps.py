"""Sleeps of ranks, as the rounds of a capture measure them."""

import pytest
from msgspec import structs

from hangwatch.model import Awaited, Frame, ProcessDump, RankDump, RankId, Sleep, SystemCall, Thread
from hangwatch.stacks import activity
from hangwatch.stacks.process_activity import find_process_activity
from hangwatch.stacks.sleeps import find_sleep
from tests.samples import change_dump

TABLE = activity.load()
USER = Frame("wait_for_file", "train.py", 48)
EVENT = (Frame("wait", "threading.py", 655), Frame("wait", "threading.py", 1003))
TORCH = Frame("_try_get_data", "torch/utils/data/dataloader.py", 1251)
NANOSLEEP = SystemCall(number=230, name="clock_nanosleep", kind="sleeps", left_seconds=30.0, until_unix_seconds=1030.0)
FUTEX = SystemCall(number=202, name="futex", left_seconds=30.0, until_unix_seconds=1030.0)


def dump(call: SystemCall | None, *frames: Frame, in_torch: bool | None = False, line: int = 48) -> ProcessDump:
    user = structs.replace(USER, line=line)
    main = Thread("MainThread", "1", (*frames, user), is_main=True, installed_frames=len(frames))
    return change_dump(ProcessDump(taken_monotonic_seconds=0.0, threads=(main,)), call=call, waits_in_torch=in_torch)


def sleep_in(*rounds: ProcessDump) -> Sleep | None:
    activities = [find_process_activity(one.threads, TABLE) for one in rounds]
    return find_sleep(RankDump(id=RankId(rank=0), rounds=rounds), activities)


@pytest.mark.parametrize(
    "taken",
    [
        dump(NANOSLEEP),
        dump(NANOSLEEP, Frame("sleep", "tenacity/nap.py", 31)),
        dump(FUTEX, *EVENT),
        dump(FUTEX, Frame("get", "queue.py", 180)),
        dump(FUTEX),
    ],
    ids=["time.sleep", "time.sleep of a library", "Event.wait", "queue.get", "Lock.acquire"],
)
def test_sleep_tells_its_end(taken: ProcessDump) -> None:
    sleep = sleep_in(taken, taken)
    assert (sleep.until_unix_seconds, sleep.seconds, sleep.is_polling) == (1030.0, 30.0, False)


@pytest.mark.parametrize(
    "taken",
    [
        dump(structs.replace(NANOSLEEP, left_seconds=None, until_unix_seconds=None)),
        dump(FUTEX, *EVENT, TORCH),
        dump(FUTEX, in_torch=True),
        dump(FUTEX, in_torch=None),
        dump(NANOSLEEP, in_torch=True),
        dump(NANOSLEEP, Frame("_store_based_barrier", "torch/distributed/distributed_c10d.py", 900)),
        change_dump(dump(FUTEX, *EVENT), asks_rank="main"),
        change_dump(dump(FUTEX, *EVENT), awaits_store="main"),
        change_dump(dump(FUTEX, *EVENT), awaited=Awaited(name="10.0.0.9 port 8000")),
    ],
    ids=[
        "no end",
        "a timed wait in a loop of a library",
        "work.wait()",
        "unknown compiled code",
        "NCCL polls with nanosleep",
        "waits for ranks",
        "receives from a rank",
        "receives from the store",
        "receives from a server",
    ],
)
def test_other_wait_is_no_sleep(taken: ProcessDump) -> None:
    assert sleep_in(taken, taken) is None


def test_sleep_of_a_capture_is_that_of_its_last_round_and_the_longest() -> None:
    later = structs.replace(NANOSLEEP, left_seconds=12.0, until_unix_seconds=1031.0)
    first, last = dump(NANOSLEEP), dump(later)
    assert sleep_in(first, dump(None, line=49), last) == sleep_in(first, last)
    sleep = sleep_in(first, last)
    assert (sleep.until_unix_seconds, sleep.seconds) == (1031.0, 30.0)


def test_sleeps_at_different_lines_are_no_sleep() -> None:
    assert sleep_in(dump(NANOSLEEP), dump(NANOSLEEP, line=60)) is None
    assert sleep_in(dump(NANOSLEEP), dump(NANOSLEEP, line=48)) is not None
    assert sleep_in(dump(None), dump(None)) is None
