"""Search for the rank that died first and for the cause, and the incident of the crash."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from hangwatch import __version__, config, words
from hangwatch.crash.artifacts import ABORTED, FAULTS, TEXT_CHARACTERS, CrashArtifacts
from hangwatch.limits import MOST_LISTED_RANKS
from hangwatch.model import (
    CRASHED,
    Capture,
    CheckFirst,
    Confidence,
    Died,
    Evidence,
    Incident,
    Job,
    JobState,
    KernelFacts,
    Member,
    RankDump,
    RankId,
    TimelineEntry,
    Verdict,
    list_by_key,
)
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tables import secret_forms
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.wording import evidence

_SHOWN = 3
_TIE_SECONDS = 2.0  # error files have whole seconds
# Drift of the clock of the kernel log against the wall clock: seconds per second since boot
_DRIFT = 20e-6
_TERMINATION_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


class Cause(NamedTuple):
    """The cause and time of a rank's death.

    `order` is the kind of source: 0 the kernel or a core, 1 the rank's own report, 2 an abort or another signal, 3 a
    report that blames other ranks. `text` contains no exception text, because metrics, pages and the daemon's log show
    it. `detail` contains the exception text; only the incident shows it.
    """

    artifacts: CrashArtifacts
    order: int
    unix_seconds: float
    text: str
    detail: str = ""

    @property
    def is_kill(self) -> bool:
        """True if only the exit status or the launcher's log reports a SIGKILL. The kernel log has no line about it."""
        end = self.artifacts.exit
        return self.order == 2 and self.artifacts.core is None and end is not None and end.signal == "SIGKILL"


def find_causes(dead: Iterable[CrashArtifacts]) -> list[Cause]:
    """Return the known causes of death, that of the first death first. Ranks without a known cause are left out."""
    causes = [cause for left in dead if (cause := _find_cause(left)) is not None]
    certain = [cause for cause in causes if cause.order < 2]
    proven = min((cause for cause in certain if cause.order == 0), key=lambda cause: cause.unix_seconds, default=None)
    earliest = min((cause.unix_seconds for cause in certain), default=0.0)
    if proven is not None and proven.unix_seconds <= earliest + _TIE_SECONDS + _DRIFT * time.monotonic():
        return [proven, *sorted((cause for cause in causes if cause is not proven), key=_sort_key)]
    return sorted(causes, key=_sort_key)


def _sort_key(cause: Cause) -> tuple[int, float, tuple[int, str, int, int]]:
    return max(1, cause.order), cause.unix_seconds, cause.artifacts.id.sort_key()


def _find_cause(dead: CrashArtifacts) -> Cause | None:
    """Return the cause of a rank's death with the strongest evidence; None if no artifact shows a crash."""
    if (line := dead.end) is not None:
        where = f" in {line.where}" if line.where else ""
        return Cause(dead, 0, line.unix_seconds, f"{line.name.replace('_', ' ')}{where}, according to the kernel's log")
    failure, core, end = dead.failure, dead.core, dead.exit
    if core is not None and core.signal and core.signal != ABORTED:
        return Cause(dead, 0, core.unix_seconds, f"{core.signal}, by its core")
    is_fault = end is not None and end.signal in FAULTS - {ABORTED}
    if end is not None and is_fault and end.by_kernel:
        return Cause(dead, 0, dead.gone_unix_seconds, end.text)
    if failure is not None:
        at = failure.moment.seconds if failure.moment is not None else dead.gone_unix_seconds
        where = f", in {failure.where}" if failure.where else ""
        texts = (failure.exception or "an exception", failure.text)
        kind, detail = (words.elided(f"{text}{where}", TEXT_CHARACTERS) for text in texts)
        order = 3 if failure.of_others else 1
        return Cause(dead, order, at, f"{kind}, according to its error file", f"{detail}, according to its error file")
    if core is not None:
        return Cause(dead, 2, core.unix_seconds, f"{core.signal or 'a signal'}, by its core")
    if end is not None and is_fault:
        return Cause(dead, 1, dead.gone_unix_seconds, end.text)
    if end is not None and end.signal and end.signal not in _TERMINATION_SIGNALS and (end.by_kernel or end.is_first):
        return Cause(dead, 2, dead.gone_unix_seconds, end.text)
    return None


