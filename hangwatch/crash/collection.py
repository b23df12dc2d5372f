"""Collection of the crash artifacts of a job's dead ranks."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from hangwatch.capture import kernel_log
from hangwatch.crash.artifacts import FAULTS, CrashArtifacts, Exit
from hangwatch.model import EndedProcess, Job, KernelLine, RankId
from hangwatch.probes.base import procfs
from hangwatch.probes.node import kmsg
from hangwatch.probes.process import crash_artifacts
from hangwatch.tables import secret_forms

# From an artifact to the noticed end of the rank: destructors, writing a core, next scan
_NEAR_SECONDS = 120.0
_CONTAINER_GONE = (
    "its container no longer exists, and with it its error file and core; write them to a volume of the host "
    "(torchrun --log-dir, TORCHELASTIC_ERROR_FILE) to keep them"
)


def collect_artifacts(
    job: Job,
    node: str,
    seen: crash_artifacts.RankSnapshots,
    *,
    cores: bool = True,
    proc_root: Path = procfs.PROC,
    kernel_log_path: Path = Path("/dev/kmsg"),
) -> list[CrashArtifacts]:
    """Return the crash artifacts of each dead rank of a job.

    It starts a child process and takes seconds. If `cores` is false, no core is read.
    """
    log = kmsg.SHARED.read(kernel_log_path)
    log_lines = log.lines if isinstance(log, kmsg.KernelEvents) else ()
    lines = kernel_log.find_lines(job, log_lines, now=time.monotonic(), unix_now=time.time(), proc_root=proc_root)
    dead = [process for process in job.ended if not process.is_worker]
    living = [*(launcher.pid for launcher in job.launcher_ids), *(rank.id.pid for rank in job.ranks)]
    artifacts = {process.id: _make_artifacts(process, node, lines.get(process.id.pid, ())) for process in dead}
    readable = []
    for process in dead:
        last_seen = seen.find(process.id)
        if (code := crash_artifacts.exit_code(process.id, proc_root)) is not None:
            artifacts[process.id] = artifacts[process.id]._replace(exit=Exit(code, by_kernel=True))
        if last_seen is None or last_seen.uid is None or last_seen.mounts is None:
            continue
        root = crash_artifacts.find_root(last_seen.mounts, living, proc_root)
        if root is None:
            artifacts[process.id] = artifacts[process.id]._replace(refused=(_CONTAINER_GONE,))
        else:
            readable.append((last_seen, root))
    # A file of several ranks does not show which rank wrote it.
    users = Counter(last_seen.error_file for last_seen, _ in readable)
    with_file = [(rank, root) for rank, root in readable if rank.error_file and users[rank.error_file] == 1]
    for (rank, _), file in zip(with_file, crash_artifacts.read_error_files(with_file), strict=True):
        artifacts[rank.id] = _with_error_file(artifacts[rank.id], file)
    found_cores = crash_artifacts.find_cores(readable, proc_root) if cores else [None] * len(readable)
    for (rank, _), core in zip(readable, found_cores, strict=True):
        artifacts[rank.id] = _with_core(artifacts[rank.id], core)
    for rank, exited in _read_exits(readable):
        if artifacts[rank.id].exit is None:
            artifacts[rank.id] = artifacts[rank.id]._replace(exit=exited)
    return list(artifacts.values())


def _read_exits(
    readable: Sequence[tuple[crash_artifacts.RankSnapshot, Path]],
) -> Iterable[tuple[crash_artifacts.RankSnapshot, Exit]]:
    """Yield the exit codes that the launchers' logs report, each with its rank."""
    from hangwatch.formats import torchrun_exits  # only a crash needs it

    exits_by_log = {path: torchrun_exits.exits(text) for path, text in crash_artifacts.read_log_ends(readable).items()}
    for rank, _ in readable:
        exits = (exits_by_log.get(path, {}).get(rank.inner_pid) for path in rank.logs)
        if (exited := next(filter(None, exits), None)) is not None:
            yield rank, Exit(exited.code, by_kernel=False, is_first=exited.is_first)


def _make_artifacts(process: EndedProcess, node: str, lines: tuple[KernelLine, ...]) -> CrashArtifacts:
    rank = RankId.copy_from(process, node=node, pid=process.id.pid)
    return CrashArtifacts(rank, process.gone_unix_seconds, lines)


def _with_error_file(dead: CrashArtifacts, file: crash_artifacts.ErrorFile) -> CrashArtifacts:
    if file.refused:
        return dead._replace(refused=(*dead.refused, secret_forms.mask(f"its error file {file.refused}")))
    if not file.text:
        return dead
    from hangwatch.logs import failures  # only a crash needs it

    try:
        failure = failures.parse_error_file(file.text)
    except ValueError as error:
        return dead._replace(refused=(*dead.refused, f"its error file {error}"))
    failure = failure._replace(of_others=failures.blames_another(failure, dead.id.rank))
    is_of_its_end = failure.moment is not None and abs(failure.moment.seconds - dead.gone_unix_seconds) < _NEAR_SECONDS
    return dead._replace(failure=failure) if is_of_its_end else dead


def _with_core(dead: CrashArtifacts, core: crash_artifacts.Core | None) -> CrashArtifacts:
    if core is None or not core.path:
        return dead
    if core.refused:
        return dead._replace(refused=(*dead.refused, secret_forms.mask(f"its core {core.refused}")))
    # not of an earlier process with the same pid, nor caused by a sent signal
    is_of_its_end = core.signal in FAULTS and abs(core.unix_seconds - dead.gone_unix_seconds) < _NEAR_SECONDS
    return dead._replace(core=core) if is_of_its_end else dead
