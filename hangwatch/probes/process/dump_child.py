"""A child that reads the stacks of one process: what it prints is bounded, it is ended at its deadline or left behind.

py-spy and pystack open the files that a process has mapped. Where their file system gives no answer not even SIGKILL
ends them: such a child is left to the kernel, and both kinds share the same places.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.probes.abandoned_children import LeftBehind

MAX_DUMP_BYTES = 16 << 20

STUCK_REASONS = frozenset({"DumperStuck", "TooManyDumpersStuck"})
"""Of faults that say: the child cannot be ended. It waits for the file system under the program that it was to read."""

_STOP_POLL_SECONDS = 0.2
_KILL_SECONDS = 1.0
_LEFT_BEHIND = LeftBehind()


class Printed(NamedTuple):
    """What a child that ended printed, and its exit status."""

    code: int
    out: bytes
    err: bytes


def left_behind() -> int:
    """How many hang in the kernel now and could not be ended."""
    return _LEFT_BEHIND.count()


def refusal(tool: str, target: ProcessId) -> Fault | None:
    """Why none is started for a process: one still hangs there."""
    stuck = _LEFT_BEHIND.of(target)
    return None if stuck is None else _stuck(tool, f"pid {target.pid}", stuck)


def run(
    tool: str,
    command: Sequence[str],
    target: ProcessId,
    *,
    share: str,
    deadline_seconds: float,
    stop: threading.Event | None = None,
    places: LeftBehind = _LEFT_BEHIND,
) -> Printed | Fault:
    """Run `command` once for a process of this share. It is told nothing of our environment but PATH.

    It is ended by its own pid at the deadline, or once `stop` is set, and waited for briefly, never for ever. Children
    that read something else than stacks have `places` of their own.
    """
    subject = f"pid {target.pid}"
    if not places.begin(share, deadline_seconds):
        detail = f"too many {tool}s hang in the kernel and cannot be ended: no further one is started until some end"
        return Fault(subject=subject, reason="TooManyDumpersStuck", detail=detail)
    left: subprocess.Popen[bytes] | None = None
    try:
        child = _start(command, subject)
        if isinstance(child, Fault):
            return child
        try:
            answer = _answer(
                tool, child, subject, deadline_seconds, stop, "stacks" if places is _LEFT_BEHIND else "answer"
            )
        finally:
            left = None if _end(child) else child
        return answer if left is None or isinstance(answer, Printed) else _stuck(tool, subject, left.pid)
    finally:
        places.end(share, target, left)


def _stuck(tool: str, subject: str, pid: int) -> Fault:
    return Fault(
        subject=subject,
        reason="DumperStuck",
        detail=f"{tool} (pid {pid}) hangs in the kernel while it reads this process, and cannot be ended",
        remedy="mend the file system that its Python lies on: what serves it, its network; `dmesg`",
    )


def _start(command: Sequence[str], subject: str) -> subprocess.Popen[bytes] | Fault:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", ""), "RUST_BACKTRACE": "0"},
        )
    except OSError as error:
        return Fault(subject=subject, reason="CannotStart", detail=f"{command[0]}: {error.strerror}")


def _answer(
    tool: str,
    child: subprocess.Popen[bytes],
    subject: str,
    deadline_seconds: float,
    stop: threading.Event | None,
    what: str,
) -> Printed | Fault:
    assert child.stdout is not None and child.stderr is not None
    end = time.monotonic() + deadline_seconds
    texts: dict[int, bytearray] = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    poll = select.poll()
    for descriptor in texts:
        poll.register(descriptor, select.POLLIN)
    still_open = set(texts)
    while still_open:
        left = end - time.monotonic()
        if left <= 0:
            detail = f"no {what} within {deadline_seconds:g} s"
            return Fault(subject=subject, reason="Timeout", detail=detail, about="target")
        if stop is not None and stop.is_set():
            return Fault(subject=subject, reason="Interrupted", detail="hangwatch was asked to stop")
        for descriptor, _ in poll.poll(min(left, _STOP_POLL_SECONDS) * 1000):
            part = os.read(descriptor, 1 << 16)
            if not part:
                poll.unregister(descriptor)
                still_open.discard(descriptor)
            texts[descriptor] += part
        if sum(map(len, texts.values())) > MAX_DUMP_BYTES:
            return Fault(subject=subject, reason="TooLarge", detail=f"more than {MAX_DUMP_BYTES >> 20} MB of stacks")
    try:
        code = child.wait(timeout=max(0.0, end - time.monotonic()) + _KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return Fault(subject=subject, reason="Timeout", detail=f"{tool} printed its answer and did not end")
    return Printed(code, *(bytes(text) for text in texts.values()))


def _end(child: subprocess.Popen[bytes]) -> bool:
    """End a child that still runs; false when the kernel does not let it go."""
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_KILL_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    return child.returncode is not None
