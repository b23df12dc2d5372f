"""The jobs of this node, found by a command without the daemon."""

import os
from collections.abc import Iterator

import click

from hangwatch import config
from hangwatch.capture.job_scan import JobScan
from hangwatch.cli.job_choice import choose
from hangwatch.cli.usage_errors import InputError
from hangwatch.jobs import discovery, likely_ranks
from hangwatch.model import Fault, GpuSweep, Job, Rank, RankId, list_by_key
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import procfs
from hangwatch.probes.node import host
from hangwatch.tables.launchers import TABLE

GPU_SECONDS = 3.0
_MOST_ANCESTORS = 64
NO_JOB = (
    "no training job found on this node: no process was started by one of these launchers\n"
    f"({', '.join(dict.fromkeys(launcher.name for launcher in TABLE.launchers))}),\n"
    f"and none has a rank in an environment that this user may read (try {'as root, or ' if os.geteuid() else ''}--pid)"
)


def jobs_of_pids(pids: tuple[int, ...], sweep: GpuSweep | None, limits: config.Jobs) -> tuple[list[Job], Job | None]:
    """Return a job that consists of these processes, or the jobs of these launchers. Raises InputError.

    With a single rank, also return the job that it is a rank of; else None.

    A process above all other processes of a job is a launcher of that job: for example the shell or the Python program
    around mp.spawn, the driver of Ray, or the first rank of Lightning. The pid of a server selects its workers.
    """
    missing = [pid for pid in pids if not procfs.read_state(pid)]
    if missing:
        raise InputError(f"--pid {missing[0]}: no such process")
    scan = JobScan(limits=limits, is_single=True)
    found_jobs = scan.find(sweep, host.node_name())
    all_jobs = (*found_jobs.jobs, *found_jobs.engines)
    started = {pid: [job for job in all_jobs if _has_started(pid, job)] for pid in pids}
    for pid, below in started.items():
        if len(below) > 1:
            click.echo(f"pid {pid} is not a rank: these are the {len(below)} jobs below it", err=True)
    if all(started.values()):
        return list({job.key: job for jobs in started.values() for job in jobs}.values()), None
    gpus = gpus_by_pid(sweep)
    processes = scan.processes.processes({*gpus, *pids})
    expanded = [
        [process.pid for job in started[pid] for process in job.processes]
        or likely_ranks.find_ranks_below(pid, processes, gpus)
        or [pid]
        for pid in pids
    ]
    selected = list(dict.fromkeys(pid for ranks in expanded for pid in ranks))
    whole = next(
        (job for job in all_jobs if len(selected) == 1 and selected[0] in {process.pid for process in job.processes}),
        None,
    )
    return [discovery.job_of_pids(processes, selected)], whole


def _has_started(pid: int, job: Job) -> bool:
    """True if a process is a launcher of the job, or above all its processes. It may be the first of several ranks."""
    if any(pid == launcher.pid for launcher in job.launcher_ids):
        return True
    others = [process.pid for process in job.processes if process.pid != pid]
    return bool(others) and all(_is_below(other, pid) for other in others)


def _is_below(pid: int | None, ancestor: int) -> bool:
    for _ in range(_MOST_ANCESTORS):
        if pid is None or pid == ancestor:
            break
        pid = procfs.read_parent(pid)
    return pid == ancestor


def gpus_by_pid(sweep: GpuSweep | None) -> dict[int, list[int]]:
    """Return the indexes of the GPUs that each process holds."""
    return list_by_key((pid, gpu.index) for gpu in (sweep.gpus if sweep is not None else ()) for pid in gpu.pids)


def find_jobs(wanted: str | None, sweep: GpuSweep | None, limits: config.Jobs, *, every: bool) -> list[Job]:
    """Return the jobs on this node; with `wanted`, only the job with this id, key or name.

    With `every`, for a dump of many nodes, return all jobs with this id, key or name; there may be none. The job is
    then selected after all nodes have responded.
    """
    scan = JobScan(limits=limits, is_single=True).find(sweep, host.node_name())
    for left_out in scan.left_out:
        click.echo(f"not monitored {left_out}: exceeds a limit in [jobs], see `hangwatch config --sample`", err=True)
    jobs = (*scan.jobs, *scan.engines)
    if every or wanted is None:
        return [job for job in jobs if wanted is None or job.is_called(wanted)]
    return [choose(wanted, jobs)]


def read_recorders(job: Job) -> Iterator[tuple[Rank, list[RankRecords], list[tuple[RankId, Fault]]]]:
    """Yield each rank of a job with its flight recorders, and with the faults of those that could not be read."""
    for rank in job.ranks:
        contents = torch_recorder.SHARED.read(rank.id, job.share)
        rank_id = RankId(rank=rank.rank, pid=rank.id.pid, title=rank.title)
        faults = [(rank_id, each) for each in contents if isinstance(each, Fault)]
        yield rank, [each for each in contents if not isinstance(each, Fault)], faults
