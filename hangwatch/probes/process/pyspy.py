"""The stacks of one process, taken by py-spy without harm: the only place that starts py-spy.

What a dump may do depends on what the kernel says of the target. A process that runs or sleeps is read while it runs
on (`--nonblocking`), which pauses nothing and now and then fails on a busy stack; then it is paused once, for some
milliseconds, under a deadline. A process with a thread in `D` (a system call that does not return) or stopped is never
paused: the pause would not end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import NamedTuple

from hangwatch.formats import pyspy_json
from hangwatch.model import BLOCKED_STATES, ENDED_STATES, STOPPED_STATES, Fault, ProcessId, Value
from hangwatch.probes import child
from hangwatch.probes.process import procfs

BLOCKING_DEADLINE_SECONDS = 5.0
OLDEST_VERSION = (0, 4)  # older ones leave a rank that waits in the kernel stopped for ever
MOST_THREADS = 4096  # of py-spy 0.4: of a process with more Python threads, or frames in one, it says "no interpreter"

SILENT: tuple[int, ...] = ()
"""Instead of a version: `--version` did not answer. Less than every version."""

_VERSION_DEADLINE_SECONDS = 3.0
_SILENT_SECONDS = 60.0  # for so long it is not asked again
_SETTLE_SECONDS = 0.01  # a target whose tracer died runs for a moment before the stop that was meant for it holds it
_MORE_TRIES = 4
_LOCK = threading.Lock()
_VERSIONS: dict[Path, Future[tuple[int, ...] | None]] = {}
_SILENT_UNTIL: dict[Path, float] = {}
_VERSION_READER = child.Runner("py-spy")
DUMPER = child.Runner("py-spy", answer="stacks", bounds_memory=False)
_NEVER_PAUSE = BLOCKED_STATES | STOPPED_STATES | ENDED_STATES | {"I"}

STUCK_REASONS = child.STUCK_REASONS


class PyspyAnswer(Value, frozen=True):
    """One dump: the JSON that py-spy printed, or the fault in its place. Never both, never neither.

    `paused` tells that the target was paused for it, `state_after` its state once the dump was over (None: it is gone).
    """

    json: bytes | None
    fault: Fault | None
    duration_seconds: float
    paused: bool = False
    state_after: str | None = None


class DumpMode(Value, frozen=True):
    """What a dump shows, and whether it may pause its target.

    `native` adds C frames and always pauses the target (0.7 s, 340 MB); `include_locals` shows variables, secrets too:
    both only when a person asks. Without `may_pause` the target is read while it runs on and is sent no signal; there
    is no second attempt.
    """

    native: bool = False
    include_locals: bool = False
    may_pause: bool = True


def dump(
    pid: int,
    *,
    deadline_seconds: float,
    mode: DumpMode = DumpMode(),  # noqa: B008 - a frozen value
    pyspy_path: Path | None = None,
    stop: threading.Event | None = None,
    proc_root: Path = procfs.PROC,
    share: str = "",
) -> PyspyAnswer:
    """Take the stacks of `pid`.

    `deadline_seconds` bounds the first attempt, and as much again a second one. Where py-spy does not tell its version
    in time, the target is not paused.
    Returns early with the fault `Interrupted` once `stop` is set. A py-spy that SIGKILL does not end is left behind:
    `pid` is not dumped again until it has ended, nor is any other process while too many hang, of all or of its `share`
    (see `Job`; of its user where none is given): `STUCK_REASONS`.
    """
    began = time.monotonic()
    program = pyspy_path or find()
    before = procfs.read_state(pid, proc_root)
    fault = _refusal(pid, before, program)
    if fault is not None or program is None or before is None:
        return PyspyAnswer(json=None, fault=fault, duration_seconds=0.0, state_after=before and before[1])
    may_pause = mode.may_pause
    if version(program) == SILENT:  # an old one could leave what it pauses stopped; reading alone harms nothing
        may_pause = False
    options = ("--locals",) if mode.include_locals else ()
    call = _Call(program, before[0], share or f"uid {procfs.read_user_id(pid, proc_root)}", options, stop, proc_root)
    was_stopped = before[1] in STOPPED_STATES or procfs.is_stop_pending(pid, proc_root)
    paused = may_pause and mode.native and _may_pause(pid, proc_root)
    answer = _attempt(call, ("--native",) if paused else ("--nonblocking",), deadline_seconds)
    # What nothing paused needs nobody to continue it; whoever stops it meanwhile may have wanted to.
    after = _let_run_on(before[0], was_stopped or not may_pause, proc_root)
    if may_pause and isinstance(answer, Fault) and not paused and _is_passing(answer) and _may_pause(pid, proc_root):
        paused = True
        answer = _attempt(call, (), min(deadline_seconds, BLOCKING_DEADLINE_SECONDS))
        after = _let_run_on(before[0], was_stopped, proc_root)
    return PyspyAnswer(
        json=None if isinstance(answer, Fault) else answer,
        fault=answer if isinstance(answer, Fault) else None,
        duration_seconds=time.monotonic() - began,
        paused=paused,
        state_after=None if after is None else after[1],
    )


def find() -> Path | None:
    """Where py-spy lies: beside this interpreter, else on PATH; None when there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    if beside.is_file():
        return beside
    found = shutil.which("py-spy")
    return Path(found) if found else None


