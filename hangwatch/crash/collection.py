"""What the ranks of a job left whose processes are gone, read of the machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from hangwatch import words
from hangwatch.capture import kernel_log
from hangwatch.crash.artifacts import FAULTS, TEXT_CHARACTERS, Exit, Left
from hangwatch.crash.first_death import causes_of
from hangwatch.model import EndedProcess, Job, KernelLine, RankId
from hangwatch.probes.node import kmsg
from hangwatch.probes.process import crash_artifacts, procfs
from hangwatch.tables import secret_forms

_FRAMES_SHOWN = 8
_LINE_CHARACTERS = 4096
_NEAR_SECONDS = 120.0  # between what a rank left and its end: a scan, and its destructors; a core is written by then
_CONTAINER_GONE = (
    "its container has gone, and with it what it may have left there (error file, core): on a volume of the host "
    "(torchrun --log-dir, TORCHELASTIC_ERROR_FILE) people can read it afterwards"
)


def read(
    job: Job,
    node: str,
    seen: crash_artifacts.LastSeen,
    *,
    cores: bool = True,
    proc_root: Path = procfs.PROC,
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
        if (code := crash_artifacts.exit_code(one.id, proc_root)) is not None:
            found[one.id] = found[one.id]._replace(exit=Exit(code, by_kernel=True))
        if known is None or known.uid is None or known.mounts is None:
            continue
        root = crash_artifacts.root_of(known.mounts, living, proc_root)
        if root is None:
            found[one.id] = found[one.id]._replace(refused=(_CONTAINER_GONE,))
        else:
            readable.append((known, root))
    shared = Counter(known.error_file for known, _ in readable)  # who of them wrote it nobody can tell
    with_file = [(known, root) for known, root in readable if known.error_file and shared[known.error_file] == 1]
    for (known, _), file in zip(with_file, crash_artifacts.error_files(with_file), strict=True):
        found[known.id] = _with_error_file(found[known.id], file)
    for (known, _), core in zip(readable, crash_artifacts.cores(readable, proc_root), strict=True):
        if core is not None and core.path and (core.refused or _is_of_its_end(core, found[known.id])):
            found[known.id] = _with_core(found[known.id], core)
    for known, exited in _exits(readable):
        if found[known.id].exit is None:
            found[known.id] = found[known.id]._replace(exit=exited)
    first = next(iter(causes_of(list(found.values()))), None)
    for known, root in readable:
        left = found[known.id]
        if cores and first is not None and left.id == first.left.id and left.core is not None:
            found[known.id] = left._replace(stack=_frames(crash_artifacts.native_stack(known, left.core, root)))
    return list(found.values())


def _exits(readable: Sequence[tuple[crash_artifacts.Seen, Path]]) -> Iterable[tuple[crash_artifacts.Seen, Exit]]:
    """How ranks ended by the logs of their launchers."""
    from hangwatch.explain.logs import launcher_text  # only a crash needs it

    told = {path: launcher_text.exits(text) for path, text in crash_artifacts.log_ends(readable).items()}
    for known, _ in readable:
        found = (told.get(path, {}).get(known.inner_pid) for path in known.logs)
        one = next((one for one in found if one is not None), None)
        if one is not None:
            yield known, Exit(one.code, by_kernel=False, is_first=one.is_first)


def _left(one: EndedProcess, node: str, lines: tuple[KernelLine, ...]) -> Left:
    rank = RankId(node=node, rank=one.rank, local_rank=one.local_rank, pid=one.id.pid)
    return Left(rank, one.gone_unix_seconds, lines)


def _with_error_file(left: Left, file: crash_artifacts.ErrorFile) -> Left:
    if file.refused:
        return left._replace(refused=(*left.refused, secret_forms.mask(f"its error file {file.refused}")))
    if not file.text:
        return left
    from hangwatch.explain.logs import rank_log  # only a crash needs it

    try:
        failure = rank_log.parse_error_file(file.text)
    except ValueError as error:
        return left._replace(refused=(*left.refused, f"its error file {error}"))
    failure = failure._replace(of_others=rank_log.blames_another(failure, left.id.rank))
    is_of_its_end = failure.moment is not None and abs(failure.moment.seconds - left.gone_unix_seconds) < _NEAR_SECONDS
    return left._replace(failure=failure) if is_of_its_end else left


def _is_of_its_end(core: crash_artifacts.Core, left: Left) -> bool:
    """Not one of another process that had its pid, long ago or in another pid namespace, nor of who was told to end."""
    return core.signal in FAULTS and abs(core.unix_seconds - left.gone_unix_seconds) < _NEAR_SECONDS


def _with_core(left: Left, core: crash_artifacts.Core) -> Left:
    if core.refused:
        return left._replace(refused=(*left.refused, secret_forms.mask(f"its core {core.refused}")))
    return left._replace(core=core)


def _frames(text: str) -> tuple[str, ...]:
    """The innermost frames of the thread that died, which gdb calls thread 1; else what it says in place of them."""
    from hangwatch.explain.stacks import gdb_text  # only a core needs it

    lines = [line[:_LINE_CHARACTERS] for line in text.splitlines() if line.strip()]
    if frames := gdb_text.died_in(lines):
        if all(frame.startswith("?? ") for frame in frames):
            return ("no native stack: gdb could not read the program and its libraries",)
        return tuple(words.elided(frame, TEXT_CHARACTERS) for frame in frames[:_FRAMES_SHOWN])
    return (f"no native stack: {words.elided(lines[-1], TEXT_CHARACTERS)}",) if lines else ()
