"""Print psutil's values of a process as JSON. A script: `python -I process_details_child.py PID`.

Open files are looked up by path, and names of children are read from their memory. Both may block for ever. Values that
cannot be read are omitted.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MOST_LISTED = 64


def swap_bytes(pid: int) -> int | None:
    """Return VmSwap of proc_pid_status(5), in bytes; None if the row is missing.

    psutil would read smaps, which takes the lock of the target's memory.
    """
    rows = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmSwap"].split()[0]) * 1024 if "VmSwap" in rows else None


def files(process: psutil.Process) -> list[str]:
    """Return the open regular files with mode, number of descriptors and positions."""
    found: dict[tuple[str, str], list[int]] = {}
    for file in process.open_files():
        found.setdefault((file.path, file.mode), []).append(file.position)
    return [f"{path} ({mode}, {_places(at)})" for (path, mode), at in list(found.items())[:MOST_LISTED]]


def _places(positions: list[int]) -> str:
    first, last = min(positions), max(positions)
    where = f"at {first:,}" if first == last else f"at {first:,} to {last:,}"
    return where if len(positions) == 1 else f"{len(positions)} times, {where}"


def connections(process: psutil.Process) -> list[str]:
    """Return the TCP and UDP sockets, each with both addresses and its state."""
    found = []
    for connection in process.net_connections("inet")[:MOST_LISTED]:
        ends = [f"{end.ip}:{end.port}" for end in (connection.laddr, connection.raddr) if end]
        state = "" if connection.status == psutil.CONN_NONE else connection.status
        found.append(f"{' -> '.join(ends)} {state}".strip())
    return found


def children(process: psutil.Process) -> list[str]:
    """Return all descendants, each with pid, name and state."""
    found = []
    for child in process.children(recursive=True)[:MOST_LISTED]:
        try:
            found.append(f"pid {child.pid} ({child.name()}), {child.status()}")
        except psutil.Error:
            continue
    return found


def main(pid: int) -> None:
    """Print one JSON object. Each value is read separately; quick reads that cannot block come first."""
    process = psutil.Process(pid)
    readers: dict[str, Callable[[], Any]] = {
        "resident_bytes": lambda: process.memory_info().rss,
        "shared_bytes": lambda: process.memory_info().shared,
        "swap_bytes": lambda: swap_bytes(pid),
        "niceness": process.nice,
        "cpus": process.cpu_affinity,
        "threads": process.num_threads,
        "descriptors": process.num_fds,
        "connections": lambda: connections(process),
        "children": lambda: children(process),
        "files": lambda: files(process),
    }
    answer: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            answer[name] = read()
        except (psutil.Error, OSError, ValueError):
            continue
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
