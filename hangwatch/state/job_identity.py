"""Match the jobs of a scan with the jobs on the board. A job keeps its name and its key while its processes live."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.detector import job_watch
from hangwatch.jobs.discovery import with_distinct_name
from hangwatch.model import Job
from hangwatch.state.board import JobEntry, Snapshot


class Match(NamedTuple):
    """A job of a scan, and the entries on the board that have its processes. The first of these entries continues."""

    job: Job
    entries: tuple[JobEntry, ...]


def match_jobs(snapshot: Snapshot, jobs: Iterable[Job]) -> list[Match]:
    """Match each job of a scan with the entries on the board that have its processes, under any name.

    If the processes of an entry are now in several jobs, the job with the most processes that are on the board gets
    the entry.
    """
    holders = {process: entry for entry in snapshot.living for process in entry.watch.identity.generation}
    matches: list[Match] = []
    followed: set[str] = set()
    for job in sorted(jobs, key=lambda job: -sum(process in holders for process in job.processes)):
        entries = {holders[process].job.key: holders[process] for process in job.processes if process in holders}
        free = [entry for key, entry in entries.items() if key not in followed]
        followed.update(entries)
        free.sort(key=lambda entry: (_merge_order(entry), entry.job.key != job.key, entry.watch.identity.began))
        matches.append(Match(job, tuple(free)))
    return matches


def _merge_order(entry: JobEntry) -> int:
    """Return a sort key for entries that are merged: an open incident comes first, a starting job last."""
    if entry.watch.is_open:
        return 0
    return 1 if _is_pinned(entry) else 3 if entry.watch.is_starting else 2


def _is_pinned(entry: JobEntry) -> bool:
    """True if a running capture or an incident refers to this job by its key."""
    return entry.watch.is_open or entry.watch.capture_record.capturing or entry.incident is not None


def assign_names(matches: Sequence[Match]) -> dict[str, Match]:
    """Return the matched jobs by key. A job keeps its name and its key while its processes live.

    A scan may find another name for a job: because of a second job in the same Slurm allocation, because its
    launcher was killed, or because a process of another user claims to be this job. A job that comes later gets a
    different name, whatever its environment claims. A job that is still starting takes the name of the scan, unless
    that name only distinguishes it from another claimant.

    Exception: if the driver never listed the first job on a GPU, but lists a later job with the same key, the later
    job gets the key. Otherwise a process with a copy of a job's variables could start first and take the job's key
    on all nodes. A key does not change while a capture or an incident refers to it.
    """
    by_key: dict[str, Match] = {}
    for match in sorted(matches, key=_precedence):
        named = _preferred_job(match)
        if named.key in by_key and match.entries:
            named = match.entries[0].job
        if named.key in by_key:
            named = match.job
        while named.key in by_key:
            named = with_distinct_name(named)
        by_key[named.key] = match._replace(job=replace(match.job, job_id=named.job_id, job_key=named.key))
    return by_key


def _preferred_job(match: Match) -> Job:
    """Return the job with the name and key that it should have, if these are free."""
    job, entry = match.job, next(iter(match.entries), None)
    if entry is None:
        return job
    was_told_apart = entry.job.job_id.startswith(f"{job.job_id}-p")
    is_told_apart = job.job_id.startswith(f"{entry.job.job_id}-p")
    may_change = was_told_apart or (entry.watch.is_starting and not is_told_apart)
    return job if may_change and not _is_pinned(entry) else entry.job


def _precedence(match: Match) -> tuple[bool, bool, bool, bool]:
    """Return a sort key: pinned jobs, those that the driver lists on a GPU, those with the key, known and new ones."""
    entry = next(iter(match.entries), None)
    if entry is None:
        return True, not match.job.holds_gpu, True, True
    held_gpu = entry.held_gpu or match.job.holds_gpu
    return not _is_pinned(entry), not held_gpu, _preferred_job(match).key != entry.job.key, False


def merge_entries(entries: Sequence[JobEntry]) -> JobEntry:
    """Return the first entry, with the processes and GPUs of all entries."""
    first, *others = entries
    watch = functools.reduce(job_watch.merge_watches, [other.watch for other in others], first.watch)
    return replace(first, watch=watch, held_gpu=any(entry.held_gpu for entry in entries))
