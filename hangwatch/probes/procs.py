"""Processes as /proc shows them: who runs, with which launcher variables, and what they used. See proc_pid_stat(5).

Everything is read directly: a scan must cost next to nothing on a node with thousands of processes, and the root of
/proc is an argument. Processes that vanish while they are read are normal and leave no trace.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import launcher_table, words
from hangwatch.model import ENDED_STATES, Fault, Process, ProcessId, Value
from hangwatch.probes import environments, locked_memory
from hangwatch.probes.environments import Environment
from hangwatch.probes.locked_memory import Target

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, field 9 of stat
_CMDLINE_LIMIT_BYTES = 4 << 10
_ARGUMENTS_KEPT = 64
_CGROUP_LIMIT_BYTES = 16 << 10
_PAGE_BYTES = 4096
_THREADS_ASKED = 64
_COMM_CHARACTERS = 15  # TASK_COMM_LEN, without its end
_CANDIDATE_COMMS = tuple({name[:_COMM_CHARACTERS] for name in launcher_table.CANDIDATES})
_MAY_READ = "run hangwatch as root, or grant it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"


class Counters(Value, frozen=True):
    """What the kernel says of one process at one moment; a field is None where it was not permitted or not there.

    `state` is None when the process does not exist. `cpu_seconds` is user and system time of all threads, `io_bytes`
    rchar + wchar of /proc/PID/io, which system calls moved, `fetched_bytes` its read_bytes, which storage gave, for
    pages of mapped files as well; `wchan` and `kernel_stack` are those of the main thread. `faults` name what was
    denied, with the capability that is missing.
    """

    id: ProcessId | None = None
    comm: str = ""
    state: str | None = None
    cpu_seconds: float | None = None
    io_bytes: int | None = None
    fetched_bytes: int | None = None
    wchan: str | None = None
    kernel_stack: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def _user(process: Process) -> str:
    return f"uid {process.uid}"


class ProcessScan:
    """The processes of this node. Keeps what a process never changes, so that each scan reads only its `stat`."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = str(proc_root)
        self._known: dict[int, _Known] = {}
        self._unread: Counter[str] = Counter()
        self._late_owners: frozenset[str] = frozenset()

    @property
    def unread(self) -> Mapping[str, int]:
        """By owner, how many processes that may belong to a job the last scan did not read, or in vain."""
        return self._unread

    def processes(
        self,
        gpu_pids: Collection[int] = (),
        *,
        share_of: Callable[[Process], str] = _user,
        max_per_owner: int = 4096,
        budget_seconds: float = 2.0,
    ) -> tuple[Process, ...]:
        """Every process that is no kernel thread, by pid.

        Command line and launcher variables are read only of those that may belong to a job: Python and launchers by
        their comm, `gpu_pids` (the pids that hold a GPU), and all that descend from these. Who holds a GPU and all
        above him are always read; of the others at most `max_per_owner` of each owner (`share_of`), new ones for about
        `budget_seconds`, the owners in turn: the next scan goes on where this one stopped. A process that does not
        answer has a fault, and its owner's turn comes last from then on: see `locked_memory`.
        """
        began = time.monotonic()
        stats = {stat.pid: stat for stat in _read_stats(self._root)}
        candidates = _candidates(stats, gpu_pids)
        self._known = {pid: self._look(stat) for pid, stat in sorted(stats.items())}
        new = [pid for pid in candidates if not self._known[pid].complete]
        new.sort(key=lambda pid: stats[pid].start_ticks)
        first = _with_ancestors(stats, gpu_pids)
        for pid in sorted(new, key=lambda pid: pid not in first):
            if pid in first or time.monotonic() < began + budget_seconds / 2:
                self._known[pid] = _with_owner(self._root, self._known[pid])
        before = (candidates - first) if new else ()
        counts = Counter(share_of(self._known[pid].process) for pid in before if self._known[pid].complete)
        self._unread = Counter()
        always, others = [], []
        owned = [(share_of(self._known[pid].process), pid) for pid in new]
        for owner, pid in _in_turn(owned, counts, first, self._late_owners):
            target = Target(self._known[pid].process.id, owner, holds_gpu=pid in first)
            if pid in first:
                always.append(target)
            elif counts[owner] < max_per_owner:
                counts[owner] += 1
                others.append(target)
            else:
                self._unread[owner] += 1
        late = self._read(always, stats, None) | self._read(others, stats, began + budget_seconds - time.monotonic())
        self._late_owners = frozenset(late)
        return tuple(known.process for known in self._known.values())

    def _read(self, targets: Sequence[Target], stats: Mapping[int, _Stat], seconds: float | None) -> set[str]:
        """Read who these are; the owners of those that gave no answer."""

        def read(target: ProcessId) -> _Known:
            return _read_process(self._root, stats[target.pid], self._known[target.pid])

        late = set()
        answers = locked_memory.SHARED.read(targets, read, seconds)
        for target in targets:
            answer, pid = answers.get(target.id), target.id.pid
            if isinstance(answer, _Known):
                self._known[pid] = answer
                continue
            self._unread[target.owner] += 1
            if answer is not None:
                late.add(target.owner)
                known = _with_owner(self._root, self._known[pid])
                self._known[pid] = known._replace(process=replace(known.process, faults=(answer,)))
        return late

    def _look(self, stat: _Stat) -> _Known:
        before = self._known.get(stat.pid)
        if before is None or not before.is_same_program(stat):
            bare = Process(
                id=ProcessId(pid=stat.pid, start_ticks=stat.start_ticks),
                parent_pid=stat.parent_pid,
                comm=stat.comm,
                state=stat.state,
            )
            return _Known(bare, _program(stat), False)
        process = before.process
        if (process.comm, process.state, process.parent_pid) == (stat.comm, stat.state, stat.parent_pid):
            return before
        # Built by hand: msgspec.structs.replace costs three times as much, and states change at every scan.
        process = Process(
            id=process.id,
            parent_pid=stat.parent_pid,
            comm=stat.comm,
            state=stat.state,
            cmdline=process.cmdline,
            environ=process.environ,
            uid=process.uid,
            is_setuid=process.is_setuid,
            user=process.user,
            cgroups=process.cgroups,
            faults=process.faults,
        )
        return _Known(process, before.program, before.complete)


