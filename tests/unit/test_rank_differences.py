"""Differences of a late rank from the others: by values, by files of control groups, and of a real process."""

import os
from pathlib import Path

import pytest

from hangwatch.collectives.rank_differences import RankLoad, find_differences
from hangwatch.model import ProcessId
from hangwatch.probes.base import procfs
from hangwatch.probes.process import control_groups

RANKS = [ProcessId(pid=100 + rank, start_ticks=1) for rank in range(4)]
WORKERS = (ProcessId(pid=200, start_ticks=1),)
COUNTERS = (
    "delay_seconds",
    "throttled_seconds",
    "io_bytes",
    "faulted_bytes",
    "worker_cpu_seconds",
    "worker_io_bytes",
)
GPU_HERTZ = 1.98e9


def differences(
    late: dict[str, float | None],
    others: dict[str, float | None] | None = None,
    workers: tuple[ProcessId, ...] = WORKERS,
) -> tuple[str, ...]:
    """Return the differences of rank 2 after a minute. All counters began at 10; the clock of the GPUs is 1,980 MHz."""
    counters: dict[str, float | None] = dict.fromkeys(COUNTERS, 10.0)
    gauges: dict[str, float | None] = {"swap_bytes": 0.0, "clock_hertz": GPU_HERTZ}
    began = RankLoad(read_monotonic_seconds=0.0, workers=WORKERS, **counters, **gauges)
    usual = counters | gauges | {"delay_seconds": 10.6} | (others or {})
    now = {
        rank: RankLoad(read_monotonic_seconds=60.0, workers=workers, **(usual | (late if rank == RANKS[2] else {})))
        for rank in RANKS
    }
    return find_differences(dict.fromkeys(RANKS, began), now, RANKS[2])


@pytest.mark.parametrize(
    ("late", "sentence"),
    [
        ({"delay_seconds": 25.0}, "its main thread waited 25% of the time for a core, those of the others at most 1%"),
        ({"throttled_seconds": 28.0}, "its CPU quota stopped it for 30% of the time, the others for at most 0%"),
        ({"worker_cpu_seconds": 64.0}, "its workers used 0.90 cores, those of the others at most 0.00"),
        ({"worker_io_bytes": 7.6e9}, "its workers read and wrote 121 MiB/s, those of the others at most 0 MiB/s"),
        ({"io_bytes": 7.6e9}, "its main thread read and wrote 121 MiB/s, those of the others at most 0 MiB/s"),
        (
            {"faulted_bytes": 7.6e9},
            "page faults of its main thread brought in 121 MiB/s, those of the others at most 0 MiB/s",
        ),
        ({"swap_bytes": 3e9}, "it has 2,861 MiB in swap, the others have at most 0 MiB"),
        ({"clock_hertz": 1.2e9}, "its GPU runs at 1,200 MHz, the others at 1,980 MHz or more"),
    ],
)
def test_value_of_the_late_rank_alone_is_said(late: dict[str, float | None], sentence: str) -> None:
    assert differences(late) == (sentence,)
    assert differences(late, late) == ()  # all ranks have it
    assert differences({}, late) == ()  # the others have it


def test_workers_that_started_or_ended_are_not_compared() -> None:
    assert differences({"worker_cpu_seconds": 64.0}, workers=(*WORKERS, RANKS[0])) == ()


def test_small_difference_is_not_said() -> None:
    assert (
        differences({"delay_seconds": 11.5, "throttled_seconds": 10.6, "swap_bytes": 5e7, "clock_hertz": 1.95e9}) == ()
    )


def test_unknown_values_are_not_compared() -> None:
    unknown: dict[str, float | None] = dict.fromkeys((*COUNTERS, "swap_bytes", "clock_hertz"))
    assert differences(unknown) == ()
    assert differences({"delay_seconds": 40.0, "swap_bytes": 3e9, "clock_hertz": 1e9}, unknown) == ()


def test_throttled_time_is_that_of_all_groups_upwards(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    for folder in (proc / "7", proc / "8", groups / "jobs/one", groups / "cpu/jobs"):
        folder.mkdir(parents=True)
    (proc / "7/cgroup").write_text("0::/jobs/one\n")
    (groups / "jobs/cpu.stat").write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 500000\n")
    (groups / "jobs/one/cpu.stat").write_text("usage_usec 9\nthrottled_usec 1500000\n")
    assert control_groups.read_throttled_seconds(7, proc, tmp_path / "sys") == 2.0
    (proc / "8/cgroup").write_text("9:memory:/jobs\n4:cpu,cpuacct:/jobs\n0::/\n")
    (groups / "cpu/jobs/cpu.stat").write_text("nr_throttled 3\nthrottled_time 250000000\n")
    assert control_groups.read_throttled_seconds(8, proc, tmp_path / "sys") == 0.25
    (groups / "cpu/jobs/cpu.stat").unlink()
    assert control_groups.read_throttled_seconds(8, proc, tmp_path / "sys") is None
    assert control_groups.read_throttled_seconds(9, proc, tmp_path / "sys") is None


def test_swap_of_a_real_process_is_read() -> None:
    swap = procfs.read_swap_bytes(os.getpid())
    assert swap is not None and swap >= 0 and swap % 1024 == 0
    assert procfs.read_swap_bytes(1 << 22) is None
