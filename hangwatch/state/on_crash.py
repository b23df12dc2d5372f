"""Steps of the board for crashed ranks. Each job has one crash at most, and each owner a limited number."""

from msgspec.structs import replace

from hangwatch.model import Incident, Job, JobState, ProcessId
from hangwatch.state.actions import Action, SaveIncident
from hangwatch.state.board import Crash, Snapshot
from hangwatch.state.hang_history import find_history, remember_hang
from hangwatch.verdict.recommendation import with_action

CRASH_SHOWN_SECONDS = 900.0
CRASHES_SHOWN = 64
CRASHES_SHOWN_PER_SHARE = 8


def record_crash(snapshot: Snapshot, incident: Incident, *, now: float) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record the incident of a crash. If there is an incident of the same ranks already, update it.

    If the job continues without the dead ranks, its entry gets the causes of their death.
    """
    snapshot = _with_causes(snapshot, incident.job)
    processes = _gone_ranks(incident)
    kept = [crash for crash in snapshot.crashes if now - crash.found_monotonic_seconds <= CRASH_SHOWN_SECONDS]
    same = [crash for crash in kept if crash.incident.job.key == incident.job.key]
    before = next((crash for crash in same if _gone_ranks(crash.incident) & processes), None)
    if before is not None:
        incident = replace(
            incident, incident_id=before.incident.incident_id, opened_unix_seconds=before.incident.opened_unix_seconds
        )
    history = find_history(snapshot, incident.job, incident, incident.node, incident.opened_unix_seconds)
    incident = replace(incident, verdict=with_action(incident.verdict, incident.grouping, history))
    if before is None and not incident.verdict.named and any(crash.incident.verdict.named for crash in same):
        return replace(snapshot, crash_count=snapshot.crash_count + 1), ()  # later deaths of the job, or its next start
    crash = Crash(incident=incident, found_monotonic_seconds=before.found_monotonic_seconds if before else now)
    others = [crash for crash in kept if crash not in same]
    of_share = [crash for crash in others if crash.incident.job.share == incident.job.share]
    for oldest in of_share[: max(0, len(of_share) + 1 - CRASHES_SHOWN_PER_SHARE)]:
        others.remove(oldest)
    snapshot = remember_hang(snapshot, incident)
    snapshot = replace(
        snapshot, crashes=(*others, crash)[-CRASHES_SHOWN:], crash_count=snapshot.crash_count + (before is None)
    )
    if before is None and len(of_share) >= CRASHES_SHOWN_PER_SHARE:
        return snapshot, ()  # any user can create ranks that die, and all users share the store
    moved_to = JobState.ENDED if before is None else None
    return snapshot, (SaveIncident(incident=incident, is_watched=False, moved_to=moved_to),)


def count_unread_crash(snapshot: Snapshot) -> tuple[Snapshot, int]:
    """Count one more job with dead ranks that are not read. Return the new count."""
    count = snapshot.unread_crash_count + 1
    return replace(snapshot, unread_crash_count=count), count


def _with_causes(snapshot: Snapshot, dead: Job) -> Snapshot:
    entry, died = snapshot.jobs.get(dead.key), {one.id: one.died for one in dead.ended}
    if entry is None:
        return snapshot
    ended = tuple(replace(one, died=died.get(one.id, one.died)) for one in entry.job.ended)
    return snapshot.with_job(replace(entry, job=replace(entry.job, ended=ended)))


def _gone_ranks(incident: Incident) -> set[ProcessId]:
    return {one.id for one in incident.job.ended if not one.is_worker}
