"""Requests to silence a job, or to end a silence, over the user socket: `/silence?job=JOB&seconds=7200&reason=TEXT`.

`end=1` instead of `seconds` ends the silence. Root may silence all jobs of this node, other users only their own.
"""

import logging
import time
from http import HTTPStatus
from urllib.parse import parse_qsl

import msgspec

from hangwatch import words
from hangwatch.formats.incident_file import StoreError
from hangwatch.model import (
    LONGEST_REASON,
    LONGEST_SILENCE_SECONDS,
    SHORTEST_SILENCE_SECONDS,
    PageSilence,
    SilenceAnswer,
    find_jobs,
)
from hangwatch.state import steps
from hangwatch.state.board import Board, Snapshot
from hangwatch.state.job_silences import MOST_SILENCES_OF_USER
from hangwatch.store import Store
from hangwatch.web.incident_pages import JSON
from hangwatch.web.listener import Answer, text

MOST_QUERY = 4096
NO_JOB = text(HTTPStatus.NOT_FOUND, "no job of yours on this node has exactly this name or key")
NOT_SILENCED = text(HTTPStatus.NOT_FOUND, "no such job of yours is silenced on this node")
BAD_SECONDS = text(
    HTTPStatus.BAD_REQUEST, f"seconds: must be {SHORTEST_SILENCE_SECONDS:.0f} to {LONGEST_SILENCE_SECONDS:.0f}"
)
TOO_MANY = text(HTTPStatus.CONFLICT, f"{MOST_SILENCES_OF_USER} jobs of yours are silenced: end one of these silences")

log = logging.getLogger(__name__)


def answer_silence(board: Board, store: Store, uid: int, query: str) -> Answer:
    """Silence a job or end its silence, write that to the store, and return the answer."""
    parameters = dict(parse_qsl(query[:MOST_QUERY]))
    wanted = parameters.get("job", "")
    if "end" in parameters:
        return _end(board, store, uid, wanted)
    jobs = find_jobs(wanted, (entry.job for entry in board.snapshot.living if uid in (0, entry.job.uid)))
    if len(jobs) != 1:
        return _several([job.key for job in jobs]) if jobs else NO_JOB
    try:
        seconds = float(parameters.get("seconds", ""))
    except ValueError:
        return BAD_SECONDS
    if not SHORTEST_SILENCE_SECONDS <= seconds <= LONGEST_SILENCE_SECONDS:
        return BAD_SECONDS
    reason = words.printable(parameters.get("reason", ""))[:LONGEST_REASON]
    silence = PageSilence(
        job_id=jobs[0].job_id, job_key=jobs[0].key, until_unix_seconds=time.time() + seconds, uid=uid, reason=reason
    )
    if not board.change(steps.record_silence, silence):
        return TOO_MANY
    why = f": {reason}" if reason else ""
    log.info("%s: silenced by user %d until %s%s", silence.in_log, uid, words.utc(silence.until_unix_seconds), why)
    return _saved(board, store, silence)


def _end(board: Board, store: Store, uid: int, wanted: str) -> Answer:
    """End the silence of a job of this user. The job may have ended: then the user who silenced it may end that."""
    snapshot = board.snapshot
    ours = [one for one in snapshot.silences.values() if _may_end(snapshot, one, uid)]
    keys = {entry.job.key for entry in snapshot.jobs.values() if entry.job.is_called(wanted)}
    called = [one for one in ours if one.job_key == wanted] or [
        one for one in ours if one.job_id == wanted or one.job_key in keys
    ]
    if len(called) != 1:
        return _several([one.job_key for one in called]) if called else NOT_SILENCED
    (silence,) = called
    board.put(steps.end_silence, silence.job_key)
    log.info("%s: its silence was ended by user %d", silence.in_log, uid)
    return _saved(board, store, silence)


def _may_end(snapshot: Snapshot, silence: PageSilence, uid: int) -> bool:
    entry = snapshot.jobs.get(silence.job_key)
    return uid in (0, silence.uid) or (entry is not None and entry.job.uid == uid)


def _several(keys: list[str]) -> Answer:
    return text(HTTPStatus.CONFLICT, f"{len(keys)} jobs have this name: give a key: {', '.join(sorted(keys)[:8])}")


def _saved(board: Board, store: Store, silence: PageSilence) -> Answer:
    """Write the silences of the board, and return the answer. A problem of the store is part of it."""
    problem = board.snapshot.store_problem
    if problem is None:
        try:
            store.silences.write(board)
        except StoreError as error:
            problem = str(error)
            log.error("silences are not stored: %s", problem)
    return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(SilenceAnswer(silence=silence, problem=problem)))
