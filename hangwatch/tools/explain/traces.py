"""Reader for stack dumps and logs of any tool. It assigns them to ranks. Pure.

A source is a name and its lines. A line may have a prefix with the rank, and lines of several ranks may be mixed.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from msgspec import structs

from hangwatch import words
from hangwatch.formats import process_title
from hangwatch.logs import enqueued_work, line_prefixes, merged_logs, rank_log
from hangwatch.logs.enqueued_work import RankWork
from hangwatch.logs.kernel_text import MOST_KEPT, KernelLogLine
from hangwatch.logs.merged_logs import RankLog
from hangwatch.model import Fault, ProcessDump, RankDump, RankId, WorkerDump
from hangwatch.model.keyed_lists import list_by_key
from hangwatch.tools.explain import file_names, line_stream, roles
from hangwatch.tools.explain.stacks import faulthandler_text, gdb_text
from hangwatch.tools.explain.stacks.parsed_processes import HugeStackError, Interned, ParsedProcess

_BEGINS_INSIDE = Fault(subject="process", reason="NoStack", detail="the text begins inside the dump of this process")
_ENDS_INSIDE = structs.replace(_BEGINS_INSIDE, detail="the text ends inside the dump of this process")
_SNIFFED_LINES = 400
_SNIFFED_CHARACTERS = 400
_MOST_STREAMS = 1 << 17  # of one source, because any program may write prefixes
_MOST_UNRANKED = 4096
_CONTINUED = ("stack trace:", "failed collective:", "(most recent call last):", "(most recent call first):")
"""Ends of a line after which lines without a mark follow."""
_CONTINUES = re.compile(r"  |#\d+ |[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit)\b")
_MOST_EMPTY_NAMED = 16  # files without a dump or log, each listed by its name


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


class _Source(NamedTuple):
    """One stream of lines, and the rank in its prefix or file name. `sure` is true if that is certainly a rank."""

    name: str
    id: RankId
    sure: bool
    reader: line_stream.Reader


def collect(sources: Iterable[tuple[str, Iterable[str]]], world_size: int | None = None) -> Collected:
    """Read the named sources and return their ranks and logs.

    Each source is read once, line by line. The notes contain the number of lines that belong neither to a dump nor to a
    rank's log. If a process appears twice, it has two rounds.
    """
    interned = Interned()
    notes: list[str] = []
    by_place: dict[tuple[object, ...], _Rank] = {}
    hearsay = _LogCollector(notes)
    read: list[_Processes] = []
    listed = list(sources)
    named = file_names.read_names(name for name, _ in listed)
    for name, lines in listed:
        if named[name].is_old:
            hearsay.old += 1
            continue
        interned.begin_text()
        try:
            streams = _read_source(name, named[name], lines, interned, hearsay)
        except HugeStackError as error:
            notes.append(f"{name}: not read: {error}")
            continue
        read += [_sort_processes(source, notes) for source in streams if source.reader.processes]
        hearsay.add(name, streams)
    programs = roles.find_programs([process for part in read if part.are_ranks for process in part.candidates])
    for part in read:
        for rank in _make_ranks(part, programs, notes):
            _add_rank(by_place, rank, notes)
    by_launcher = _number_by_launcher([rank.dump() for rank in by_place.values()], hearsay.processes, notes)
    ranks = _number_by_files(by_launcher, [rank.source for rank in by_place.values()], notes)
    hearsay.number_ended([rank.id for rank in ranks], world_size or 0)
    logs = hearsay.logs([rank.id for rank in ranks])
    kernel, works = tuple(hearsay.kernel.values()), tuple(hearsay.works)
    return Collected(tuple(ranks), tuple(notes), world_size, logs, kernel, works, tuple(hearsay.unranked))


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
        notes.append(f"the numbers of {words.count(count, 'rank')} come only from the pids in torchrun's summary")
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
    if has_rank or len(set(sources)) < len(dumps) or are_rounds:
        return dumps
    numbers = file_names.stack_ranks(sources)
    if not numbers:
        return dumps
    first, last = min(numbers.values()), max(numbers.values())
    notes.append(f"the numbers of ranks {first} to {last} come only from the file names")
    return [
        structs.replace(dump, id=structs.replace(rank, rank=numbers[source]))
        for dump, rank, source in zip(dumps, ids, sources, strict=True)
    ]


def _find_base_name(source: str) -> str:
    return source.replace("\\", "/").rpartition("/")[2]


class _LogCollector:
    """The logs that were found while the sources are read.

    `old` is the number of files of earlier attempts of torchrun.
    """

    def __init__(self, notes: list[str]) -> None:
        self.old = 0
        self.kernel: dict[tuple[str, str, str], KernelLogLine] = {}
        self._notes = notes
        self._parts: list[tuple[str, RankId, rank_log.Log]] = []
        self._told: list[tuple[str, rank_log.Failure]] = []
        self._unknown: dict[str, tuple[RankId, rank_log.Log]] = {}
        self._strange: dict[str, list[str]] = {}
        self._silent: dict[str, list[str]] = {}
        self._is_kernel_cut = False
        self.processes: set[RankId] = set()
        self.works: list[RankWork] = []
        self.unranked: list[RankLog] = []

    def add_note(self, note: str) -> None:
        """Add a note unless it has been added before."""
        if note not in self._notes:
            self._notes.append(note)

    def error_file(self, name: str, rank: RankId, text: str) -> None:
        """Read the error.json that torchelastic wrote for a rank. It takes precedence over the log of the rank."""
        log = rank_log.Log()
        try:
            log.failures.append(rank_log.parse_error_file(text))
        except ValueError as error:
            self._notes.append(f"{name}:1: {error}")
            return
        if rank.is_numbered:
            self._parts.insert(0, (name, rank, log))
        else:
            self._unknown[name] = rank, log
            self._strange[name] = [f"{name}: holds an error of an unknown rank: name the file error-rankN.json"]

    def add(self, name: str, streams: Sequence[_Source]) -> None:
        """Keep the logs of a source. A note reports lines that belong to no rank and no dump."""
        strange, example, of_ranks_here = 0, "", False
        tells = not streams or any(source.reader.processes for source in streams)  # an error.json has no streams
        self._forget_earlier_attempts(name, [source.reader.log for source in streams])
        for source in streams:
            reader, rank = source.reader, source.id
            is_of_rank = merged_logs.is_of_process(rank)
            is_kernels = reader.log.is_kernels and not reader.processes and not is_of_rank
            writer = "" if is_kernels else words.name_ranks([rank]) if is_of_rank else words.printable(name)
            self._is_kernel_cut |= reader.log.is_kernel_cut
            self.processes |= reader.log.processes
            self.works += enqueued_work.read_works(name, rank, reader.log)
            for place, heard in reader.log.kernel.items():
                if len(self.kernel) < MOST_KEPT:
                    self.kernel.setdefault((*place, writer), heard._replace(writer=writer))
                elif (*place, writer) not in self.kernel:
                    self._is_kernel_cut = True
            if is_kernels and reader.log.kernel:
                of_ranks_here = True
                continue
            of_ranks = [
                (name, failure._replace(rank=structs.replace(failure.rank, node=failure.rank.node or rank.node)))
                for failure in reader.log.failures
                if failure.rank is not None
            ]
            self._told += of_ranks
            of_ranks_here = of_ranks_here or bool(of_ranks)
            is_log = reader.log.lines > 0 and not reader.has_dump and (reader.is_log or reader.strange > 0)
            if is_log and is_of_rank:
                self._parts.append((name, rank, reader.log))
                of_ranks_here = True
            elif reader.strange:
                strange += reader.strange
                example = example or reader.strange_example
                if (reader.log.messages or reader.log.failures) and (reader.processes or len(streams) > 1):
                    self._keep_unranked(name, rank, reader.log)
                if is_log and len(streams) == 1 and not reader.processes:
                    self._unknown[name] = rank, reader.log
        kind = "of no known rank" if of_ranks_here else "not part of a stack dump"
        are = "is" if strange == 1 else "are"
        notes = [f"{name}: {words.count(strange, 'line')} {are} {kind}, for example {example!r}"] if strange else []
        notes = [f"{name}: {hint}" for hint in _explain_strange_lines([source.reader for source in streams])] or notes
        if not tells and not of_ranks_here:
            notes.append(f"{name}: holds no known stack dump and no log of a known rank")
            self._silent[name] = notes
        elif name in self._unknown:
            self._strange.setdefault(name, notes)
        else:
            self._notes += notes

    def _forget_earlier_attempts(self, name: str, logs: Sequence[rank_log.Log]) -> None:
        """Forget the failures before torchrun's last restart. Its summary lists only the last attempt's processes."""
        listed = {rank.pid for log in logs for rank in log.processes}
        ended = sorted(chain.from_iterable(log.ended for log in logs))
        restart = max((number for number, pid in ended if pid not in listed), default=0)
        if restart and ended[-1][1] in listed:
            self._notes.append(f"{name}: lines 1 to {restart} are of earlier attempts: their failures are ignored")
            for log in logs:
                log.forget(restart)

    def number_ended(self, dumped: Collection[RankId], world_size: int) -> None:
        """Number the process that ended by the line of a launcher, if only one rank of the job has no stack."""
        missing = set(range(world_size)) - {rank.rank for rank in dumped}
        pids = {rank.pid for rank in dumped}
        ended = [(name, failure) for name, failure in self._told if failure.rank and failure.rank.rank is None]
        if len(missing) == 1 and len(ended) == 1 and (rank := ended[0][1].rank) and rank.pid not in pids:
            name, failure = ended[0]
            numbered = failure._replace(rank=structs.replace(rank, rank=missing.pop()))
            self._told = [told for told in self._told if told[1] is not failure]
            self._told.append((name, numbered))

    def _keep_unranked(self, name: str, rank: RankId, log: rank_log.Log) -> None:
        if len(self.unranked) < _MOST_UNRANKED:
            self.unranked.append(merged_logs.read_unranked(name, rank, log))

    def _name_processes(self, dumped: Collection[RankId]) -> None:
        """Assign the log of each process to its rank. The logs of processes that are not ranks become `unranked`."""
        owners = roles.find_log_owners([rank for _, rank, _ in self._parts], dumped)
        parts, self._parts = self._parts, []
        for name, writer, log in parts:
            if (rank := owners[writer]) is not None:
                self._parts.append((name, rank, log))
            elif log.messages or log.failures:
                self._keep_unranked(name, writer, log)

    def logs(self, dumped: Collection[RankId]) -> tuple[RankLog, ...]:
        """Return one log for each rank. `dumped` are the ranks with a stack dump.

        If the names of logs without a rank differ in one number, that number is the rank.
        """
        self._name_processes(dumped)
        numbered = file_names.number_logs({name: rank for name, (rank, _) in self._unknown.items()})
        for name, (rank, log) in self._unknown.items():
            if numbered[name].rank is None:
                self._notes += self._strange.get(name, ())
                if log.messages or log.failures:
                    self._keep_unranked(name, rank, log)
                    self._silent.pop(name, None)
            else:
                self._parts.append((name, numbered[name], log))
                self._silent.pop(name, None)
        if len(self._silent) > _MOST_EMPTY_NAMED:
            note = f"{len(self._silent)} files hold no known stack dump and no log of a known rank"
            self._notes.append(f"{note}, for example {next(iter(self._silent))}")
        else:
            self._notes += chain.from_iterable(self._silent.values())
        if self._is_kernel_cut:
            self._notes.append(f"more than {MOST_KEPT} different kernel log lines: only the first {MOST_KEPT} are used")
        if self.old:
            self._notes.append(f"{words.count(self.old, 'file')} of earlier attempts ignored")
        return merged_logs.join(self._parts, self._told)


def _explain_strange_lines(readers: Sequence[line_stream.Reader]) -> Iterator[str]:
    """Yield what the lines outside of dumps are, if they are an answer of hangwatch or frames without their thread."""
    has_dump, lone_frames = any(reader.processes for reader in readers), sum(reader.lone_frames for reader in readers)
    if any(reader.has_answer for reader in readers):
        if has_dump:
            yield "only its stacks are read: `hangwatch dump --json` and incident.json also hold sequence numbers"
        else:
            yield "is an answer of hangwatch without its stacks: `hangwatch dump --stacks`, --json or -o DIR keeps them"
    elif lone_frames and not has_dump:
        frames = words.count(lone_frames, "frame")
        yield f'{frames} without the line above, `Thread ... "MainThread"`: paste that line, too'


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
    """Return the rounds of a process in the order of the text.

    The text contains no times, so rounds are one second apart.
    """
    return tuple(
        ProcessDump(taken_monotonic_seconds=float(number), threads=process.threads, fault=process.fault)
        for number, process in enumerate(processes)
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
        kept = rank if earlier is None else max(earlier, rank, key=_make_precedence)
        by_place[_make_place(rank.id)] = kept
        if earlier is not None:
            name = f"rank {rank.id.rank}" if rank.id.rank is not None else f"local rank {rank.id.local_rank}"
            lower, higher = sorted((earlier.id.pid or 0, rank.id.pid or 0))
            notes.append(f"{name} appears as pid {lower} and as pid {higher}: pid {kept.id.pid} counts")
        return
    earlier.rounds += rank.rounds
    for pid, rounds in rank.workers.items():
        earlier.workers.setdefault(pid, []).extend(rounds)


def _make_precedence(rank: _Rank) -> tuple[bool, int]:
    """Return the key by which one of two processes of the same rank is kept. The higher key is kept.

    A process with a stack has precedence, then the one with the higher pid.
    """
    return any(thread.frames for process in rank.rounds for thread in process.threads), rank.id.pid or 0


def _make_place(rank: RankId) -> tuple[object, ...]:
    return rank.node, rank.rank, rank.local_rank, None if rank.is_numbered else rank.pid


def _read_source(
    name: str,
    named: file_names.RankInName,
    lines: Iterable[str],
    interned: Interned,
    hearsay: _LogCollector,
) -> list[_Source]:
    """Pass each line of a source to the reader of its prefix. Return one stream for each prefix.

    Raises HugeStackError if a dump exceeds the limits.
    """
    iterator = iter(lines)
    head = list(islice(iterator, _SNIFFED_LINES))
    if rank_log.is_error_file("".join(head[:2])[:_SNIFFED_CHARACTERS]):
        hearsay.error_file(name, named.id, "".join(islice(chain(head, iterator), _SNIFFED_LINES)))
        return []
    return _Streams(name, named, interned, hearsay).read(head, iterator)


class _Streams:
    """The streams of one source: a reader for each prefix of its lines."""

    def __init__(self, name: str, named: file_names.RankInName, interned: Interned, hearsay: _LogCollector) -> None:
        self._name = name
        self._named = named
        self._interned = interned
        self._hearsay = hearsay
        self._sources: dict[tuple[RankId, bool], _Source] = {}
        self._headings = line_prefixes.Headings(line_stream.begins_dump)
        self._heading: tuple[RankId, bool] | None = None
        self._by_prefix: dict[str, line_stream.Reader] = {}  # by `[node:rank]`, a cache: most lines repeat a prefix

    def read(self, head: Sequence[str], tail: Iterable[str]) -> list[_Source]:
        """Read the lines with their line ends and return the streams. Raises HugeStackError if a dump is too large."""
        self._is_labelled = line_prefixes.are_labelled(
            [part for line in head for part in line_prefixes.read_texts(line)]
        )
        find_reader = self._by_prefix.get
        for number, line in enumerate(chain(head, tail), 1):
            end = line.find("]") + 1
            reader = find_reader(line[:end])
            if reader is not None and reader.repeat_frame(line[end:]):
                self._heading = None
                continue
            for part in line_prefixes.read_texts(line):
                self._feed(part, number)
        for source in self._sources.values():
            source.reader.end()
        return list(self._sources.values())

    def _feed(self, line: str, number: int) -> None:
        prefix = line[: line.find("]") + 1] if line.startswith("[") else ""
        reader = self._by_prefix.get(prefix)
        if reader is not None and not line.startswith(":", len(prefix)):
            reader.feed(line[len(prefix) :], number)
            self._heading = None
            return
        unmarked = self._named.id
        rank, sure, rest = line_prefixes.split(line, unmarked, labelled=self._is_labelled)
        if rank is not unmarked:
            self._heading = (rank, sure) if rest.rstrip().endswith(_CONTINUED) else None
        elif self._heading and _CONTINUES.match(line):
            rank, sure = self._heading
        else:
            self._heading = None
        if rank is unmarked and (number_above := self._headings.follow(line)) is not None:
            rank = structs.replace(rank, rank=number_above)
        if (rank, sure) not in self._sources and len(self._sources) >= _MOST_STREAMS:
            if len(self._sources) == _MOST_STREAMS:
                self._hearsay.add_note(
                    f"{self._name}: more than {_MOST_STREAMS:,} prefixes; a further prefix is read as part of its line"
                )
            rank, sure, rest = unmarked, True, line
        reader = self._find_reader(rank, sure=sure)
        if prefix and rank.is_numbered and len(rest) == len(line) - len(prefix):
            self._by_prefix[prefix] = reader
        reader.feed(rest, number, line[: len(line) - len(rest)])

    def _find_reader(self, rank: RankId, *, sure: bool) -> line_stream.Reader:
        if (rank, sure) not in self._sources:
            self._sources[rank, sure] = _Source(
                self._name, rank, sure, line_stream.Reader(self._interned, is_log=self._named.is_log)
            )
        return self._sources[rank, sure].reader


class _Processes(NamedTuple):
    """The processes of one stream, without launchers. `are_ranks` is true if each candidate is a rank of its own."""

    source: _Source
    candidates: list[ParsedProcess]
    helpers: list[ParsedProcess]
    are_ranks: bool


def _sort_processes(source: _Source, notes: list[str]) -> _Processes:
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
            identity = ids.get(process.pid) or structs.replace(
                source.id, pid=process.pid, title=_find_title(source, process)
            )
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


def _find_title(source: _Source, process: ParsedProcess) -> str | None:
    """Return the title of a process, from its command line or from the prefix of its lines."""
    title = process_title.read(process.command)
    return title.name if title else source.id.title


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


def _number_unknown_ranks(source: _Source, ranks: Sequence[_Rank]) -> None:
    """Number the processes of one stream that have no rank and no pid, in their order.

    The number becomes part of the node.
    """
    unknown = [rank for rank in ranks if rank.id == structs.replace(source.id, pid=None)]
    if len(unknown) > 1:
        for number, rank in enumerate(unknown, 1):
            place = rank.id.node or _find_base_name(source.name)
            rank.id = structs.replace(rank.id, node=f"{place} process {number}")


def _are_all_ranks(source: _Source, candidates: Sequence[ParsedProcess]) -> bool:
    """True if each candidate is a rank: the stream has no number, or its number is a label of srun for a whole node."""
    if not source.id.is_numbered:
        return True
    pids = {process.pid for process in candidates if process.pid is not None}
    commands = {roles.LOCAL_RANK.sub("", process.command) for process in candidates if process.pid is not None}
    return not source.sure and len(pids) > 1 and len(commands) == 1
