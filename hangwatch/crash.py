"""A rank that died: what it left, who died first, and why. Orderly ends leave nothing, and make no incident.

`read` asks the machine, `judge` decides. The kernel's log is its own word; error files and cores are the owner's, who
can lie about his own job, and about no other. Whoever complains of others in its error file followed somebody.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from hangwatch import __version__, config, kernel_lines, words
from hangwatch.hang import kernel_log, votes
from hangwatch.hang.activity import Table
from hangwatch.hang.grouping import group_ranks
from hangwatch.model import (
    CRASHED,
    Capture,
    Confidence,
    Died,
    EndedProcess,
    Evidence,
    FirstLook,
    Incident,
    Job,
    JobState,
    KernelLine,
    Member,
    RankDump,
    RankId,
    TimelineEntry,
    Verdict,
)
from hangwatch.probes import kmsg, procs, remains

if TYPE_CHECKING:
    from hangwatch.explain import logs

_SHOWN = 3
_MOST_IDS = 64
_FRAMES_SHOWN = 8
_TEXT_CHARACTERS = 240
_LINE_CHARACTERS = 4096
_TIE_SECONDS = 2.0  # an error file tells whole seconds
_NEAR_SECONDS = 120.0  # between what a rank left and its end: a scan, and its destructors; a core is written by then
_DRIFT = 20e-6  # of the clock of the kernel's log against the wall clock, in which it counts since boot
_ABORTED = "SIGABRT"
_FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS", _ABORTED})
"""What a program dies of by itself; others are sent, and gcore writes the core of a process that lives on."""
_TOLD_TO_END = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
_CONTAINER_GONE = (
    "its container has gone, and with it what it may have left there (error file, core): on a volume of the host "
    "(torchrun --log-dir, TORCHELASTIC_ERROR_FILE) people can read it afterwards"
)
_SECRETS = re.compile(
    r"(?i)(//)[^/@\s]+@|\b(bearer\s+|(?:token|password|passwd|secret|api[_-]?key)\s*[=:]\s*)[^\s,;'\"]+"
)


class Exit(NamedTuple):
    """How a rank ended: its exit code, negative for a signal, by the kernel or by what its launcher printed.

    `is_first`: its launcher tells it as the first failure. Of exit codes in one second that is any of them.
    """

    code: int
    by_kernel: bool
    is_first: bool = False

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty where none did."""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return ""

    @property
    def text(self) -> str:
        """For people: `SIGSEGV` or `exit code 1`, and where that stands."""
        where = "its exit status" if self.by_kernel else "its launcher's log"
        return f"{self.signal or f'exit code {self.code}'}, by {where}"


class Left(NamedTuple):
    """What one dead rank left: lines of the kernel's log, its failure by the error file, its core with the stack in it.

    `exit` is None where nothing tells how it ended. `refused` says what was there and was not read.
    """

    id: RankId
    gone_unix_seconds: float
    lines: tuple[KernelLine, ...] = ()
    failure: logs.Failure | None = None
    core: remains.Core | None = None
    stack: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    exit: Exit | None = None

    @property
    def end(self) -> KernelLine | None:
        """The line of the kernel's log that tells of its own end."""
        rows = kernel_lines.load()
        return next((line for line in self.lines if rows[line.name].deadly and line.subject == str(self.id.pid)), None)


class Cause(NamedTuple):
    """Why a rank died, and when.

    `order`: 0 by the kernel or a core, 1 by its own word, 2 an abort or another signal, 3 of others.
    """

    left: Left
    order: int
    unix_seconds: float
    text: str


def read(
    job: Job,
    node: str,
    seen: remains.LastSeen,
    *,
    cores: bool = True,
    proc_root: Path = procs.PROC,
    kernel_log_path: Path = Path("/dev/kmsg"),
) -> list[Left]:
    """What the ranks of a job left whose processes are gone; takes a child, some seconds, and for a core three minutes.

    Without `cores` a core is not given to gdb; which signal it tells is read.
    """
    log = kmsg.SHARED.read(kernel_log_path)
    said = log.lines if isinstance(log, kmsg.KernelEvents) else ()
    lines = kernel_log.lines_of(job, said, now=time.monotonic(), unix_now=time.time(), proc_root=proc_root)
    dead = [one for one in job.ended if not one.is_worker]
    living = [*(one.pid for one in job.launcher_ids), *(rank.id.pid for rank in job.ranks)]
    found = {one.id: _left(one, node, lines.get(one.id.pid, ())) for one in dead}
    readable = []
    for one in dead:
        known = seen.of(one.id)
        if (code := remains.exit_code(one.id, proc_root)) is not None:
            found[one.id] = found[one.id]._replace(exit=Exit(code, by_kernel=True))
        if known is None or known.uid is None or known.mounts is None:
            continue
        root = remains.root_of(known.mounts, living, proc_root)
        if root is None:
            found[one.id] = found[one.id]._replace(refused=(_CONTAINER_GONE,))
        else:
            readable.append((known, root))
    shared = Counter(known.error_file for known, _ in readable)  # who of them wrote it nobody can tell
    with_file = [(known, root) for known, root in readable if known.error_file and shared[known.error_file] == 1]
    for (known, _), file in zip(with_file, remains.error_files(with_file), strict=True):
        found[known.id] = _with_error_file(found[known.id], file)
    for (known, _), core in zip(readable, remains.cores(readable, proc_root), strict=True):
        if core is not None and core.path and (core.refused or _is_of_its_end(core, found[known.id])):
            found[known.id] = _with_core(found[known.id], core)
    for known, exited in _exits(readable):
        if found[known.id].exit is None:
            found[known.id] = found[known.id]._replace(exit=exited)
    first = next(iter(_causes(list(found.values()))), None)
    for known, root in readable:
        left = found[known.id]
        if cores and first is not None and left.id == first.left.id and left.core is not None:
            found[known.id] = left._replace(stack=_frames(remains.native_stack(known, left.core, root)))
    return list(found.values())


