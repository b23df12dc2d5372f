"""The timeline and the incident of a job: what transitions, captures and hooks change in them, and when it closes."""

from __future__ import annotations

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.model import Incident, JobState, TimelineEntry
from hangwatch.state.actions import Action, SaveIncident
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.diagnosis import Diagnosis

TIMELINE_LENGTH = 60
CAPTURES_KEPT = 4  # the first, which shows how it began, and the last ones


def settle(
    entry: JobEntry, wanted: tuple[detector.Action, ...], unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """Note the transitions, and the looks that are worth it, in the job's timeline and carry them into its incident."""
    actions: list[Action] = list(wanted)
    for move in wanted:
        if isinstance(move, detector.TakeCapture):
            if move.is_told:
                entry, saved = _told(entry, move.reason, unix_now)
                actions += saved
            continue
        line = TimelineEntry(unix_seconds=unix_now, state=move.state, message=move.message)
        entry = replace(entry, timeline=(*entry.timeline, line)[-TIMELINE_LENGTH:])
        incident = entry.incident
        if incident is None:
            continue
        if incident.closed_unix_seconds is not None:
            entry = replace(entry, incident=None if move.state is JobState.TRAINING else incident)
            continue
        closed = unix_now if move.state in (JobState.RECOVERED, JobState.ENDED, JobState.TRAINING) else None
        incident = replace(incident, state=move.state, timeline=(*incident.timeline, line), closed_unix_seconds=closed)
        entry = replace(entry, incident=incident)
        actions.append(SaveIncident(incident=incident, moved_to=move.state))
    return entry, tuple(actions)


def _told(entry: JobEntry, message: str, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    """Put a line into the timeline of a job whose state is what it was, and into that of its open incident."""
    line = TimelineEntry(unix_seconds=unix_now, state=entry.watch.state, message=message)
    entry = replace(entry, timeline=(*entry.timeline, line)[-TIMELINE_LENGTH:])
    if entry.open_incident is None:
        return entry, ()
    incident = replace(entry.open_incident, timeline=(*entry.open_incident.timeline, line))
    return replace(entry, incident=incident), (SaveIncident(incident=incident),)


def with_capture(entry: JobEntry, look: Diagnosis) -> Incident:
    """The job's open incident with one more capture, or a new one."""
    incident = entry.incident
    if incident is None or incident.closed_unix_seconds is not None:
        return look.incident(entry.job, entry.watch.state, entry.timeline)
    captures = (*incident.captures, look.capture)
    if len(captures) > CAPTURES_KEPT:
        captures = (captures[0], *captures[-(CAPTURES_KEPT - 1) :])
    job = look.read_by_owner(entry.job)
    return replace(
        incident,
        state=entry.watch.state,
        job=replace(job, uid=None) if incident.job.uid is None else job,
        verdict=look.verdict,
        grouping=look.grouping,
        captures=captures,
    )


def noted(
    snapshot: Snapshot, incident: Incident, message: str, *, unix_now: float
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Put a line into the timeline of an incident, where it still is its job's: what a hook came to."""
    entry = snapshot.jobs.get(incident.job.key)
    if entry is None or entry.incident is None or entry.incident.incident_id != incident.incident_id:
        return snapshot, ()
    line = TimelineEntry(unix_seconds=unix_now, state=entry.incident.state, message=message)
    told = replace(entry.incident, timeline=(*entry.incident.timeline, line))
    return snapshot.with_job(replace(entry, incident=told)), (SaveIncident(incident=told),)
