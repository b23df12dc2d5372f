"""The roles of dumped processes by stack and command line: ranks, launchers, helpers, and other programs. Pure."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from hangwatch import tables, words
from hangwatch.formats import process_title
from hangwatch.model import Frame, RankId
from hangwatch.tools.explain.stacks.parsed_processes import ParsedProcess

_PATTERNS = tables.Patterns("process_roles.toml")

LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,7})\b")
_FOREIGN = frozenset({"NotPython", "NoInterpreter", "PermissionDenied", "ProcessGone"})
_DIGITS = re.compile(r"\d+")
_WORDS_LOOKED_AT = 16
_TOOL_CHARACTERS = 40
_TOOLS_SHOWN = 8


class RankPrograms(NamedTuple):
    """The programs that ranks run; empty if unknown. A process of another program is not a rank.

    `ranks_are_forked` is true if multiprocessing forked the ranks. `are_workers` is true if the ranks are workers with
    a number in their process title.
    """

    programs: frozenset[str]
    ranks_are_forked: bool
    are_workers: bool

    def is_tool(self, process: ParsedProcess) -> bool:
        """True for a process of another program: wandb, tensorboard, a system daemon, the parent server of workers.

        A process in a collective is always a rank. Exception: if `are_workers` is true, a process without a number is
        no rank.
        """
        if not self.programs:
            return False
        program = _find_program(process)
        is_other = program not in self.programs if program else _is_foreign(process)
        is_other &= not _is_numbered(process)
        if self.are_workers and is_other:
            return True
        is_other |= _read_main_stack(process).is_forked and not self.ranks_are_forked
        return is_other and not is_in_collective(process)


def find_programs(candidates: Sequence[ParsedProcess]) -> RankPrograms:
    """Return the programs that the ranks among these processes run.

    A rank runs the same program as the processes in a collective. If no process is in a collective, a rank is a process
    with a number in its title, else it runs the most common program. A process title counts as a program if several
    processes have a title of its family.

    A forked process may work for a rank: it writes checkpoints or serves metrics. Ranks themselves are forked if
    multiprocessing forked a process in a collective. If no process is in a collective, at least half of all processes
    must be forked.
    """
    inside = [process for process in candidates if is_in_collective(process)]
    counts = Counter(program for process in candidates if (program := _find_program(process)))
    titles = {_find_program(process) for process in inside if process_title.read(process.command) is not None}
    programs = {_find_program(process) for process in inside} - {""} - {title for title in titles if counts[title] == 1}
    workers = {_find_program(process) for process in inside if _is_numbered(process)} & programs
    if not inside and (numbered := {_find_program(process) for process in candidates if _is_numbered(process)}):
        workers = numbered
    elif not inside:
        common = counts.most_common(2)
        if common and common[0][1] > 1 and (len(common) == 1 or common[1][1] < common[0][1]):
            programs = {common[0][0]}
    forked = sum(_read_main_stack(process).is_forked for process in inside or candidates)
    ranks_are_forked = forked > 0 if inside else forked * 2 >= len(candidates)
    return RankPrograms(frozenset(workers or programs), ranks_are_forked, are_workers=bool(workers))


def _is_foreign(process: ParsedProcess) -> bool:
    fault = process.fault
    return process.pid is None and fault is not None and fault.reason in _FOREIGN and not process.threads


def _is_numbered(process: ParsedProcess) -> bool:
    """True if the title of the process contains a number: that of a rank, or that of a part of a model."""
    title = process_title.read(process.command)
    return title is not None and (title.is_worker or LOCAL_RANK.search(process.command) is not None)


def _find_program(process: ParsedProcess) -> str:
    """Return the script or module in the command line of a process, without interpreter and options; "" if unknown.

    For a process with a title, return the family of the title.
    """
    arguments = process.command.split()[:_WORDS_LOOKED_AT]
    if (title := process_title.read(process.command)) is not None:
        return title.family
    for number, word in enumerate(arguments[1:], 1):
        if word in {"-m", "-c"}:
            return _DIGITS.sub("#", " ".join(arguments[number : number + (2 if word == "-m" else _WORDS_LOOKED_AT)]))
        if not word.startswith("-") and arguments[number - 1] not in {"-W", "-X"}:
            return word.rpartition("/")[2]
    return ""


def describe_tools(tools: Sequence[ParsedProcess]) -> str:
    """Return a note on processes that are not ranks: "not ranks of this job: pid 7 (wandb-service), pid 9 (...)"."""
    with_pid = [
        f"pid {tool.pid} ({words.elided(_find_program(tool), _TOOL_CHARACTERS)})"
        for tool in tools
        if tool.pid is not None
    ]
    without_pid = len(tools) - len(with_pid)
    more = f"{len(with_pid) - _TOOLS_SHOWN:,} more" if len(with_pid) > _TOOLS_SHOWN else ""
    errors = f"{words.count(without_pid, 'error')} without a process" if without_pid else ""
    return f"not ranks of this job: {', '.join(filter(None, (*with_pid[:_TOOLS_SHOWN], more, errors)))}"


def ids_by_command(prefix: RankId, candidates: Sequence[ParsedProcess]) -> dict[int | None, RankId]:
    """Return the rank in the command line of each process, keyed by pid.

    If two processes have the same numbers, each rank has only its pid and title.
    """
    ids = {process.pid: _read_id(prefix, process) for process in candidates}
    numbers = [(rank.node, rank.rank, rank.local_rank) for rank in ids.values() if rank.is_numbered]
    if len(numbers) == len(set(numbers)):
        return ids
    return {pid: structs.replace(rank, rank=None, local_rank=None) for pid, rank in ids.items()}


def _read_id(prefix: RankId, process: ParsedProcess) -> RankId:
    host, rank, local = (
        pattern.search(process.command) for pattern in (_PATTERNS["node_rank"], _PATTERNS["global_rank"], LOCAL_RANK)
    )
    task = f"task {prefix.rank}" if prefix.rank is not None else None
    node = f"node {host.group(1)}" if host else task
    title = process_title.read(process.command)
    by_title = title.rank if title and local is None else None
    return RankId(
        node=prefix.node or node,
        rank=int(rank.group(1)) if rank else by_title,
        local_rank=int(local.group(1)) if local else None,
        pid=process.pid or prefix.pid,
        title=title.name if title else None,
    )


def is_launcher(process: ParsedProcess) -> bool:
    """True for a process that starts ranks and waits for them: torchrun, deepspeed, accelerate, or mp.spawn."""
    return _read_main_stack(process).is_launcher


def is_helper(process: ParsedProcess, pids: set[int | None]) -> bool:
    """True for a process that works for a rank: its parent is one of `pids`, or it runs the loop of a worker."""
    if process.parent_pid is not None and process.parent_pid in pids:
        return True
    stack = _read_main_stack(process)
    is_worker = stack.is_worker or _PATTERNS["helper_command"].search(process.command) is not None
    return is_worker and not stack.is_served  # a child of the fork server keeps its command line and outer frames


def is_in_collective(process: ParsedProcess) -> bool:
    """True if a process is in a collective or a backward pass. Only ranks are.

    Lightning starts the other ranks as children of rank 0, so a child in a collective is not a helper.
    """
    return _read_main_stack(process).is_in_collective


class _MainStack(NamedTuple):
    """Signs of the role of a process in the stack of its main thread. `is_served`: it is a child of a fork server.

    `is_forked` is true for a child that multiprocessing forked. Its parent, which forks or joins it, is in one file.
    """

    is_launcher: bool
    is_served: bool
    is_worker: bool
    is_forked: bool
    is_in_collective: bool


def _read_main_stack(process: ParsedProcess) -> _MainStack:
    return _read_stack(next((thread.frames for thread in process.threads if thread.is_main), ()))


@lru_cache(maxsize=1 << 10)  # most ranks have the same stack
def _read_stack(frames: tuple[Frame, ...]) -> _MainStack:
    spawns = any(
        frame.function.endswith("join") and frame.file.endswith("multiprocessing/spawn.py") for frame in frames
    )
    return _MainStack(
        is_launcher=spawns or any(_PATTERNS["launcher_files"].search(frame.file) for frame in frames[:8]),
        is_served=any(
            frame.function == "_serve_one" and _PATTERNS["forkserver"].search(frame.file) for frame in frames
        ),
        is_worker=any(
            _PATTERNS["helper_frames"].match(f"{frame.function.rsplit('.', 1)[-1]} ({frame.file}") for frame in frames
        ),
        is_forked=any(
            inner.function.rpartition(".")[2] == "_bootstrap" and _PATTERNS["forked"].search(outer.file)
            for inner, outer in itertools.pairwise(frames)
        ),
        is_in_collective=any(_PATTERNS["takes_part"].search(frame.file) for frame in frames),
    )


def find_log_owners(
    writers: Sequence[RankId], dumped: Collection[RankId], numbered: Collection[RankId]
) -> dict[RankId, RankId | None]:
    """Return the rank of each writer of a log with a process id but no rank. None if the writer is not a rank.

    The prefix of its lines is that of vLLM or Ray (`(Worker_TP2 pid=4122)`), or the beginning of NCCL's own lines.
    Servers and drivers write with such prefixes, too.

    If a dump, another line or one of `numbered` has the same pid and a rank, that is the rank. If not, a process is a
    rank if its kind of title is that of a process with a rank, or of a numbered worker of vLLM or SGLang. If no log has
    a number, a process is a rank if its kind of title is the most common one.
    """
    pids = Counter(rank.pid for rank in numbered)  # Ray writes no address before lines of the driver's node
    by_pid: dict[tuple[str | None, int | None], RankId] = {
        (None, rank.pid): rank for rank in numbered if pids[rank.pid] == 1
    }
    by_pid |= {
        (rank.node, rank.pid): rank for rank in (*numbered, *writers) if rank.pid is not None and rank.is_numbered
    }
    of_dumps: dict[int | None, RankId] = {rank.pid: rank for rank in dumped if rank.pid is not None}
    titles = {rank: title for rank in writers if (title := process_title.read(rank.title or "")) is not None}
    are_numbered = any(rank.is_numbered for rank in writers)
    families = {title.family for rank, title in titles.items() if rank.is_numbered or title.is_worker}
    if not families and not are_numbered:
        counts = Counter(title.family for title in titles.values())
        families = {family for family, count in counts.items() if count == max(counts.values())}
    owners: dict[RankId, RankId | None] = {}
    for rank in writers:
        title = titles.get(rank)
        if rank.pid is None or rank.pid in of_dumps or (rank.node, rank.pid) in by_pid:
            of_pid = rank if rank.is_numbered else by_pid.get((rank.node, rank.pid), rank)
            owners[rank] = of_dumps.get(rank.pid) or of_pid
        else:
            is_rank = title.family in families if title else not (are_numbered or titles)
            owners[rank] = rank if is_rank else None
    return owners
