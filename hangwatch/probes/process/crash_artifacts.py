"""Read crash artifacts of a rank: torchelastic's error file, log ends, and the pid and signal in a core.

Only a living process shows their paths, so hangwatch records them while it lives. The paths come from the job's owner.
So a child (`crash_artifacts_child`) opens only regular files of that owner, and follows no link of the owner. The child
may be abandoned at a file system that does not respond. No debugger is run, on a core or on a rank.
"""

import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hangwatch import words
from hangwatch.model import Process, ProcessId, Value
from hangwatch.probes.base import child, child_runner, procfs, pseudo_files

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MOST_ERROR_BYTES = 1 << 18
MOST_LOG_BYTES = 1 << 16
MOST_LOGS = 16
MOST_ANSWER_BYTES = 8 << 20
FILES_DEADLINE_SECONDS = 10.0
DEAD_KEPT_OF_A_SHARE = 1024
_SHARES_KEPT = 4  # each of them with the full number of dead ranks
_CORE_PATTERN = Path("sys/kernel/core_pattern")
_CORE_USES_PID = Path("sys/kernel/core_uses_pid")
_SPECIFIER = re.compile(r"%(.?)")
_EXIT_CODE = 49  # the field after the name in parentheses, counted from 0
_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class RankSnapshot(NamedTuple):
    """A rank as it was while it lived.

    `mounts` is its mount namespace; None if unknown. `inner_pid` is its pid in its pid namespace. `logs` are the files
    that it and its parent write to. The parent may be its launcher.
    """

    id: ProcessId
    share: str
    uid: int | None
    comm: str
    error_file: str
    program: str
    folder: str
    mounts: str | None
    inner_pid: int
    logs: tuple[str, ...] = ()


class ErrorFile(Value, frozen=True):
    """The text of an error file, or the reason why it was not read. Both are empty if there is no error file."""

    text: str = ""
    refused: str = ""


class Core(Value, frozen=True):
    """A core: its path, its time, and the signal that ended its process; or the reason why it was not read."""

    path: str
    unix_seconds: float = 0.0
    signal: str = ""
    refused: str = ""


class RankSnapshots:
    """The newest snapshot of each living rank, and of the ranks that died last.

    The number of dead ranks is limited in total, and to `most_of_a_share` per user or pod. A user or pod has at most
    this number of monitored ranks. So the snapshots of all its ranks are kept if they die together.
    """

    def __init__(self, proc_root: Path = procfs.PROC, most_of_a_share: int = DEAD_KEPT_OF_A_SHARE) -> None:
        self._proc_root = proc_root
        self._most_of_a_share = most_of_a_share
        self._living: dict[ProcessId, RankSnapshot] = {}
        self._dead: dict[ProcessId, RankSnapshot] = {}

    def note(self, ranks: Iterable[tuple[Process, str]]) -> None:
        """Record the ranks that live now, each with the user or pod that it counts for."""
        living = {process.id: self._seen(process, share) for process, share in ranks}
        self._dead |= {process_id: seen for process_id, seen in self._living.items() if process_id not in living}
        self._living = living
        counts = Counter(seen.share for seen in self._dead.values())
        for process_id, seen in list(self._dead.items()):
            if counts[seen.share] > self._most_of_a_share:
                counts[seen.share] -= 1
                del self._dead[process_id]
        while len(self._dead) > _SHARES_KEPT * self._most_of_a_share:
            del self._dead[next(iter(self._dead))]

    def find(self, process: ProcessId) -> RankSnapshot | None:
        """Return the newest snapshot of a rank; None if there is none."""
        return self._dead.get(process) or self._living.get(process)

    def _seen(self, process: Process, share: str) -> RankSnapshot:
        folder, parent = (self._proc_root / str(pid) for pid in (process.id.pid, process.parent_pid))
        now = RankSnapshot(
            id=process.id,
            share=share,
            uid=None if process.is_setuid else process.uid,
            comm=process.comm,
            error_file=str(Path(pseudo_files.read_link(parent / "cwd"), path))  # relative: `torchrun --log-dir logs`
            if (path := process.environ.get(ERROR_FILE))
            else "",
            program=pseudo_files.read_link(folder / "exe"),
            folder=pseudo_files.read_link(folder / "cwd"),
            mounts=procfs.namespace(self._proc_root, process.id.pid, "mnt"),
            inner_pid=procfs.read_inner_pid(process.id.pid, self._proc_root),
            logs=self._logs(process),
        )
        # An ending process shows less: it loses its program and its memory first.
        return now if now.mounts is not None and now.folder and now.program else self._living.get(process.id, now)

    def _logs(self, process: Process) -> tuple[str, ...]:
        folders = (self._proc_root / str(pid) / "fd" for pid in (process.parent_pid, process.id.pid))
        links = (pseudo_files.read_link(folder / name) for folder in folders for name in ("2", "1"))
        return tuple(dict.fromkeys(link for link in links if link.startswith("/") and not link.startswith("/dev/")))


def find_root(mounts: str | None, living: Iterable[int], proc_root: Path = procfs.PROC) -> Path | None:
    """Return a path to the root of a mount namespace; None if no process was found in it.

    The path leads through this process, process 1 or a process in `living`.
    """
    places: tuple[int | str, ...] = ("self", 1, *living)
    for pid in places:
        if mounts is not None and procfs.namespace(proc_root, pid, "mnt") == mounts:
            return Path("/") if pid == "self" else proc_root / str(pid) / "root"
    return None


_FILES = child_runner.Runner("reader of crash artifacts", keeps_part=True, most_bytes=MOST_ANSWER_BYTES)


