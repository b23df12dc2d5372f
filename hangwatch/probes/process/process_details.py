"""Read open files, connections, children, memory and CPUs of a few processes with psutil, in child processes.

A child may wait for ever for a file system, or for the lock of the target's memory. Then it is abandoned, and its
target has no details.
"""

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
    """The output of a child. A value is None or empty if it could not be read."""

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


def abandoned_children() -> int:
    """Return the number of abandoned children that still wait for a process or a file system."""
    return _RUNNER.abandoned.count()


def read(
    targets: Sequence[ProcessId],
    *,
    share: str,
    deadline_seconds: float,
    stop: threading.Event | None = None,
) -> dict[ProcessId, ProcessDetails]:
    """Return the details of at most eight processes.

    A process is missing if it could not be read by the common deadline, or has ended. `share` as in `Job`.
    """
    end = time.monotonic() + deadline_seconds

    def ask(target: ProcessId) -> ProcessDetails | None:
        remaining = end - time.monotonic()
        if remaining <= 0 or _RUNNER.refusal(target) is not None:
            return None
        command = [sys.executable, "-I", str(CHILD), str(target.pid)]
        printed = _RUNNER.run(command, target, share=share, deadline_seconds=remaining, stop=stop)
        return None if isinstance(printed, Fault) or not procfs.is_alive(target) else _parse(printed.out)

    read_targets = targets[:MOST_PROCESSES]
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="details") as pool:
        details_of = dict(zip(read_targets, pool.map(ask, read_targets), strict=True))
    return {target: details for target, details in details_of.items() if details is not None}


def _parse(raw: bytes) -> ProcessDetails | None:
    try:
        answer = _ANSWER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ProcessDetails(
        resident_bytes=answer.resident_bytes,
        shared_bytes=answer.shared_bytes,
        swap_bytes=answer.swap_bytes,
        niceness=answer.niceness,
        cpus=words.fold(answer.cpus),
        threads=answer.threads,
        descriptors=answer.descriptors,
        connections=_listed(answer.connections),
        children=_listed(answer.children),
        files=_listed(answer.files),
    )


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(words.elided(text, _CHARACTERS) for text in texts[:_LISTED])
