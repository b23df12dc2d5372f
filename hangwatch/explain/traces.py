"""Pure: stack dumps and logs that people already have, from any means -> ranks.

A source is a name and its lines. A line may carry a prefix that tells the rank; lines of several ranks may be mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from msgspec import structs

from hangwatch import words
from hangwatch.explain import file_names, line_prefixes, line_stream, roles
from hangwatch.explain.logs import merged_logs, rank_log
from hangwatch.explain.logs.kernel_text import MOST_KEPT, Heard
from hangwatch.explain.logs.merged_logs import RankLog
from hangwatch.explain.stacks import faulthandler_text
from hangwatch.explain.stacks.parsed_processes import FoundProcess, HugeStackError, Interned
from hangwatch.model import ProcessDump, RankDump, RankId, WorkerDump

_SNIFFED_LINES = 400
_SNIFFED_CHARACTERS = 400
_MOST_STREAMS = 1 << 17  # of one source: a prefix is what anybody may have written
_MOST_SILENT_TOLD = 16  # files that hold nothing, by name


class Collected(NamedTuple):
    """What was read: ranks for `grouping.group`, notes for people, the world size that was given, and logs of ranks.

    `kernel` are lines as of the kernel's log, wherever they stood.
    """

    ranks: tuple[RankDump, ...]
    notes: tuple[str, ...]
    world_size: int | None
    logs: tuple[RankLog, ...] = ()
    kernel: tuple[Heard, ...] = ()


class _Source(NamedTuple):
    """One stream of lines and what its prefix or file name says of it; `sure`: that its number is a rank's."""

    name: str
    id: RankId
    sure: bool
    reader: line_stream.Reader


def collect(sources: Iterable[tuple[str, Iterable[str]]], world_size: int | None = None) -> Collected:
    """Read named sources, one after the other, each line once.

    Lines that are no part of a dump or of a rank's log are counted and told in the notes. A process that appears twice
    gives two rounds.
    """
    interned = Interned()
    notes: list[str] = []
    found: dict[tuple[object, ...], _Rank] = {}
    hearsay = _Hearsay(notes)
    listed = list(sources)
    named = file_names.read_names(name for name, _ in listed)
    for name, lines in listed:
        if named[name].is_old:
            hearsay.old += 1
            continue
        interned.begin_text()
        try:
            streams = _read(name, named[name], lines, interned, hearsay)
        except HugeStackError as error:
            notes.append(f"{name}: left out: {error}")
            continue
        for source in streams:
            for rank in _ranks(source, notes) if source.reader.processes else ():
                _add(found, rank, notes)
        hearsay.add(name, streams)
    by_launcher = _numbered_by_launcher([rank.dump() for rank in found.values()], hearsay.processes, notes)
    ranks = _numbered_by_files(by_launcher, [rank.source for rank in found.values()], notes)
    told = hearsay.logs()
    kernel = tuple(hearsay.kernel.values())
    return Collected(tuple(ranks), tuple(notes), world_size, told, kernel)


def _numbered_by_launcher(dumps: Sequence[RankDump], told: Collection[RankId], notes: list[str]) -> Sequence[RankDump]:
    """The ranks of pids that nothing tells but torchrun, which lists those that failed at its end.

    A pid that it lists twice, or of another node, tells nothing; nor does a rank that another process is already, or
    the list of several nodes of a process without one.
    """
    listed: dict[int | None, list[RankId]] = {}
    for one in told:
        listed.setdefault(one.pid, []).append(one)
    hosts = {one.node for one in told}
    fitting = {None, *hosts} if len(hosts) == 1 else hosts - {None}
    taken = {dump.id.rank for dump in dumps}
    named: list[RankDump] = []
    for dump in dumps:
        whose = listed.get(dump.id.pid, []) if dump.id.rank is None and dump.id.local_rank is None else []
        sure = len(whose) == 1 and whose[0].rank not in taken
        if sure and dump.id.node in fitting and dump.id.node in (None, whose[0].node):
            rank = structs.replace(dump.id, rank=whose[0].rank, local_rank=whose[0].local_rank)
            named.append(structs.replace(dump, id=rank))
        else:
            named.append(dump)
    count = sum(dump is not before for dump, before in zip(named, dumps, strict=True))
    if count:
        notes.append(
            f"{words.count(count, 'rank')} by the pids in what torchrun printed at its end: nothing else tells"
        )
    return named