def read_counters(pid: int, proc_root: Path = PROC) -> Counters:
    """Read what one process used so far, and where it waits in the kernel. Never raises: what is denied is a fault."""
    root = str(proc_root)
    raw = _read(f"{root}/{pid}/stat", _PAGE_BYTES)
    stat = _parse_stat(raw) if isinstance(raw, bytes) else None
    if stat is None:
        return Counters()
    faults = []
    texts = {}
    for name, capabilities in (
        ("io", "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"),
        ("wchan", "CAP_SYS_PTRACE"),
        ("stack", "CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_SYS_ADMIN"),
    ):
        answer = _read(f"{root}/{pid}/{name}", 16384)
        texts[name] = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
        if isinstance(answer, PermissionError):
            faults.append(_denied(pid, f"/proc/{pid}/{name}", f"run hangwatch as root, or grant it {capabilities}"))
    wchan = texts["wchan"].strip()
    return Counters(
        id=ProcessId(pid=pid, start_ticks=stat.start_ticks),
        comm=stat.comm,
        state=stat.state,
        cpu_seconds=stat.cpu_ticks / TICKS_PER_SECOND,
        io_bytes=_parse_io(texts["io"], "rchar", "wchar"),
        fetched_bytes=_parse_io(texts["io"], "read_bytes"),
        wchan=None if wchan in ("", "0") else wchan,
        kernel_stack=tuple(line.partition("] ")[2] or line for line in texts["stack"].splitlines()),
        faults=tuple(faults),
    )


