"""Scan all processes of this node: state, owner, and launcher variables.

A scan must be cheap on a node with thousands of processes. `procfs` reads them, and constant values are cached.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.formats import python_files
from hangwatch.model import ENDED_STATES, Fault, Process, ProcessId, list_by_key
from hangwatch.probes.base.owner_turns import order_by_turns
from hangwatch.probes.base.procfs import (
    COMM_CHARACTERS,
    PROC,
    Stat,
    denied,
    list_pids,
    parse_stat,
    paths_of_cgroups,
    printable,
    read_stat,
    read_user_ids,
)
from hangwatch.probes.base.pseudo_files import PAGE_BYTES, read_link, read_start
from hangwatch.probes.process import environment, late_environ, locked_memory
from hangwatch.probes.process.environment import Environment
from hangwatch.probes.process.locked_memory import Target
from hangwatch.tables import launchers

_CMDLINE_LIMIT_BYTES = 4 << 10
_ARGUMENTS_KEPT = 64
_MOST_READS = 3  # a process can change its name again and again
_CGROUP_LIMIT_BYTES = 16 << 10
_CANDIDATE_COMMS = tuple({name[:COMM_CHARACTERS] for name in launchers.CANDIDATES})
_MAY_READ = "run hangwatch as root, or grant it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"


class ProcessScan:
    """The processes of this node. Constant values are cached: each scan reads only `stat` of a known process."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = str(proc_root)
        self._entries: dict[int, _Entry] = {}
        self._unread: Counter[str] = Counter()
        self._late_environments = late_environ.LateEnvironments(proc_root)
        self._late_owners = set[str]()

    @property
    def unread(self) -> Mapping[str, int]:
        """Number of processes, by owner, that may belong to a job and that the last scan did not read."""
        return self._unread

    def processes(
        self,
        gpu_pids: Collection[int] = (),
        *,
        share_of: Callable[[Process], str] = lambda process: f"uid {process.uid}",
        max_per_owner: int = 4096,
        budget_seconds: float = 2.0,
        related_only: bool = False,
    ) -> tuple[Process, ...]:
        """Return every process except kernel threads, sorted by pid.

        Command line and launcher variables are read only of processes that may belong to a job. These are Python and
        launchers (by comm), `gpu_pids` (which hold a GPU), and all their descendants. With `related_only`, only these
        and their ancestors are returned.

        GPU holders and their ancestors are always read. Of other processes at most `max_per_owner` per owner
        (`share_of`) are read. New processes are read for about `budget_seconds`, owners in turn; the next scan
        continues.

        A process that does not respond has a fault, see `locked_memory`. Its owner comes last in the next scan.
        Variables that a process has set after its start are added, see `late_environ`.
        """
        began = time.monotonic()
        stats = dict(self._read_stats())
        candidates = _candidates(stats, gpu_pids)
        self._update_entries(stats, candidates if related_only else stats)
        new = [pid for pid in candidates if not self._entries[pid].complete]
        new.sort(key=lambda pid: self._entries[pid].process.id.start_ticks)
        with_gpu = _with_ancestors(stats, gpu_pids)
        for pid in sorted(new, key=lambda pid: pid not in with_gpu):
            if pid in with_gpu or time.monotonic() < began + budget_seconds / 2:
                self._entries[pid] = _with_owner(self._root, self._entries[pid])
        already_read = (candidates - with_gpu) if new else ()
        counts = Counter(share_of(self._entries[pid].process) for pid in already_read if self._entries[pid].complete)
        self._unread = Counter()
        unlimited, limited = [], []
        owned = [(share_of(self._entries[pid].process), pid) for pid in new]
        for owner, pid in order_by_turns(owned, with_gpu.__contains__, counts, self._late_owners):
            target = Target(self._entries[pid].process.id, owner, holds_gpu=pid in with_gpu)
            if pid in with_gpu:
                unlimited.append(target)
            elif counts[owner] < max_per_owner:
                counts[owner] += 1
                limited.append(target)
            else:
                self._unread[owner] += 1
        self._late_owners = self._read(unlimited, stats, None)
        self._late_owners |= self._read(limited, stats, began + budget_seconds - time.monotonic())
        read = [(entry.process, entry.program) for entry in self._entries.values() if entry.may_set_rank]
        late = self._late_environments.add_to(read, gpu_pids, share_of, budget_seconds / 4)
        return tuple(late.get(pid, entry.process) for pid, entry in self._entries.items())

    def _read_stats(self) -> Iterator[tuple[int, Stat | Process]]:
        """Yield the pid and `stat` of every process except kernel threads; the known value if `stat` is unchanged."""
        for name in list_pids(self._root):
            raw = read_start(f"{self._root}/{name}/stat", PAGE_BYTES)
            if not isinstance(raw, bytes):
                continue
            entry = self._entries.get(int(name))
            if entry is not None and entry.stat_hash == hash(raw):
                yield int(name), entry.process
            elif (stat := parse_stat(raw)) is not None and not stat.is_kernel_thread:
                yield stat.pid, stat

    def _update_entries(self, stats: Mapping[int, Stat | Process], wanted: Iterable[int]) -> None:
        """Keep the entries of the processes in `wanted`, of all that were read, and of their ancestors."""
        read = (pid for pid, entry in self._entries.items() if entry.complete)  # its comm may have become a title
        pids = sorted(_with_ancestors(stats, (*wanted, *read)))
        self._entries = {pid: self._update(pid, stats[pid]) for pid in pids}

    def _read(self, targets: Sequence[Target], stats: Mapping[int, Stat | Process], seconds: float | None) -> set[str]:
        """Read these processes. Return the owners of those that did not respond."""

        def read(target: ProcessId) -> _Entry | None:
            stat: Stat | Process | None = stats[target.pid]
            if not isinstance(stat, Stat):  # unchanged since a scan that did not need the process
                stat = read_stat(f"{self._root}/{target.pid}")
            return None if stat is None else _read_process(self._root, stat, self._entries[target.pid])

        late_owners = set()
        answers = locked_memory.SHARED.read(targets, read, seconds)
        for target in targets:
            answer, pid = answers.get(target.id), target.id.pid
            if isinstance(answer, _Entry):
                self._entries[pid] = answer
                continue
            self._unread[target.owner] += 1
            if answer is not None:
                late_owners.add(target.owner)
                entry = _with_owner(self._root, self._entries[pid])
                self._entries[pid] = entry._replace(process=replace(entry.process, faults=(answer,)))
        return late_owners

    def _update(self, pid: int, stat: Stat | Process) -> _Entry:
        before = self._entries.get(pid)
        if before is not None and before.process is stat:
            return before
        assert isinstance(stat, Stat)
        if before is None or not before.is_same_program(stat):
            bare = Process(
                id=ProcessId(pid=stat.pid, start_ticks=stat.start_ticks),
                parent_pid=stat.parent_pid,
                comm=stat.comm,
                state=stat.state,
            )
            return _Entry(bare, _program(stat), stat.content_hash)
        process = replace(before.process, parent_pid=stat.parent_pid, comm=stat.comm, state=stat.state)
        return before._replace(process=process, stat_hash=stat.content_hash)