def _numbered_by_files(dumps: Sequence[RankDump], sources: Sequence[str], notes: list[str]) -> Sequence[RankDump]:
    """The ranks by the names of their files, where nothing else tells any: one process in each, no two the same.

    Files with one pid may be rounds of one process; without a pid nothing tells rounds from ranks.
    """
    ids = [dump.id for dump in dumps]
    is_told = any(one.rank is not None or one.local_rank is not None or one.node is not None for one in ids)
    pids = {one.pid for one in ids if one.pid is not None}
    if is_told or len(set(sources)) < len(dumps) or len(pids) < len(dumps):
        return dumps
    numbers = file_names.stack_ranks(sources)
    if not numbers:
        return dumps
    first, last = min(numbers.values()), max(numbers.values())
    notes.append(f"ranks {first} to {last} by the numbers in the names of the files: nothing else tells them")
    return [
        structs.replace(dump, id=structs.replace(dump.id, rank=numbers[source]))
        for dump, source in zip(dumps, sources, strict=True)
    ]


class _Hearsay:
    """What logs say, while the sources are read; `old` counts those of attempts that torchrun has since repeated."""

    def __init__(self, notes: list[str]) -> None:
        self.old = 0
        self.kernel: dict[tuple[str, str, str], Heard] = {}
        self._notes = notes
        self._parts: list[tuple[str, RankId, rank_log.Log]] = []
        self._told: list[tuple[str, rank_log.Failure]] = []
        self._unknown: dict[str, tuple[RankId, rank_log.Log]] = {}
        self._strange: dict[str, list[str]] = {}
        self._silent: dict[str, list[str]] = {}
        self._is_kernel_cut = False
        self.processes: set[RankId] = set()

    def say(self, note: str) -> None:
        """Tell people of what was found, once."""
        if note not in self._notes:
            self._notes.append(note)

    def error_file(self, name: str, rank: RankId, text: str) -> None:
        """Read torchelastic's error.json of a rank; what it holds counts before what its log says of the same."""
        log = rank_log.Log()
        try:
            log.failures.append(rank_log.parse_error_file(text))
        except ValueError as error:
            self._notes.append(f"{name}:1: {error}")
            return
        if rank.rank is not None or rank.local_rank is not None:
            self._parts.insert(0, (name, rank, log))
        else:
            self._unknown[name] = rank, log
            self._strange[name] = [f"{name}: holds an error, and nothing says of which rank: name it error-rankN.json"]

    def add(self, name: str, streams: Sequence[_Source]) -> None:
        """Keep the logs of a source; what is no log of a rank is told in a note, once it is known that it is none."""
        strange, example, of_ranks_here = 0, "", False
        tells = not streams or any(source.reader.processes for source in streams)  # an error.json has no streams
        for source in streams:
            reader, rank = source.reader, source.id
            is_of_rank = rank.rank is not None or rank.local_rank is not None
            is_kernels = reader.log.is_kernels and not reader.processes and not is_of_rank
            writer = "" if is_kernels else words.who([rank]) if is_of_rank else words.printable(name)
            self._is_kernel_cut |= reader.log.is_kernel_cut
            self.processes |= reader.log.processes
            for place, heard in reader.log.kernel.items():
                if len(self.kernel) < MOST_KEPT:
                    self.kernel.setdefault((*place, writer), heard._replace(writer=writer))
                elif (*place, writer) not in self.kernel:
                    self._is_kernel_cut = True
            of_ranks = [(name, failure) for failure in reader.log.failures if failure.rank is not None]
            self._told += of_ranks
            of_ranks_here = of_ranks_here or bool(of_ranks)
            is_log = reader.log.lines > 0 and not reader.has_dump and (reader.is_log or reader.strange > 0)
            if is_log and is_of_rank:
                self._parts.append((name, rank, reader.log))
                of_ranks_here = True
            elif reader.strange:
                strange += reader.strange
                example = example or reader.strange_example
                if is_log and len(streams) == 1 and not reader.processes:
                    self._unknown[name] = rank, reader.log
        kind = "of no known rank" if of_ranks_here else "no part of a stack dump"
        told = [f"{name}: {strange} lines are {kind}, for example {example!r}"] if strange else []
        if not tells and not of_ranks_here:
            told.append(f"{name}: holds no stack dump that hangwatch knows, and no log of a known rank")
            self._silent[name] = told
        elif name in self._unknown:
            self._strange.setdefault(name, told)
        else:
            self._notes += told

    def logs(self) -> tuple[RankLog, ...]:
        """One log for each rank; logs without a rank get one where their names differ in one number."""
        numbered = file_names.number_logs({name: rank for name, (rank, _) in self._unknown.items()})
        for name, (_, log) in self._unknown.items():
            if numbered[name].rank is None:
                self._notes += self._strange.get(name, ())
            else:
                self._parts.append((name, numbered[name], log))
                self._silent.pop(name, None)
        if len(self._silent) > _MOST_SILENT_TOLD:
            told = f"{len(self._silent)} files hold no stack dump that hangwatch knows, and no log of a known rank"
            self._notes.append(f"{told}, for example {next(iter(self._silent))}")
        else:
            self._notes += chain.from_iterable(self._silent.values())
        if self._is_kernel_cut:
            self._notes.append(f"more than {MOST_KEPT} different lines of the kernel: the first {MOST_KEPT} count")
        if self.old:
            self._notes.append(f"{words.count(self.old, 'file')} of attempts before the last one left out")
        return merged_logs.join(self._parts, self._told)


