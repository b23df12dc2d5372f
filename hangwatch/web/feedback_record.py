"""Feedback of people on verdicts, given by `hangwatch verdict` to the store or over the user socket."""

import time

from hangwatch import words
from hangwatch.errors import UserError
from hangwatch.formats import incident_file
from hangwatch.model import Feedback, Incident, RankId
from hangwatch.report.phrases import describe_feedback
from hangwatch.store import Store


class FeedbackError(UserError):
    """Feedback that contradicts its incident. The message says why."""


def record(incidents: Store, name: str, *, is_right: bool, culprit: int | None, cause: str, by_uid: int) -> str:
    """Store the feedback on an incident, and return a sentence about it. Raises StoreError and FeedbackError."""
    if is_right and culprit is not None:
        raise FeedbackError("--culprit needs --wrong: a right verdict has named the culprit, or there was none")
    folder = incidents.find(name)
    incident = incident_file.load(folder)
    judged = incident.verdict
    rank = _find_rank(culprit, incident) if culprit is not None else None
    if rank is not None and judged.named == (rank,):
        raise FeedbackError(f"--culprit {culprit}: is the rank that the verdict names\n  type --right")
    given = Feedback(
        is_right=is_right,
        verdict=judged.kind,
        named=judged.named,
        given_unix_seconds=time.time(),
        by_uid=by_uid,
        culprit=rank,
        cause=words.printable(cause),
    )
    incidents.save_feedback(folder.name, given)
    return f"{folder.name}: {describe_feedback(given, judged)}"


def _find_rank(number: int, incident: Incident) -> RankId:
    """Return the rank with this number; in an incident without global ranks, the local rank."""
    ids = [*incident.verdict.named, *(member.id for member in incident.grouping.members)]
    is_local = all(rank.rank is None for rank in ids)
    found = next((rank for rank in ids if number == (rank.local_rank if is_local else rank.rank)), None)
    if found is None:
        raise FeedbackError(f"--culprit {number}: the incident has no such rank\n  its ranks: {words.fold_ids(ids)}")
    return found