def _exits(readable: Sequence[tuple[remains.Seen, Path]]) -> Iterable[tuple[remains.Seen, Exit]]:
    """How ranks ended by the logs of their launchers."""
    from hangwatch.explain import launcher_text  # only a crash needs it

    told = {path: launcher_text.exits(text) for path, text in remains.log_ends(readable).items()}
    for known, _ in readable:
        found = (told.get(path, {}).get(known.inner_pid) for path in known.logs)
        one = next((one for one in found if one is not None), None)
        if one is not None:
            yield known, Exit(one.code, by_kernel=False, is_first=one.is_first)


def _left(one: EndedProcess, node: str, lines: tuple[KernelLine, ...]) -> Left:
    rank = RankId(node=node, rank=one.rank, local_rank=one.local_rank, pid=one.id.pid)
    return Left(rank, one.gone_unix_seconds, lines)


def _with_error_file(left: Left, file: remains.ErrorFile) -> Left:
    if file.refused:
        return left._replace(refused=(*left.refused, f"its error file {file.refused}"))
    if not file.text:
        return left
    from hangwatch.explain import logs  # only a crash needs it

    try:
        failure = logs.parse_error_file(file.text)
    except ValueError as error:
        return left._replace(refused=(*left.refused, f"its error file {error}"))
    failure = failure._replace(
        of_others=logs.blames_another(failure, left.id.rank), text=_SECRETS.sub(r"\1\2***", failure.text)
    )
    is_of_its_end = failure.moment is not None and abs(failure.moment.seconds - left.gone_unix_seconds) < _NEAR_SECONDS
    return left._replace(failure=failure) if is_of_its_end else left


def _is_of_its_end(core: remains.Core, left: Left) -> bool:
    """Not one of another process that had its pid, long ago or in another pid namespace, nor of who was told to end."""
    return core.signal in _FAULTS and abs(core.unix_seconds - left.gone_unix_seconds) < _NEAR_SECONDS


def _with_core(left: Left, core: remains.Core) -> Left:
    if core.refused:
        return left._replace(refused=(*left.refused, f"its core {core.refused}"))
    return left._replace(core=core)


def _frames(text: str) -> tuple[str, ...]:
    """The innermost frames of the thread that died, which gdb calls thread 1; else what it says in place of them."""
    from hangwatch.explain import gdb_text  # only a core needs it

    lines = [line[:_LINE_CHARACTERS] for line in text.splitlines() if line.strip()]
    if frames := gdb_text.died_in(lines):
        if all(frame.startswith("?? ") for frame in frames):
            return ("no native stack: gdb could not read the program and its libraries",)
        return tuple(words.elided(frame, _TEXT_CHARACTERS) for frame in frames[:_FRAMES_SHOWN])
    return (f"no native stack: {words.elided(lines[-1], _TEXT_CHARACTERS)}",) if lines else ()


# --- who died first --------------------------------------------------------------------------------------------------


def _causes(found: Iterable[Left]) -> list[Cause]:
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
    if core is not None and core.signal and core.signal != _ABORTED:
        return Cause(left, 0, core.unix_seconds, f"{core.signal}, by its core")
    is_fault = end is not None and end.signal in _FAULTS - {_ABORTED}
    if end is not None and is_fault and end.by_kernel:
        return Cause(left, 0, left.gone_unix_seconds, end.text)
    if failure is not None:
        at = failure.moment.seconds if failure.moment is not None else left.gone_unix_seconds
        where = f", in {failure.where}" if failure.where else ""
        text = words.elided(f"{failure.text}{where}", _TEXT_CHARACTERS)
        return Cause(left, 3 if failure.of_others else 1, at, f"{text}, by its error file")
    if core is not None:
        return Cause(left, 2, core.unix_seconds, f"{core.signal or 'a signal'}, by its core")
    if end is not None and is_fault:
        return Cause(left, 1, left.gone_unix_seconds, end.text)
    if end is not None and end.signal and end.signal not in _TOLD_TO_END and (end.by_kernel or end.is_first):
        return Cause(left, 2, left.gone_unix_seconds, end.text)
    return None


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
    causes = _causes(found)
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
    message = f"{words.who([rank])} at {words.utc(cause.unix_seconds)}: {cause.text}{blames}"
    return Evidence(kind="crash", message=message, ranks=(rank,), supports=True if rank in named else None)


def _more(found: Sequence[Left], named: Sequence[RankId]) -> Iterable[Evidence]:
    yield from votes.kernel_log((Member(id=left.id, kernel_lines=left.lines) for left in found), named)
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
        message = f"{words.who(ids)}: {words.elided(text, _TEXT_CHARACTERS)}"
        yield Evidence(kind=kind, message=message, ranks=tuple(ids[:_MOST_IDS]))


def with_died(job: Job, found: Sequence[Left]) -> Job:
    """The job with what is known of the end of its dead ranks: the others may wait for them, and hang."""
    causes = _causes(found)
    firsts = _firsts(causes) if causes else []
    told = {
        one.left.id.pid: Died(
            text=one.text,
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
    job = with_died(job, found)
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
