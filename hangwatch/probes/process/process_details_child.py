"""Prints what psutil tells of one process as JSON. Runs by itself, as `python -I process_details_child.py PID`.

Open files are looked at by their paths, and names of children by what stands in their memory: both may never answer.
What cannot be read is left out.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MOST_LISTED = 64


def swap_bytes(pid: int) -> int | None:
    """By VmSwap of proc_pid_status(5): psutil asks smaps, which holds the lock of the target's memory map meanwhile."""
    rows = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmSwap"].split()[0]) * 1024 if "VmSwap" in rows else None


def files(process: psutil.Process) -> list[str]:
    """Regular files with how they are open, how often, and where in them it reads or writes."""
    found: dict[tuple[str, str], list[int]] = {}
    for file in process.open_files():
        found.setdefault((file.path, file.mode), []).append(file.position)
    return [f"{path} ({mode}, {_places(at)})" for (path, mode), at in list(found.items())[:MOST_LISTED]]


def _places(positions: list[int]) -> str:
    first, last = min(positions), max(positions)
    where = f"at {first:,}" if first == last else f"at {first:,} to {last:,}"
    return where if len(positions) == 1 else f"{len(positions)} times, {where}"


def connections(process: psutil.Process) -> list[str]:
    """TCP and UDP sockets: both ends and the state."""
    found = []
    for one in process.net_connections("inet")[:MOST_LISTED]:
        ends = [f"{end.ip}:{end.port}" for end in (one.laddr, one.raddr) if end]
        found.append(f"{' -> '.join(ends)} {'' if one.status == psutil.CONN_NONE else one.status}".strip())
    return found


def children(process: psutil.Process) -> list[str]:
    """All that it started, and these, by pid, name and state."""
    found = []
    for child in process.children(recursive=True)[:MOST_LISTED]:
        try:
            found.append(f"pid {child.pid} ({child.name()}), {child.status()}")
        except psutil.Error:
            continue
    return found


def main(pid: int) -> None:
    """Print one JSON object; what is quick and cannot block comes first, since each part is asked by itself."""
    process = psutil.Process(pid)
    asked: dict[str, Callable[[], Any]] = {
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
    for name, ask in asked.items():
        try:
            answer[name] = ask()
        except (psutil.Error, OSError, ValueError):
            continue
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
