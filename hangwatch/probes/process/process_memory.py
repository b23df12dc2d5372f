"""Read memory of other processes through a child that may be abandoned.

A page may be in a file of a FUSE file system that its owner serves and that does not respond. A reader then waits in
the kernel. Not even SIGKILL ends this wait while the file system exists. Such a thread would keep a stopping daemon,
its ports and its lock alive.

So a child reads. A child that does not respond is killed and abandoned. Its target is not read again until the child is
gone. Another child continues. The number of abandoned children is limited.
"""

import contextlib
import errno
import itertools
import marshal
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.probes.base import pseudo_files
from hangwatch.probes.base.child import KILL_SECONDS, STARTUP_SECONDS, Child, Starvation
from hangwatch.probes.base.child_runner import AbandonedChildren
from hangwatch.probes.process.memory_image import Place, Read, UnreadableError

CHILD = Path(__file__).with_name("process_memory_child.py")
MOST_MAPS_BYTES = 8 << 20  # of /proc/PID/maps
DEADLINE_SECONDS = 0.5
STARVATION = Starvation(5.0, most_asleep=2)  # a child that waits for a CPU, or starts, does not wait for a page
MOST_BYTES = 1 << 15  # of one piece of `read`
MOST_PIECES = 1024  # of one question: it then fits into a pipe, and writing it never blocks


class FilePlaces(NamedTuple):
    """Places to read in a file of /proc/PID.

    With the `start_ticks` of a process, the child keeps the file open until it is not read for a minute. A kept file of
    a process that has ended is empty, even if another process has its pid.
    """

    path: Path
    places: Sequence[Place]
    start_ticks: int = 0


class Turns:
    """A lock that threads get in the order in which they asked for it.

    A threading.Lock is often taken again by the thread that has just released it, while other threads wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._served = 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._served == turn)

    def count(self) -> int:
        """Return the number of threads that have the lock or wait for it."""
        return self._asked - self._served

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


class MemoryReader:
    """A child that reads the memory of processes, and the children that wait for a file for ever.

    The child ends after `idle_seconds` without a question. It occupies 9 MiB, and its start costs 12 ms of CPU.
    """

    def __init__(self, idle_seconds: float = 0.5) -> None:
        self._idle_seconds = idle_seconds
        self._turns = Turns()
        self._child: Child | None = None
        self.abandoned = AbandonedChildren()

    def read(self, memory: Path, address: int, count: int) -> bytes:
        """Return up to `count` bytes of a /proc/PID/mem; empty if not permitted, not mapped, or not read in time."""
        answer = self.read_pieces(memory, [(address, min(count, MOST_BYTES))])
        return answer[0] if isinstance(answer, tuple) else b""

    def read_pieces(self, memory: Path, places: Sequence[Place], share: str = "") -> tuple[bytes, ...] | int:
        """Return the readable content at each (address, bytes) of a file of /proc/PID, or an errno.

        Takes at most half a second per 1,024 places. For the errno and `share`, see `read_files`.
        """
        pieces: list[bytes] = []
        for first in range(0, len(places), MOST_PIECES):
            (part,) = self.read_files([FilePlaces(memory, places[first : first + MOST_PIECES])], share)
            if isinstance(part, int):
                return part
            pieces += part
        return tuple(pieces)

    def read_files(self, files: Sequence[FilePlaces], share: str = "") -> list[list[bytes] | int]:
        """Return for each file the readable content at each of its places, or an errno. Takes at most half a second.

        `share` is the user or pod that a child counts for.

        ETIMEDOUT means that the file did not respond in time. EBUSY means that a file was not read, because a child
        hangs: for this file, for an earlier one, or too many in total.
        """
        answers: list[list[bytes] | int] = []
        with self._turns:
            readable = [file for file in files if self.abandoned.pid_for(file.path) is None]
            stuck = None
            if readable and self.abandoned.begin(share, 0.0):
                try:
                    for _ in range(2):  # an idle child may have ended: start another one
                        answers = []
                        with contextlib.suppress(EOFError, BrokenPipeError):
                            self._ask(readable, answers)
                            break
                        stuck = self._end_child(KILL_SECONDS)
                except TimeoutError:
                    stuck = self._end_child(0.0)
                    answers.append(errno.ETIMEDOUT)
                except OSError:  # no child could start
                    stuck = self._end_child(0.0)
                finally:
                    self.abandoned.end(share, readable[max(0, len(answers) - 1)].path, stuck)
        by_file = dict(zip(map(id, readable), answers, strict=False))
        return [by_file.get(id(file), errno.EBUSY) for file in files]

    def _end_child(self, seconds: float) -> Child | None:
        """End the child. Return it if it still exists after `seconds`, else None."""
        child, self._child = self._child, None
        return None if child is None or child.end(seconds) else child

    def _ask(self, files: Sequence[FilePlaces], answers: list[list[bytes] | int]) -> None:
        """Ask the child, and append its answer for each file: the pieces, or the errno of open(2).

        Raises EOFError or BrokenPipeError if the child has ended, other OSErrors if it does not respond.
        """
        end = time.monotonic() + DEADLINE_SECONDS
        if self._child is None or self._child.wait() is not None:
            end += STARTUP_SECONDS
            self._end_child(0.0)
            command = [sys.executable, "-I", "-S", str(CHILD), str(self._idle_seconds)]
            self._child = Child(command, environ=os.environ, has_input=True, errors=None, own_session=True)
        question = marshal.dumps([(str(path), places, start_ticks) for path, places, start_ticks in files])
        self._child.write(len(question).to_bytes(4, sys.byteorder) + question, end)
        answer = bytearray()
        for file in files:
            head = struct.Struct(f"=i{len(file.places)}I")
            _take(self._child, answer, head.size, end)
            number, *lengths = head.unpack_from(answer)
            _take(self._child, answer, head.size + sum(lengths), end)
            ends = list(itertools.accumulate(lengths, initial=head.size))
            answers.append(int(number) or [bytes(answer[first:last]) for first, last in itertools.pairwise(ends)])
            del answer[: ends[-1]]


def _take(child: Child, taken: bytearray, count: int, end: float) -> None:
    """Read from the child until `taken` has `count` bytes. Raises EOFError if the child has ended.

    Raises TimeoutError at `end` (monotonic clock), or later if the child waits for a CPU.
    """
    while len(taken) < count:
        part, _ = child.read(end, STARVATION)
        if not part:
            raise EOFError
        taken += part


SHARED = MemoryReader()


def reader(path: Path, seconds: float, share: str = "") -> Read:
    """Return a function that reads places of a file of /proc/PID for about `seconds` from now.

    `share` is the user or pod that a child counts for. The function raises UnreadableError if the file cannot be
    opened, does not respond, or the time is over.
    """
    end = time.monotonic() + seconds

    def read(places: Sequence[Place]) -> Sequence[bytes]:
        if time.monotonic() > end:
            raise UnreadableError("NoAnswer", f"reading took longer than {seconds:g} s")
        answer = SHARED.read_pieces(path, places, share)
        if isinstance(answer, int):
            raise _refused(answer, path)
        return answer

    return read


def _refused(number: int, path: Path) -> UnreadableError:
    """Convert an errno of open(2). EBUSY and ETIMEDOUT come from `read_files`."""
    if number in (errno.EBUSY, errno.ETIMEDOUT):
        return UnreadableError("NoAnswer", f"{path} does not respond")
    fault = pseudo_files.fault_of(OSError(number, os.strerror(number)), str(path), str(path))
    return (
        UnreadableError(fault.reason, fault.detail)
        if fault
        else UnreadableError("ProcessGone", "the process has ended")
    )
