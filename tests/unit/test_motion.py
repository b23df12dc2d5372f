"""Frozen or moving: what changes between rounds is progress, what spins is not."""

from __future__ import annotations

import pytest
from msgspec import structs

from hangwatch import config
from hangwatch.hang import activity, motion
from hangwatch.hang.standing import find_standing
from hangwatch.model import Fault, Frame, Motion, ProcessDump, RankDump, RankId, Thread, WorkerDump

TABLE = activity.load()
SETTINGS = config.Capture()
FAILED = Fault(subject="pid 1", reason="Timeout", detail="no stacks within 5 s")
WAIT = ["all_reduce (torch/distributed/distributed_c10d.py:2501)", "train (train.py:50)"]
POLL = ["sched_yield (vllm/distributed/utils.py:40)", "acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:674)", "dequeue (vllm/distributed/device_communicators/shm_broadcast.py:755)", "worker_busy_loop (vllm/v1/executor/multiproc_executor.py:963)"]  # fmt: skip
POLL_ELSEWHERE = ["acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:680)", *POLL[2:]]
LOAD = ["wait (threading.py:302)", "get (queue.py:170)", "_try_get_data (torch/utils/data/dataloader.py:1011)", "train (train.py:35)"]  # fmt: skip
SYNC = ["synchronize (torch/cuda/__init__.py:1083)", "train (train.py:60)"]
COUNT = ["count (mine.py:7)", "train (train.py:30)"]


def frames(lines: list[str]) -> tuple[Frame, ...]:
    found = []
    for line in lines:
        function, _, rest = line.rstrip(")").rpartition(" (")
        file, colon, number = rest.rpartition(":")
        found.append(Frame(function=function, file=file if colon else rest, line=int(number) if colon else None))
    return tuple(found)


def measure(found: RankDump, settings: config.Capture) -> tuple[Motion, float | None, float | None]:
    standings = [
        find_standing(dump.threads, TABLE) if any(thread.frames for thread in dump.threads) else None
        for dump in found.rounds
    ]
    return motion.measure(found, standings, TABLE, settings)


def dumps(stacks: list[list[str]], cpu: float = 0.0, io: float = 0.0, state: str = "S") -> tuple[ProcessDump, ...]:
    """Rounds 5 s apart; `cpu` in cores, `io` in bytes per second. An empty stack is a dump that failed."""
    return tuple(
        ProcessDump(
            taken_monotonic_seconds=5.0 * number,
            threads=(Thread(name="MainThread", thread_id="1", frames=frames(lines), is_main=True),) if lines else (),
            fault=None if lines else FAILED,
            state=state,
            cpu_seconds=100.0 + 5.0 * number * cpu,
            io_bytes=int(5.0 * number * io),
        )
        for number, lines in enumerate(stacks)
    )


def rank(rounds: tuple[ProcessDump, ...], worker: tuple[ProcessDump, ...] = (), gone: bool = False) -> RankDump:
    workers = (WorkerDump(pid=2, comm="pt_data_worker", rounds=worker),) if worker else ()
    return RankDump(id=RankId(rank=0), rounds=rounds, workers=workers, gone=gone)


def moved(found: RankDump) -> Motion:
    return measure(found, SETTINGS)[0]


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("one round tells nothing", rank(dumps([WAIT])), Motion.UNKNOWN),
        ("no round tells nothing", rank(()), Motion.UNKNOWN),
        ("a wait that spins is frozen", rank(dumps([WAIT] * 3, cpu=1.0)), Motion.FROZEN),
        ("a wait that polls is frozen", rank(dumps([POLL, POLL_ELSEWHERE, POLL], cpu=1.0)), Motion.FROZEN),
        ("the next collective of the same kind is progress",
         rank(dumps([WAIT, [WAIT[0], "train (train.py:70)"]])), Motion.MOVING),
        ("from one operation to another is progress", rank(dumps([WAIT, LOAD, LOAD])), Motion.MOVING),
        ("a GPU synchronisation that spins is frozen", rank(dumps([SYNC] * 3, cpu=1.0)), Motion.FROZEN),
        ("I/O beside a wait is no progress", rank(dumps([WAIT] * 3, io=1e7)), Motion.FROZEN),
        ("a loader without data is frozen", rank(dumps([LOAD] * 3, cpu=0.001)), Motion.FROZEN),
        ("a loader whose worker computes moves", rank(dumps([LOAD] * 3), dumps([COUNT] * 3, cpu=0.5)), Motion.MOVING),
        ("a loader whose worker reads moves", rank(dumps([LOAD] * 3), dumps([COUNT] * 3, io=1e6)), Motion.MOVING),
        ("a loader whose worker is stuck is frozen", rank(dumps([LOAD] * 3), dumps([COUNT] * 3)), Motion.FROZEN),
        ("a Python loop at one line moves by its CPU time", rank(dumps([COUNT] * 3, cpu=1.0)), Motion.MOVING),
        ("a Python loop moves by its lines", rank(dumps([COUNT, ["count (mine.py:8)", COUNT[1]]])), Motion.MOVING),
        ("native frames that spin are no motion",
         rank(dumps([["0x7f01 (libcuda.so)", *SYNC], ["poll (libc.so.6)", *SYNC]], cpu=1.0)), Motion.FROZEN),
        ("undumpable in D", rank(dumps([[], []], state="D")), Motion.FROZEN),
        ("undumpable and stopped", rank(dumps([[], []], state="T")), Motion.FROZEN),
        ("undumpable in D, yet it used CPU", rank(dumps([[], []], cpu=0.5, state="D")), Motion.UNKNOWN),
        ("undumpable and running", rank(dumps([[], []], cpu=0.5, state="R")), Motion.UNKNOWN),
        ("one dump of three is no comparison", rank(dumps([[], LOAD, []])), Motion.UNKNOWN),
        ("gone", rank((), gone=True), Motion.FROZEN),
        ("a zombie", rank(dumps([WAIT, WAIT], state="Z")), Motion.FROZEN),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_motion(name: str, found: RankDump, expected: Motion) -> None:
    assert moved(found) is expected, name