def left_behind() -> int:
    """How many dumpers hang in the kernel now and could not be ended."""
    return DUMPER.abandoned.count()


def version(program: Path) -> tuple[int, ...] | None:
    """The version of a py-spy, e.g. (0, 4, 3); None when it does not say. An answer is asked for once per path.

    `SILENT` where it does not answer within its deadline: then it is not asked again for a minute. All dumps of a round
    begin at once: one of them asks, and the others wait for the same answer, or for none.
    """
    with _LOCK:
        if time.monotonic() < _SILENT_UNTIL.get(program, 0.0):
            return SILENT
        is_first = program not in _VERSIONS
        asked = _VERSIONS.setdefault(program, Future())
    if is_first:
        found = None
        try:
            found = _version(program)
        finally:
            if not found:  # who comes later asks again
                with _LOCK:
                    del _VERSIONS[program]
                    if found == SILENT:
                        _SILENT_UNTIL[program] = time.monotonic() + _SILENT_SECONDS
            asked.set_result(found)
    with contextlib.suppress(FutureTimeoutError):
        return asked.result(2 * _VERSION_DEADLINE_SECONDS)
    return SILENT


def _version(program: Path) -> tuple[int, ...] | None:
    us = ProcessId(pid=os.getpid(), start_ticks=0)
    command = [str(program), "--version"]
    printed = _VERSION_READER.run(command, us, share="", deadline_seconds=_VERSION_DEADLINE_SECONDS)
    if isinstance(printed, Fault):
        return None if printed.reason == "CannotStart" else SILENT
    found = re.search(rb"py-spy (\d+)\.(\d+)(?:\.(\d+))?", printed.out)
    return None if found is None else tuple(int(part) for part in found.groups(b"0"))


class _Call(NamedTuple):
    program: Path
    target: ProcessId
    share: str
    options: tuple[str, ...]
    stop: threading.Event | None
    proc_root: Path

    @property
    def subject(self) -> str:
        return f"pid {self.target.pid}"


def _refusal(pid: int, before: tuple[ProcessId, str] | None, program: Path | None) -> Fault | None:
    """Why no dump is even tried."""
    subject = f"pid {pid}"
    if before is None or before[1] in ENDED_STATES:
        return Fault(subject=subject, reason="ProcessGone", detail="the process has ended", about="target")
    install = "install it beside hangwatch: pip install 'py-spy>=0.4.1'"
    if program is None:
        return Fault(subject=subject, reason="NoPyspy", detail="py-spy was not found", remedy=install)
    found = version(program)
    if found is None or (found != SILENT and found < OLDEST_VERSION):
        words = ".".join(str(part) for part in found) if found else "unknown"
        detail = f"{program} has version {words}; before 0.4 it can leave a rank stopped for ever"
        return Fault(subject=subject, reason="PyspyTooOld", detail=detail, remedy=install)
    return DUMPER.refusal(before[0])


