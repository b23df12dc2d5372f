"""Finds the jobs of a scan on the board. A watch follows its processes; a job keeps its name and its key."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.detector import job_watch
from hangwatch.jobs.discovery import with_distinct_name
from hangwatch.model import Job
from hangwatch.state.board import JobEntry, Snapshot


class Match(NamedTuple):
    """A job of a scan, and the entries of which the watches know its processes. The first entry continues."""

    job: Job
    entries: tuple[JobEntry, ...]


def match_jobs(snapshot: Snapshot, jobs: Iterable[Job]) -> list[Match]:
    """Match each job of a scan with the watches of its processes, under any name.

    If the processes of a watch are now in several jobs, the job with the most known processes gets the watch.
    """
    holders = {process: entry for entry in snapshot.living for process in entry.watch.identity.generation}
    matches: list[Match] = []
    followed: set[str] = set()
    for job in sorted(jobs, key=lambda job: -sum(process in holders for process in job.processes)):
        found = {holders[process].job.key: holders[process] for process in job.processes if process in holders}
        free = [entry for key, entry in found.items() if key not in followed]
        followed.update(found)
        free.sort(key=lambda entry: (_merge_order(entry), entry.job.key != job.key, entry.watch.identity.began))
        matches.append(Match(job, tuple(free)))
    return matches


def _merge_order(entry: JobEntry) -> int:
    """Return the rank of an entry when watches are merged: an open incident comes first, a starting job last."""
    if entry.watch.is_open:
        return 0
    return 1 if _is_pinned(entry) else 3 if entry.watch.is_starting else 2


def _is_pinned(entry: JobEntry) -> bool:
    """True if a running capture or an incident refers to the job by its key."""
    return entry.watch.is_open or entry.watch.capture_record.capturing or entry.incident is not None


def assign_names(matches: Sequence[Match]) -> dict[str, Match]:
    """Return the matched jobs by key. While its processes live, a job keeps its name and its key.

    A scan may give it another name: because of a second job in the same Slurm allocation, a launcher that was killed,
    or a process of another user that claims to be this job. A job that comes later gets a different name, for any
    claim. A job that has not begun to work takes the name of the scan, except a name that only tells it apart from
    another claimant.

    Exception: a job that the driver never listed on a GPU gives the key to a job that the driver does list and that has
    this key in the scan. Otherwise a copy of the job's variables, started first, would have its key on all nodes. A key
    does not change while a capture or an incident refers to it.
    """
    found: dict[str, Match] = {}
    for match in sorted(matches, key=_precedence):
        named = _preferred_job(match)
        if named.key in found and match.entries:
            named = match.entries[0].job
        if named.key in found:
            named = match.job
        while named.key in found:
            named = with_distinct_name(named)
        found[named.key] = match._replace(job=replace(match.job, job_id=named.job_id, job_key=named.key))
    return found


def _preferred_job(match: Match) -> Job:
    """Return the job of which this one should have the name and the key, if these are free."""
    job, entry = match.job, next(iter(match.entries), None)
    if entry is None:
        return job
    was_told_apart = entry.job.job_id.startswith(f"{job.job_id}-p")
    is_told_apart = job.job_id.startswith(f"{entry.job.job_id}-p")
    may_change = was_told_apart or (entry.watch.is_starting and not is_told_apart)
    return job if may_change and not _is_pinned(entry) else entry.job


def _precedence(match: Match) -> tuple[bool, bool, bool, bool]:
    """Return the order of jobs that want the same key.

    First a pinned job, then one that the driver has listed on a GPU, then the one that has the key, then a known job.
    """
    entry = next(iter(match.entries), None)
    if entry is None:
        return True, not match.job.holds_gpu, True, True
    held_gpu = entry.held_gpu or match.job.holds_gpu
    return not _is_pinned(entry), not held_gpu, _preferred_job(match).key != entry.job.key, False


def merge_entries(entries: Sequence[JobEntry]) -> JobEntry:
    """Return the first entry, with the processes and GPUs that the others know."""
    first, *others = entries
    watch = functools.reduce(job_watch.merge_watches, [other.watch for other in others], first.watch)
    return replace(first, watch=watch, held_gpu=any(entry.held_gpu for entry in entries))
