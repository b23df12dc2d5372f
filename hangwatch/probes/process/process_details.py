"""Read open files, connections, children, memory and CPUs of a few processes.

No file system and no lock of a process's memory is waited for. So psutil reads numbers only: it would look up open
files by their paths, and names of children in their memory. The kernel names both in proc_pid_fd(5) and
proc_pid_stat(5). psutil reads swapped memory from smaps, which takes that lock; proc_pid_status(5) has it, too.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import structs

from hangwatch import words
from hangwatch.model import ProcessDetails, ProcessId, list_by_key
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.network import sockets

MOST_PROCESSES = 8
_LISTED = 32
_MOST_DESCRIPTORS = 1024  # of a process; their positions are read
_CHARACTERS = 200
_NO_FILE = ("/dev/", "/memfd:")
_CLOSED = ("pos:", "0", "flags:", f"{os.O_PATH:o}")  # a file that was closed meanwhile
_MODES = ("r", "w", "r+")  # by the lowest bits of the flags of open(2)


def read(targets: Sequence[ProcessId]) -> dict[ProcessId, ProcessDetails]:
    """Return the details of at most eight processes. A process that has ended is missing."""
    tables = sockets.Tables(procfs.PROC)
    details = {target: _read(target.pid, tables) for target in targets[:MOST_PROCESSES]}
    return {target: its_details for target, its_details in details.items() if procfs.is_alive(target)}


def _read(pid: int, tables: sockets.Tables) -> ProcessDetails:
    # Not at the start: only details of a named rank need it, and it costs 1 MiB
    import psutil

    proc_root = tables.proc_root
    links = sockets.descriptors(pid, proc_root)
    details = ProcessDetails(
        swap_bytes=procfs.read_swap_bytes(pid, proc_root),
        descriptors=None if links is None else len(links),
        connections=_first_of(_connections(pid, links or {}, tables)),
        children=_first_of(_children(pid, proc_root)),
        files=_first_of(_files(proc_root / str(pid), links or {})),
    )
    try:
        process = psutil.Process(pid)
        memory = process.memory_info()
        return structs.replace(
            details,
            resident_bytes=memory.rss,
            shared_bytes=memory.shared,
            niceness=process.nice(),
            cpus=words.fold(process.cpu_affinity()),
            threads=process.num_threads(),
        )
    except psutil.Error:
        return details


def _first_of(texts: Iterator[str]) -> tuple[str, ...]:
    return tuple(words.elided(text, _CHARACTERS) for text in islice(texts, _LISTED))


def _files(folder: Path, links: Mapping[int, str]) -> Iterator[str]:
    """Yield the open files with mode, number of descriptors and positions."""
    opened: list[tuple[tuple[str, str], int]] = []
    for number, path in islice(links.items(), _MOST_DESCRIPTORS):
        if path.startswith("/") and not path.startswith(_NO_FILE):
            _, position, _, flags, *_ = pseudo_files.read_or_empty(folder / "fdinfo" / str(number)).split() or _CLOSED
            if not int(flags, 8) & (os.O_DIRECTORY | os.O_PATH):
                mode = _MODES[int(flags, 8) & os.O_ACCMODE]
                mode = mode.replace("r+", "a+").replace("w", "a") if int(flags, 8) & os.O_APPEND else mode
                opened.append(((path, mode), int(position)))
    for (path, mode), positions in list_by_key(opened).items():
        first, last = min(positions), max(positions)
        where = f"at {first:,}" if first == last else f"at {first:,} to {last:,}"
        times = f"{len(positions)} times, " if len(positions) > 1 else ""
        yield f"{path} ({mode}, {times}{where})"


def _connections(pid: int, links: Mapping[int, str], tables: sockets.Tables) -> Iterator[str]:
    """Yield the TCP and UDP sockets, each with its ends; a TCP socket with its state."""
    for connection in tables.read_held(pid):
        yield f"{_ends(connection)} {sockets.STATE_NAMES[connection.state]}"
    inodes = set((sockets.sockets_among(links) or {}).values())
    for datagrams in sockets.list_connections(tables.proc_root / str(pid) / "net", tables=("udp", "udp6")):
        if datagrams.inode in inodes:
            yield _ends(datagrams)


def _ends(connection: sockets.Connection) -> str:
    ends = (connection.local, connection.remote) if connection.remote[1] else (connection.local,)
    return " -> ".join(words.place(sockets.format_address(end), end[1]) for end in ends)


def _children(pid: int, proc_root: Path) -> Iterator[str]:
    """Yield the descendants, each with pid, name and state."""
    for child in procfs.read_children(pid, proc_root):
        stat = procfs.read_stat(f"{proc_root}/{child}")
        if stat is not None:
            yield f"pid {child} ({stat.comm}), {words.PROCESS_STATES.get(stat.state, stat.state)}"
