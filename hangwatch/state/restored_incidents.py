"""Restore the incidents that were open when an earlier daemon ended."""

from collections.abc import Iterable

from msgspec.structs import replace

from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.model import Incident, JobState, ProcessId, TimelineEntry
from hangwatch.state.actions import Action, SaveIncident
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.ended_jobs import with_known_absent
from hangwatch.state.incident_timeline import TIMELINE_LENGTH

STARTED_AGAIN = "hangwatch has restarted: the processes are the same, so the incident continues"


def restore_incidents(
    snapshot: Snapshot,
    incidents: Iterable[Incident],
    living: frozenset[ProcessId],
    *,
    now: float,
    unix_now: float,
    settings: Detector,
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Continue or close the incidents that were open when an earlier daemon ended. The newest incident is first.

    `living` are the processes that exist now. An incident continues if the board has its processes. It is closed,
    with the reason, if none of them lives or if other ranks replaced them. If no scan has found them yet, it stays
    in `unresumed_incidents`.
    """
    actions: list[Action] = []
    waiting: list[Incident] = []
    for incident in incidents:
        ranks = frozenset(incident.job.processes)
        entry = next(
            (
                candidate
                for candidate in snapshot.living
                if ranks & {*candidate.job.processes, *candidate.job.launcher_ids}
            ),
            None,
        )
        reason = _find_closing_reason(entry, ranks, living)
        if reason is not None:
            line = TimelineEntry(unix_seconds=unix_now, state=JobState.ENDED, message=reason)
            closed = replace(
                incident, state=JobState.ENDED, closed_unix_seconds=unix_now, timeline=(*incident.timeline, line)
            )
            actions.append(SaveIncident(incident=closed, is_watched=False, moved_to=JobState.ENDED))
        elif entry is None:
            waiting.append(incident)
        else:
            snapshot = snapshot.without_job(entry.job.key)
            entry = _restore_entry(entry, incident, now, unix_now, settings)
            snapshot = snapshot.with_job(entry)
            if entry.incident is not None:
                actions.append(SaveIncident(incident=entry.incident))
    return replace(snapshot, unresumed_incidents=tuple(waiting)), tuple(actions)


def _find_closing_reason(
    entry: JobEntry | None, ranks: frozenset[ProcessId], living: frozenset[ProcessId]
) -> str | None:
    """Return the reason why a restored incident is closed; None if it continues, or may continue later."""
    if not ranks & living:
        return "its processes had ended when hangwatch restarted"
    if entry is None:
        return None
    present = frozenset(entry.job.processes)
    if present - ranks and ranks - present:
        return "its ranks had been replaced by new ones when hangwatch restarted"
    if entry.watch.is_open:
        return "a later incident of the same processes continues"
    if entry.watch.state in (JobState.TRAINING, JobState.RECOVERED):
        return "the job was working when hangwatch read this incident after its restart"
    return None


def _restore_entry(entry: JobEntry, incident: Incident, now: float, unix_now: float, settings: Detector) -> JobEntry:
    """Return the entry of a job with its former name and its incident. A capture is due at once."""
    job = with_known_absent(replace(entry, job=incident.job), entry.job)
    job = replace(job, job_id=incident.job.job_id, job_key=incident.job.key)
    timeline = incident.timeline
    if timeline and timeline[-1].message == STARTED_AGAIN:
        timeline = timeline[:-1]  # one such line only, even if the daemon restarts often
    timeline = (*timeline, TimelineEntry(unix_seconds=unix_now, state=incident.state, message=STARTED_AGAIN))
    incident = replace(incident, job=job, timeline=timeline)
    watch = job_watch.resume_watch(entry.watch, incident, now, unix_now, settings)
    return replace(
        entry,
        job=job,
        watch=watch,
        page=job_watch.should_page(watch, now, settings),
        incident=incident,
        timeline=timeline[-TIMELINE_LENGTH:],
    )
