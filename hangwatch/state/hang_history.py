"""Earlier hangs on this node. The board remembers the newest, so a verdict can show that it happened before."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from hangwatch.model import Incident, JobState, PastHang
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.recommendation import History

MOST_HANGS = 256


def restore_hangs(snapshot: Snapshot, hangs: Iterable[PastHang]) -> Snapshot:
    """Return the snapshot with the hangs that an earlier daemon saw. The newest are kept."""
    known = {hang.incident_id: hang for hang in (*hangs, *snapshot.past_hangs)}
    newest = sorted(known.values(), key=lambda hang: hang.opened_unix_seconds)[-MOST_HANGS:]
    return replace(snapshot, past_hangs=tuple(newest))


def remember_hang(snapshot: Snapshot, entry: JobEntry) -> Snapshot:
    """Return the snapshot with the incident of a job, if the job is hung."""
    if entry.watch.state is not JobState.HUNG or entry.open_incident is None:
        return snapshot
    return restore_hangs(
        replace(snapshot, past_hangs=_without(snapshot, entry.open_incident)), (_as_hang(entry.open_incident),)
    )


def find_history(snapshot: Snapshot, entry: JobEntry, node: str, unix_now: float) -> History:
    """Return the hangs before the open incident of a job, for `verdict.recommendation`."""
    hangs = snapshot.past_hangs if entry.open_incident is None else _without(snapshot, entry.open_incident)
    return History(hangs, node, entry.job.share or entry.job.owner, unix_seconds=unix_now)


def _without(snapshot: Snapshot, incident: Incident) -> tuple[PastHang, ...]:
    return tuple(hang for hang in snapshot.past_hangs if hang.incident_id != incident.incident_id)


def _as_hang(incident: Incident) -> PastHang:
    return PastHang(
        incident_id=incident.incident_id,
        node=incident.node,
        opened_unix_seconds=incident.opened_unix_seconds,
        owner=incident.job.share or incident.job.owner,
        fingerprint=incident.verdict.fingerprint,
        action=incident.verdict.action.kind,
    )
