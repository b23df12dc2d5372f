"""Children that read what may never answer: bounded in time, memory and output, ended by SIGKILL or left to the kernel.

A file system, a driver or a lock that gives no answer holds its reader in the kernel (state D), and not even SIGKILL
ends that. A thread of ours must never wait so: it would keep the daemon, its ports and its lock. A child that SIGKILL
does not end is abandoned: counted, given no successor for the same target, and reaped once the kernel lets it go.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.process import procfs

MOST_ABANDONED = 32
MOST_ABANDONED_OF_SHARE = 8
"""Of one user or pod: any can mount a file system that does not answer, and must not use up what all share."""

MOST_PRINTED_BYTES = 16 << 20
MOST_MEMORY_BYTES = 4 << 30  # RLIMIT_DATA of a child that answers once
KILL_SECONDS = 1.0
STUCK_REASONS = frozenset({"DumperStuck", "TooManyDumpersStuck"})
"""Of faults that say: the child cannot be ended. It waits for the file system under the program that it was to read."""

_STOP_POLL_SECONDS = 0.2
_STARVED_POLL_SECONDS = 0.1


class StoppedError(Exception):
    """The caller was asked to stop while it read from a child."""


class Starvation(NamedTuple):
    """How much longer a child may take that waits for a core: then it does not wait for what it reads.

    It is one that is runnable, or was within the last `most_asleep` looks (0.1 s apart), and has used less CPU.
    """

    seconds: float = 0.0
    cpu_seconds: float = math.inf
    most_asleep: int = 0


_NOT_AWAITED = Starvation()


class Child:
    """A child process and our ends of its pipes, for one thread; `kill` may be called by any.

    It runs in `/`, so that it keeps no mount busy, and inherits no descriptor but `pass_fds`. Of our environment it is
    told PATH alone, unless `environ` is given. One with its own session takes no Ctrl-C that is meant for us, and is
    killed together with what it has started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        is_asked: bool = False,
        errors: int | None = subprocess.DEVNULL,
        own_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it; `is_asked`: by `write`. `errors` as `stderr` of Popen. Raises OSError where it cannot start."""
        program = os.path.abspath(command[0]) if "/" in command[0] else command[0]  # noqa: PTH100 - strings in and out
        self._process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",
            env={"PATH": os.environ.get("PATH", ""), "RUST_BACKTRACE": "0"} if environ is None else environ,
            start_new_session=own_session,
            pass_fds=pass_fds,
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
        """Pass a question on. Raises TimeoutError where it is not taken until `end`, BrokenPipeError if never."""
        assert self._process.stdin is not None
        poll, descriptor = select.poll(), self._process.stdin.fileno()
        poll.register(descriptor, select.POLLOUT)
        while question:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                question = question[os.write(descriptor, question) :]

    def close_input(self) -> None:
        """Tell it that no more questions come."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def read(
        self, end: float, starvation: Starvation = _NOT_AWAITED, stop: threading.Event | None = None
    ) -> tuple[bytes, bytes]:
        """The next parts of its output and of its errors, if those are piped; both empty once it has closed them.

        Raises TimeoutError at `end`, later while it is starved; StoppedError once `stop` is set.
        """
        looks, asleep = 0, 0
        while self._open:
            if stop is not None and stop.is_set():
                raise StoppedError
            left = end - time.monotonic()
            if left < -starvation.seconds - KILL_SECONDS:  # one that prints a byte now and then
                raise TimeoutError
            pause = min(left, _STOP_POLL_SECONDS) if left > 0 else _STARVED_POLL_SECONDS * (looks > 0)
            ready = [descriptor for descriptor, _ in self._poll.poll(pause * 1000)]
            parts = self._take(ready)
            if any(parts):
                return parts
            if not ready and left <= 0:
                looks, stat = looks + 1, procfs.read_stat(f"{procfs.PROC}/{self.pid}")
                asleep = 0 if stat is not None and stat.state == "R" else asleep + 1
                used = math.inf if stat is None else stat.cpu_ticks / procfs.TICKS_PER_SECOND
                if asleep > starvation.most_asleep or used > starvation.cpu_seconds or -left >= starvation.seconds:
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
        """Allow it so much data, unless its limit is lower already; see RLIMIT_DATA of getrlimit(2)."""
        with contextlib.suppress(OSError):
            limits = resource.prlimit(self.pid, resource.RLIMIT_DATA)
            soft, hard = (most_bytes if one == resource.RLIM_INFINITY else min(one, most_bytes) for one in limits)
            resource.prlimit(self.pid, resource.RLIMIT_DATA, (soft, hard))

    def kill(self) -> None:
        """Send SIGKILL; one that is blocked in the kernel ignores it for now."""
        if not self._own_session:
            self._process.kill()
        elif self._process.returncode is None:  # until it is reaped, nobody else has its pid, which names its group
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 0.0) -> int | None:
        """Its exit status, None while it still exists."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self, seconds: float) -> bool:
        """Kill it if it has not ended, wait for so long at most, close our ends; false while the kernel keeps it."""
        if self._process.returncode is None:
            self.kill()
        is_ended = self.wait(seconds) is not None
        for pipe in self._pipes:
            pipe.close()
        return is_ended


class _Abandoned(NamedTuple):
    child: Child
    share: str
    targets: frozenset[Hashable]


class AbandonedChildren:
    """The children that hang in the kernel, by what they were started for (a process, paths), and those that run."""

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._abandoned: list[_Abandoned] = []
        self._running: Counter[str] = Counter()

    def begin(self, share: str, patience_seconds: float) -> bool:
        """Take a place for a child that is started for a process of this share; false when too many hang.

        Waits for a place, at most so long, while others that were started a moment ago may still end well.
        """
        with self._freed:
            self._freed.wait_for(lambda: self._has_room(share) or self._is_full(share), patience_seconds)
            if not self._has_room(share):
                return False
            self._running[share] += 1
            return True

    def end(self, share: str, target: Hashable, stuck: Child | None) -> None:
        """Give the place back; `stuck` is the child that could not be ended, and keeps it."""
        with self._freed:
            self._running[share] -= 1
            if stuck is not None:
                self._abandoned.append(_Abandoned(stuck, share, frozenset((target,))))
            self._freed.notify_all()

    def add(self, stuck: Child, targets: frozenset[Hashable]) -> None:
        """Take in a child that had no place."""
        with self._freed:
            self._abandoned.append(_Abandoned(stuck, "", targets))

    def targets(self) -> frozenset[Hashable]:
        """What children hang for now."""
        with self._freed:
            return frozenset().union(*(one.targets for one in self._reap()))

    def pid_for(self, target: Hashable) -> int | None:
        """The pid of a child that still hangs for this target."""
        with self._freed:
            return next((one.child.pid for one in self._reap() if target in one.targets), None)

    def count(self) -> int:
        """How many hang now."""
        with self._freed:
            return len(self._reap())

    def _reap(self) -> list[_Abandoned]:
        self._abandoned = [one for one in self._abandoned if one.child.wait() is None]
        return self._abandoned

    def _hanging(self, share: str) -> tuple[int, int]:
        hanging = self._reap()
        return len(hanging), sum(one.share == share for one in hanging)

    def _is_full(self, share: str) -> bool:
        everybody, own = self._hanging(share)
        return everybody >= MOST_ABANDONED or own >= MOST_ABANDONED_OF_SHARE

    def _has_room(self, share: str) -> bool:
        everybody, own = self._hanging(share)
        running = sum(self._running.values())
        return everybody + running < MOST_ABANDONED and own + self._running[share] < MOST_ABANDONED_OF_SHARE


class Printed(NamedTuple):
    """What a child that ended printed, and its exit status."""

    code: int
    out: bytes
    err: bytes


class Runner:
    """Runs children of one kind, each for one answer, and knows those that it had to abandon.

    `tool` and `answer` are words for faults. `keeps_part`: what came until the deadline or the bound is an answer, too,
    its exit status tells nothing, its errors are part of its output, and all that it has started ends with it. Kinds
    that hang for the same cause share `abandoned`. `waits_for_place`: for a place among many that run, up to the
    deadline. `bounds_memory` is false for what maps the libraries of its target privately, with CUDA many gigabytes.
    """

    def __init__(
        self,
        tool: str,
        *,
        answer: str = "answer",
        abandoned: AbandonedChildren | None = None,
        starvation: Starvation = _NOT_AWAITED,
        keeps_part: bool = False,
        waits_for_place: bool = True,
        bounds_memory: bool = True,
        most_bytes: int = MOST_PRINTED_BYTES,
    ) -> None:
        self.abandoned = abandoned or AbandonedChildren()
        self.most_bytes = most_bytes
        self._tool, self._answer, self._starvation = tool, answer, starvation
        self._keeps_part, self._waits_for_place, self._bounds_memory = keeps_part, waits_for_place, bounds_memory

    def refusal(self, target: ProcessId) -> Fault | None:
        """Why none is started for a process: one still hangs there."""
        stuck = self.abandoned.pid_for(target)
        return None if stuck is None else self._stuck(f"pid {target.pid}", stuck)

    def run(
        self,
        command: Sequence[str],
        target: ProcessId,
        *,
        share: str,
        deadline_seconds: float,
        stop: threading.Event | None = None,
        question: bytes | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Printed | Fault:
        """Run `command` once for a process of this share, with `question` on its standard input.

        It is ended at the deadline, or once `stop` is set, and waited for briefly, never for ever.
        """
        subject = f"pid {target.pid}"
        if not self.abandoned.begin(share, deadline_seconds if self._waits_for_place else 0.0):
            detail = f"too many {self._tool}s hang in the kernel and cannot be ended: no further one is started"
            return Fault(subject=subject, reason="TooManyDumpersStuck", detail=f"{detail} until some end")
        stuck: Child | None = None
        try:
            child = Child(
                command,
                is_asked=question is not None,
                errors=subprocess.STDOUT if self._keeps_part else subprocess.PIPE,
                own_session=self._keeps_part,
                pass_fds=pass_fds,
            )
            try:
                if self._bounds_memory:
                    child.bound_memory(MOST_MEMORY_BYTES)
                answer = self._collect(child, question, subject, deadline_seconds, stop)
            finally:
                stuck = None if child.end(KILL_SECONDS) else child
            return answer if stuck is None or isinstance(answer, Printed) else self._stuck(subject, stuck.pid)
        except OSError as error:
            return Fault(subject=subject, reason="CannotStart", detail=f"{command[0]}: {error.strerror}")
        finally:
            self.abandoned.end(share, target, stuck)

    def _collect(
        self, child: Child, question: bytes | None, subject: str, deadline_seconds: float, stop: threading.Event | None
    ) -> Printed | Fault:
        out, err = bytearray(), bytearray()
        end = time.monotonic() + deadline_seconds
        fault = Fault(
            subject=subject,
            reason="Timeout",
            detail=f"no {self._answer} within {deadline_seconds:g} s",
            about="target",
        )
        try:
            if question is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.write(question, end)
                child.close_input()
            while len(out) + len(err) <= self.most_bytes and any(parts := child.read(end, self._starvation, stop)):
                out += parts[0]
                err += parts[1]
        except TimeoutError:
            if not self._keeps_part:
                return fault
        except StoppedError:
            return Fault(subject=subject, reason="Interrupted", detail="hangwatch was asked to stop")
        if self._keeps_part:
            return Printed(0, bytes(out[: self.most_bytes]), b"")
        if len(out) + len(err) > self.most_bytes:
            detail = f"more than {self.most_bytes >> 20} MB of {self._answer}"
            return Fault(subject=subject, reason="TooLarge", detail=detail)
        code = child.wait(max(0.0, end - time.monotonic()) + KILL_SECONDS)
        if code is None:
            return Fault(subject=subject, reason="Timeout", detail=f"{self._tool} printed its answer and did not end")
        return Printed(code, bytes(out), bytes(err))

    def _stuck(self, subject: str, pid: int) -> Fault:
        return Fault(
            subject=subject,
            reason="DumperStuck",
            detail=f"{self._tool} (pid {pid}) hangs in the kernel while it reads this process, and cannot be ended",
            remedy="mend the file system that its Python lies on: what serves it, its network; `dmesg`",
        )
