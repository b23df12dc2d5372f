"""Memory of other processes, read by a child that may be left behind.

A page may lie in a file of a file system that its owner serves himself (FUSE) and that gives no answer; who reads it
waits in the kernel, and not even SIGKILL ends that before the file system goes. A thread that waits so would keep a
daemon, its ports and its lock that is told to end. So a child reads; one that does not answer is killed and left to the
kernel, its process is not asked again until it is gone, and another child goes on: so many at most.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hangwatch.probes.child import KILL_SECONDS, AbandonedChildren, Child, Starvation

CHILD = Path(__file__).with_name("process_memory_child.py")
STARTUP_SECONDS = 2.0
DEADLINE_SECONDS = 0.5
STARVATION = Starvation(5.0)  # a child that waits for a core does not wait for a page
MOST_BYTES = 1 << 15  # of one piece, where nothing else is said
MOST_PIECES = 1024  # of one question, which so fits into a pipe: to ask never waits


class MemoryReader:
    """One child that reads, and those that were left behind, by the file that they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._abandoned = AbandonedChildren()

    def read(self, memory: Path, address: int, count: int) -> bytes:
        """So many bytes of a /proc/PID/mem, or none: not permitted, not there, or no answer within half a second."""
        answer = self.read_pieces(memory, [(address, min(count, MOST_BYTES))])
        return answer[0] if isinstance(answer, tuple) else b""

    def read_pieces(self, memory: Path, places: Sequence[tuple[int, int]]) -> tuple[bytes, ...] | int:
        """What stands at each (address, bytes) of a file of /proc/PID, as far as it can be read.

        Half a second for each thousand of them. In place of an answer the error number of open(2); EBUSY where there
        was none in time, or too many wait already.
        """
        pieces: list[bytes] = []
        for first in range(0, len(places), MOST_PIECES):
            some = self._read(memory, places[first : first + MOST_PIECES])
            if isinstance(some, int):
                return some
            pieces += some
        return tuple(pieces)

    def _read(self, memory: Path, places: Sequence[tuple[int, int]]) -> list[bytes] | int:
        question = json.dumps([str(memory), places]).encode() + b"\n"
        with self._lock:
            if self._abandoned.pid_for(memory) is not None or not self._abandoned.begin("", 0.0):
                return errno.EBUSY
            stuck = None
            try:
                for _ in range(2):  # one that had nothing to do for long has ended
                    with contextlib.suppress(EOFError, BrokenPipeError):
                        return self._ask(question, len(places))
                    stuck = self._end_child(KILL_SECONDS)
            except OSError:  # no child, or no answer
                stuck = self._end_child(0.0)
            finally:
                self._abandoned.end("", memory, stuck)
            return errno.EBUSY

    def left_behind(self) -> int:
        """How many children wait for a process now."""
        return self._abandoned.count()

    def _end_child(self, seconds: float) -> Child | None:
        """End the child; it is returned where it cannot be ended so soon."""
        child, self._child = self._child, None
        return None if child is None or child.end(seconds) else child

    def _ask(self, question: bytes, count: int) -> list[bytes] | int:
        """Raises EOFError or BrokenPipeError where the child has ended, other OSErrors where there is no answer."""
        end = time.monotonic() + DEADLINE_SECONDS
        if self._child is None or self._child.wait() is not None:
            end += STARTUP_SECONDS
            self._end_child(0.0)
            command = [sys.executable, "-I", "-S", str(CHILD)]
            self._child = Child(command, environ=os.environ, is_asked=True, errors=None, own_session=True)
        self._child.write(question, end)
        head, answer = struct.Struct(f"=i{count}I"), bytearray()
        _take(self._child, answer, head.size, end)
        number, *lengths = head.unpack_from(answer)
        _take(self._child, answer, head.size + sum(lengths), end)
        if number:
            return int(number)
        ends = list(itertools.accumulate(lengths, initial=head.size))
        return [bytes(answer[first:last]) for first, last in itertools.pairwise(ends)]


def _take(child: Child, taken: bytearray, count: int, end: float) -> None:
    """Take so many bytes in all. Raises TimeoutError at `end`, later where the child has no core; EOFError."""
    while len(taken) < count:
        part, _ = child.read(end, STARVATION)
        if not part:
            raise EOFError
        taken += part


SHARED = MemoryReader()
