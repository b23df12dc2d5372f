"""Who of the dead ranks died first, and why; the incident of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from hangwatch import __version__, config, words
from hangwatch.crash.artifacts import ABORTED, FAULTS, TEXT_CHARACTERS, Left
from hangwatch.model import (
    CRASHED,
    Capture,
    Confidence,
    Died,
    Evidence,
    FirstLook,
    Incident,
    Job,
    JobState,
    Member,
    RankDump,
    RankId,
    TimelineEntry,
    Verdict,
)
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import evidence

if TYPE_CHECKING:
    from hangwatch.explain.logs import rank_log

_SHOWN = 3
_MOST_IDS = 64
_TIE_SECONDS = 2.0  # an error file tells whole seconds
_DRIFT = 20e-6  # of the clock of the kernel's log against the wall clock, in which it counts since boot
_TOLD_TO_END = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


class Cause(NamedTuple):
    """Why a rank died, and when.

    `order`: 0 by the kernel or a core, 1 by its own word, 2 an abort or another signal, 3 of others. `text` stands in
    metrics, pages and the daemon's log: no word of an exception. `detail` has these, for the incident.
    """

    left: Left
    order: int
    unix_seconds: float
    text: str
    detail: str = ""

    @property
    def told(self) -> str:
        """All that is known, for who may read the incident."""
        return self.detail or self.text


def causes_of(found: Iterable[Left]) -> list[Cause]:
    """Why each died of which something tells it, the first one first."""
    causes = [cause for left in found if (cause := _cause(left)) is not None]
    own = [cause for cause in causes if cause.order < 2]
    hard = min((cause for cause in own if cause.order == 0), key=lambda cause: cause.unix_seconds, default=None)
    earliest = min((cause.unix_seconds for cause in own), default=0.0)
    if hard is not None and hard.unix_seconds <= earliest + _TIE_SECONDS + _DRIFT * time.monotonic():
        return [hard, *sorted((one for one in causes if one is not hard), key=_by_time)]
    return sorted(causes, key=_by_time)


def _by_time(cause: Cause) -> tuple[int, float, tuple[int, str, int, int]]:
    return max(1, cause.order), cause.unix_seconds, cause.left.id.sort_key()


def _cause(left: Left) -> Cause | None:
    """The hardest word on one rank."""
    if (line := left.end) is not None:
        where = f" in {line.where}" if line.where else ""
        return Cause(left, 0, line.unix_seconds, f"{line.name.replace('_', ' ')}{where}, by the kernel's log")
    failure, core, end = left.failure, left.core, left.exit
    if core is not None and core.signal and core.signal != ABORTED:
        return Cause(left, 0, core.unix_seconds, f"{core.signal}, by its core")
    is_fault = end is not None and end.signal in FAULTS - {ABORTED}
    if end is not None and is_fault and end.by_kernel:
        return Cause(left, 0, left.gone_unix_seconds, end.text)
    if failure is not None:
        at = failure.moment.seconds if failure.moment is not None else left.gone_unix_seconds
        where = f", in {failure.where}" if failure.where else ""
        kind, said = (words.elided(f"{one}{where}", TEXT_CHARACTERS) for one in (_type(failure), failure.text))
        order = 3 if failure.of_others else 1
        return Cause(left, order, at, f"{kind}, by its error file", f"{said}, by its error file")
    if core is not None:
        return Cause(left, 2, core.unix_seconds, f"{core.signal or 'a signal'}, by its core")
    if end is not None and is_fault:
        return Cause(left, 1, left.gone_unix_seconds, end.text)
    if end is not None and end.signal and end.signal not in _TOLD_TO_END and (end.by_kernel or end.is_first):
        return Cause(left, 2, left.gone_unix_seconds, end.text)
    return None


def _type(failure: rank_log.Failure) -> str:
    return failure.exception or "an exception"


def _firsts(causes: Sequence[Cause]) -> list[RankId]:
    """Who died first; by their own words several may in one second, and where all complain of others nobody."""
    first = causes[0]
    if first.order == 3:
        return []
    if first.order != 1:
        return [first.left.id]
    return [one.left.id for one in causes if one.order == 1 and abs(one.unix_seconds - first.unix_seconds) < 1.0]


def judge(job: Job, found: Sequence[Left]) -> Verdict | None:
    """Who died first, and why, with the evidence; None where nothing tells that anybody crashed."""
    causes = causes_of(found)
    if not causes:
        return None
    first, named = causes[0], _firsts(causes)
    if len(named) == len(found) > 1:
        return _all_alike(first, named)
    rest = len(found) - max(1, len(named))
    others = f"; {words.count(rest, 'other rank')} of this node ended as well" if rest else ""
    still = f"; {words.count(len(job.ranks), 'rank')} still here" if job.ranks else ""
    when = words.utc(first.unix_seconds)
    if named:
        message = f"{words.who(named)} crashed first, at {when}: {first.text}{others}{still}."
    else:
        message = (
            f"ranks crashed, and all that left word complain of others: {words.who([first.left.id])} first, at {when}: "
            f"{first.text}{others}{still}. Who died before is not known: it left no word, or is on another node."
        )
    sure = (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW, Confidence.NONE)[first.order]
    looks = tuple(_silent(job, found, causes)) if first.order == 3 else ()
    if looks:
        message += f" Look first at {words.who(looks)}: {looks[0].why}."
    return Verdict(
        kind=CRASHED,
        message=message[:1].upper() + message[1:],
        first_look=looks,
        named=tuple(named),
        confidence=Confidence.LOW if len(named) > 1 else sure,
        evidence=(*(_evidence(one, named) for one in causes[: 2 * _SHOWN]), *_more(found, named)),
    )


def _all_alike(first: Cause, ended: Sequence[RankId]) -> Verdict:
    """All ended in one second with errors of their own: they were told to, or have one reason."""
    message = (
        f"all {words.count(len(ended))} that ended did so in the second of {words.utc(first.unix_seconds)}, "
        f"each with an error of its own: {words.who([first.left.id])} with {first.text}. Nobody stands out."
    )
    return Verdict(kind=CRASHED, message=message[:1].upper() + message[1:], evidence=(_evidence(first, ()),))


def _silent(job: Job, found: Sequence[Left], causes: Sequence[Cause]) -> Iterable[FirstLook]:
    """Who left no word where more of the others complain, of a job on this node alone: a signal lets nobody write."""
    spoke = {cause.left.id for cause in causes}
    silent = [left.id for left in found if left.id not in spoke]
    if job.is_elsewhere_too or job.ranks or len(silent) >= len(spoke):
        return
    why = f"it left no word, and {words.count(len(spoke), 'other rank')} complain of others"
    settle = "its log and the launcher's: exit code -11 is a segfault, -9 somebody's SIGKILL"
    for rank in silent:
        yield FirstLook(**structs.asdict(rank), why=why, settle=settle)


def _evidence(cause: Cause, named: Sequence[RankId]) -> Evidence:
    rank = cause.left.id
    blames = ", which complains of others" if cause.order == 3 else ""
    message = f"{words.who([rank])} at {words.utc(cause.unix_seconds)}: {cause.told}{blames}"
    return Evidence(kind="crash", message=message, ranks=(rank,), supports=True if rank in named else None)


def _more(found: Sequence[Left], named: Sequence[RankId]) -> Iterable[Evidence]:
    yield from evidence.kernel_log((Member(id=left.id, kernel_lines=left.lines) for left in found), named)
    for left in found:
        if left.stack:
            stack = " < ".join(left.stack)
            yield Evidence(kind="core", message=f"native stack of {words.who([left.id])}: {stack}", ranks=(left.id,))
    yield from _folded(
        "exit", ((left.id, left.exit.text) for left in found if left.exit is not None and left.exit.code)
    )
    yield from _folded("not_read", ((left.id, why) for left in found for why in left.refused))


def _folded(kind: str, told: Iterable[tuple[RankId, str]]) -> Iterable[Evidence]:
    """A few things that are said of ranks, each once."""
    ranks: dict[str, list[RankId]] = {}
    for rank, text in told:
        ranks.setdefault(text, []).append(rank)
    for text, ids in list(ranks.items())[:_SHOWN]:
        message = f"{words.who(ids)}: {words.elided(text, TEXT_CHARACTERS)}"
        yield Evidence(kind=kind, message=message, ranks=tuple(ids[:_MOST_IDS]))


def _with_died(job: Job, found: Sequence[Left]) -> Job:
    """The job with what is known of the end of its dead ranks: the others may wait for them, and hang."""
    causes = causes_of(found)
    firsts = _firsts(causes) if causes else []
    told = {
        one.left.id.pid: Died(
            text=one.text,
            detail=one.detail,
            unix_seconds=one.unix_seconds,
            of_others=one.order == 3,
            is_first=one.left.id in firsts,
        )
        for one in causes
    }
    ended = (one if one.is_worker else structs.replace(one, died=told.get(one.id.pid)) for one in job.ended)
    return structs.replace(job, ended=tuple(ended))


def incident(
    job: Job, node: str, found: Sequence[Left], verdict: Verdict, activities: Table, *, unix_now: float
) -> Incident:
    """The incident of a crash: closed as it is opened, for nothing of it goes on."""
    job = _with_died(job, found)
    died = {one.id.pid: one.died for one in job.ended}
    ranks = tuple(
        RankDump(id=left.id, gone=True, kernel_lines=left.lines, died=died.get(left.id.pid or 0)) for left in found
    )
    taken = Capture(
        job_id=job.job_id,
        job_key=job.key,
        node=node,
        started_unix_seconds=unix_now,
        duration_seconds=0.0,
        rounds=0,
        ranks=ranks,
        world_size=job.world_size,
    )
    return Incident(
        incident_id=words.incident_name(job, unix_now),
        node=node,
        job=job,
        opened_unix_seconds=unix_now,
        closed_unix_seconds=unix_now,
        state=JobState.ENDED,
        verdict=verdict,
        grouping=group_ranks(taken, activities, config.Capture()),
        captures=(taken,),
        timeline=(TimelineEntry(unix_seconds=unix_now, state=JobState.ENDED, message=verdict.message),),
        hangwatch_version=__version__,
    )
