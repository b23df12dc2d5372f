"""Dumps in py-spy's text format, for grep and for `hangwatch explain`."""

import re
from collections.abc import Iterator

from hangwatch.model import Capture, Incident, ProcessDump, RankDump, RankId, Thread
from hangwatch.words import printable, utc

GONE = "no such process: its node responds, but the process of this rank does not exist"
_UNFIT = re.compile(r"[^\w.-]")  # in a host name these characters would end the prefix
_SEPARATOR = "-" * 80  # between the processes of a rank, as in `py-spy dump --subprocesses`


def prefix(rank: RankId) -> str:
    """Return the prefix of a rank's lines: `[host:rank]`.

    If the rank is unknown, the prefix is `[host:local rank]:` as in torchrun's --tee. If the local rank is unknown,
    too, it is `host: ` as in pdsh.
    """
    node = _UNFIT.sub("_", printable(rank.node or "unknown"))
    if rank.rank is not None:
        return f"[{node}:{rank.rank}]"
    return f"[{node}:{rank.local_rank}]:" if rank.local_rank is not None else f"{node}: "


def rank_lines(dump: RankDump, command: str, round_number: int | None = None) -> Iterator[str]:
    """Yield the lines of a rank and its workers in one round.

    `round_number` counts from 0. If it is None, the last round with a stack is shown.
    """
    lead = prefix(dump.id)
    for line in _rank_lines(dump, printable(command) or "python", round_number):
        yield f"{lead}{line}"


def process_lines(dump: ProcessDump) -> Iterator[str]:
    """Yield the threads of a process in one round. If it has no stack, yield the error and the kernel's state."""
    if dump.fault is not None:
        yield f"Error: {printable(dump.fault.detail or dump.fault.reason)}"
        yield f"Fault: {printable(dump.fault.reason)}"
    if dump.fault is not None or not dump.threads:
        yield from (
            f"{name}: {printable(text)}" for name, text in (("State", dump.state), ("Wchan", dump.main.wchan)) if text
        )
        yield from (f"Kernel: {printable(line)}" for line in dump.kernel_stack)
    for thread in dump.threads:
        yield from _thread_lines(thread)


def dump_files(incident: Incident) -> dict[str, str]:
    """Return the text of each file by its path: one file for each rank and round, `dumps/<UTC time>-round1/rank7.txt`.

    One folder contains all ranks of this node in one round. `hangwatch explain` can read it. `store.save` writes the
    files.
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
    """Yield the lines of every rank of a capture, in the order of ranks. The last round with a stack is shown."""
    for dump in sorted(capture.ranks, key=lambda rank: rank.id.sort_key()):
        yield from rank_lines(dump, command)


def shown_round(dump: RankDump) -> int:
    """Return the index of the last round with a stack. If no round has a stack, return that of the last round."""
    with_threads = [number for number, process in enumerate(dump.rounds) if process.threads]
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
        if frame.locals:
            yield "        Locals:"
            yield from (f"            {printable(name)}: {printable(value)}" for name, value in frame.locals)


def file_name(rank: RankId) -> str:
    """Return the name of a rank's file: `rank7.txt`; of an unknown rank, with its local rank or pid."""
    if rank.rank is not None:
        return f"rank{rank.rank}.txt"
    return f"local-rank{rank.local_rank}.txt" if rank.local_rank is not None else f"pid{rank.pid}.txt"
