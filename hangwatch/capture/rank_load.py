"""Read the counters of a rank that may show why it is late: CPU, quota, I/O, page faults, swap, workers, GPU clock."""

import time
from pathlib import Path

from hangwatch.collectives.rank_differences import RankLoad
from hangwatch.model import GpuSweep, Rank, sum_all
from hangwatch.probes.base import procfs
from hangwatch.probes.process import control_groups, main_thread

MOST_WORKERS = 64


def read_load(
    rank: Rank, sweep: GpuSweep | None, proc_root: Path = procfs.PROC, sys_root: Path = Path("/sys")
) -> RankLoad:
    """Return the counters of a rank now, with those of its first 64 workers, and the clocks in this GPU sample."""
    thread = main_thread.read_counters(rank.id.pid, proc_root)
    worker_counters = [procfs.read_counters(worker.id.pid, proc_root) for worker in rank.workers[:MOST_WORKERS]]
    clocks = [
        gpu.sm_clock_hertz
        for gpu in (sweep.gpus if sweep is not None else ())
        if gpu.uuid in rank.gpu_uuids and gpu.sm_clock_hertz is not None
    ]
    return RankLoad.copy_from(
        thread,
        read_monotonic_seconds=time.monotonic(),
        throttled_seconds=control_groups.read_throttled_seconds(rank.id.pid, proc_root, sys_root),
        swap_bytes=procfs.read_swap_bytes(rank.id.pid, proc_root),
        clock_hertz=min(clocks, default=None),
        workers=tuple(counters.id for counters in worker_counters if counters.id is not None),
        worker_cpu_seconds=sum_all(counters.cpu_seconds for counters in worker_counters),
        worker_io_bytes=sum_all(counters.io_bytes for counters in worker_counters),
    )