def _find_first_deaths(causes: Sequence[Cause]) -> list[RankId]:
    """Return the ranks that died first: all within one second; none if all reports blame other ranks."""
    first = causes[0]
    if first.order == 3:
        return []
    if first.order != 1:
        return [first.artifacts.id]
    tied = (cause for cause in causes if cause.order == 1 and abs(cause.unix_seconds - first.unix_seconds) < 1.0)
    return [cause.artifacts.id for cause in tied]


def judge(job: Job, dead: Sequence[CrashArtifacts], *, was_open: bool = False) -> Verdict | None:
    """Return the verdict on a crash; None if no artifact shows a crash.

    `was_open` is true if the job had an open incident. A person or a launcher ends such a job with SIGKILL. That is not
    a crash, even if other ranks then report errors about the killed ranks.
    """
    causes = find_causes(dead)
    if not causes or (
        was_open
        and any(cause.is_kill for cause in causes)
        and all(cause.is_kill or cause.order == 3 for cause in causes)
    ):
        return None
    first, named = causes[0], _find_first_deaths(causes)
    if len(named) == len(dead) > 1:
        return _make_common_verdict(first, named)
    rest = len(dead) - max(1, len(named))
    others = f"; {words.count(rest, 'other rank')} of this node ended, too" if rest else ""
    still = f"; {words.count(len(job.ranks), 'rank')} still running" if job.ranks else ""
    when = words.utc(first.unix_seconds)
    if named:
        message = f"{words.name_ranks(named)} crashed first, at {when}: {first.text}{others}{still}."
    else:
        message = (
            "ranks crashed, and all reports blame other ranks; "
            f"the first report is of {words.name_ranks([first.artifacts.id])}, at {when}: {first.text}{others}{still}. "
            "The rank that died earlier left no report, or is on another node."
        )
    confidence = (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW, Confidence.NONE)[first.order]
    looks = tuple(_find_ranks_without_report(job, dead, causes)) if first.order == 3 else ()
    if looks:
        message += f" Check {words.name_ranks(looks)} first: {looks[0].why}."
    return Verdict(
        kind=CRASHED,
        message=message[:1].upper() + message[1:],
        check_first=looks,
        named=tuple(named),
        confidence=Confidence.LOW if len(named) > 1 else confidence,
        evidence=(*(_evidence(cause, named) for cause in causes[: 2 * _SHOWN]), *_list_more_evidence(dead, named)),
    )


def _make_common_verdict(first: Cause, ended: Sequence[RankId]) -> Verdict:
    """Return the verdict if all ranks ended within a second, each with its own error: probably a common cause."""
    message = (
        f"no rank can be named: {words.count(len(ended))} ended in the same second ({words.utc(first.unix_seconds)}), "
        f"each with its own error. The first report is of {words.name_ranks([first.artifacts.id])}: {first.text}."
    )
    return Verdict(kind=CRASHED, message=message[:1].upper() + message[1:], evidence=(_evidence(first, ()),))


def _find_ranks_without_report(
    job: Job, dead: Sequence[CrashArtifacts], causes: Sequence[Cause]
) -> Iterable[CheckFirst]:
    """Yield the ranks without a report, if more ranks have a report that blames others.

    A rank that a signal ended leaves no report. If the job also runs on other nodes or has running ranks, yield
    nothing.
    """
    reporting = {cause.artifacts.id for cause in causes}
    silent = [artifacts.id for artifacts in dead if artifacts.id not in reporting]
    if job.has_ranks_on_other_nodes or job.ranks or len(silent) >= len(reporting):
        return
    why = f"it left no report, and {words.count(len(reporting), 'other rank')} blame other ranks"
    settle = "read its log and that of the launcher: exit code -11 is a segfault, -9 a SIGKILL from outside"
    for rank in silent:
        yield CheckFirst.copy_from(rank, why=why, settle=settle)


