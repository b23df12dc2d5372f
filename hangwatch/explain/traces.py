"""Pure: stack dumps that people already have, from any means -> ranks.

A source is a name and its lines. A line may carry a prefix that tells the rank; lines of several ranks may be mixed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from msgspec import structs

from hangwatch.explain import pyspy_text
from hangwatch.explain.pyspy_text import FoundProcess
from hangwatch.model import Frame, ProcessDump, RankDump, RankId, WorkerDump

_HOST_RANK = re.compile(r"^\[([^\[\]\s:]+):(\d{1,7})\](:?)")
_TORCHRUN = re.compile(r"^\[([A-Za-z_][\w.-]*?)(\d{1,7})\]:")
_MPIRUN = re.compile(r"^\[(?:[^\[\],]*@)?\d+,(\d{1,7})\]<std\w+>:")
_KUBECTL = re.compile(r"^\[pod/([^/\]\s]+)/[^\]\s]+\] ?")
_LABEL = re.compile(r"^\s*([\w.-]+): ?")
_LABELLED = re.compile(r"^\s*([\w.-]+): ?(?:Process \d+:|Thread (?:0x[0-9A-Fa-f]+|\d+) \()")
_SNIFFED_LINES = 400

_LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,7})\b")
_NODE_RANK = re.compile(r"--(?:node|machine)[_-]rank[= ](\d{1,7})\b")
_GLOBAL_RANK = re.compile(r"--global[_-]rank[= ](\d{1,7})\b")  # plain --rank is the rank of an adapter in many scripts
_FILE_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?(\d{1,7})(?![\d])", re.I)
_FILE_NODE = re.compile(
    r"^(?:trace|traces|pyspy|py-spy|stack|stacks|dump|dumps)[-_.](.+?)(?:\.(?:out|txt|log|trace|dump|json|err))*$", re.I
)

_LAUNCHER_FILES = re.compile(
    r"(^|/)(torch/distributed/(elastic/agent/.*|launcher/api|run|launch)"
    r"|deepspeed/launcher/\w+|accelerate/commands/\w+)\.py$"
)
_HELPER_FRAMES = re.compile(
    r"^(_worker_loop \((.*/)?torch/utils/data/_utils/worker\.py|worker \((.*/)?multiprocess(ing)?/pool\.py"
    r"|_process_worker \((.*/)?concurrent/futures/process\.py"
    r"|main \((.*/)?multiprocess(ing)?/(resource_tracker|forkserver)\.py)"
)
_HELPER_COMMAND = re.compile(
    r"multiprocessing\.(resource_tracker|forkserver)|_inductor/compile_worker"
    r"|(^|/)wandb-(service|core)\b|\bwandb service\b"
)
_TAKES_PART = re.compile(r"(^|/)(torch/distributed/distributed_c10d|torch/autograd/graph|deepspeed/comm/\w+)\.py$")


class Collected(NamedTuple):
    """What was read: ranks for `grouping.group`, notes for people, and the world size that was given."""

    ranks: tuple[RankDump, ...]
    notes: tuple[str, ...]
    world_size: int | None


class _Source(NamedTuple):
    """One stream of lines and what its prefix or file name says of it; `sure`: that its number is a rank's."""

    name: str
    id: RankId
    sure: bool
    reader: pyspy_text.Reader


def collect(sources: Iterable[tuple[str, Iterable[str]]], world_size: int | None = None) -> Collected:
    """Read named sources, one after the other, each line once.

    Lines that are no part of a dump are counted and told in the notes. A process that appears twice gives two rounds.
    """
    interned = pyspy_text.Interned()
    notes: list[str] = []
    found: dict[tuple[object, ...], _Rank] = {}
    for name, lines in sources:
        streams = _read(name, lines, interned)
        for source in streams:
            for rank in _ranks(source, notes):
                _add(found, rank, notes)
        strange = sum(source.reader.strange for source in streams)
        if strange:
            example = next(source.reader.strange_example for source in streams if source.reader.strange)
            notes.append(f"{name}: {strange} lines are no part of a stack dump, for example {example!r}")
        if not any(source.reader.processes for source in streams):
            notes.append(f"{name}: holds no stack dump that hangwatch knows (py-spy text or JSON)")
    return Collected(tuple(rank.dump() for rank in found.values()), tuple(notes), world_size)


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