def read_children(pid: int, proc_root: Path = PROC, most: int = 64) -> tuple[int, ...]:
    """The pids of those that a process has started, and of those that these have, at most so many; see proc_pid(5)."""
    found: list[int] = []
    parents = [pid]
    for parent in parents:
        for thread in _numbers(f"{proc_root}/{parent}/task")[:_THREADS_ASKED]:
            raw = _read(f"{proc_root}/{parent}/task/{thread}/children", _PAGE_BYTES)
            children = [int(word) for word in raw.split()] if isinstance(raw, bytes) else []
            found += children
            parents += children
            if len(found) >= most:
                return tuple(found[:most])
    return tuple(found)


def read_state(pid: int, proc_root: Path = PROC) -> tuple[ProcessId, str] | None:
    """Who has this pid now, and the state letter of its main thread; None when nobody has."""
    raw = _read(f"{proc_root}/{pid}/stat", _PAGE_BYTES)
    stat = _parse_stat(raw) if isinstance(raw, bytes) else None
    return None if stat is None else (ProcessId(pid=pid, start_ticks=stat.start_ticks), stat.state)


def read_parent(pid: int, proc_root: Path = PROC) -> int | None:
    """The pid of the process that started it, or has taken it over; None when it is gone."""
    raw = _read(f"{proc_root}/{pid}/stat", _PAGE_BYTES)
    stat = _parse_stat(raw) if isinstance(raw, bytes) else None
    return None if stat is None else stat.parent_pid


def read_thread_states(pid: int, proc_root: Path = PROC) -> str:
    """The state letter of every thread of a process, e.g. "SSSD"; empty when it is gone."""
    states = []
    for thread in _numbers(f"{proc_root}/{pid}/task"):
        raw = _read(f"{proc_root}/{pid}/task/{thread}/stat", _PAGE_BYTES)
        stat = _parse_stat(raw) if isinstance(raw, bytes) else None
        if stat is not None:
            states.append(stat.state)
    return "".join(states)


def read_thread_count(pid: int, proc_root: Path = PROC) -> int:
    """How many threads a process has, whatever they run; 0 when it is gone."""
    counts = _read_status(pid, proc_root, b"Threads:")
    return int(counts[0]) if counts else 0


def is_stop_pending(pid: int, proc_root: Path = PROC) -> bool:
    """Whether a SIGSTOP was sent that takes hold once the process is next on a core or back from the kernel."""
    masks = _read_status(pid, proc_root, b"SigPnd:", b"ShdPnd:")
    return any(int(mask, 16) >> (signal.SIGSTOP - 1) & 1 for mask in masks)


def read_user_id(pid: int, proc_root: Path = PROC) -> int | None:
    """The real user id of a process in the namespace of the daemon; None when it is gone."""
    ids = read_user_ids(pid, proc_root)
    return ids[0] if ids else None