class _Rank:
    """One rank while it is put together: its rounds and its workers."""

    def __init__(self, source: str, rank: RankId, process: FoundProcess) -> None:
        self.source = source
        self.id = rank
        self.rounds = [process]
        self.workers: dict[int | None, list[FoundProcess]] = {}

    def dump(self) -> RankDump:
        return RankDump(
            id=self.id,
            rounds=_rounds(self.rounds),
            workers=tuple(
                WorkerDump(pid=pid or 0, comm="child process", rounds=_rounds(rounds))
                for pid, rounds in self.workers.items()
            ),
        )


def _rounds(processes: Sequence[FoundProcess]) -> tuple[ProcessDump, ...]:
    """Rounds in the order of the text, which tells no times: they are one second apart by definition."""
    return tuple(
        ProcessDump(taken_monotonic_seconds=float(number), threads=process.threads, fault=process.fault)
        for number, process in enumerate(processes)
    )


def _add(found: dict[tuple[object, ...], _Rank], rank: _Rank, notes: list[str]) -> None:
    """Keep a rank: the same process again is another round, another process of the same rank takes its place.

    Local ranks and pids of two files say nothing of each other unless a node is named: the file stands for the node.
    """
    earlier = found.get(_place(rank.id))
    if earlier is not None and rank.id.node is None and rank.id.rank is None and earlier.source != rank.source:
        rank.id = structs.replace(rank.id, node=rank.source.replace("\\", "/").rsplit("/", 1)[-1])
        earlier = found.get(_place(rank.id))
    if earlier is None or earlier.id.pid != rank.id.pid:
        kept = rank if earlier is None else max(earlier, rank, key=_precedence)
        found[_place(rank.id)] = kept
        if earlier is not None:
            name = f"rank {rank.id.rank}" if rank.id.rank is not None else f"local rank {rank.id.local_rank}"
            lower, higher = sorted((earlier.id.pid or 0, rank.id.pid or 0))
            notes.append(f"{name} appears as pid {lower} and as pid {higher}: pid {kept.id.pid} counts")
        return
    earlier.rounds += rank.rounds
    for pid, rounds in rank.workers.items():
        earlier.workers.setdefault(pid, []).extend(rounds)


def _precedence(rank: _Rank) -> tuple[bool, int]:
    """Of two processes of one rank the one with a stack counts, then the higher pid: whatever their order."""
    return any(thread.frames for process in rank.rounds for thread in process.threads), rank.id.pid or 0


def _place(rank: RankId) -> tuple[object, ...]:
    numbered = rank.rank is not None or rank.local_rank is not None
    return rank.node, rank.rank, rank.local_rank, None if numbered else rank.pid