class _Entry(NamedTuple):
    """A process as the last scan read it.

    `program` changes at execve(2). `complete` is false until its environment was read. `may_set_rank`: see
    `late_environ`.
    """

    process: Process
    program: int | str
    stat_hash: int
    complete: bool = False
    may_set_rank: bool = False

    def is_same_program(self, stat: Stat) -> bool:
        """True if this is the process, and it has not executed another program.

        A zombie shows no memory, but is the same program; so does a process without its main thread.
        """
        return self.process.id.start_ticks == stat.start_ticks and (
            not stat.resident_bytes or self.program == _program(stat)
        )


def _program(stat: Stat) -> int | str:
    """Return a value that changes at execve(2): the environment's address, else the comm, which may change alone."""
    return stat.env_start or stat.comm


def _candidates(stats: Mapping[int, Stat | Process], gpu_pids: Collection[int]) -> set[int]:
    children = list_by_key((stat.parent_pid, pid) for pid, stat in stats.items())
    found: set[int] = set()
    queue = [
        pid
        for pid, stat in stats.items()
        if pid in gpu_pids or stat.comm.startswith(_CANDIDATE_COMMS) or stat.comm.endswith(".py")
    ]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, ())
    return found


def _with_ancestors(stats: Mapping[int, Stat | Process], pids: Iterable[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        while pid in stats and pid not in found:
            found.add(pid)
            pid = stats[pid].parent_pid  # noqa: PLW2901 - upwards
    return found


_parse_cgroups = functools.lru_cache(maxsize=64)(paths_of_cgroups)  # most processes share a few


def _with_owner(root: str, entry: _Entry) -> _Entry:
    """Return the entry with the owner that the kernel reports. Keep an owner that was already read."""
    if entry.process.uid is not None:
        return entry
    pid = entry.process.id.pid
    raw = read_start(f"{root}/{pid}/cgroup", _CGROUP_LIMIT_BYTES)
    cgroups = _parse_cgroups(raw) if isinstance(raw, bytes) else ()
    ids = read_user_ids(pid, root)
    uid, is_setuid = ids[0] if ids else None, len(set(ids)) > 1
    return entry._replace(process=replace(entry.process, uid=uid, is_setuid=is_setuid, cgroups=cgroups))


def _read_process(root: str, stat: Stat, entry: _Entry) -> _Entry:
    """Read a process, again if it executed another program meanwhile: the result must not mix both programs."""
    for _ in range(_MOST_READS):
        found = _read_once(root, stat, entry)
        now = read_stat(f"{root}/{stat.pid}")
        if now is None or now.start_ticks != stat.start_ticks or now.state in ENDED_STATES:
            return found
        if (_program(now), now.comm) == (_program(stat), stat.comm):
            return found
        stat, entry = now, entry._replace(process=replace(entry.process, uid=None))
    return found


def _read_once(root: str, stat: Stat, entry: _Entry) -> _Entry:
    owned = _with_owner(root, entry).process  # the entry is cached for ever: it must have its owner
    # If only its main thread has ended, another thread still shows the memory of the process.
    thread = str(stat.pid) if stat.resident_bytes else [str(stat.pid), *list_pids(f"{root}/{stat.pid}/task")][-1]
    raw_cmdline = read_start(f"{root}/{thread}/cmdline", _CMDLINE_LIMIT_BYTES)
    answer: Environment | OSError
    try:
        answer = environment.read(f"{root}/{thread}", launchers.VARIABLES, launchers.SHOWN)
    except OSError as error:
        answer = error.with_traceback(None)
    environ = answer.variables if isinstance(answer, Environment) else {}
    faults = _faults(stat.pid, answer)
    process = replace(
        owned,
        parent_pid=stat.parent_pid,
        comm=stat.comm,
        state=stat.state,
        cmdline=_parse_cmdline(raw_cmdline) if isinstance(raw_cmdline, bytes) else (),
        environ=environ,
        faults=faults,
        is_python=_is_python(root, thread, has_rank=not launchers.RANKS.isdisjoint(environ)),
    )
    # An empty environment usually means that execve has not set it up yet.
    complete = bool(faults) or (isinstance(answer, Environment) and not answer.is_empty)
    may_set_rank = complete and late_environ.may_set_rank(process)
    return _Entry(process, _program(stat), stat.content_hash, complete, may_set_rank)


def _is_python(root: str, pid: str, *, has_rank: bool) -> bool | None:
    """Return if a process runs Python, by its executable or a mapped libpython; None if these do not show it.

    setproctitle changes the name, the command line and the environment of a process, but not its executable.
    """
    program = read_link(f"{root}/{pid}/exe")
    if not program or python_files.is_interpreter(program) or not has_rank:
        return python_files.is_interpreter(program) or None
    try:
        with open(f"{root}/{pid}/maps", "rb") as maps:  # noqa: PTH123 - a file of the kernel
            return any(python_files.is_library(os.fsdecode(line.rstrip())) for line in maps)
    except OSError:
        return None


def _faults(pid: int, answer: Environment | OSError) -> tuple[Fault, ...]:
    """Return the faults that explain why a possible rank has no rank variables; empty if there are none."""
    path = f"/proc/{pid}/environ"
    if isinstance(answer, PermissionError):
        return (denied(pid, path, _MAY_READ),)
    if isinstance(answer, OSError) or answer.complete or not launchers.RANKS.isdisjoint(answer.variables):
        return ()
    detail = f"{path} is too large: the {environment.READ_BYTES >> 10} KiB that hangwatch reads contain no rank"
    remedy = "unset variables that the job does not need"
    return (Fault(subject=f"pid {pid}", reason="TooLarge", detail=detail, remedy=remedy),)


@functools.lru_cache(maxsize=64)  # the workers of a rank have the same
def _parse_cmdline(raw: bytes) -> tuple[str, ...]:
    parts = raw.rstrip(b"\0").split(b"\0", _ARGUMENTS_KEPT)[:_ARGUMENTS_KEPT]
    return tuple(printable(part) for part in parts) if raw else ()
