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
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CHILD = Path(__file__).with_name("process_memory_child.py")
STARTUP_SECONDS = 2.0
DEADLINE_SECONDS = 0.5
STARVED_SECONDS = 5.0  # a child that waits for a core does not wait for a page
MOST_LEFT_BEHIND = 8
MOST_BYTES = 1 << 15  # of one piece, where nothing else is said
MOST_PIECES = 1024  # of one question, which so fits into a pipe: to ask never waits


class MemoryReader:
    """One child that reads, and those that were left behind, by the file that they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._left_behind: dict[subprocess.Popen[bytes], str] = {}

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
            self._left_behind = {child: place for child, place in self._left_behind.items() if child.poll() is None}
            if str(memory) in self._left_behind.values() or len(self._left_behind) >= MOST_LEFT_BEHIND:
                return errno.EBUSY
            for _ in range(2):  # one that had nothing to do for long has ended
                with contextlib.suppress(EOFError, BrokenPipeError):
                    return self._ask(question, len(places), str(memory))
                self._child = None
            return errno.EBUSY

    def left_behind(self) -> int:
        """How many children wait for a process now."""
        with self._lock:
            return sum(child.poll() is None for child in self._left_behind)

    def _ask(self, question: bytes, count: int, place: str) -> list[bytes] | int:
        """Raises EOFError or BrokenPipeError where the child has ended."""
        end = time.monotonic() + DEADLINE_SECONDS
        if self._child is None or self._child.poll() is not None:
            end += STARTUP_SECONDS
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(CHILD)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is meant for who asks
                )
            except OSError:
                return errno.EBUSY
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(question)
        child.stdin.flush()
        try:
            output, head = child.stdout.fileno(), struct.Struct(f"=i{count}I")
            number, *lengths = head.unpack(_take(output, head.size, end, child.pid))
            raw = _take(output, sum(lengths), end, child.pid)
        except TimeoutError:
            child.kill()
            self._left_behind[child] = place
            self._child = None
            return errno.EBUSY
        if number:
            return int(number)
        ends = list(itertools.accumulate(lengths, initial=0))
        return [raw[first:last] for first, last in itertools.pairwise(ends)]


def _take(descriptor: int, count: int, end: float, writer: int) -> bytes:
    """So many bytes. Raises TimeoutError at `end`, later where the writer has no core; EOFError where no more come."""
    taken = bytearray()
    while len(taken) < count:
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            if time.monotonic() > end + STARVED_SECONDS or not _is_runnable(writer):
                raise TimeoutError
            select.select([descriptor], [], [], 0.05)
            continue
        part = os.read(descriptor, count - len(taken))
        if not part:
            raise EOFError
        taken += part
    return bytes(taken)


def _is_runnable(pid: int) -> bool:
    """By its state in proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"R"]


SHARED = MemoryReader()