SILENT = "/mnt/jfs (fuse.juicefs)"


def shut(
    cpu: float = 0.0, io: float = 0.0, state: str = "S", rounds: int = 3, mount: str | None = SILENT, held: bool = False
) -> RankDump:
    """A rank without any stack, whose program lies on a file system that gives no answer."""
    found = dumps([[]] * rounds, cpu=cpu, io=io, state=state)
    return structs.replace(rank(found), silent_mount=mount, waits_for_mount=held)


@pytest.mark.parametrize(
    ("name", "found", "mount_holds_job", "expected"),
    [
        ("asleep through three rounds", shut(), False, Motion.FROZEN),
        ("asleep, and no file system is known to be silent", shut(mount=None), False, Motion.UNKNOWN),
        ("nor then, where another rank waits for one", shut(mount=None), True, Motion.UNKNOWN),
        ("two rounds are too few", shut(rounds=2), True, Motion.UNKNOWN),
        ("computes, maybe", shut(cpu=1.0, state="R"), False, Motion.UNKNOWN),
        ("spins, and another rank waits for the file system", shut(cpu=1.0, state="R"), True, Motion.FROZEN),
        ("reads", shut(io=1e6), True, Motion.UNKNOWN),
        ("waits for the file system itself", shut(held=True), True, Motion.FROZEN),
    ],
)
def test_a_rank_that_a_silent_mount_hides(name: str, found: RankDump, mount_holds_job: bool, expected: Motion) -> None:
    measured = motion.measure(found, [None] * len(found.rounds), TABLE, SETTINGS, mount_holds_job=mount_holds_job)
    assert measured[0] is expected, name


def test_rates_count_the_workers() -> None:
    found = rank(dumps([LOAD] * 3, cpu=0.25, io=1000.0), dumps([COUNT] * 3, cpu=0.5, io=2000.0))
    _, cpu_ratio, io_bytes_per_second = measure(found, SETTINGS)
    assert cpu_ratio == pytest.approx(0.75)
    assert io_bytes_per_second == pytest.approx(3000.0)


def test_counters_that_are_missing_stay_unknown() -> None:
    rounds = tuple(ProcessDump(taken_monotonic_seconds=float(n), threads=dumps([LOAD])[0].threads) for n in range(2))
    assert measure(rank(rounds), SETTINGS) == (Motion.FROZEN, None, None)


def test_thresholds_come_from_the_configuration() -> None:
    found = rank(dumps([COUNT] * 2, cpu=0.1))
    assert measure(found, config.Capture(motion_cpu_ratio=0.05))[0] is Motion.MOVING
    assert measure(found, config.Capture(motion_cpu_ratio=0.2))[0] is Motion.FROZEN


@pytest.mark.parametrize(
    ("stack", "cpu", "gpu", "expected"),
    [
        (["evaluate (metrics.py:9)", "train (train.py:30)"], 1.0, 0.3, Motion.UNKNOWN),
        (["evaluate (metrics.py:9)", "train (train.py:30)"], 1.0, 1.0, Motion.FROZEN),
        (["evaluate (metrics.py:9)", "train (train.py:30)"], 1.0, None, Motion.FROZEN),
        (["evaluate (metrics.py:9)", "train (train.py:30)"], 0.0, 0.0, Motion.FROZEN),
        (["train (train.py:30)"], 1.0, 0.0, Motion.UNKNOWN),
        (SYNC, 1.0, 0.0, Motion.FROZEN),
        (WAIT, 1.0, 0.0, Motion.FROZEN),
    ],
)
def test_a_busy_core_beside_an_idle_gpu_may_be_computing(
    stack: list[str], cpu: float, gpu: float | None, expected: Motion
) -> None:
    found = structs.replace(rank(dumps([stack] * 3, cpu=cpu)), utilization_ratio=gpu)
    assert moved(found) is expected
