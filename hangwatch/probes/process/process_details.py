"""What psutil tells of few processes: open files, connections, children, memory, CPUs. Asked by a child of its own.

The child may wait for a file system or a lock of the target's memory for good: then it is left behind, and its process
has no details.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hangwatch import words
from hangwatch.formats import decoding
from hangwatch.model import Fault, ProcessDetails, ProcessId
from hangwatch.probes import child
from hangwatch.probes.process import procfs

CHILD = Path(__file__).with_name("process_details_child.py")
MOST_PROCESSES = 8
_PARALLEL = 2
_LISTED = 32
_CHARACTERS = 200
_RUNNER = child.Runner("reader of details")


class _Answer(msgspec.Struct):
    """What the child prints; what could not be read is missing."""

    resident_bytes: int | None = None
    shared_bytes: int | None = None
    swap_bytes: int | None = None
    niceness: int | None = None
    cpus: list[int] = []
    threads: int | None = None
    descriptors: int | None = None
    connections: list[str] = []
    children: list[str] = []
    files: list[str] = []


_ANSWER = decoding.decoder(_Answer)


def left_behind() -> int:
    """How many children wait for a process or a file system now."""
    return _RUNNER.abandoned.count()


def read(
    targets: Sequence[ProcessId],
    *,
    share: str,
    deadline_seconds: float,
    stop: threading.Event | None = None,
) -> dict[ProcessId, ProcessDetails]:
    """The details of at most eight processes, of those that answer within the deadline of all. `share` as in `Job`."""
    end = time.monotonic() + deadline_seconds

    def ask(target: ProcessId) -> ProcessDetails | None:
        left = end - time.monotonic()
        if left <= 0 or _RUNNER.refusal(target) is not None:
            return None
        command = [sys.executable, "-I", str(CHILD), str(target.pid)]
        printed = _RUNNER.run(command, target, share=share, deadline_seconds=left, stop=stop)
        return None if isinstance(printed, Fault) or not _is_same(target) else _parsed(printed.out)

    asked = targets[:MOST_PROCESSES]
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="details") as pool:
        found = dict(zip(asked, pool.map(ask, asked), strict=True))
    return {target: details for target, details in found.items() if details is not None}


def _parsed(raw: bytes) -> ProcessDetails | None:
    try:
        found = _ANSWER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ProcessDetails(
        resident_bytes=found.resident_bytes,
        shared_bytes=found.shared_bytes,
        swap_bytes=found.swap_bytes,
        niceness=found.niceness,
        cpus=words.fold(found.cpus),
        threads=found.threads,
        descriptors=found.descriptors,
        connections=_listed(found.connections),
        children=_listed(found.children),
        files=_listed(found.files),
    )


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(words.elided(text, _CHARACTERS) for text in texts[:_LISTED])


def _is_same(target: ProcessId) -> bool:
    now = procfs.read_state(target.pid)
    return now is not None and now[0] == target
