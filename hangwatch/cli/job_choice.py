"""The job that a person means by `--job WANTED`, among the jobs on this node."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hangwatch import words
from hangwatch.cli.usage_errors import InputError, with_sudo
from hangwatch.model import Job, find_jobs
from hangwatch.probes.base.procfs import TICKS_PER_SECOND

_SHORTEST_PREFIX = 4
_BY_PROCESS = re.compile(r"pid([0-9]{1,7})-([0-9]{1,20})(?:-[0-9]+)?", re.ASCII)
"""The id of a job with an environment that another user could not read."""


def choose(wanted: str, jobs: Sequence[Job]) -> Job:
    """Return the job with the key `wanted`, else with this id, name or program, else with an id that begins like this.

    Raises InputError if no job matches, or several do.
    """
    chosen = find_jobs(wanted, jobs) or _find_more(wanted, jobs)
    if not chosen:
        listed = "".join(f"\n    {_describe(job)}" for job in jobs) or " none"
        hidden = f"\n  this user may not read the names of other users' jobs: `{with_sudo()}`" if os.geteuid() else ""
        raise InputError(f"--job {wanted}: no such job on this node{hidden}\n  jobs here:{listed}")
    return choose_only(chosen, f"--job {wanted}: {len(chosen)} jobs on this node match\n  give the key of one")


def choose_only(jobs: Sequence[Job], problem: str = "") -> Job:
    """Return the only job. Raises InputError with `problem` and the list of jobs if there are several."""
    if len(jobs) == 1:
        return jobs[0]
    problem = problem or f"there are {len(jobs)} jobs\n  give the key of one with --job"
    listed = "".join(f"\n    {job.key}: {_describe(job)}" for job in jobs)
    raise InputError(f"{problem}:{listed}")


def _find_more(wanted: str, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that run a program, else a process, else those with a key or id that begins with `wanted`."""
    by_program = [job for job in jobs if job.program and job.program == Path(wanted).name]
    process = _BY_PROCESS.fullmatch(wanted)
    pid, ticks = map(int, process.groups()[:2]) if process else (0, 0)
    by_process = [
        job
        for job in jobs
        if any((process.pid, process.start_ticks) == (pid, ticks) for process in (*job.launcher_ids, *job.processes))
    ]
    by_prefix = [
        job
        for job in jobs
        if len(wanted) >= _SHORTEST_PREFIX and any(name.startswith(wanted) for name in (job.key, job.job_id))
    ]
    return by_program or by_process or by_prefix


def _describe(job: Job) -> str:
    """Return a job with what distinguishes it from others of its name: its launcher, its size and its age."""
    launchers = [f"{job.launcher} pid {one.pid}" for one in job.launcher_ids[:1]]
    oldest = min((one.start_ticks for one in (*job.launcher_ids, *job.processes)), default=None)
    age = -1.0 if oldest is None else time.clock_gettime(time.CLOCK_BOOTTIME) - oldest / TICKS_PER_SECOND
    started = [f"started {words.duration(age)} ago"] if age >= 0 else []
    return words.printable(", ".join([words.describe_job(job), *launchers, words.count(len(job.ranks)), *started]))
