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
from hangwatch.probes.base import child_runner, procfs

CHILD = Path(__file__).with_name("process_details_child.py")
MOST_PROCESSES = 8
_PARALLEL = 2
_LISTED = 32
_CHARACTERS = 200
RUNNER = child_runner.Runner("reader of details")


class _Answer(ProcessDetails, frozen=True):
    """The output of a child. The cores are a list, and the texts are not bounded."""

    cpus: tuple[int, ...] = ()  # type: ignore[assignment]


_ANSWER = decoding.decoder(_Answer)
_LISTS = ("connections", "children", "files")


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
        if remaining <= 0 or RUNNER.refusal(target) is not None:
            return None
        command = [sys.executable, "-I", str(CHILD), str(target.pid)]
        printed = RUNNER.run(command, target, share=share, deadline_seconds=remaining, stop=stop)
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
    lists = {
        name: tuple(words.elided(text, _CHARACTERS) for text in getattr(answer, name)[:_LISTED]) for name in _LISTS
    }
    return ProcessDetails.copy_from(answer, cpus=words.fold(answer.cpus), **lists)