def _read(name: str, lines: Iterable[str], interned: pyspy_text.Interned) -> list[_Source]:
    """Give each line to the reader of its prefix."""
    iterator = iter(lines)
    head = [line.rstrip("\r\n") for line in islice(iterator, _SNIFFED_LINES)]
    labelled = _is_labelled(head)
    file_id = _of_file(name)
    sources: dict[tuple[RankId, bool], _Source] = {}
    by_prefix: dict[str, _Source] = {}  # `[node:rank]` as it stands in the text: most lines repeat one
    for line in chain(head, (line.rstrip("\r\n") for line in iterator)):
        prefix = line[: line.find("]") + 1] if line.startswith("[") else ""
        source = by_prefix.get(prefix) if prefix else None
        if source is not None and not line.startswith(":", len(prefix)):
            source.reader.feed(line[len(prefix) :])
            continue
        rank, sure, rest = _split(line, file_id, labelled=labelled)
        source = sources.get((rank, sure))
        if source is None:
            source = sources[rank, sure] = _Source(name, rank, sure, pyspy_text.Reader(interned))
        if prefix and len(rest) == len(line) - len(prefix):
            by_prefix[prefix] = source
        source.reader.feed(rest)
    for source in sources.values():
        source.reader.end()
    return list(sources.values())


def _is_labelled(head: Iterable[str]) -> bool:
    """Whether lines begin with `N: ` (srun --label) or `host: ` (pdsh, clush): some label stands before `Process`."""
    return any(found and found.group(1) not in {"Process", "Error"} for found in map(_LABELLED.match, head))


def _split(line: str, file_id: RankId, *, labelled: bool) -> tuple[RankId, bool, str]:
    """The rank that a line's prefix tells, whether it is sure to be a rank, and the rest of the line."""
    if line.startswith("["):
        return _split_bracket(line, file_id)
    found = _LABEL.match(line) if labelled else None
    if found and found.group(1) not in {"Process", "Error", "Reason"}:
        label, rest = found.group(1), line[found.end() :]
        if label.isascii() and label.isdigit() and len(label) < 8:
            return RankId(rank=int(label)), False, rest
        return RankId(node=label), False, rest
    return file_id, True, line


def _split_bracket(line: str, file_id: RankId) -> tuple[RankId, bool, str]:
    if found := _HOST_RANK.match(line):
        number, is_local = int(found.group(2)), bool(found.group(3))  # a colon after it: torchrun --tee
        rank = RankId(node=found.group(1), rank=None if is_local else number, local_rank=number if is_local else None)
    elif found := _MPIRUN.match(line):
        rank = RankId(rank=int(found.group(1)))
    elif found := _TORCHRUN.match(line):
        number, is_local = int(found.group(2)), found.group(1) != "rank"  # [rank3]: is torch's own, a global rank
        rank = RankId(node=file_id.node, local_rank=number) if is_local else RankId(rank=number)
    elif found := _KUBECTL.match(line):
        rank = RankId(node=found.group(1))
    else:
        return file_id, True, line
    return rank, True, line[found.end() :]


