"""Steps of the board for silences: jobs that do not page until a time, because root or their owner asked for it."""

from collections.abc import Iterable

from msgspec.structs import replace

from hangwatch.model import PageSilence
from hangwatch.state.board import Snapshot

MOST_SILENCES_OF_USER = 64


def record_silence(snapshot: Snapshot, silence: PageSilence) -> tuple[Snapshot, bool]:
    """Record a silence. It replaces an earlier one of the same job. False if its user has too many of other jobs."""
    others = sum(one.uid == silence.uid and one.job_key != silence.job_key for one in snapshot.silences.values())
    if silence.uid != 0 and others >= MOST_SILENCES_OF_USER:
        return snapshot, False
    return replace(snapshot, silences={**snapshot.silences, silence.job_key: silence}), True


def end_silence(snapshot: Snapshot, job_key: str) -> Snapshot:
    """Return the snapshot without the silence of this job."""
    return replace(snapshot, silences={key: one for key, one in snapshot.silences.items() if key != job_key})


def drop_ended_silences(snapshot: Snapshot, unix_now: float) -> tuple[Snapshot, tuple[PageSilence, ...]]:
    """Drop the silences that have ended, and return them."""
    ended = {key: one for key, one in snapshot.silences.items() if one.until_unix_seconds <= unix_now}
    kept = {key: one for key, one in snapshot.silences.items() if key not in ended}
    return replace(snapshot, silences=kept), tuple(ended.values())


def restore_silences(snapshot: Snapshot, silences: Iterable[PageSilence]) -> Snapshot:
    """Return the snapshot with the silences of an earlier daemon. A newer silence of the same job is kept."""
    return replace(snapshot, silences={one.job_key: one for one in silences} | snapshot.silences)
