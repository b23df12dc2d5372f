"""Steps of the board for a scan of /proc: jobs begin, continue, restart and end."""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.detector import job_watch
from hangwatch.detector.job_watch import JobWatch
from hangwatch.model import Job, JobState, ProcessId
from hangwatch.state.actions import Action
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.ended_jobs import ask_for_artifacts, with_ended, with_known_absent
from hangwatch.state.incident_timeline import update_timeline
from hangwatch.state.job_identity import assign_names, match_jobs, merge_entries

ENDED_SHOWN_SECONDS = 120.0
ENDED_SHOWN_PER_SHARE = 64
WAITS_NO_MORE = "its launcher has ended, or has started a process that is not a rank"
RANKS_CAME = "it was a launcher without ranks; its ranks are monitored from now on"


def record_scan(
    snapshot: Snapshot, jobs: Iterable[Job], now: float, unix_now: float, ticks_per_second: float = 100.0
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record the jobs that a scan found: begin, restart and end watches. Return the snapshot and the actions to do.

    `now` is CLOCK_MONOTONIC in seconds. `ticks_per_second` is the unit of `start_ticks`.
    """
    actions: list[Action] = []
    with_ranks = [entry for entry in snapshot.jobs.values() if entry.job.ranks]
    before = {launcher: entry.watch for entry in with_ranks for launcher in entry.job.launcher_ids}
    jobs = [job for job in jobs if not _has_just_lost_its_ranks(job, before, now)]
    matches = assign_names(match_jobs(snapshot, jobs))
    followed = {entry.job.key for match in matches.values() for entry in match.entries}
    free = {key: entry for key, entry in snapshot.jobs.items() if key not in followed}
    for key in followed - matches.keys():
        snapshot = snapshot.without_job(key)
    for key, (job, entries) in matches.items():
        for other in entries[1:]:
            ended, more = _end(other, f"its ranks now belong to job {job.job_id}", now, unix_now)
            actions += more
            snapshot = snapshot if other.job.key in matches else snapshot.with_job(ended)
        entry = merge_entries(entries) if entries else free.get(key)
        entry, more = _update_entry(entry, job, _started_seconds(job, before, ticks_per_second), now, unix_now)
        actions += more
        snapshot = snapshot.with_job(entry)
    launchers_with_ranks = {
        launcher for match in matches.values() if match.job.ranks for launcher in match.job.launcher_ids
    }
    for missing in [entry for key, entry in snapshot.jobs.items() if key not in matches]:
        if missing.watch.state is not JobState.ENDED:
            has_ranks = missing.job.waiting is not None and missing.job.launcher_id in launchers_with_ranks
            reason = WAITS_NO_MORE if missing.job.waiting else "all its ranks on this node have ended"
            ended, more = _end_without_ranks(missing, RANKS_CAME if has_ranks else reason, now, unix_now)
            actions += more
            # The job continues with its ranks, possibly under another name: it must not be shown twice.
            snapshot = snapshot.without_job(missing.job.key) if has_ranks else snapshot.with_job(ended)
        elif now - missing.watch.since > ENDED_SHOWN_SECONDS:
            snapshot = snapshot.without_job(missing.job.key)
    return _without_old_ends(snapshot), tuple(actions)


def _started_seconds(job: Job, before: dict[ProcessId, JobWatch], ticks_per_second: float) -> float:
    """Return the time at which the first process of a job started (CLOCK_MONOTONIC, seconds).

    For a launcher that had ranks before, return the time at which it lost them.
    """
    started = min((process.start_ticks for process in job.processes), default=0) / ticks_per_second
    if job.waiting and job.launcher_id in before:
        return max(started, before[job.launcher_id].since)
    return started


def _update_entry(
    entry: JobEntry | None, job: Job, started: float, now: float, unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """Return the entry of a job that the scan found, and the actions. A new or restarted job gets a new watch."""
    actions: tuple[Action, ...] = ()
    if entry is not None and job_watch.is_restart(entry.watch, job):
        reason = RANKS_CAME if entry.job.waiting else "its ranks were replaced by new ones"
        entry, actions = _end_without_ranks(entry, reason, now, unix_now)
    if entry is None or entry.watch.state is JobState.ENDED:
        # Pods of uid 0 may have the same key. The known pauses of one pod must not be used for another.
        is_same = entry is not None and entry.job.share == job.share
        watch = job_watch.begin_watch(job, now, started, entry.watch if entry is not None and is_same else None)
        return JobEntry(job=job, watch=watch, held_gpu=job.holds_gpu), actions
    updated = with_ended(entry.job, with_known_absent(entry, job), unix_now)
    actions += ask_for_artifacts(entry, updated)
    held_gpu = entry.held_gpu or job.holds_gpu
    return replace(entry, job=updated, watch=job_watch.update_identity(entry.watch, job), held_gpu=held_gpu), actions


def _end_without_ranks(
    entry: JobEntry, message: str, now: float, unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """Return the ended entry of a job with ranks that the scan did not find, and the actions."""
    gone = ask_for_artifacts(entry, with_ended(entry.job, replace(entry.job, ranks=()), unix_now))
    ended, actions = _end(entry, message, now, unix_now)
    return ended, (*gone, *actions)


def _has_just_lost_its_ranks(job: Job, before: Mapping[ProcessId, JobWatch], now: float) -> bool:
    """True if a launcher has just lost the ranks of a monitored job, because the job ends or its ranks start again.

    The launcher counts as waiting only if it still has no ranks when the ended job is no longer shown.
    """
    watch = before.get(job.launcher_id) if job.waiting and job.launcher_id else None
    return watch is not None and (watch.state is not JobState.ENDED or now - watch.since <= ENDED_SHOWN_SECONDS)


def _end(entry: JobEntry, message: str, now: float, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    watch, wanted = detector.end_watch(entry.watch, message, now)
    return update_timeline(replace(entry, watch=watch, page=False), wanted, unix_now)


def _without_old_ends(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the newest ended jobs of each owner: many short jobs must not fill the board."""
    ended = [entry for entry in snapshot.jobs.values() if entry.watch.state is JobState.ENDED]
    seen = Counter[str]()
    for entry in sorted(ended, key=lambda entry: -entry.watch.since):
        seen[entry.job.share] += 1
        if seen[entry.job.share] > ENDED_SHOWN_PER_SHARE:
            snapshot = snapshot.without_job(entry.job.key)
    return snapshot
