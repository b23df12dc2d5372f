"""Which job of a scan is which on the board: a watch follows its processes, and a job keeps its name and its key."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.detector import job_watch
from hangwatch.jobs.discovery import told_apart
from hangwatch.model import Job
from hangwatch.state.board import JobEntry, Snapshot


class Match(NamedTuple):
    """A job as a scan found it, and the watches of its processes; the first is the one that goes on."""

    job: Job
    entries: tuple[JobEntry, ...]


def matched(snapshot: Snapshot, jobs: Iterable[Job]) -> list[Match]:
    """A watch follows its processes, whatever the scan calls them; where a job fell apart, the part with most ranks."""
    holders = {process: entry for entry in snapshot.living for process in entry.watch.identity.generation}
    matches: list[Match] = []
    followed: set[str] = set()
    for job in sorted(jobs, key=lambda job: -sum(process in holders for process in job.processes)):
        found = {holders[process].job.key: holders[process] for process in job.processes if process in holders}
        free = [entry for key, entry in found.items() if key not in followed]
        followed.update(found)
        free.sort(key=lambda entry: (_progress(entry), entry.job.key != job.key, entry.watch.identity.began))
        matches.append(Match(job, tuple(free)))
    return matches


def _progress(entry: JobEntry) -> int:
    """The order in which watches that become one are preferred: whose incident is open comes first."""
    if entry.watch.is_open:
        return 0
    return 1 if _is_pinned(entry) else 3 if entry.watch.is_starting else 2


def _is_pinned(entry: JobEntry) -> bool:
    """Whether a capture that is under way or an incident goes by its key."""
    return entry.watch.is_open or entry.watch.looks.capturing or entry.incident is not None


def with_kept_names(matches: Sequence[Match]) -> dict[str, Match]:
    """The jobs by key. A job is its processes: while they live it keeps the name and the key that it had.

    What a scan would call it may change: by a second job in the same Slurm allocation, by a launcher that was killed,
    by a stranger who says that he is this job. Whoever comes later is told apart, whatever his claim. Before the job
    was at work its name may change, too, but not by a stranger.

    Who came first and never held a GPU by the driver's list gives the key to whom the scan gives it and who holds one:
    else who copies a job's variables before it starts would be that job on all nodes. Nobody loses his key while a
    capture or an incident goes by it.
    """
    found: dict[str, Match] = {}
    for match in sorted(matches, key=_precedence):
        named = _wanted(match)
        if named.key in found and match.entries:
            named = match.entries[0].job
        if named.key in found:
            named = match.job
        while named.key in found:
            named = told_apart(named)
        found[named.key] = match._replace(job=replace(match.job, job_id=named.job_id, job_key=named.key))
    return found


def _wanted(match: Match) -> Job:
    """The job by whose name and key this one goes, where they are free."""
    job, entry = match.job, next(iter(match.entries), None)
    if entry is None:
        return job
    was_told_apart = entry.job.job_id.startswith(f"{job.job_id}-p")
    is_told_apart = job.job_id.startswith(f"{entry.job.job_id}-p")
    may_change = was_told_apart or (entry.watch.is_starting and not is_told_apart)
    return job if may_change and not _is_pinned(entry) else entry.job


def _precedence(match: Match) -> tuple[bool, bool, bool, bool]:
    """Of jobs that want one key: whom it is pinned to, who was seen on a GPU, who has it, who is known."""
    entry = next(iter(match.entries), None)
    if entry is None:
        return True, not match.job.holds_gpu, True, True
    held_gpu = entry.held_gpu or match.job.holds_gpu
    return not _is_pinned(entry), not held_gpu, _wanted(match).key != entry.job.key, False


def as_one(entries: Sequence[JobEntry]) -> JobEntry:
    """The first of these, with what the others know of their processes and GPUs."""
    first, *others = entries
    watch = functools.reduce(job_watch.merged, [other.watch for other in others], first.watch)
    return replace(first, watch=watch, held_gpu=any(entry.held_gpu for entry in entries))
