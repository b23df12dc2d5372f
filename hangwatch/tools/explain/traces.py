"""Reader for stack dumps and logs of any tool. It assigns them to ranks. Pure.

A source is a name and its lines. A line may have a prefix with the rank, and lines of several ranks may be mixed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from msgspec import structs

from hangwatch import words
from hangwatch.formats import process_title
from hangwatch.limits import MOST_RANKS
from hangwatch.logs import failures
from hangwatch.logs.kernel_text import KernelLogLine
from hangwatch.logs.merged_logs import RankLog
from hangwatch.logs.rank_reports import RankWork
from hangwatch.model import Fault, ProcessDump, RankDump, RankId, WorkerDump, list_by_key
from hangwatch.tools.explain import file_names, roles
from hangwatch.tools.explain.log_collector import LogCollector
from hangwatch.tools.explain.stacks import faulthandler_text, gdb_text
from hangwatch.tools.explain.stacks.parsed_processes import HugeStackError, Interned, ParsedProcess
from hangwatch.tools.explain.streams import Source, Streams

_BEGINS_INSIDE = Fault(subject="process", reason="NoStack", detail="the text begins inside the dump of this process")
_ENDS_INSIDE = structs.replace(_BEGINS_INSIDE, detail="the text ends inside the dump of this process")
_SNIFFED_LINES = 400
_SNIFFED_CHARACTERS = 400


class Collected(NamedTuple):
    """The ranks and logs that were read, notes for people, and the world size that the caller gave.

    `kernel` are lines of the kernel log from any file. `works` are the sequence numbers of collectives in logs.
    `unranked` are logs of unknown ranks that contain a failure or a line of NCCL.
    """

    ranks: tuple[RankDump, ...]
    notes: tuple[str, ...]
    world_size: int | None
    logs: tuple[RankLog, ...] = ()
    kernel: tuple[KernelLogLine, ...] = ()
    works: tuple[RankWork, ...] = ()
    unranked: tuple[RankLog, ...] = ()


def collect(sources: Iterable[tuple[str, Iterable[str]]], world_size: int | None = None) -> Collected:
    """Read the named sources and return their ranks and logs.

    Each source is read once, line by line. The notes contain the number of lines that belong neither to a dump nor to a
    rank's log. If a process appears twice, it has two rounds.
    """
    interned = Interned()
    notes: list[str] = []
    by_place: dict[tuple[object, ...], _Rank] = {}
    found_logs = LogCollector(notes)
    streams: dict[str, list[Source]] = {}
    read: list[_Processes] = []
    listed = list(sources)
    named = file_names.read_names(name for name, _ in listed)
    for name, lines in listed:
        if named[name].is_old:
            found_logs.old += 1
            continue
        interned.begin_text()
        try:
            streams[name] = _read_source(name, named[name], lines, interned, found_logs)
        except HugeStackError as error:
            notes.append(f"{name}: not read: {error}")
    for name, of_file in _name_nodes(_localize_ranks(streams, world_size)).items():
        read += [_sort_processes(source, notes) for source in of_file if source.reader.processes]
        found_logs.add(name, of_file)
    programs = roles.find_programs([process for part in read if part.are_ranks for process in part.candidates])
    for part in read:
        for rank in _make_ranks(part, programs, notes):
            _add_rank(by_place, rank, notes)
    by_launcher = _number_by_launcher([rank.dump() for rank in by_place.values()], found_logs.processes, notes)
    ranks = _number_by_files(by_launcher, [rank.source for rank in by_place.values()], notes)
    found_logs.number_ended([rank.id for rank in ranks], world_size or 0)
    logs = found_logs.logs([rank.id for rank in ranks])
    return Collected(
        ranks=tuple(ranks),
        notes=tuple(notes),
        world_size=world_size,
        logs=logs,
        kernel=tuple(found_logs.kernel.values()),
        works=tuple(found_logs.works),
        unranked=tuple(found_logs.unranked),
    )


def _localize_ranks(streams: Mapping[str, list[Source]], world_size: int | None) -> Mapping[str, list[Source]]:
    """Return the streams with local ranks if most ranks are on several nodes: `[host:3]` is then local rank 3.

    They stay global ranks if the job has fewer ranks than there would be.
    """
    places = {
        source: structs.replace(source.id, rank=None, local_rank=source.id.rank)
        for source in chain.from_iterable(streams.values())
        if source.id.node and source.id == RankId(node=source.id.node, rank=source.id.rank)
    }
    nodes = list_by_key({(place.local_rank, place.node) for place in places.values() if place.local_rank is not None})
    are_global = 2 * sum(len(of_rank) > 1 for of_rank in nodes.values()) <= len(nodes)
    if are_global or (world_size or MOST_RANKS) < sum(map(len, nodes.values())):
        return streams
    return {
        name: [source._replace(id=places.get(source, source.id)) for source in of_file]
        for name, of_file in streams.items()
    }


def _name_nodes(streams: Mapping[str, list[Source]]) -> Mapping[str, list[Source]]:
    """Return the streams of each file, with the name of the file as the node, if several files have local ranks.

    torchrun --tee writes no node. A file of one local rank is not the log of a node.
    """
    nodes = {
        name: file_names.without_ending(name)
        for name, of_file in streams.items()
        if len({source.id.local_rank for source in of_file if source.id.node is None} - {None}) > 1
    }
    return (
        streams
        if len(set(nodes.values())) < 2
        else {
            name: [
                source._replace(id=structs.replace(source.id, node=source.id.node or nodes.get(name)))
                for source in of_file
            ]
            for name, of_file in streams.items()
        }
    )


def _number_by_launcher(dumps: Sequence[RankDump], failed: Collection[RankId], notes: list[str]) -> Sequence[RankDump]:
    """Return the dumps with ranks from torchrun's summary of failed ranks, for dumps that have a pid but no rank.

    A pid in the summary does not count if it is listed twice or for another node, or if another dump has its rank. If
    the summary has several nodes, only dumps with a node get a rank.
    """
    by_pid = list_by_key((rank.pid, rank) for rank in failed)
    hosts = {rank.node for rank in failed}
    nodes = {None, *hosts} if len(hosts) == 1 else hosts - {None}
    taken = {dump.id.rank for dump in dumps}
    numbered: list[RankDump] = []
    count = 0
    for dump in dumps:
        listed = by_pid.get(dump.id.pid, []) if not dump.id.is_numbered else []
        sure = len(listed) == 1 and listed[0].rank not in taken
        if sure and dump.id.node in nodes and dump.id.node in (None, listed[0].node):
            count += 1
            rank = structs.replace(dump.id, rank=listed[0].rank, local_rank=listed[0].local_rank)
            dump = structs.replace(dump, id=rank)  # noqa: PLW2901 - the numbered dump takes its place
        numbered.append(dump)
    if count:
        notes.append(f"the numbers of {words.count(count, 'rank')} come only from the pids in the logs")
    return numbered


def _number_by_files(dumps: Sequence[RankDump], sources: Sequence[str], notes: list[str]) -> Sequence[RankDump]:
    """Return the dumps with ranks from their file names, if no dump has a rank and each file has a different process.

    Files with the same pid may be rounds of one process. Files without a pid may be rounds or ranks, unless the names
    count processes (`proc_3.log`).
    """
    ids = [
        structs.replace(dump.id, node=None) if dump.id.node == _find_base_name(source) else dump.id
        for dump, source in zip(dumps, sources, strict=True)
    ]
    has_rank = any(rank.is_numbered or rank.node is not None for rank in ids)
    pids = {rank.pid for rank in ids if rank.pid is not None}
    are_rounds = len(pids) < len(dumps) and not (file_names.are_processes(sources) and not pids)
    has_other_ids = has_rank or len(set(sources)) < len(dumps) or are_rounds
    numbers = {} if has_other_ids else file_names.stack_ranks(sources)
    if not numbers:
        return dumps
    notes.append(
        f"the numbers of ranks {min(numbers.values())} to {max(numbers.values())} come only from the file names"
    )
    return [
        structs.replace(dump, id=structs.replace(rank, rank=numbers[source]))
        for dump, rank, source in zip(dumps, ids, sources, strict=True)
    ]


def _find_base_name(source: str) -> str:
    return source.replace("\\", "/").rpartition("/")[2]


class _Rank:
    """A rank while its dumps are read: its rounds and its workers."""

    def __init__(self, source: str, rank: RankId, process: ParsedProcess) -> None:
        self.source = source
        self.id = rank
        self.rounds = [process]
        self.workers: dict[int | None, list[ParsedProcess]] = {}

    def dump(self) -> RankDump:
        return RankDump(
            id=self.id,
            rounds=_make_rounds(self.rounds),
            workers=tuple(
                WorkerDump(pid=pid or 0, comm="child process", rounds=_make_rounds(rounds))
                for pid, rounds in self.workers.items()
            ),
        )


def _make_rounds(processes: Sequence[ParsedProcess]) -> tuple[ProcessDump, ...]:
    """Return the last three rounds of a process in the order of the text, as many as the daemon takes.

    The text contains no times, so rounds are one second apart.
    """
    return tuple(
        ProcessDump(taken_monotonic_seconds=float(number), threads=process.threads, fault=process.fault)
        for number, process in enumerate(processes[-3:])
    )


def _add_rank(by_place: dict[tuple[object, ...], _Rank], rank: _Rank, notes: list[str]) -> None:
    """Add a rank. If its process was added before, the process gets another round.

    If another process has the same rank, only one of the two is kept. Local ranks and pids in two files may belong to
    different nodes. If no node is known, the file name is used as the node.
    """
    earlier = by_place.get(_make_place(rank.id))
    if earlier is not None and rank.id.node is None and rank.id.rank is None and earlier.source != rank.source:
        rank.id = structs.replace(rank.id, node=_find_base_name(rank.source))
        earlier = by_place.get(_make_place(rank.id))
    if earlier is None or earlier.id.pid != rank.id.pid:
        # A process with a stack has precedence, then the one with the higher pid.
        kept = max(
            filter(None, (earlier, rank)),
            key=lambda rank: (any(thread.frames for dump in rank.rounds for thread in dump.threads), rank.id.pid or 0),
        )
        by_place[_make_place(rank.id)] = kept
        if earlier is not None:
            name = f"rank {rank.id.rank}" if rank.id.rank is not None else f"local rank {rank.id.local_rank}"
            lower, higher = sorted((earlier.id.pid or 0, rank.id.pid or 0))
            notes.append(f"{name} appears as pid {lower} and as pid {higher}: pid {kept.id.pid} counts")
        return
    earlier.rounds += rank.rounds
    for pid, rounds in rank.workers.items():
        earlier.workers.setdefault(pid, []).extend(rounds)


def _make_place(rank: RankId) -> tuple[object, ...]:
    return rank.node, rank.rank, rank.local_rank, None if rank.is_numbered else rank.pid


def _read_source(
    name: str, named: file_names.RankInName, lines: Iterable[str], interned: Interned, found_logs: LogCollector
) -> list[Source]:
    """Pass each line of a source to the reader of its prefix. Return one stream for each prefix.

    Raises HugeStackError if a dump exceeds the limits.
    """
    iterator = iter(lines)
    head = list(islice(iterator, _SNIFFED_LINES))
    if failures.is_error_file("".join(head[:2])[:_SNIFFED_CHARACTERS]):
        found_logs.error_file(name, named.id, "".join(islice(chain(head, iterator), _SNIFFED_LINES)))
        return []
    return Streams(name, named, interned, found_logs.add_note).read(head, iterator)


class _Processes(NamedTuple):
    """The processes of one stream, without launchers. `are_ranks` is true if each candidate is a rank of its own."""

    source: Source
    candidates: list[ParsedProcess]
    helpers: list[ParsedProcess]
    are_ranks: bool


def _sort_processes(source: Source, notes: list[str]) -> _Processes:
    """Divide the processes of one stream into candidates and helpers. Launchers are left out."""
    every = list(source.reader.processes)
    if source.reader.ends_inside and not source.id.is_numbered:
        every[-1] = every[-1]._replace(threads=(), fault=_ENDS_INSIDE)
    processes = [process for process in every if not roles.is_launcher(process)]
    if len(processes) < len(every):
        notes.append(f"{source.name}: {len(every) - len(processes)} launcher processes skipped")
    pids = {process.pid for process in processes}
    helpers: list[ParsedProcess] = []
    begins_inside = source.reader.begins_inside and not source.id.is_numbered
    candidates = [ParsedProcess(None, "", None, (), _BEGINS_INSIDE)] if begins_inside else []
    for process in processes:
        is_helper = roles.is_helper(process, pids) and (source.id.is_numbered or not roles.is_in_collective(process))
        (helpers if is_helper else candidates).append(process)
    return _Processes(source, candidates, helpers, _are_all_ranks(source, candidates))


def _make_ranks(part: _Processes, programs: roles.RankPrograms, notes: list[str]) -> Iterator[_Rank]:
    """Yield the ranks of one stream. Helpers become workers of their rank. Processes of other programs are left out."""
    source, candidates, helpers, are_ranks = part
    if tools := [process for process in candidates if are_ranks and programs.is_tool(process)]:
        notes.append(f"{source.name}: {roles.describe_tools(tools)}")
        candidates = [process for process in candidates if not programs.is_tool(process)]
    ids = roles.ids_by_command(source.id, candidates) if are_ranks else {}
    ranks: dict[int | str | None, _Rank] = {}
    for process, key in zip(candidates, _make_keys(candidates), strict=True):
        if key in ranks:
            ranks[key].rounds.append(process)
        elif are_ranks or not ranks:
            title = process_title.read(process.command)
            name = title.name if title else source.id.title
            identity = ids.get(process.pid) or structs.replace(source.id, pid=process.pid, title=name)
            ranks[key] = _Rank(source.name, identity, process)
        else:
            helpers.append(process)
    _number_unknown_ranks(source, list(ranks.values()))
    first = next(iter(ranks.values()), None)
    for process in helpers:
        owner = ranks.get(process.parent_pid) or first
        if owner is not None:
            owner.workers.setdefault(process.pid, []).append(process)
    yield from ranks.values()


def _make_keys(processes: Sequence[ParsedProcess]) -> Iterator[int | str | None]:
    """Yield a key for each dump. Dumps of the same process have the same key.

    The key is the pid. Without a pid it is the id of the main thread (faulthandler). A faulthandler dump of a single
    thread has neither. It belongs to the process before it. Each `bt` of gdb is of another process.
    """
    last: int | str | None = None
    for number, process in enumerate(processes):
        main = next((thread.thread_id for thread in process.threads if thread.is_main), None)
        if process.pid is not None:
            last = process.pid
        elif main != faulthandler_text.NO_NUMBER:
            last = f"{main} {number}" if main == gdb_text.LONE else main
        yield last


def _number_unknown_ranks(source: Source, ranks: Sequence[_Rank]) -> None:
    """Number the processes of one stream that have no rank and no pid, in order, as a part of their node."""
    unknown = [rank for rank in ranks if rank.id == structs.replace(source.id, pid=None)]
    if len(unknown) > 1:
        for number, rank in enumerate(unknown, 1):
            place = rank.id.node or _find_base_name(source.name)
            rank.id = structs.replace(rank.id, node=f"{place} process {number}")


def _are_all_ranks(source: Source, candidates: Sequence[ParsedProcess]) -> bool:
    """True if each candidate is a rank: the stream has no number, or its number is a label of srun for a whole node."""
    if not source.id.is_numbered:
        return True
    pids = {process.pid for process in candidates if process.pid is not None}
    commands = {roles.LOCAL_RANK.sub("", process.command) for process in candidates if process.pid is not None}
    return not source.sure and len(pids) > 1 and len(commands) == 1
