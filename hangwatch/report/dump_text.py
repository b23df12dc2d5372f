"""Captured processes -> py-spy's text form, which people can grep and `hangwatch explain` reads back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hangwatch.model import Capture, Frame, Incident, ProcessDump, RankDump, RankId, Thread
from hangwatch.words import printable, utc

GONE = "no such process: its node answers, and the process of this rank does not exist"
_UNFIT = re.compile(r"[^\w.-]")  # in a host's name, where it would end the prefix
_SEPARATOR = "-" * 80  # between the processes of a rank, as `py-spy dump --subprocesses` prints


def prefix(rank: RankId) -> str:
    """`[host:rank]`; with only a local rank `[host:local rank]:`, as torchrun's --tee; with none `host: `, as pdsh."""
    node = _UNFIT.sub("_", printable(rank.node or "unknown"))
    if rank.rank is not None:
        return f"[{node}:{rank.rank}]"
    return f"[{node}:{rank.local_rank}]:" if rank.local_rank is not None else f"{node}: "


def rank_lines(dump: RankDump, command: str, round_number: int | None = None) -> Iterator[str]:
    """One rank and its workers, each line with its prefix. `round_number` is from 0; None: the last with a stack."""
    lead = prefix(dump.id)
    for line in _rank_lines(dump, printable(command) or "python", round_number):
        yield f"{lead}{line}"


def process_lines(dump: ProcessDump) -> Iterator[str]:
    """What one process showed in one round: its threads, or the error and what the kernel says of it."""
    if dump.fault is not None:
        yield f"Error: {printable(dump.fault.detail or dump.fault.reason)}"
        yield f"Fault: {printable(dump.fault.reason)}"
    if dump.fault is not None or not dump.threads:
        yield from (
            f"{name}: {printable(text)}" for name, text in (("State", dump.state), ("Wchan", dump.wchan)) if text
        )
        yield from (f"Kernel: {printable(line)}" for line in dump.kernel_stack)
    for thread in dump.threads:
        yield from _thread_lines(thread)


def dump_files(incident: Incident) -> dict[str, str]:
    """One file for each rank and round of each capture, for `store.save`: `dumps/<UTC time>-round1/rank7.txt`.

    The files of one folder are one moment of the job on this node: `hangwatch explain` takes the folder.
    """
    files: dict[str, str] = {}
    for capture in incident.captures:
        moment = utc(capture.started_unix_seconds, "%Y%m%dT%H%M%SZ")
        for number in range(capture.rounds):
            for dump in capture.ranks:
                lines = rank_lines(dump, incident.job.command, number)
                files[f"dumps/{moment}-round{number + 1}/{file_name(dump.id)}"] = "\n".join(lines) + "\n"
    return files


def raw_lines(capture: Capture, command: str) -> Iterator[str]:
    """The last stack of every rank of a capture, in the order of ranks."""
    for dump in sorted(capture.ranks, key=lambda rank: rank.id.sort_key()):
        yield from rank_lines(dump, command)


def shown_round(dump: RankDump) -> int:
    """The last round in which the rank showed a stack, else the last."""
    with_threads = [number for number, found in enumerate(dump.rounds) if found.threads]
    return with_threads[-1] if with_threads else len(dump.rounds) - 1


def _rank_lines(dump: RankDump, command: str, round_number: int | None) -> Iterator[str]:
    number = shown_round(dump) if round_number is None else round_number
    if dump.id.pid is not None:
        yield f"Process {dump.id.pid}: {command}"
    if dump.gone:
        yield f"Error: {GONE}"
    elif not 0 <= number < len(dump.rounds):
        yield "Error: no dump in this round"
    else:
        yield from _spaced(process_lines(dump.rounds[number]))
    for worker in dump.workers:
        at = min(number, len(worker.rounds) - 1)
        if at < 0:
            continue
        yield ""
        yield _SEPARATOR
        yield f"Process {worker.pid}: {printable(worker.comm)}"
        yield f"Parent Process {dump.id.pid}: {command}"
        yield from _spaced(process_lines(worker.rounds[at]))


def _spaced(lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == 0 and line.startswith("Thread "):
            yield ""
        yield line


def _thread_lines(thread: Thread) -> Iterator[str]:
    active = "?" if thread.active is None else "active" if thread.active else "idle"
    flags = f"{active}+gil" if thread.owns_gil else active
    name = "" if thread.name is None else f': "{printable(thread.name)}"'
    yield f"Thread {printable(thread.thread_id) or '?'} ({flags}){name}"
    for frame in thread.frames:
        yield f"    {printable(str(frame))}"
        yield from _local_lines(frame)


def _local_lines(frame: Frame) -> Iterator[str]:
    if frame.locals:
        yield "        Locals:"
        yield from (f"            {printable(name)}: {printable(value)}" for name, value in frame.locals)


def file_name(rank: RankId) -> str:
    """`rank7.txt`; by the local rank or the pid where that is all that is known."""
    if rank.rank is not None:
        return f"rank{rank.rank}.txt"
    return f"local-rank{rank.local_rank}.txt" if rank.local_rank is not None else f"pid{rank.pid}.txt"
