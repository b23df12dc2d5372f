"""Count the collectives of ranks once a second: the last enqueued number of each process group, from their memory.

The table of groups is read anew each time, in one question for many ranks. A child reads, see `process_memory`. It
reads the places of the last time in advance, so it is asked again only if the table has changed.

A group counts if the main thread or a thread of autograd uses it, or if one thread alone uses all groups. A group of
another thread, such as a heartbeat, proves no progress of the job. A group of an unknown thread counts, too: it must
never look as if a healthy job stands still.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from hangwatch.model import Fault, ProcessId, list_by_key
from hangwatch.model.flight_records import COUNTING_THREADS, Library, ProgressCounter, RankRecords, ThreadKind
from hangwatch.probes.base import procfs
from hangwatch.probes.base.owner_turns import OwnerTurns
from hangwatch.probes.process.memory_image import Place, UnreadableError
from hangwatch.probes.process.process_memory import FilePlaces, MemoryReader
from hangwatch.probes.torch_recorder import SHARED, Recorders, decode, threads
from hangwatch.probes.torch_recorder.layouts import Layout

RANKS_AT_ONCE = 64  # of one question to the child
NEWEST_RECORDS = 8  # of a group; they show which threads use it
# A rank without a new collective for this long: the threads of its groups are read again
STOPPED_SECONDS = 8.0
THREADS_SECONDS = 300.0  # between two readings of the threads
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # between attempts; doubled each time
TORN_SECONDS = 10.0  # a recorder that could not be read for this long is not usable
# The ranks of an owner are not read for this long, if memory of one did not respond
SILENCE_SECONDS = 60.0
# Of one reading of all ranks; the next one begins with the owners that it omitted
MOST_SECONDS = 5.0

GroupKey: TypeAlias = tuple[Library, int]


@dataclass
class _Rank:
    """The counters of one rank. All times are those of the clock.

    `numbers` has the last enqueued number of each group. `counts` tells if a group counts; unknown groups are left out.
    """

    owner: str
    memory: Path
    followed_at: float
    recorders: Mapping[Library, tuple[int, Layout]] = field(default_factory=dict)
    numbers: dict[GroupKey, int] = field(default_factory=dict)
    counts: Mapping[GroupKey, bool] = field(default_factory=dict)
    epochs: dict[Library, int] = field(default_factory=dict)
    tables: dict[Library, decode.GroupTable] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    fault: Fault | None = None
    total: int = 0
    restarts: int = 0
    read_at: float | None = None
    increased_at: float = 0.0
    looked_at: float | None = None
    pause_seconds: float = FIRST_PAUSE_SECONDS

    def is_look_due(self, now: float) -> bool:
        """True if the records should be read, to find the recorder or the threads that use its groups."""
        if self.looked_at is None:
            return True
        waited = now - self.looked_at
        if not self.recorders or any(number >= 0 and key not in self.counts for key, number in self.numbers.items()):
            return waited >= self.pause_seconds
        has_stopped = now - self.increased_at >= STOPPED_SECONDS and self.looked_at < self.increased_at
        return waited >= (LONGEST_PAUSE_SECONDS if has_stopped else THREADS_SECONDS)

    def add(self, library: Library, read: decode.Counts) -> bool:
        """Add the numbers of one recorder. Return True if one increased that counts."""
        before = self.total
        is_first = library not in self.epochs
        if self.epochs.setdefault(library, read.epoch) != read.epoch:
            self.epochs[library] = read.epoch
            self.restarts += 1
        for group_id, number in read.by_group.items():
            key = library, group_id
            last = self.numbers.get(key, number if is_first else 0)
            self.numbers[key] = number
            if self.counts.get(key) is not False:
                self.total += max(0, number - last)
                self.restarts += max(0, number) < last
        for key in [key for key in self.numbers if key[0] == library and key[1] not in read.by_group]:
            del self.numbers[key]
        return self.total > before


_Wanted: TypeAlias = tuple[ProcessId, _Rank, tuple[Place, ...], Mapping[Library, tuple[int, Layout]]]


class ProgressCounters:
    """The progress counters of the ranks of this node.

    `look` finds the recorder of each rank and the threads that use its groups. It takes milliseconds for a rank, but
    is due rarely. `read` reads the numbers. Two threads may call these at the same time.
    """

    def __init__(
        self,
        recorders: Recorders = SHARED,
        proc_root: Path = procfs.PROC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorders, self._proc_root, self._clock = recorders, proc_root, clock
        self._memory = MemoryReader(1.5)  # one of its own, read each second: no capture waits for it
        self._lock = threading.Lock()
        self._ranks: dict[ProcessId, _Rank] = {}
        self._silent_until: dict[str, float] = {}
        self._look_turns, self._read_turns = OwnerTurns(clock), OwnerTurns(clock)

    def follow(self, ranks: Mapping[ProcessId, str]) -> None:
        """Set the ranks to read, each with its owner. All others are forgotten."""
        root, now = self._proc_root, self._clock()
        with self._lock:
            self._ranks = {
                process: self._ranks.get(process) or _Rank(owner, root / str(process.pid) / "mem", now)
                for process, owner in ranks.items()
            }

    def read(self) -> dict[ProcessId, ProgressCounter | Fault]:
        """Return the counter of each rank, or the reason why it has none. A rank that is not yet known is left out."""
        now = self._clock()
        with self._lock:
            self._silent_until = {owner: end for owner, end in self._silent_until.items() if end > now}
            wanted = list_by_key(
                (rank.owner, (process, rank, tuple(rank.places), rank.recorders))
                for process, rank in self._ranks.items()
                if rank.recorders and rank.owner not in self._silent_until
            )
        parts = (
            (owner, ranks[first : first + RANKS_AT_ONCE])
            for owner, ranks in wanted.items()
            for first in range(0, len(ranks), RANKS_AT_ONCE)
        )
        for part in self._read_turns.take(parts, now + MOST_SECONDS):
            self._read_part(part, now)
        with self._lock:
            counters = {process: self._answer(process, rank, now) for process, rank in self._ranks.items()}
        return {process: answer for process, answer in counters.items() if answer is not None}

    def _read_part(self, part: Sequence[_Wanted], now: float) -> None:
        """Read the numbers of some ranks of one owner. If memory does not respond, its owner is silent for a while."""
        owner = part[0][1].owner
        files = [FilePlaces(rank.memory, places, process.start_ticks) for process, rank, places, _ in part]
        answers = self._memory.read_files(files, owner)
        for (_, rank, places, recorders), file, answer in zip(part, files, answers, strict=True):
            if answer == errno.ETIMEDOUT:
                self._silent_until[owner] = now + SILENCE_SECONDS
            elif not isinstance(answer, int) and owner not in self._silent_until:
                memory = _Prefetched(self._memory, file, owner, dict(zip(places, answer, strict=True)))
                self._count(rank, recorders, memory, now)

    def _count(
        self, rank: _Rank, recorders: Mapping[Library, tuple[int, Layout]], memory: _Prefetched, now: float
    ) -> None:
        """Read the numbers of one rank. If the writer changes them meanwhile, the next time counts."""
        try:
            counts = {
                library: decode.last_enqueued(memory.read, address, layout, rank.tables.get(library))
                for library, (address, layout) in recorders.items()
            }
        except TimeoutError:
            self._silent_until[rank.owner] = now + SILENCE_SECONDS
            counts = {}
        except UnreadableError:
            counts = {}
        with self._lock:
            rank.places = list(dict.fromkeys(memory.wanted))
            if not counts:
                return
            rank.tables = {library: read.table for library, read in counts.items()}
            if sum(rank.add(library, numbers) for library, numbers in counts.items()):
                rank.increased_at = now
            rank.read_at = now

    def _answer(self, process: ProcessId, rank: _Rank, now: float) -> ProgressCounter | Fault | None:
        if rank.fault is not None:
            return rank.fault
        is_late = now - (rank.followed_at if rank.read_at is None else rank.read_at) > TORN_SECONDS
        if is_late and rank.owner in self._silent_until:
            reason = "NoAnswer"
            detail = f"memory of a process of {rank.owner} does not respond: its ranks are not read for a while"
        elif is_late and rank.looked_at is None:
            reason = "NoTurn"
            detail = f"not read yet: the processes of {rank.owner} need more time than its turns have"
        elif rank.read_at is None:
            return None
        elif is_late:
            reason, detail = "ChangedWhileRead", f"its counters could not be read for {TORN_SECONDS:g} s"
        elif not any(map(rank.counts.get, rank.numbers)):
            reason = "NoCollectives"
            detail = "its main thread has enqueued no collective that the flight recorder shows"
        else:
            return ProgressCounter(total=rank.total, restarts=rank.restarts)
        return Fault(subject=f"pid {process.pid}", reason=reason, detail=detail)

    def uncounted_groups(self, process: ProcessId) -> frozenset[GroupKey]:
        """Return the groups of a rank that do not count, because neither its main thread nor autograd uses them."""
        with self._lock:
            rank = self._ranks.get(process)
            counts = {} if rank is None else rank.counts
            return frozenset(key for key, does_count in counts.items() if not does_count)

    def look(self, most_seconds: float = 1.0) -> None:
        """Find recorders and the threads that use their groups, for the ranks for which it is due."""
        end = self._clock() + most_seconds
        with self._lock:
            due = [(process, rank) for process, rank in self._ranks.items() if rank.is_look_due(self._clock())]
        due.sort(key=lambda item: item[1].looked_at or 0.0)
        for process, rank in self._look_turns.take(((rank.owner, (process, rank)) for process, rank in due), end):
            contents = self._recorders.read(process, rank.owner, NEWEST_RECORDS)
            counts = self._find_counting_groups(process, contents)
            with self._lock:
                self._keep(rank, contents, self._recorders.places(process), counts)

    def _keep(
        self,
        rank: _Rank,
        contents: Sequence[RankRecords | Fault],
        recorders: Mapping[Library, tuple[int, Layout]],
        counts: Mapping[GroupKey, bool | None],
    ) -> None:
        rank.looked_at = self._clock()
        rank.fault = next((each for each in contents if isinstance(each, Fault)), None) if not recorders else None
        longest = LONGEST_PAUSE_SECONDS if rank.fault is None else THREADS_SECONDS
        rank.pause_seconds = min(2 * rank.pause_seconds, longest)
        if recorders and not rank.recorders:
            rank.places = [(address, layout.recorder_bytes) for address, layout in recorders.values()]
            rank.increased_at = rank.looked_at
        rank.recorders = recorders
        kept = {key: does_count for key, does_count in rank.counts.items() if key in rank.numbers}
        rank.counts = kept | {key: does_count for key, does_count in counts.items() if does_count is not None}

    def _find_counting_groups(
        self, process: ProcessId, contents: Iterable[RankRecords | Fault]
    ) -> dict[GroupKey, bool | None]:
        """Return for each group with records if it counts; None if a thread that uses it is not known."""
        recorders = [each for each in contents if isinstance(each, RankRecords)]
        used = list_by_key(
            ((recorder.library, record.group_id), record.thread)
            for recorder in threads.with_threads(recorders, process, self._proc_root)
            for record in recorder.records
        )
        return {key: _combine(kinds[-NEWEST_RECORDS:]) for key, kinds in used.items()}


def _combine(kinds: Sequence[ThreadKind]) -> bool | None:
    """Return True if a thread counts that used the group, False if all are known and none does, else None."""
    if not COUNTING_THREADS.isdisjoint(kinds):
        return True
    return None if "" in kinds else False


class _Prefetched:
    """Memory of a rank at one moment. Some places have been read in advance.

    `wanted` are the places that were needed. A place is read only once.
    """

    def __init__(self, reader: MemoryReader, file: FilePlaces, owner: str, pieces: dict[Place, bytes]) -> None:
        self._reader, self._file, self._owner, self._pieces = reader, file, owner, pieces
        self.wanted: list[Place] = []

    def read(self, places: Sequence[Place]) -> Sequence[bytes]:
        """Return the bytes at each place. Raises UnreadableError, or TimeoutError if the memory does not respond."""
        self.wanted += places
        missing = [place for place in places if place not in self._pieces]
        if missing:
            (answer,) = self._reader.read_files([self._file._replace(places=missing)], self._owner)
            if answer == errno.ETIMEDOUT:
                raise TimeoutError
            if isinstance(answer, int):
                raise UnreadableError("NoAnswer", "its memory could not be read")
            self._pieces.update(zip(missing, answer, strict=True))
        return [self._pieces[place] for place in places]
