"""Runners of child processes: each child gives one answer within its limits of time, memory and output.

A child that survives SIGKILL is abandoned. It is counted, and no new child starts for the same target. It is reaped
once the kernel releases it.
"""

import contextlib
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.base.child import KILL_SECONDS, NO_EXTRA_TIME, Child, Starvation, StoppedError

MOST_ABANDONED = 32
MOST_ABANDONED_OF_SHARE = 8
"""Limit of abandoned children per user or pod: each can mount a silent file system and use up the total limit."""

MOST_PRINTED_BYTES = 16 << 20
MOST_MEMORY_BYTES = 4 << 30  # RLIMIT_DATA of a child of `Runner`
STUCK_REASONS = frozenset({"DumperStuck", "TooManyDumpersStuck"})
"""Reasons of faults for a child that cannot be killed. It waits for the file system of the program that it reads."""


class _Abandoned(NamedTuple):
    child: Child
    share: str
    targets: frozenset[Hashable]


class AbandonedChildren:
    """Limits for running and abandoned children, in total and per user or pod.

    Abandoned children are kept with their targets: processes or paths. `share` is the user or pod that a child counts
    for.
    """

    def __init__(self) -> None:
        self._freed = threading.Condition()
        self._abandoned: list[_Abandoned] = []
        self._running: Counter[str] = Counter()

    def begin(self, share: str, patience_seconds: float) -> bool:
        """Reserve a place for a child of this user or pod. Return False if no place becomes free in time.

        Wait at most `patience_seconds` for a running child to end. Do not wait if abandoned children hold all places.
        """
        with self._freed:
            self._freed.wait_for(
                lambda: self._has_room(share, self._running) or not self._has_room(share, Counter()), patience_seconds
            )
            if not self._has_room(share, self._running):
                return False
            self._running[share] += 1
            return True

    def end(self, share: str, target: Hashable, stuck: Child | None) -> None:
        """Release the place of a child. `stuck` is the child if it could not be killed: it is kept as abandoned."""
        with self._freed:
            self._running[share] -= 1
            if stuck is not None:
                self._abandoned.append(_Abandoned(stuck, share, frozenset((target,))))
            self._freed.notify_all()

    def add(self, stuck: Child, targets: frozenset[Hashable]) -> None:
        """Add an abandoned child for which no place was reserved."""
        with self._freed:
            self._abandoned.append(_Abandoned(stuck, "", targets))

    def targets(self) -> frozenset[Hashable]:
        """Return the targets for which abandoned children still hang."""
        with self._freed:
            return frozenset().union(*(abandoned.targets for abandoned in self._reap()))

    def pid_for(self, target: Hashable) -> int | None:
        """Return the pid of an abandoned child for this target; None if there is no such child."""
        with self._freed:
            return next((abandoned.child.pid for abandoned in self._reap() if target in abandoned.targets), None)

    def count(self) -> int:
        """Return the number of abandoned children that still hang."""
        with self._freed:
            return len(self._reap())

    def _reap(self) -> list[_Abandoned]:
        self._abandoned = [abandoned for abandoned in self._abandoned if abandoned.child.wait() is None]
        return self._abandoned

    def _has_room(self, share: str, running: Counter[str]) -> bool:
        """True if both limits allow another child: the total limit, and the limit of this user or pod.

        Abandoned children and the `running` children count.
        """
        hanging = self._reap()
        in_total = len(hanging) + sum(running.values())
        in_share = sum(abandoned.share == share for abandoned in hanging) + running[share]
        return in_total < MOST_ABANDONED and in_share < MOST_ABANDONED_OF_SHARE


class Printed(NamedTuple):
    """The exit status and output of a child that ended."""

    code: int
    out: bytes
    err: bytes


class Runner:
    """A starter of children of one kind. Each child gives one answer.

    * `tool` and `answer` name the program and its output in faults.
    * `abandoned` holds the abandoned children. Kinds of children that hang for the same cause share it.
    * `keeps_part`: the output until the deadline or size limit is an answer, too. The exit status is ignored, stderr is
      part of the output, and all processes of the child's group are killed.
    * `most_memory_bytes` limits the data of each child (RLIMIT_DATA). A job owns what the child reads, and could make
      it need any amount of memory.
    """

    def __init__(
        self,
        tool: str,
        *,
        answer: str = "answer",
        abandoned: AbandonedChildren | None = None,
        starvation: Starvation = NO_EXTRA_TIME,
        keeps_part: bool = False,
        most_memory_bytes: int = MOST_MEMORY_BYTES,
        most_bytes: int = MOST_PRINTED_BYTES,
    ) -> None:
        self.abandoned = abandoned or AbandonedChildren()
        self.most_bytes = most_bytes
        self._tool, self._answer, self._starvation = tool, answer, starvation
        self._keeps_part, self._most_memory_bytes = keeps_part, most_memory_bytes

    def refusal(self, target: ProcessId | None = None) -> Fault | None:
        """Return a fault if an abandoned child for this process still hangs: then no new one may start for it."""
        stuck = self.abandoned.pid_for(target)
        return None if stuck is None else self._stuck(self._subject(target), stuck)

    def _subject(self, target: ProcessId | None) -> str:
        return self._tool if target is None else f"pid {target.pid}"

    def run(
        self,
        command: Sequence[str],
        target: ProcessId | None = None,
        *,
        share: str = "",
        deadline_seconds: float,
        stop: threading.Event | None = None,
        question: bytes | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Printed | Fault:
        """Run `command` once, with `question` on its stdin. `environ` is as in `Child`.

        `target` is the process that the child reads, if any. `share` is the user or pod that the child counts for. The
        child is killed at the deadline, or once `stop` is set. Its end is awaited for at most 1 s.
        """
        subject = self._subject(target)
        if not self.abandoned.begin(share, deadline_seconds):
            detail = (
                f"too many children ({self._tool}) hang in the kernel and cannot be killed; no further child is started"
            )
            remedy = "repair the file system that they wait for; see `dmesg`"
            return Fault(subject=subject, reason="TooManyDumpersStuck", detail=detail, remedy=remedy)
        stuck: Child | None = None
        try:
            child = Child(
                command,
                environ=environ,
                has_input=question is not None,
                errors=subprocess.STDOUT if self._keeps_part else subprocess.PIPE,
                own_session=self._keeps_part,
            )
            try:
                child.bound_memory(self._most_memory_bytes)
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
            detail=f"{self._tool} (pid {pid}) hangs in the kernel while it reads this process, and cannot be killed",
            remedy="repair the file system that holds its Python (its server or network); see `dmesg`",
        )
