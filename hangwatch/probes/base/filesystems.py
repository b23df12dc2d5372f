"""Read mounted file systems through child processes, so that a dead mount cannot block the daemon.

statvfs(2) on a dead NFS, Lustre or FUSE mount can block for ever. Then not even SIGKILL ends the process. So a child
makes the call. A child that does not respond is killed and abandoned. Its paths are not read again until it is gone: at
most one child hangs per dead mount.

The file that a process waits for is found through /proc. This does not touch its file system.
"""

import contextlib
import errno
import itertools
import marshal
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hangwatch import words
from hangwatch.model import Fault, Value
from hangwatch.probes.base import pseudo_files, system_calls
from hangwatch.probes.base.child import KILL_SECONDS, STARTUP_SECONDS, Child
from hangwatch.probes.base.child_runner import AbandonedChildren

CHILD = Path(__file__).with_name("filesystems_child.py")
_STUCK_SECONDS = 0.3  # time for a child to end that has not responded: it probably hangs
NOT_STARTED = "OnlookerNotStarted"
NETWORK_TYPES = frozenset(
    """
    nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs wekafs afs 9p virtiofs orangefs pvfs2 panfs ocfs2 gfs2
    coda acfs mmfs quobyte vastnfs fuse fuseblk
    """.split()  # noqa: SIM905 - a table
)
# FUSE types of this node's desktop or container runtime: not storage.
_LOCAL_FUSE = frozenset({"fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse", "fuse.fuse-overlayfs"})
_SECTOR_BYTES = 512  # unit of /sys/dev/block, independent of the device
_KINDS = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(Value, frozen=True):
    """A mounted file system. `device` is `major:minor`, equal for all its mounts. `id` is unique per mount."""

    path: str
    type: str
    source: str
    device: str
    id: str = ""

    def __str__(self) -> str:
        return f"{words.printable(self.path)} ({words.printable(self.type)})"


class Space(Value, frozen=True):
    """Size of a file system, bytes available to ordinary users, and duration of the call."""

    size_bytes: int
    available_bytes: int
    seconds: float
    read_only: bool = False


class FileKind(NamedTuple):
    """The kind of a file in words, and the device of its file system, as in `Mount`.

    `target` is the path to which a symbolic link leads, "" for other files.
    """

    words: str
    device: str
    target: str = ""


def find_mount(path: str, proc_root: Path) -> tuple[Mount | None, str]:
    """Return the mount of an absolute path by its names alone, and the path below which that mount is reachable.

    `/proc/PID/root/...` is a path in the mount namespace of this process. None if its mounts cannot be read.
    """
    parts = Path(path).relative_to(proc_root).parts if Path(path).is_relative_to(proc_root) else ()
    view, root = (parts[0], f"{proc_root}/{parts[0]}/root") if parts[1:2] == ("root",) else ("self", "")
    inner, seen = Path(path.removeprefix(root) or "/"), mounts(proc_root, view)
    above = [mount for mount in seen if inner.is_relative_to(mount.path)] if isinstance(seen, tuple) else []
    return max(reversed(above), key=lambda mount: len(mount.path), default=None), root


