"""Make the dump of each rank from the dumps of its processes. Ranks without a process get a dump, too.

A file system that does not respond blocks py-spy. The dumps of the processes that need it say so.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    FUSE_WAITS,
    Fault,
    GpuLevels,
    GpuReadings,
    GpuSweep,
    Job,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    TrafficSweep,
    Worker,
    WorkerDump,
)
from hangwatch.probes.base import filesystems
from hangwatch.probes.process import pyspy
from hangwatch.stacks.link_traffic import gpu_use, link_rates

ABSENT_LISTED = 64
_MOUNT_DEADLINE_SECONDS = 3.0


def measure_gpus(
    rank: Rank, sweeps: Sequence[GpuSweep], levels: Mapping[str, GpuLevels], carried: Sequence[TrafficSweep]
) -> GpuReadings:
    """Return the load of a rank's GPUs. Power and utilization are means over all sweeps and GPUs."""
    held = [gpu for sweep in sweeps for gpu in sweep.gpus if gpu.uuid in rank.gpu_uuids]
    levels_and_watts = [
        (levels[gpu.uuid], gpu.power_watts) for gpu in held if gpu.uuid in levels and gpu.power_watts is not None
    ]
    nvlink, pcie = link_rates(rank.gpu_uuids, carried)
    return GpuReadings(
        power_watts=_mean([gpu.power_watts for gpu in held]),
        utilization_ratio=_mean([gpu.utilization_ratio for gpu in held]),
        busy_power_ratio=_mean([level.ratio(watts) for level, watts in levels_and_watts]),
        works_lightly=bool(levels_and_watts) and all(level.is_light for level, _ in levels_and_watts),
        nvlink_bytes_per_second=nvlink,
        pcie_bytes_per_second=pcie,
        use=gpu_use(rank.gpu_uuids, carried),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def make_rank_dump(
    rank: Rank,
    taken: Sequence[dict[ProcessId, ProcessDump]],
    node: str,
    gpu: GpuReadings,
    mount_by_pid: Mapping[int, filesystems.Mount],
) -> RankDump:
    """Return the dump of a rank and its workers. `mount_by_pid` has the silent file systems that processes need."""
    mount = mount_by_pid.get(rank.id.pid)
    rounds = tuple(_add_mount(dumps[rank.id], mount) for dumps in taken)
    return RankDump(
        id=RankId.copy_from(rank, node=node, pid=rank.id.pid),
        rounds=rounds,
        workers=tuple(
            _worker_dump(worker, tuple(dumps[worker.id] for dumps in taken), mount_by_pid.get(worker.id.pid))
            for worker in rank.workers
            if taken and worker.id in taken[0]
        ),
        # /proc shows that the process has ended. An error of py-spy does not prove that.
        gone=bool(rounds) and (rounds[-1].state_after or "X") in ENDED_STATES,
        gpu=gpu,
        silent_mount=str(mount) if mount else None,
        waits_for_mount=_is_waiting_for(rounds, mount),
        most_peers=rank.most_peers,
    )


def _worker_dump(worker: Worker, rounds: tuple[ProcessDump, ...], mount: filesystems.Mount | None) -> WorkerDump:
    return WorkerDump(
        pid=worker.id.pid,
        comm=worker.comm,
        rounds=tuple(_add_mount(dump, mount) for dump in rounds),
        waits_for_mount=_is_waiting_for(rounds, mount),
    )


def find_silent_mounts(taken: Sequence[dict[ProcessId, ProcessDump]], proc_root: Path) -> dict[int, filesystems.Mount]:
    """Return the file systems that did not respond to a test, by pid of the process on which py-spy hung."""
    stuck = {target.pid: None for dumps in taken for target, dump in dumps.items() if _is_stuck(dump.fault)}
    return filesystems.SHARED.find_silent_mounts(proc_root, list(stuck), _MOUNT_DEADLINE_SECONDS) if stuck else {}


def _is_stuck(fault: Fault | None) -> bool:
    return fault is not None and fault.reason in pyspy.STUCK_REASONS


def _add_mount(dump: ProcessDump, mount: filesystems.Mount | None) -> ProcessDump:
    """Return the dump with the file system in its fault, if py-spy hung; any other dump unchanged."""
    if mount is None or dump.fault is None or not _is_stuck(dump.fault):
        return dump
    detail = f"{dump.fault.detail}; its program or a library is on {mount}, which does not respond"
    return replace(dump, fault=replace(dump.fault, detail=detail))


def _is_waiting_for(rounds: Sequence[ProcessDump], mount: filesystems.Mount | None) -> bool:
    """True if the kernel shows the process in a call on this file system in every round."""
    if mount is None:
        return False
    places = FUSE_WAITS if mount.type.startswith("fuse") else frozenset[str]()
    return all(
        dump.state in BLOCKED_STATES or dump.called == mount.device or dump.main.wchan in places for dump in rounds
    )


def absent_ranks(job: Job, node: str) -> tuple[RankDump, ...]:
    """Return dumps for the ranks that should be on this node but have no process.

    The global rank is set if an earlier scan saw the rank, or if it follows from the other ranks. At most
    `ABSENT_LISTED` dumps are returned, because a user can claim any number of ranks.
    """
    offsets = {
        rank.rank - rank.local_rank for rank in job.ranks if rank.rank is not None and rank.local_rank is not None
    }
    offset = offsets.pop() if len(offsets) == 1 else None
    seen = {process.local_rank: process for process in job.ended if not process.is_worker}

    def absent(place: int) -> RankDump:
        ended = seen.get(place)
        rank = ended.rank if ended is not None else None if offset is None else offset + place
        pid = None if ended is None else ended.id.pid
        return RankDump.copy_from(ended, id=RankId(node=node, rank=rank, local_rank=place, pid=pid), gone=True)

    return tuple(map(absent, itertools.islice(itertools.chain.from_iterable(job.absent), ABSENT_LISTED)))
