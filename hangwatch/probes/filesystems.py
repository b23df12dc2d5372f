"""Mounted file systems, asked so that a dead one can never block us: a child process asks, and may be left behind.

statvfs(2) on a dead NFS, Lustre or FUSE mount can block for ever, and not even SIGKILL ends the process before the
kernel gives up. Hence a child; one that does not answer is killed, left to the kernel, and its paths are not asked
again until it is gone: as many children can hang as there are dead mounts, never more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes import pseudofiles

CHILD = Path(__file__).with_name("filesystems_child.py")
STARTUP_SECONDS = 2.0
NOT_STARTED = "OnlookerNotStarted"
NETWORK_TYPES = frozenset(
    """
    nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs wekafs afs 9p virtiofs orangefs pvfs2 panfs ocfs2 gfs2
    coda acfs mmfs quobyte vastnfs fuse fuseblk
    """.split()  # noqa: SIM905 - a table
)
# Served by this node's own desktop or container runtime: no storage.
_LOCAL_FUSE = frozenset({"fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse", "fuse.fuse-overlayfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(Value, frozen=True):
    """One mounted file system. `device` is `major:minor`, the same for every mount of one file system."""

    path: str
    type: str
    source: str
    device: str


class Space(Value, frozen=True):
    """An answer: size, bytes available to ordinary users, and how long it took."""

    size_bytes: int
    available_bytes: int
    seconds: float
    read_only: bool = False


def mounts(proc_root: Path, pid: int | str = "self") -> tuple[Mount, ...] | Fault | None:
    """The mounts that a process sees, /proc/PID/mountinfo; None when it is gone."""
    text = pseudofiles.read(proc_root / str(pid) / "mountinfo", "mounts")
    return parse_mounts(text) if isinstance(text, str) else text


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Rows of mountinfo, see proc_pid_mountinfo(5): the type and the source stand after a lone hyphen."""
    found = []
    for line in text.splitlines():
        left, hyphen, right = line.partition(" - ")
        words, after = left.split(), right.split()
        if hyphen and len(words) >= 5 and len(after) >= 2:
            found.append(Mount(path=_unescape(words[4]), type=after[0], source=_unescape(after[1]), device=words[2]))
    return tuple(found)


def is_network(mount: Mount, also: Iterable[str] = ()) -> bool:
    """Whether another machine, or a process that talks to one, stands behind a mount; `also` names more types."""
    named = mount.type in NETWORK_TYPES or mount.type in also
    return named or (mount.type.startswith("fuse.") and mount.type not in _LOCAL_FUSE)


class Onlookers:
    """Asks paths through child processes, and remembers those that were left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_behind: dict[subprocess.Popen[bytes], frozenset[str]] = {}

    def space(self, paths: Sequence[str], deadline_seconds: float) -> dict[str, Space | Fault]:
        """Size and free space of the file system of each path, within the deadline."""
        answers = self._ask([("space", path) for path in paths], deadline_seconds)
        return {path: _space(path, answers["space", path]) for path in paths}

    def names(self, folders: Sequence[str], deadline_seconds: float) -> dict[str, tuple[str, ...] | Fault]:
        """The names in each folder, within the deadline; at most 20,000."""
        answers = self._ask([("names", folder) for folder in folders], deadline_seconds)
        return {folder: _names(folder, answers["names", folder]) for folder in folders}

    def left_behind(self) -> int:
        """How many children still hang in the kernel."""
        with self._lock:
            self._left_behind = {child: asked for child, asked in self._left_behind.items() if child.poll() is None}
            return len(self._left_behind)

    def _ask(self, questions: list[tuple[str, str]], deadline_seconds: float) -> dict[tuple[str, str], object]:
        """The raw answer to each question: what the child printed, or None where it printed nothing in time."""
        self.left_behind()
        with self._lock:
            stuck = frozenset().union(*self._left_behind.values())
        asked = [question for question in dict.fromkeys(questions) if question[1] not in stuck]
        answers: dict[tuple[str, str], object] = dict.fromkeys(questions)
        if not asked:
            return answers
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), str(deadline_seconds), json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        except OSError as error:
            return dict.fromkeys(questions, _not_started(error))
        assert child.stdout is not None
        with child.stdout as pipe:
            for line in _lines(pipe.fileno(), deadline_seconds + STARTUP_SECONDS):
                with contextlib.suppress(ValueError):
                    index, answer = json.loads(line)
                    answers[asked[index]] = answer
        self._dismiss(child, frozenset(path for kind, path in asked if answers[kind, path] is None))
        return answers

    def _dismiss(self, child: subprocess.Popen[bytes], unanswered: frozenset[str]) -> None:
        """Reap the child; one that the kernel holds is left behind, together with what it was asked."""
        try:
            child.wait(0.5 if not unanswered else 0.1)
        except subprocess.TimeoutExpired:
            child.kill()
            try:
                child.wait(0.2)
            except subprocess.TimeoutExpired:
                with self._lock:
                    self._left_behind[child] = unanswered


def _lines(descriptor: int, deadline_seconds: float) -> Iterator[bytes]:
    """The lines that come until the pipe is closed or the deadline passes."""
    end = time.monotonic() + deadline_seconds
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0 and selector.select(left):
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


def _space(path: str, answer: object) -> Space | Fault:
    if isinstance(answer, dict) and "size" in answer:
        return Space(
            size_bytes=answer["size"],
            available_bytes=answer["available"],
            seconds=answer["seconds"],
            read_only=bool(answer.get("read_only")),
        )
    return _fault(path, answer)


def _names(folder: str, answer: object) -> tuple[str, ...] | Fault:
    if isinstance(answer, dict) and "names" in answer:
        return tuple(answer["names"])
    return _fault(folder, answer)


def _not_started(error: OSError) -> Fault:
    return Fault(
        subject="file systems",
        reason=NOT_STARTED,
        detail=f"the process that asks file systems cannot be started: {error}",
        remedy=f"make {sys.executable} executable for this user; `ulimit -u`, and memory that is left",
    )


def _fault(path: str, answer: object) -> Fault:
    if isinstance(answer, Fault):
        return answer
    if isinstance(answer, dict) and "errno" in answer:
        code = int(answer["errno"])
        reason = {
            errno.ENOENT: "Missing",
            errno.ESRCH: "Missing",
            errno.EACCES: "PermissionDenied",
            errno.EPERM: "PermissionDenied",
        }
        detail = f"{path}: {os.strerror(code)}"
        return Fault(subject=path, reason=reason.get(code, "CannotRead"), detail=detail)
    return Fault(subject=path, reason="NoAnswer", detail=f"{path} gives no answer")


def _unescape(word: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), word)