def mounts(proc_root: Path, pid: int | str = "self") -> tuple[Mount, ...] | Fault | None:
    """Return the mounts that a process sees, from /proc/PID/mountinfo; None if the process is gone."""
    text = pseudo_files.read(proc_root / str(pid) / "mountinfo", "mounts")
    return parse_mounts(text) if isinstance(text, str) else text


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Parse mountinfo, see proc_pid_mountinfo(5). The type and the source follow a single hyphen."""
    parsed = []
    for line in text.splitlines():
        mount_part, hyphen, source_part = line.partition(" - ")
        fields, source_fields = mount_part.split(), source_part.split()
        if hyphen and len(fields) >= 5 and len(source_fields) >= 2:
            parsed.append(
                Mount(
                    path=_unescape(fields[4]),
                    type=source_fields[0],
                    source=_unescape(source_fields[1]),
                    device=fields[2],
                    id=fields[0],
                )
            )
    return tuple(parsed)


def mount_of_system_call(proc_root: Path, pid: int, thread: int | None = None) -> Mount | None:
    """Return the file system of the descriptor in the call of the main thread (or `thread`); None if not visible.

    The source is /proc/PID/syscall, see proc_pid_syscall(5). Calls that name a file by its path give None.
    """
    call = system_calls.read(pid, proc_root, thread)
    is_of_file = call is not None and call.row.on == "descriptor"
    return mount_of(proc_root, pid, call.arguments[0]) if call is not None and is_of_file else None


def mount_of(proc_root: Path, pid: int, descriptor: int) -> Mount | None:
    """Return the file system of an open file of a process; None if it is not a file or not visible.

    The source is `mnt_id` in /proc/PID/fdinfo, see proc_pid_fdinfo(5). The file itself is not touched.
    """
    rows = pseudo_files.read_or_empty(proc_root / str(pid) / "fdinfo" / str(descriptor)).splitlines()
    ids = [row.split()[-1] for row in rows if row.startswith("mnt_id:")]
    seen = mounts(proc_root, pid)
    return next((mount for mount in seen if mount.id in ids), None) if isinstance(seen, tuple) else None


def written_bytes(mount: Mount, pid: int, proc_root: Path, sys_root: Path) -> int | None:
    """Return the bytes written to the device of a mount, or by this node to its NFS server; None if not counted.

    See Documentation/admin-guide/iostats.rst for /sys/dev/block/MAJOR:MINOR/stat, and nfsiostat(8) for mountstats.
    """
    fields = pseudo_files.read_or_empty(sys_root / "dev" / "block" / mount.device / "stat").split()
    if len(fields) > 6 and fields[6].isdecimal():
        return int(fields[6]) * _SECTOR_BYTES
    if not mount.type.startswith("nfs"):
        return None
    blocks = pseudo_files.read_or_empty(proc_root / str(pid) / "mountstats").split("\ndevice ")
    mounted = f" mounted on {mount.path} with "
    block = next((block for block in blocks if mounted in _unescape(block.partition("\n")[0])), "")
    counters = block.partition("\tbytes:")[2].partition("\n")[0].split()
    return int(counters[5]) if len(counters) > 5 and counters[5].isdecimal() else None


def dirty_bytes(proc_root: Path) -> int | None:
    """Return Dirty and Writeback of /proc/meminfo: the bytes still to be written to storage; None if unknown."""
    lines = pseudo_files.read_or_empty(proc_root / "meminfo").splitlines()
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    found = [rows[name].split()[0] for name in ("Dirty", "Writeback") if rows.get(name, "").split()]
    return sum(int(word) << 10 for word in found) if len(found) == 2 else None


def is_network(mount: Mount, also: Iterable[str] = ()) -> bool:
    """True if another machine, or a process of this node, serves the file system. `also` are further such types."""
    named = mount.type in NETWORK_TYPES or mount.type in also
    return named or (mount.type.startswith("fuse.") and mount.type not in _LOCAL_FUSE)


def is_on_local_disk(mount: Mount, sys_root: Path = Path("/sys")) -> bool:
    """True if a file system is on an NVMe or SATA disk in this machine.

    False for disks over a network (iSCSI, RBD, NVMe over fabrics), of a virtual machine, and behind a mapper, and for
    file systems without a disk. Source: the device's path in sysfs.
    """
    device = os.path.realpath(sys_root / "dev" / "block" / mount.device)
    return device.startswith(f"{sys_root}/devices/pci") and any(f"/{bus}" in device for bus in ("nvme/", "ata"))


class FilesystemReader:
    """A reader of file systems through child processes. It keeps the children that it abandoned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.abandoned = AbandonedChildren()
        self._names: dict[str, str] = {}

    def read_space(self, paths: Sequence[str], deadline_seconds: float) -> dict[str, Space | Fault]:
        """Return size and free space of the file system of each path; a Fault if it did not respond by the deadline."""
        answers = self._ask([("space", path) for path in paths], deadline_seconds)
        return {path: Space(**answer) if isinstance(answer, dict) else answer for (_, path), answer in answers.items()}

    def read_kind(self, path: str, root: str, deadline_seconds: float) -> FileKind | Fault:
        """Return the kind of a file by lstat(2); a Fault if its file system did not respond by the deadline.

        An absolute link leads to a file below `root`.
        """
        answer = self._ask([("file", path)], deadline_seconds)["file", path]
        if isinstance(answer, Fault):
            return answer
        kind = _KINDS.get(stat.S_IFMT(answer["mode"]), "special file")
        link = answer["target"]
        target = os.path.normpath(f"{root}{link}" if link[:1] == "/" else Path(path).parent / link) if link else ""
        return FileKind(kind, answer["device"], target)

    def list_names(self, folders: Sequence[str], deadline_seconds: float) -> dict[str, tuple[str, ...] | Fault]:
        """Return the names in each folder, at most 20,000; a Fault if it did not respond by the deadline."""
        answers = self._ask([("names", folder) for folder in folders], deadline_seconds)
        return {
            folder: tuple(answer["names"]) if isinstance(answer, dict) else answer
            for (_, folder), answer in answers.items()
        }

    def find_silent_mounts(self, proc_root: Path, pids: Sequence[int], deadline_seconds: float) -> dict[int, Mount]:
        """Return, by pid, the mount of the process's program or libraries that does not respond.

        Takes at most twice the deadline. A process is skipped if its mappings cannot be read in time.
        """
        rows = {pid: f"{proc_root}/{pid}/maps" for pid in pids}
        answers = self._ask([("devices", path) for path in rows.values()], deadline_seconds)
        own_mounts = _by_device(mounts(proc_root))
        mounts_of: dict[int, list[Mount]] = {}
        for pid, path in rows.items():
            answer, its_mounts = answers["devices", path], _by_device(mounts(proc_root, pid))
            devices = answer["devices"] if isinstance(answer, dict) else ()
            mounts_of[pid] = [its_mounts[device] for device in devices if device in its_mounts]
        paths: dict[str, str] = {}
        for pid, mounted in mounts_of.items():
            for mount in mounted:  # read each file system once, through one path
                own_mount = own_mounts.get(mount.device)
                paths.setdefault(
                    mount.device, own_mount.path if own_mount else self._reachable_path(proc_root, pid, mount)
                )
        spaces = self.read_space(list(paths.values()), deadline_seconds)
        silent = {path for path, space in spaces.items() if isinstance(space, Fault) and space.reason == "NoAnswer"}
        return {
            pid: mount
            for pid, mounted in mounts_of.items()
            for mount in reversed(mounted)  # so that the first one stays
            if paths[mount.device] in silent
        }

    def _reachable_path(self, proc_root: Path, pid: int, mount: Mount) -> str:
        """Return a path on a mount that process `pid` sees, through the root of that process.

        If a child already hangs in a path to the same device, return that path.
        """
        path = f"{proc_root}/{pid}/root{mount.path}"
        with self._lock:
            stuck = self.abandoned.targets()
            known = self._names.get(mount.device)
            self._names[mount.device] = known if known in stuck and known is not None else path
            return self._names[mount.device]

    def _ask(
        self, questions: list[tuple[str, str]], deadline_seconds: float
    ) -> dict[tuple[str, str], dict[str, Any] | Fault]:
        """Return the values that answer each question; a Fault if there are none, or if no answer came in time."""
        stuck = self.abandoned.targets()
        answers: dict[tuple[str, str], dict[str, Any] | Fault] = {
            (kind, path): Fault(subject=path, reason="NoAnswer", detail=f"{path} does not respond")
            for kind, path in questions
        }
        unanswered = dict(enumerate(question for question in answers if question[1] not in stuck))
        if not unanswered:
            return answers
        try:
            words_of_questions = itertools.chain.from_iterable(unanswered.values())
            child = Child([sys.executable, "-I", "-S", str(CHILD), str(deadline_seconds), *words_of_questions])
        except OSError as error:
            fault = Fault(
                subject="file systems",
                reason=NOT_STARTED,
                detail=f"the process that reads file systems cannot be started: {error}",
                remedy=f"make {sys.executable} executable for this user; check `ulimit -u` and free memory",
            )
            return dict.fromkeys(questions, fault)
        for number, answer in _answers(child, time.monotonic() + deadline_seconds + STARTUP_SECONDS):
            question = unanswered.pop(number)
            answers[question] = _read_fault(question[1], answer["errno"]) if "errno" in answer else answer
        if not child.end(_STUCK_SECONDS if unanswered else KILL_SECONDS):
            self.abandoned.add(child, frozenset(path for _, path in unanswered.values()))
        return answers


SHARED = FilesystemReader()
"""The reader of this daemon. All callers share it, so that at most one child hangs per dead mount."""


def _by_device(mounts_seen: tuple[Mount, ...] | Fault | None) -> dict[str, Mount]:
    return {mount.device: mount for mount in reversed(mounts_seen)} if isinstance(mounts_seen, tuple) else {}


def _answers(child: Child, end: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the answers of the child until it closes its output, at the latest until `end` (monotonic clock)."""
    rest = b""
    with contextlib.suppress(TimeoutError):
        while piece := child.read(end)[0]:
            rest += piece
            while len(rest) >= 4 and len(rest) >= (after := 4 + int.from_bytes(rest[:4], sys.byteorder)):
                yield marshal.loads(rest[4:after])  # noqa: S302 - from our own child, which runs the same Python
                rest = rest[after:]


def _read_fault(path: str, code: int) -> Fault:
    is_missing, is_denied = code in (errno.ENOENT, errno.ESRCH), code in pseudo_files.DENIED
    reason = "Missing" if is_missing else "PermissionDenied" if is_denied else "CannotRead"
    return Fault(subject=path, reason=reason, detail=f"{path}: {os.strerror(code)}")


def _unescape(word: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), word)
