"""Earlier hangs on this node. The board remembers the newest, so a verdict can show that it happened before."""

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from hangwatch.model import Incident, Job, PastHang
from hangwatch.state.board import Snapshot
from hangwatch.verdict.recommendation import History

MOST_HANGS = 256
MOST_HANGS_OF_USER = 32


def restore_hangs(snapshot: Snapshot, hangs: Iterable[PastHang]) -> Snapshot:
    """Return the snapshot with these hangs, too. The newest are kept, of each user at most `MOST_HANGS_OF_USER`."""
    known = {hang.incident_id: hang for hang in (*hangs, *snapshot.past_hangs)}
    kept: list[PastHang] = []
    counts = Counter[int | None]()
    for hang in sorted(known.values(), key=lambda hang: -hang.opened_unix_seconds):
        counts[hang.uid] += 1
        if counts[hang.uid] <= MOST_HANGS_OF_USER:
            kept.append(hang)
    return replace(snapshot, past_hangs=tuple(kept[:MOST_HANGS][::-1]))


def remember_hang(snapshot: Snapshot, incident: Incident) -> Snapshot:
    """Return the snapshot with an incident of a job that is hung or has crashed."""
    hang = PastHang.copy_from(incident, incident.job, incident.verdict, action=incident.verdict.action.kind)
    return restore_hangs(replace(snapshot, past_hangs=_without(snapshot, incident)), (hang,))


def find_history(snapshot: Snapshot, job: Job, incident: Incident | None, node: str, unix_now: float) -> History:
    """Return the hangs before the `incident` of a job, for `verdict.recommendation`."""
    hangs = snapshot.past_hangs if incident is None else _without(snapshot, incident)
    return History(hangs, node, job.uid, unix_seconds=unix_now)


def _without(snapshot: Snapshot, incident: Incident) -> tuple[PastHang, ...]:
    return tuple(hang for hang in snapshot.past_hangs if hang.incident_id != incident.incident_id)