def _may_pause(pid: int, proc_root: Path) -> bool:
    """One thread that the kernel does not let go makes a pause endless, whatever the main thread does."""
    states = procfs.read_thread_states(pid, proc_root)
    return bool(states) and _NEVER_PAUSE.isdisjoint(states)


def _is_passing(fault: Fault) -> bool:
    """Whether it can end otherwise while the target is paused."""
    return fault.reason in ("StackChanged", "DumpFailed")


def _let_run_on(target: ProcessId, was_stopped: bool, proc_root: Path) -> tuple[ProcessId, str] | None:
    """Continue a process that was not stopped before an attempt and is after it; who has its pid then, in which state.

    Also after an attempt without a pause: nobody can tell whose stop it was, and a rank left stopped costs the job.
    Looked at twice, because a stop may take hold after py-spy has ended.
    """
    for pause_seconds in (_SETTLE_SECONDS, 0.0):
        if not was_stopped and _is_stopped(target, proc_root):
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(target.pid, signal.SIGCONT)
        time.sleep(pause_seconds)
    return procfs.read_state(target.pid, proc_root)


def _is_stopped(target: ProcessId, proc_root: Path) -> bool:
    pending = procfs.is_stop_pending(target.pid, proc_root)  # asked first: it turns into T, never the other way round
    now = procfs.read_state(target.pid, proc_root)
    return now is not None and now[0] == target and (pending or now[1] == "T")


def _attempt(call: _Call, mode: tuple[str, ...], deadline_seconds: float) -> bytes | Fault:
    """One rung of the ladder. py-spy looks for the interpreter before it pauses anything, and on a busy process misses
    it now and then, with and without a pause: then the same again."""
    end = time.monotonic() + deadline_seconds
    answer = _run(call, mode, deadline_seconds)
    for _ in range(_MORE_TRIES):
        left = end - time.monotonic()
        if isinstance(answer, bytes) or answer.reason != "NoInterpreter" or left <= 0:
            break
        threads = procfs.read_thread_count(call.target.pid, call.proc_root)
        if threads > MOST_THREADS:
            detail = f"it has {threads:,} threads, and py-spy reads no process of more than {MOST_THREADS:,}"
            return Fault(subject=call.subject, reason="TooManyThreads", detail=detail)
        answer = _run(call, mode, left)
    return answer


def _run(call: _Call, mode: tuple[str, ...], deadline_seconds: float) -> bytes | Fault:
    """Run py-spy once."""
    command = [str(call.program), "dump", "--json", *mode, *call.options, "--pid", str(call.target.pid)]
    printed = DUMPER.run(command, call.target, share=call.share, deadline_seconds=deadline_seconds, stop=call.stop)
    if isinstance(printed, Fault):
        return printed
    is_whole = printed.code == 0 and printed.out.strip()
    return printed.out if is_whole else explain(call.target.pid, printed.code, printed.err.decode("utf-8", "replace"))


def explain(pid: int, code: int, stderr: str) -> Fault:
    """What py-spy's complaint means: its first sentence as the detail, a CamelCase reason, and the remedy if any."""
    lines = [line.strip() for line in stderr.partition("Stack backtrace:")[0].splitlines() if line.strip()]
    lines = [re.sub(r"^(Error: |Caused by:|\d+: )", "", line).strip() for line in lines]
    whole = ": ".join(line for line in lines if line)
    if not whole:
        return Fault(
            subject=f"pid {pid}", reason="DumpFailed", detail=f"py-spy ended with status {code} and said nothing"
        )
    return pyspy_json.fault(f"pid {pid}", whole)
