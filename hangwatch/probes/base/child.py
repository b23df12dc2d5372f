"""A child process that may block for ever. Its time and memory are limited.

A file system, driver or lock that does not respond blocks its reader in the kernel (state D). Not even SIGKILL ends
such a process. A thread of the daemon must never block like this: it would keep the daemon, its ports and its lock
alive.
"""

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.probes.base import procfs

KILL_SECONDS = 1.0
STARTUP_SECONDS = 2.0  # of a child with Python, in addition to its deadline
_STOP_POLL_SECONDS = 0.2
_STARVED_POLL_SECONDS = 0.1


class StoppedError(Exception):
    """The error of a read from a child that ended early, because the daemon is stopping."""


class Starvation(NamedTuple):
    """Extra time for a child that waits for a CPU, at most `seconds`.

    A child gets the extra time while two conditions hold. It has used less CPU time than `cpu_seconds`, and at most
    `most_asleep` successive polls (0.1 s apart) saw it asleep. A child that sleeps longer waits for what it reads, not
    for a CPU.
    """

    seconds: float = 0.0
    cpu_seconds: float = math.inf
    most_asleep: int = 0


NO_EXTRA_TIME = Starvation()


class Child:
    """A child process and our ends of its pipes.

    One thread uses it; any thread may call `kill`. The child runs in `/`, so that it keeps no mount busy. Its
    environment holds only PATH and RUST_BACKTRACE, unless `environ` is given. With `own_session` it does not receive
    our Ctrl-C, and `kill` also ends its children.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        has_input: bool = False,
        errors: int | None = subprocess.DEVNULL,
        own_session: bool = False,
    ) -> None:
        """Start the child. Raises OSError.

        With `has_input` the child has a stdin, to which `write` sends. `errors` is the argument `stderr` of Popen.
        """
        program = os.path.abspath(command[0]) if "/" in command[0] else command[0]  # noqa: PTH100 - strings in and out
        self._process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",
            env={"PATH": os.environ.get("PATH", ""), "RUST_BACKTRACE": "0"} if environ is None else environ,
            start_new_session=own_session,
        )
        self.pid = self._process.pid
        self._own_session = own_session
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._poll, self._open = select.poll(), set[int]()
        for pipe in pipes[1:]:
            if pipe is not None:
                self._poll.register(pipe, select.POLLIN)
                self._open.add(pipe.fileno())
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def write(self, question: bytes, end: float) -> None:
        """Write `question` to the child's stdin.

        Raises TimeoutError if the child has not read all of it by `end` (monotonic clock), BrokenPipeError if it closed
        its stdin.
        """
        assert self._process.stdin is not None
        poll, descriptor = select.poll(), self._process.stdin.fileno()
        poll.register(descriptor, select.POLLOUT)
        while question:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                question = question[os.write(descriptor, question) :]

    def close_input(self) -> None:
        """Close the child's stdin."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def read(
        self, end: float, starvation: Starvation = NO_EXTRA_TIME, stop: threading.Event | None = None
    ) -> tuple[bytes, bytes]:
        """Return the next parts of the child's stdout and stderr; both are empty once the child has closed them.

        Raises TimeoutError at `end` (monotonic clock), or later if the child waits for a CPU, see `Starvation`. Raises
        StoppedError once `stop` is set.
        """
        polls, asleep = 0, 0
        longest_pause = math.inf if stop is None else _STOP_POLL_SECONDS
        while self._open:
            if stop is not None and stop.is_set():
                raise StoppedError
            remaining = end - time.monotonic()
            if remaining < -starvation.seconds - KILL_SECONDS:  # a child that keeps printing single bytes
                raise TimeoutError
            pause = min(remaining, longest_pause) if remaining > 0 else _STARVED_POLL_SECONDS * (polls > 0)
            ready = [descriptor for descriptor, _ in self._poll.poll(pause * 1000)]
            parts = self._take(ready)
            if any(parts):
                return parts
            if not ready and remaining <= 0:
                polls, stat = polls + 1, procfs.read_stat(f"{procfs.PROC}/{self.pid}")
                asleep = 0 if stat is not None and stat.state == "R" else asleep + 1
                used = math.inf if stat is None else stat.cpu_ticks / procfs.TICKS_PER_SECOND
                if asleep > starvation.most_asleep or used > starvation.cpu_seconds or -remaining >= starvation.seconds:
                    raise TimeoutError
        return b"", b""

    def _take(self, ready: Sequence[int]) -> tuple[bytes, bytes]:
        assert self._process.stdout is not None
        printed, errors = b"", b""
        for descriptor in ready:
            part = os.read(descriptor, 1 << 16)
            if not part:
                self._poll.unregister(descriptor)
                self._open.discard(descriptor)
            elif descriptor == self._process.stdout.fileno():
                printed = part
            else:
                errors = part
        return printed, errors

    def bound_memory(self, most_bytes: int) -> None:
        """Limit the child's data to `most_bytes`, unless its limit is already lower (RLIMIT_DATA of getrlimit(2)).

        If the node has no memory left, the kernel ends the child first.
        """
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("1000")
            limits = resource.prlimit(self.pid, resource.RLIMIT_DATA)
            soft, hard = (most_bytes if limit == resource.RLIM_INFINITY else min(limit, most_bytes) for limit in limits)
            resource.prlimit(self.pid, resource.RLIMIT_DATA, (soft, hard))

    def kill(self) -> None:
        """Send SIGKILL. A child that is blocked in the kernel ends only when the kernel releases it."""
        if not self._own_session:
            self._process.kill()
        elif self._process.returncode is None:  # until the child is reaped, its pid (and group id) is not reused
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 0.0) -> int | None:
        """Return the child's exit status; None if it still exists after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self, seconds: float) -> bool:
        """End the child and close our ends of its pipes.

        Kill it if it has not ended, and wait at most `seconds`. Return False if it still exists.
        """
        if self._process.returncode is None:
            self.kill()
        is_ended = self.wait(seconds) is not None
        for pipe in self._pipes:
            pipe.close()
        return is_ended


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGSEGV`; "" if no signal with a name has this number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def describe_signal(code: int) -> str:
    """Return "ended by signal 11 (SIGSEGV)" for the negative exit status of a child that a signal has ended."""
    return f"ended by signal {-code} ({signal_name(-code) or 'unknown'})"
