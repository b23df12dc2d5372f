"""All processes of this node, again and again: who runs, whose it is, and with which launcher variables.

A scan must cost next to nothing on a node with thousands of processes: `procfs` reads them, and what a process never
changes is kept.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.model import ENDED_STATES, Fault, Process, ProcessId
from hangwatch.probes.process import environment, locked_memory
from hangwatch.probes.process.environment import Environment
from hangwatch.probes.process.locked_memory import Target
from hangwatch.probes.process.procfs import (
    COMM_CHARACTERS,
    PROC,
    Stat,
    denied,
    numbers,
    paths_of_cgroups,
    printable,
    read_start,
    read_stat,
    read_user_ids,
)
from hangwatch.tables import launchers

_CMDLINE_LIMIT_BYTES = 4 << 10
_ARGUMENTS_KEPT = 64
_MOST_READS = 3  # anybody can change his name all the time
_CGROUP_LIMIT_BYTES = 16 << 10
_CANDIDATE_COMMS = tuple({name[:COMM_CHARACTERS] for name in launchers.CANDIDATES})
_MAY_READ = "run hangwatch as root, or grant it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"


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

    def _read(self, targets: Sequence[Target], stats: Mapping[int, Stat], seconds: float | None) -> set[str]:
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

    def _look(self, stat: Stat) -> _Known:
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


class _Known(NamedTuple):
    """A process as it was seen last. `program` changes when it executes another one, `complete` is false until its
    environment was asked for."""

    process: Process
    program: int | str
    complete: bool

    def is_same_program(self, stat: Stat) -> bool:
        if self.process.id.start_ticks != stat.start_ticks:
            return False
        # A zombie has lost its memory, not its past.
        return stat.state in ENDED_STATES or self.program == _program(stat)


def _program(stat: Stat) -> int | str:
    """What differs after execve(2): the place of the environment, or the comm where that place is not to be seen.

    The comm alone would not do: setproctitle changes it, and overwrites the environment that was read before.
    """
    return stat.env_start or stat.comm


def _candidates(stats: dict[int, Stat], gpu_pids: Collection[int]) -> set[int]:
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


def _with_ancestors(stats: Mapping[int, Stat], pids: Collection[int]) -> set[int]:
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
    cgroups = paths_of_cgroups(read_start(f"{root}/{pid}/cgroup", _CGROUP_LIMIT_BYTES))
    ids = read_user_ids(pid, root)
    uid, is_setuid = ids[0] if ids else None, len(set(ids)) > 1
    return known._replace(process=replace(known.process, uid=uid, is_setuid=is_setuid, cgroups=cgroups))


def _read_process(root: str, stat: Stat, known: _Known) -> _Known:
    """A process as one program: who executes another between two reads would have the name and owner of the first."""
    for _ in range(_MOST_READS):
        found = _read_once(root, stat, known)
        now = read_stat(f"{root}/{stat.pid}")
        if now is None or now.start_ticks != stat.start_ticks or now.state in ENDED_STATES:
            return found
        if (_program(now), now.comm) == (_program(stat), stat.comm):
            return found
        stat, known = now, known._replace(process=replace(known.process, uid=None))
    return found


def _read_once(root: str, stat: Stat, known: _Known) -> _Known:
    owned = _with_owner(root, known).process  # kept for good: never without its owner
    raw_cmdline = read_start(f"{root}/{stat.pid}/cmdline", _CMDLINE_LIMIT_BYTES)
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
        user=next(filter(None, map(environ.get, launchers.TABLE.users)), None),
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
        return environment.read(descriptor, f"{root}/{pid}", launchers.VARIABLES, launchers.SHOWN)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)


def _faults(pid: int, answer: Environment | OSError) -> tuple[Fault, ...]:
    """Why it may be a rank and does not look like one."""
    path = f"/proc/{pid}/environ"
    if isinstance(answer, PermissionError):
        return (denied(pid, path, _MAY_READ),)
    if isinstance(answer, OSError) or answer.complete or not launchers.RANKS.isdisjoint(answer.variables):
        return ()
    detail = f"{path} is too large: no rank is among the {environment.READ_BYTES >> 10} KiB that are read of it"
    return (Fault(subject=f"pid {pid}", reason="TooLarge", detail=detail, remedy="unset what the job does not need"),)


def _read_stats(root: str) -> Iterator[Stat]:
    for pid in numbers(root):
        stat = read_stat(f"{root}/{pid}")
        if stat is not None and not stat.is_kernel_thread:
            yield stat


def _parse_cmdline(raw: bytes) -> tuple[str, ...]:
    return (
        tuple(printable(part) for part in raw.rstrip(b"\0").split(b"\0", _ARGUMENTS_KEPT)[:_ARGUMENTS_KEPT])
        if raw
        else ()
    )
