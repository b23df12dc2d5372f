"""What a scan of /proc does to the jobs on the board: they begin, go on, start again and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.detector import job_watch
from hangwatch.detector.job_watch import JobWatch
from hangwatch.model import Job, JobState, ProcessId
from hangwatch.state.actions import Action
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.ended_jobs import remains, with_ended, with_known_absent
from hangwatch.state.incident_timeline import settle
from hangwatch.state.job_identity import as_one, matched, with_kept_names

ENDED_SHOWN_SECONDS = 120.0
ENDED_SHOWN_PER_SHARE = 64
WAITS_NO_MORE = "its launcher has ended, or has started what is no rank"
RANKS_CAME = "its ranks have come"


def discovered(
    snapshot: Snapshot, jobs: Iterable[Job], now: float, unix_now: float, ticks_per_second: float = 100.0
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take the jobs that a scan found: begin, restart and end watches; start_ticks are `ticks_per_second`."""
    actions: list[Action] = []
    before = _ranks_of_launchers(snapshot)
    jobs = [job for job in jobs if not _has_just_lost_its_ranks(job, before, now)]
    found = with_kept_names(matched(snapshot, jobs))
    followed = {entry.job.key for match in found.values() for entry in match.entries}
    free = {key: entry for key, entry in snapshot.jobs.items() if key not in followed}
    for key in followed - found.keys():
        snapshot = snapshot.without_job(key)
    for key, (job, entries) in found.items():
        for other in entries[1:]:
            ended, more = _end(other, f"its ranks are ranks of job {job.job_id}", now, unix_now)
            actions += more
            snapshot = snapshot if other.job.key in found else snapshot.with_job(ended)
        entry = as_one(entries) if entries else free.get(key)
        started = _started_seconds(job, before, ticks_per_second)
        entry, more = _found(entry, job, started, now, unix_now)
        actions += more
        snapshot = snapshot.with_job(entry)
    led = {launcher for match in found.values() if match.job.ranks for launcher in match.job.launcher_ids}
    for missing in [entry for key, entry in snapshot.jobs.items() if key not in found]:
        if missing.watch.state is not JobState.ENDED:
            has_come = missing.job.waiting is not None and missing.job.launcher_id in led
            ended, more = _missed(missing, now, unix_now, has_come=has_come)
            actions += more
            # The job goes on with its ranks, which may know it by another name: it is not shown twice.
            snapshot = snapshot.without_job(missing.job.key) if has_come else snapshot.with_job(ended)
        elif now - missing.watch.since > ENDED_SHOWN_SECONDS:
            snapshot = snapshot.without_job(missing.job.key)
    return _without_old_ends(snapshot), tuple(actions)


def _started_seconds(job: Job, before: dict[ProcessId, JobWatch], ticks_per_second: float) -> float:
    """When its processes began, by CLOCK_MONOTONIC; of a launcher that had ranks, when it lost them."""
    started = min((process.start_ticks for process in job.processes), default=0) / ticks_per_second
    if job.waiting and job.launcher_id in before:
        return max(started, before[job.launcher_id].since)
    return started


def _found(
    entry: JobEntry | None, job: Job, started: float, now: float, unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """The job as the scan found it: its watch goes on, or one begins where it is new, has ended or started again."""
    actions: tuple[Action, ...] = ()
    if entry is not None and job_watch.is_restart(entry.watch, job):
        reason = RANKS_CAME if entry.job.waiting else "its ranks were replaced by new ones"
        gone = remains(entry.job, with_ended(entry.job, replace(entry.job, ranks=()), unix_now))
        entry, more = _end(entry, reason, now, unix_now)
        actions = (*gone, *more)
    if entry is None or entry.watch.state is JobState.ENDED:
        # Pods of uid 0 may have one key between them: what one was taught is not the other's.
        is_same = entry is not None and entry.job.share == job.share
        watch = job_watch.begin(job, now, started, entry.watch if entry is not None and is_same else None)
        return JobEntry(job=job, watch=watch, held_gpu=job.holds_gpu), actions
    known = with_ended(entry.job, with_known_absent(entry, job), unix_now)
    actions += remains(entry.job, known)
    held_gpu = entry.held_gpu or job.holds_gpu
    return replace(entry, job=known, watch=job_watch.joined(entry.watch, job), held_gpu=held_gpu), actions


def _missed(entry: JobEntry, now: float, unix_now: float, *, has_come: bool) -> tuple[JobEntry, tuple[Action, ...]]:
    """The end of a job that the scan did not find; `has_come`: it was a launcher, and its ranks are there now."""
    reason = WAITS_NO_MORE if entry.job.waiting else "all its ranks on this node have ended"
    gone = remains(entry.job, with_ended(entry.job, replace(entry.job, ranks=()), unix_now))
    ended, actions = _end(entry, RANKS_CAME if has_come else reason, now, unix_now)
    return ended, (*gone, *actions)


def _ranks_of_launchers(snapshot: Snapshot) -> dict[ProcessId, JobWatch]:
    """By launcher, the watch of the ranks that it has or had."""
    entries = [entry for entry in snapshot.jobs.values() if entry.job.ranks]
    return {launcher: entry.watch for entry in entries for launcher in entry.job.launcher_ids}


def _has_just_lost_its_ranks(job: Job, before: Mapping[ProcessId, JobWatch], now: float) -> bool:
    """Whether it is a launcher at the end of a job that was watched, or between two starts of its ranks.

    That job ends, and its ranks may come again; only who is still without any when its end is no longer shown waits.
    """
    watch = before.get(job.launcher_id) if job.waiting and job.launcher_id else None
    return watch is not None and (watch.state is not JobState.ENDED or now - watch.since <= ENDED_SHOWN_SECONDS)


def _end(entry: JobEntry, message: str, now: float, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    watch, wanted = detector.end(entry.watch, message, now)
    return settle(replace(entry, watch=watch, page=False), wanted, unix_now)


def _without_old_ends(snapshot: Snapshot) -> Snapshot:
    """Of a user or pod the last jobs that ended: processes that come and go by the hundred fill no board."""
    ended = [entry for entry in snapshot.jobs.values() if entry.watch.state is JobState.ENDED]
    seen = Counter[str]()
    for entry in sorted(ended, key=lambda entry: -entry.watch.since):
        seen[entry.job.share] += 1
        if seen[entry.job.share] > ENDED_SHOWN_PER_SHARE:
            snapshot = snapshot.without_job(entry.job.key)
    return snapshot