def read_error_files(ranks: Sequence[tuple[RankSnapshot, Path]]) -> list[ErrorFile]:
    """Return the error file of each rank. Its path is below the given root."""
    questions = [
        {"kind": "error", "root": str(root), "path": seen.error_file, "uid": seen.uid, "most_bytes": MOST_ERROR_BYTES}
        for seen, root in ranks
    ]
    answers = _ask(questions, ranks)
    return [ErrorFile(text=each.get("content", ""), refused=each.get("refused", "")) for each in answers]


def read_log_ends(ranks: Sequence[tuple[RankSnapshot, Path]]) -> dict[str, str]:
    """Return, by path, the ends of the logs of these ranks and their launchers that belong to the rank's user."""
    wanted = dict.fromkeys((path, root, seen.uid) for seen, root in ranks for path in seen.logs)
    questions = [
        {"kind": "end", "root": str(root), "path": path, "uid": uid, "most_bytes": MOST_LOG_BYTES}
        for path, root, uid in list(wanted)[:MOST_LOGS]
    ]
    answers = zip(questions, _ask(questions, ranks), strict=True)
    return {str(question["path"]): answer["content"] for question, answer in answers if "content" in answer}


def exit_code(process: ProcessId, proc_root: Path = procfs.PROC) -> int | None:
    """Return the exit code of a zombie, negative for a signal; None if the process is not a zombie.

    `exit_code` of proc_pid_stat(5) has the form of waitpid(2).
    """
    state = procfs.read_state(process.pid, proc_root)
    if state is None or state[0] != process or state[1] != "Z":
        return None
    try:
        fields = (proc_root / str(process.pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        return None


def find_cores(ranks: Sequence[tuple[RankSnapshot, Path]], proc_root: Path = procfs.PROC) -> list[Core | None]:
    """Return the core of each rank; None if it left none. A core that the kernel passes to a program is `refused`."""
    pattern = pseudo_files.read_or_empty(proc_root / _CORE_PATTERN).strip()
    if not pattern:
        return [None] * len(ranks)
    if pattern.startswith("|"):
        return [Core(path="", refused=_piped(pattern, seen.id.pid)) for seen, _ in ranks]
    uses_pid = pseudo_files.read_or_empty(proc_root / _CORE_USES_PID).strip() == "1"
    candidates = [
        (index, seen, root, path)
        for index, (seen, root) in enumerate(ranks)
        for path in core_paths(pattern, seen, uses_pid=uses_pid)
    ]
    questions = [
        {"kind": "core", "root": str(root), "path": path, "uid": seen.uid} for _, seen, root, path in candidates
    ]
    found_cores: list[Core | None] = [None] * len(ranks)
    for (index, seen, _, path), answer in zip(candidates, _ask(questions, ranks), strict=True):
        is_of_rank = answer.get("pid") in (seen.id.pid, seen.inner_pid)
        if answer.get("refused") or is_of_rank:
            name = child.signal_name(answer.get("signal", 0)) if is_of_rank else ""
            found_cores[index] = Core(
                path=path, unix_seconds=answer.get("unix_seconds", 0.0), signal=name, refused=answer.get("refused", "")
            )
    return found_cores


def core_paths(pattern: str, seen: RankSnapshot, *, uses_pid: bool) -> tuple[str, ...]:
    """Return the possible paths of a core for a plain pattern of core(5); empty if the pattern contains a time."""
    values = {
        "%": "%",
        "p": str(seen.inner_pid),
        "P": str(seen.id.pid),
        "i": str(seen.inner_pid),
        "I": str(seen.id.pid),
        "u": str(seen.uid),
        "e": seen.comm,
        "E": seen.program.replace("/", "!"),
        "h": os.uname().nodename,
        "": "",
    }
    if any(name not in {*values, "s"} for name in _SPECIFIER.findall(pattern)):
        return ()
    if uses_pid and not re.search("%[pP]", pattern):
        pattern += f".{seen.inner_pid}"
    paths = []
    for number in _SIGNALS if "%s" in pattern else _SIGNALS[:1]:
        name = _SPECIFIER.sub(lambda match, number=number: (values | {"s": str(int(number))})[match[1]], pattern)  # type: ignore[misc]
        paths.append(name if name.startswith("/") else f"{seen.folder}/{name}")
    return tuple(path for path in paths if path.startswith("/"))


def _piped(pattern: str, pid: int) -> str:
    """Return the reason why a core is not read: a program receives it, and would run as root on the owner's data."""
    if "systemd-coredump" in pattern:
        return f"cores go to systemd-coredump: run `coredumpctl info {pid}`"
    return f"cores go to the program {words.elided(pattern[1:].strip().partition(' ')[0], 200)}"


def _ask(questions: Sequence[dict[str, Any]], ranks: Sequence[tuple[RankSnapshot, Path]]) -> list[dict[str, Any]]:
    """Return an answer for each question. It is `refused` if the child did not answer in time."""
    if not questions:
        return []
    seen, _ = ranks[0]
    printed = _FILES.run(
        [sys.executable, "-I", "-m", f"{__package__}.crash_artifacts_child"],
        seen.id,
        share=seen.share,
        deadline_seconds=FILES_DEADLINE_SECONDS,
        question=json.dumps(questions).encode(),
    )
    answers: list[dict[str, Any]] = []
    for line in printed.out.splitlines() if isinstance(printed, child_runner.Printed) else ():
        with contextlib.suppress(ValueError):
            answers.append(json.loads(line))
    return [*answers[: len(questions)], *([{"refused": "did not respond"}] * (len(questions) - len(answers)))]