def _evidence(cause: Cause, named: Sequence[RankId]) -> Evidence:
    rank = cause.artifacts.id
    blames = " (blames other ranks)" if cause.order == 3 else ""
    message = f"{words.name_ranks([rank])} at {words.utc(cause.unix_seconds)}: {cause.detail or cause.text}{blames}"
    return Evidence(kind="crash", message=message, ranks=(rank,), supports=True if rank in named else None)


def _list_more_evidence(dead: Sequence[CrashArtifacts], named: Sequence[RankId]) -> Iterable[Evidence]:
    yield from evidence.kernel_log((Member(id=left.id, kernel=KernelFacts(lines=left.lines)) for left in dead), named)
    for left in dead:
        if left.core is not None:
            path = secret_forms.mask(left.core.path)
            message = f"{words.name_ranks([left.id])} left a core, {path}: gdb shows its native stack"
            yield Evidence(kind="core", message=message, ranks=(left.id,))
    yield from _fold("exit", ((left.id, left.exit.text) for left in dead if left.exit is not None and left.exit.code))
    yield from _fold("not_read", ((left.id, why) for left in dead for why in left.refused))


def _fold(kind: str, texts: Iterable[tuple[RankId, str]]) -> Iterable[Evidence]:
    """Yield evidence for the first three different texts, each with all its ranks."""
    ranks = list_by_key((text, rank) for rank, text in texts)
    for text, ids in list(ranks.items())[:_SHOWN]:
        message = f"{words.name_ranks(ids)}: {words.elided(text, TEXT_CHARACTERS)}"
        yield Evidence(kind=kind, message=message, ranks=tuple(ids[:MOST_LISTED_RANKS]))


def _add_deaths(job: Job, dead: Sequence[CrashArtifacts]) -> Job:
    """Return the job with the causes of death of its ended ranks. Other ranks may wait for these ranks and hang."""
    causes = find_causes(dead)
    firsts = _find_first_deaths(causes) if causes else []
    deaths = {
        cause.artifacts.id.pid: Died.copy_from(cause, of_others=cause.order == 3, is_first=cause.artifacts.id in firsts)
        for cause in causes
    }
    ended = (
        process if process.is_worker else structs.replace(process, died=deaths.get(process.id.pid))
        for process in job.ended
    )
    return structs.replace(job, ended=tuple(ended))


def make_incident(
    job: Job, node: str, dead: Sequence[CrashArtifacts], verdict: Verdict, activities: Table, *, unix_now: float
) -> Incident:
    """Return the incident of a crash. It is closed, because a crash does not continue."""
    job = _add_deaths(job, dead)
    deaths = {
        artifacts.id.pid: Died(text=artifacts.exit.text, unix_seconds=artifacts.gone_unix_seconds, of_others=True)
        for artifacts in dead
        if artifacts.exit is not None and artifacts.exit.code
    } | {process.id.pid: process.died for process in job.ended if process.died is not None}
    ranks = tuple(
        RankDump(id=artifacts.id, gone=True, kernel_lines=artifacts.lines, died=deaths.get(artifacts.id.pid))
        for artifacts in dead
    )
    capture = Capture(
        job_id=job.job_id,
        job_key=job.key,
        node=node,
        started_unix_seconds=unix_now,
        duration_seconds=0.0,
        rounds=0,
        ranks=ranks,
        world_size=job.world_size if job.has_ranks_on_other_nodes else None,
    )
    grouping = group_ranks(capture, activities, config.Capture())
    return Incident(
        incident_id=words.incident_name(job, unix_now),
        node=node,
        job=job,
        opened_unix_seconds=unix_now,
        closed_unix_seconds=unix_now,
        state=JobState.ENDED,
        verdict=with_action(verdict, grouping),
        grouping=grouping,
        captures=(capture,),
        timeline=(TimelineEntry(unix_seconds=unix_now, state=JobState.ENDED, message=verdict.message),),
        hangwatch_version=__version__,
    )
