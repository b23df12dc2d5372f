"""Update the timeline and the incident of a job after transitions, captures and hooks. Close the incident."""

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.model import PAGED, Incident, JobState, RecommendedAction, TimelineEntry
from hangwatch.state.actions import Action, SaveIncident
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.diagnosis import Diagnosis

TIMELINE_LENGTH = 60
CAPTURES_KEPT = 4  # the first capture and the last three


def update_timeline(
    entry: JobEntry, wanted: tuple[detector.Action, ...], unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """Add transitions, and captures with `is_in_timeline`, to a job and its incident. Return the actions to do, too."""
    actions: list[Action] = list(wanted)
    entry = _end_wait(entry)
    if entry.watch.gap is None and entry.suspected is not None:
        entry = replace(entry, suspected=None)
    for move in wanted:
        if isinstance(move, detector.TakeCapture):
            if move.is_in_timeline:
                entry, saved = _add_line(entry, move.reason, unix_now)
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
    if entry.page and entry.open_incident is not None and entry.open_incident.paged_unix_seconds is None:
        entry, saved = _add_line(entry, PAGED, unix_now)
        if actions and isinstance(actions[-1], SaveIncident):
            actions[-1] = replace(actions[-1], incident=entry.incident)
        else:
            actions += saved
    return entry, tuple(actions)


def _end_wait(entry: JobEntry) -> JobEntry:
    """Return the entry of a job. If it pages, its incident does not recommend to wait."""
    incident = entry.open_incident
    if incident is None or not entry.page or incident.verdict.action.kind != "wait":
        return entry
    verdict = replace(incident.verdict, action=RecommendedAction(reason="the job should have continued by now"))
    return replace(entry, incident=replace(incident, verdict=verdict))


def _add_line(entry: JobEntry, message: str, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    """Add a line to the timeline of a job and of its open incident. The job keeps its state."""
    line = TimelineEntry(unix_seconds=unix_now, state=entry.watch.state, message=message)
    entry = replace(entry, timeline=(*entry.timeline, line)[-TIMELINE_LENGTH:])
    if entry.open_incident is None:
        return entry, ()
    incident = replace(entry.open_incident, timeline=(*entry.open_incident.timeline, line))
    return replace(entry, incident=incident), (SaveIncident(incident=incident),)


def add_capture(entry: JobEntry, look: Diagnosis, now: float) -> Incident:
    """Return the open incident of the job with one more capture; a new incident if none is open.

    A new incident begins with the last progress of the job. `now` is CLOCK_MONOTONIC in seconds.
    """
    incident = entry.open_incident
    if incident is None:
        incident = look.incident(entry.job, entry.watch.state, entry.timeline, quiet_seconds(entry.watch, now))
        incident = replace(incident, by_counters=entry.watch.is_counted)
        if entry.suspected is None:
            return incident
        return replace(incident, captures=(entry.suspected.capture, look.capture))
    first, *later = (*incident.captures, look.capture)
    job = look.hide_from_other_users(entry.job)
    return replace(
        incident,
        state=entry.watch.state,
        job=replace(job, uid=None) if incident.job.uid is None else job,
        verdict=look.verdict,
        grouping=look.grouping,
        captures=(first, *later[1 - CAPTURES_KEPT :]),
    )


def record_note(
    snapshot: Snapshot, incident: Incident, message: str, *, unix_now: float
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Add the result of a hook to the timeline of an incident, if its job still has this incident."""
    entry = snapshot.jobs.get(incident.job.key)
    if entry is None or entry.incident is None or entry.incident.incident_id != incident.incident_id:
        return snapshot, ()
    line = TimelineEntry(unix_seconds=unix_now, state=entry.incident.state, message=message)
    told = replace(entry.incident, timeline=(*entry.incident.timeline, line))
    return snapshot.with_job(replace(entry, incident=told)), (SaveIncident(incident=told),)