def read_user_ids(pid: int, proc_root: Path | str = PROC) -> tuple[int, ...]:
    """The real, effective and saved user id of a process in the namespace of the daemon; none when it is gone.

    The folder's owner is root's for every process that may not be dumped.
    """
    words = _read_status(pid, proc_root, b"Uid:")[:3]
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def read_cgroups(proc_root: Path = PROC) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every process by pid, with the different paths of its control groups; nothing of those that vanish meanwhile."""
    for pid in map(int, _numbers(str(proc_root))):
        raw = _read(f"{proc_root}/{pid}/cgroup", _PAGE_BYTES)
        if isinstance(raw, bytes):
            yield pid, _cgroups(raw)


def read_inner_pid(pid: int, proc_root: Path = PROC) -> int:
    """The pid by which a process knows itself: the last number of NSpid in /proc/PID/status, else `pid`."""
    numbers = _read_status(pid, proc_root, b"NSpid:")
    return int(numbers[-1]) if numbers else pid


def is_running(program: str, proc_root: Path = PROC) -> bool:
    """Whether any process has the name of this program, of which the kernel keeps 15 characters."""
    comm = program[:_COMM_CHARACTERS].encode() + b"\n"
    return any(_read(f"{proc_root}/{pid}/comm", _PAGE_BYTES) == comm for pid in _numbers(str(proc_root)))


class _Stat(NamedTuple):
    pid: int
    comm: str
    state: str
    parent_pid: int
    start_ticks: int
    cpu_ticks: int
    is_kernel_thread: bool
    env_start: int


class _Known(NamedTuple):
    """A process as it was seen last. `program` changes when it executes another one, `complete` is false until its
    environment was asked for."""

    process: Process
    program: int | str
    complete: bool

    def is_same_program(self, stat: _Stat) -> bool:
        if self.process.id.start_ticks != stat.start_ticks:
            return False
        # A zombie has lost its memory, not its past.
        return stat.state in ENDED_STATES or self.program == _program(stat)


def _program(stat: _Stat) -> int | str:
    """What differs after execve(2): the place of the environment, or the comm where that place is not to be seen.

    The comm alone would not do: setproctitle changes it, and overwrites the environment that was read before.
    """
    return stat.env_start or stat.comm


def _candidates(stats: dict[int, _Stat], gpu_pids: Collection[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent_pid, []).append(stat.pid)
    found: set[int] = set()
    queue = [stat.pid for stat in stats.values() if stat.pid in gpu_pids or _is_candidate_comm(stat.comm)]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, ())
    return found


def _is_candidate_comm(comm: str) -> bool:
    return comm.startswith(_CANDIDATE_COMMS) or comm.endswith(".py")


def _with_ancestors(stats: Mapping[int, _Stat], pids: Collection[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        while pid in stats and pid not in found:
            found.add(pid)
            pid = stats[pid].parent_pid  # noqa: PLW2901 - upwards
    return found


def _in_turn(
    owned: Iterable[tuple[str, int]], counts: Mapping[str, int], first: Collection[int], late: Collection[str]
) -> list[tuple[str, int]]:
    """Those in `first`, then one of each owner after the other; who has many already comes late, `late` ones last."""
    turns, seen = [], Counter(counts)
    for owner, pid in owned:
        turns.append((pid not in first, owner in late, seen[owner], owner, pid))
        seen[owner] += 1
    turns.sort(key=lambda turn: turn[:3])
    return [(owner, pid) for *_, owner, pid in turns]


def _with_owner(root: str, known: _Known) -> _Known:
    """A process with what the kernel says of its owner, where that was not asked before."""
    if known.process.uid is not None:
        return known
    pid = known.process.id.pid
    cgroups = _cgroups(_read(f"{root}/{pid}/cgroup", _CGROUP_LIMIT_BYTES))
    ids = read_user_ids(pid, root)
    uid, is_setuid = ids[0] if ids else None, len(set(ids)) > 1
    return known._replace(process=replace(known.process, uid=uid, is_setuid=is_setuid, cgroups=cgroups))


def _read_process(root: str, stat: _Stat, known: _Known) -> _Known:
    owned = _with_owner(root, known).process  # kept for good: never without its owner
    raw_cmdline = _read(f"{root}/{stat.pid}/cmdline", _CMDLINE_LIMIT_BYTES)
    answer = _read_environment(root, stat.pid)
    environ = answer.variables if isinstance(answer, Environment) else {}
    faults = _faults(stat.pid, answer)
    process = Process(
        id=owned.id,
        parent_pid=stat.parent_pid,
        comm=stat.comm,
        state=stat.state,
        cmdline=_parse_cmdline(raw_cmdline) if isinstance(raw_cmdline, bytes) else (),
        environ=environ,
        uid=owned.uid,
        is_setuid=owned.is_setuid,
        # As the process says: asking the name service could block for as long as the directory server is away.
        user=next(filter(None, map(environ.get, launcher_table.TABLE.users)), None),
        cgroups=owned.cgroups,
        faults=faults,
    )
    # An empty environment is one that execve has not laid out yet, more often than one without a variable.
    return _Known(process, _program(stat), bool(faults) or (isinstance(answer, Environment) and not answer.is_empty))


def _read_environment(root: str, pid: int) -> Environment | OSError:
    try:
        descriptor = os.open(f"{root}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        return environments.read(descriptor, f"{root}/{pid}", launcher_table.VARIABLES, launcher_table.SHOWN)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)


def _faults(pid: int, answer: Environment | OSError) -> tuple[Fault, ...]:
    """Why it may be a rank and does not look like one."""
    path = f"/proc/{pid}/environ"
    if isinstance(answer, PermissionError):
        return (_denied(pid, path, _MAY_READ),)
    if isinstance(answer, OSError) or answer.complete or not launcher_table.RANKS.isdisjoint(answer.variables):
        return ()
    detail = f"{path} is too large: no rank is among the {environments.READ_BYTES >> 10} KiB that are read of it"
    return (Fault(subject=f"pid {pid}", reason="TooLarge", detail=detail, remedy="unset what the job does not need"),)


def _denied(pid: int, path: str, remedy: str) -> Fault:
    return Fault(subject=f"pid {pid}", reason="PermissionDenied", detail=f"{path} may not be read", remedy=remedy)


def _cgroups(raw: bytes | OSError) -> tuple[str, ...]:
    """The different paths of /proc/PID/cgroup, see cgroups(7): `11:devices:/slurm/uid_0/job_1`, `0::/user.slice`."""
    lines = raw.decode("utf-8", "replace").splitlines() if isinstance(raw, bytes) else []
    paths = dict.fromkeys(line.split(":", 2)[2] for line in lines if line.count(":") >= 2)
    return tuple(paths)


def _read_stats(root: str) -> Iterator[_Stat]:
    for pid in _numbers(root):
        raw = _read(f"{root}/{pid}/stat", _PAGE_BYTES)
        stat = _parse_stat(raw) if isinstance(raw, bytes) else None
        if stat is not None and not stat.is_kernel_thread:
            yield stat


def _read_status(pid: int, proc_root: Path | str, *names: bytes) -> list[bytes]:
    """The words of these lines of /proc/PID/status; none when the process is gone."""
    raw = _read(f"{proc_root}/{pid}/status", 8192)
    if not isinstance(raw, bytes):
        return []
    # Searched for, since a status has sixty lines, and splitting them was a fifth of a first scan.
    rests = [rest for name in names for _, found, rest in [(b"\n" + raw).partition(b"\n" + name)] if found]
    return [word for rest in rests for word in rest.partition(b"\n")[0].split()]


def _numbers(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - 600 names at each scan
    except OSError:
        return []


def _read(path: str, limit_bytes: int) -> bytes | OSError:
    """The start of a file, or why it could not be read (gone, denied)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        if limit_bytes <= _PAGE_BYTES:  # the kernel gives a small file whole; a second read would only say so
            return os.read(descriptor, limit_bytes)
        parts = []
        while limit_bytes > 0 and (part := os.read(descriptor, min(limit_bytes, 65536))):
            parts.append(part)
            limit_bytes -= len(part)
        return b"".join(parts)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)


def _parse_stat(raw: bytes) -> _Stat | None:
    """Fields by their number in proc_pid_stat(5); the comm may hold anything, closing brackets too."""
    left, right = raw.find(b"("), raw.rfind(b")")
    fields = raw[right + 2 :].split()
    if left < 0 or len(fields) < 20:
        return None
    try:
        return _Stat(
            pid=int(raw[:left]),
            comm=_printable(raw[left + 1 : right]),
            state=fields[0].decode("ascii"),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            is_kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
            env_start=int(fields[47]) if len(fields) > 47 else 0,
        )
    except ValueError:
        return None


def _parse_io(text: str, *names: str) -> int | None:
    counters = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    try:
        return sum(int(counters[name]) for name in names)
    except (KeyError, ValueError):
        return None


def _parse_cmdline(raw: bytes) -> tuple[str, ...]:
    return (
        tuple(_printable(part) for part in raw.rstrip(b"\0").split(b"\0", _ARGUMENTS_KEPT)[:_ARGUMENTS_KEPT])
        if raw
        else ()
    )


def _printable(raw: bytes) -> str:
    """Text of another process, safe to show."""
    return words.printable(raw.decode("utf-8", "replace"))