def _read(
    name: str,
    named: file_names.Named,
    lines: Iterable[str],
    interned: Interned,
    hearsay: _Hearsay,
) -> list[_Source]:
    """Give each line to the reader of its prefix."""
    iterator = iter(lines)
    head = [line.rstrip("\r\n") for line in islice(iterator, _SNIFFED_LINES)]
    if rank_log.is_error_file("".join(head[:2])[:_SNIFFED_CHARACTERS]):
        hearsay.error_file(name, named.id, "\n".join(islice(chain(head, iterator), _SNIFFED_LINES)))
        return []
    if pasted := line_prefixes.pasted(head):
        iterator = (line_prefixes.without(pasted, line) for line in chain(head, iterator))
        head = list(islice(iterator, len(head)))
    labelled = line_prefixes.are_labelled([part for line in head for part in line_prefixes.unwrapped(line)])
    sources: dict[tuple[RankId, bool], _Source] = {}
    by_prefix: dict[str, _Source] = {}  # `[node:rank]` as it stands in the text: most lines repeat one
    whole = enumerate(chain(head, (line.rstrip("\r\n") for line in iterator)), 1)
    for number, line in ((number, part) for number, kept in whole for part in line_prefixes.unwrapped(kept)):
        prefix = line[: line.find("]") + 1] if line.startswith("[") else ""
        source = by_prefix.get(prefix) if prefix else None
        if source is not None and not line.startswith(":", len(prefix)):
            source.reader.feed(line[len(prefix) :], number)
            continue
        rank, sure, rest = line_prefixes.split(line, named.id, labelled=labelled)
        source = sources.get((rank, sure))
        if source is None:
            if len(sources) >= _MOST_STREAMS:
                if len(sources) == _MOST_STREAMS:
                    hearsay.say(f"{name}: more than {_MOST_STREAMS:,} prefixes; lines of further ones have none")
                rank, sure, rest = named.id, True, line
            reader = line_stream.Reader(interned, is_log=named.is_log)
            source = sources.setdefault((rank, sure), _Source(name, rank, sure, reader))
        if prefix and len(rest) == len(line) - len(prefix):
            by_prefix[prefix] = source
        source.reader.feed(rest, number)
    for source in sources.values():
        source.reader.end()
    return list(sources.values())


def _ranks(source: _Source, notes: list[str]) -> Iterator[_Rank]:
    """The ranks among the processes of one stream; launchers are left out, helpers belong to the rank they work for."""
    processes = [process for process in source.reader.processes if not roles.is_launcher(process)]
    if len(processes) < len(source.reader.processes):
        notes.append(f"{source.name}: {len(source.reader.processes) - len(processes)} launcher processes left out")
    pids = {process.pid for process in processes}
    numbered = source.id.rank is not None or source.id.local_rank is not None
    helpers: list[FoundProcess] = []
    candidates: list[FoundProcess] = []
    for process in processes:
        is_helper = roles.is_helper(process, pids) and (numbered or not roles.takes_part(process))
        (helpers if is_helper else candidates).append(process)
    own = _are_all_ranks(source, candidates)
    if own:
        candidates, tools = roles.without_tools(candidates)
        if tools:
            notes.append(f"{source.name}: {roles.describe_tools(tools)}")
    ids = roles.ids_by_command(source.id, candidates) if own else {}
    ranks: dict[int | str | None, _Rank] = {}
    for process, key in zip(candidates, _keys(candidates), strict=True):
        if key in ranks:
            ranks[key].rounds.append(process)
        elif own or not ranks:
            identity = ids.get(process.pid) or structs.replace(source.id, pid=process.pid)
            ranks[key] = _Rank(source.name, identity, process)
        else:
            helpers.append(process)
    _tell_apart(source, list(ranks.values()))
    first = next(iter(ranks.values()), None)
    for process in helpers:
        owner = ranks.get(process.parent_pid) or first
        if owner is not None:
            owner.workers.setdefault(process.pid, []).append(process)
    yield from ranks.values()


def _keys(processes: Sequence[FoundProcess]) -> Iterator[int | str | None]:
    """What makes two dumps the same process: the pid, else the number of the main thread, as faulthandler prints it.

    faulthandler's dump of one thread has neither: it is of the process that was dumped before.
    """
    last: int | str | None = None
    for process in processes:
        main = next((thread.thread_id for thread in process.threads if thread.is_main), None)
        if process.pid is not None:
            last = process.pid
        elif main != faulthandler_text.NO_NUMBER:
            last = main
        yield last


def _tell_apart(source: _Source, ranks: Sequence[_Rank]) -> None:
    """Several processes of one stream that nothing tells apart are numbered in the order in which they came."""
    unknown = [rank for rank in ranks if rank.id == structs.replace(source.id, pid=None)]
    if len(unknown) > 1:
        for number, rank in enumerate(unknown, 1):
            place = rank.id.node or source.name.replace("\\", "/").rpartition("/")[2]
            rank.id = structs.replace(rank.id, node=f"{place} process {number}")


def _are_all_ranks(source: _Source, candidates: Sequence[FoundProcess]) -> bool:
    """Whether each process is a rank of its own: nothing numbers them, or a label of `srun` covers a whole node."""
    if source.id.rank is None and source.id.local_rank is None:
        return True
    pids = {process.pid for process in candidates if process.pid is not None}
    commands = {roles.LOCAL_RANK.sub("", process.command) for process in candidates if process.pid is not None}
    return not source.sure and len(pids) > 1 and len(commands) == 1