def _of_file(name: str) -> RankId:
    """What a file's name tells: `rank3.txt` a rank, `trace-node7.out` a node."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    rank, host = _FILE_RANK.search(base), _FILE_NODE.match(base)
    node = host.group(1) if host and not host.group(1).isdigit() and not rank else None
    return RankId(node=node, rank=int(rank.group(1)) if rank else None)


def _ranks(source: _Source, notes: list[str]) -> Iterator[_Rank]:
    """The ranks among the processes of one stream; launchers are left out, helpers belong to the rank they work for."""
    processes = [process for process in source.reader.processes if not _is_launcher(process)]
    if len(processes) < len(source.reader.processes):
        notes.append(f"{source.name}: {len(source.reader.processes) - len(processes)} launcher processes left out")
    pids = {process.pid for process in processes}
    numbered = source.id.rank is not None or source.id.local_rank is not None
    helpers: list[FoundProcess] = []
    candidates: list[FoundProcess] = []
    for process in processes:
        is_helper = _is_helper(process, pids) and (numbered or not _takes_part(process))
        (helpers if is_helper else candidates).append(process)
    own = _are_all_ranks(source, candidates)
    ids = _ids_by_command(source.id, candidates) if own else {}
    ranks: dict[int | None, _Rank] = {}
    for process in candidates:
        if process.pid in ranks:
            ranks[process.pid].rounds.append(process)
        elif own or not ranks:
            identity = ids.get(process.pid) or structs.replace(source.id, pid=process.pid)
            ranks[process.pid] = _Rank(source.name, identity, process)
        else:
            helpers.append(process)
    first = next(iter(ranks.values()), None)
    for process in helpers:
        owner = ranks.get(process.parent_pid) or first
        if owner is not None:
            owner.workers.setdefault(process.pid, []).append(process)
    yield from ranks.values()


def _are_all_ranks(source: _Source, candidates: Sequence[FoundProcess]) -> bool:
    """Whether each process is a rank of its own: nothing numbers them, or a label of `srun` covers a whole node."""
    if source.id.rank is None and source.id.local_rank is None:
        return True
    pids = {process.pid for process in candidates if process.pid is not None}
    commands = {_LOCAL_RANK.sub("", process.command) for process in candidates if process.pid is not None}
    return not source.sure and len(pids) > 1 and len(commands) == 1


def _ids_by_command(prefix: RankId, candidates: Sequence[FoundProcess]) -> dict[int | None, RankId]:
    """Who each process is by its command line; by its pid alone where the numbers there are the same for several."""
    ids = {process.pid: _id_by_command(prefix, process) for process in candidates}
    numbers = [
        (rank.node, rank.rank, rank.local_rank) for rank in ids.values() if rank.rank or rank.local_rank is not None
    ]
    if len(numbers) == len(set(numbers)):
        return ids
    return {pid: structs.replace(rank, rank=None, local_rank=None) for pid, rank in ids.items()}


def _id_by_command(prefix: RankId, process: FoundProcess) -> RankId:
    host, rank, local = (pattern.search(process.command) for pattern in (_NODE_RANK, _GLOBAL_RANK, _LOCAL_RANK))
    node = f"node {host.group(1)}" if host else None
    if node is None and prefix.rank is not None:
        node = f"task {prefix.rank}"
    return RankId(
        node=prefix.node or node,
        rank=int(rank.group(1)) if rank else None,
        local_rank=int(local.group(1)) if local else None,
        pid=process.pid,
    )


def _is_launcher(process: FoundProcess) -> bool:
    frames = _main(process)
    spawned = any(
        frame.function.endswith("join") and frame.file.endswith("multiprocessing/spawn.py") for frame in frames
    )
    return spawned or any(_LAUNCHER_FILES.search(frame.file) for frame in frames[:8])


def _is_helper(process: FoundProcess, pids: set[int | None]) -> bool:
    """A process that works for a rank: its parent is in the same stream, or it runs a worker's loop."""
    if process.parent_pid is not None and process.parent_pid in pids:
        return True
    if _HELPER_COMMAND.search(process.command):
        return True
    return any(_HELPER_FRAMES.match(f"{frame.function.rsplit('.', 1)[-1]} ({frame.file}") for frame in _main(process))


def _takes_part(process: FoundProcess) -> bool:
    """A child that is in a collective or a backward pass is a rank: Lightning starts the other ranks from rank 0."""
    return any(_TAKES_PART.search(frame.file) for frame in _main(process))


def _main(process: FoundProcess) -> tuple[Frame, ...]:
    return next((thread.frames for thread in process.threads if thread.is_main), ())
