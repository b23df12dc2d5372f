"""Take the stacks of a process with py-spy, without harm to it. No other module starts py-spy.

The kernel state of the target decides. A process that runs or sleeps is first read without a pause (`--nonblocking`).
This sometimes fails on a busy stack. Then the process is paused once, for a few milliseconds, under a deadline.

A stopped process is never paused, nor a process with a thread in `D` (a system call that does not return): the pause
would not end.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hangwatch.formats import pyspy_json
from hangwatch.model import BLOCKED_STATES, ENDED_STATES, STOPPED_STATES, Fault, ProcessId, Value
from hangwatch.probes.base import child, child_runner, procfs
from hangwatch.probes.base.interpreter import pip_install
from hangwatch.probes.process.dump_obstacles import MOST_THREADS

BLOCKING_DEADLINE_SECONDS = 5.0
OLDEST_VERSION = (0, 4)  # older versions leave a rank that waits in the kernel stopped for ever

SILENT: tuple[int, ...] = ()
"""The version of a py-spy that did not respond to `--version`. It is less than every other version."""

_VERSION_DEADLINE_SECONDS = 3.0
_SILENT_SECONDS = 60.0  # time before the next call of `--version`
# A target without its tracer runs for a moment before a pending stop takes effect
_SETTLE_SECONDS = 0.01
_MORE_TRIES = 4
_LOCK = threading.Lock()
_VERSIONS: dict[Path, tuple[int, ...]] = {}
_SILENT_UNTIL: dict[Path, float] = {}
_VERSION_READER = child_runner.Runner("py-spy")
# A torch rank needs 8 MiB, 66,000 frames (16 MiB of JSON, as much as is read) 32 MiB
MOST_MEMORY_BYTES = 48 << 20
_MOST_MEMORY_BYTES_NATIVE = 2 << 30  # it reads the symbols of all libraries of the target
DUMPER = child_runner.Runner("py-spy", answer="stacks", most_memory_bytes=MOST_MEMORY_BYTES)
_NATIVE_DUMPER = child_runner.Runner(
    "py-spy", answer="stacks", abandoned=DUMPER.abandoned, most_memory_bytes=_MOST_MEMORY_BYTES_NATIVE
)
_OUT_OF_MEMORY = "memory allocation of"  # Rust's message before it aborts
_NEVER_PAUSE = BLOCKED_STATES | STOPPED_STATES | ENDED_STATES | {"I"}

# Faults for which an attempt with a paused target can succeed.
_PASSING = frozenset({"StackChanged", "DumpFailed", "DumperCrashed"})

STUCK_REASONS = child_runner.STUCK_REASONS


class PyspyAnswer(Value, frozen=True):
    """A dump: either the JSON of py-spy, or a fault.

    `paused` is true if the target was paused for it. `state_after` is the target's state after the dump; None if it is
    gone.
    """

    json: bytes | None
    fault: Fault | None
    duration_seconds: float
    paused: bool = False
    state_after: str | None = None


class DumpMode(Value, frozen=True):
    """The content of a dump, and the permission to pause the target.

    `native` adds C frames, and always pauses the target (0.7 s, 340 MB). `include_locals` shows variables, also
    secrets. Both are used only when a person requests them. Without `may_pause` the target is read while it runs: it
    receives no signal, and there is no second attempt.
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
    """Take the stacks of process `pid`.

    `deadline_seconds` limits the first attempt, and again the second one. If py-spy does not report its version in
    time, the target is not paused. Returns the fault `Interrupted` once `stop` is set.

    A py-spy that survives SIGKILL is abandoned: `pid` is not dumped again until that py-spy has ended. No process is
    dumped while too many hang, in total or of its `share` (see `Job`; default: its user). `STUCK_REASONS` are the
    reasons of these faults.
    """
    began = time.monotonic()
    program = pyspy_path or find()
    before = procfs.read_state(pid, proc_root)
    known_version = None if program is None else version(program)
    fault = _refusal(pid, before, program, known_version)
    if fault is not None or program is None or before is None:
        return PyspyAnswer(json=None, fault=fault, duration_seconds=0.0, state_after=before and before[1])
    # An old version could leave the target stopped; reading alone does no harm.
    may_pause = mode.may_pause and known_version != SILENT
    options = ("--locals",) if mode.include_locals else ()
    call = _Call(program, before[0], share or f"uid {procfs.read_user_id(pid, proc_root)}", options, stop, proc_root)
    was_stopped = before[1] in STOPPED_STATES or procfs.is_stop_pending(pid, proc_root)
    paused = may_pause and mode.native and _may_pause(pid, proc_root)
    answer = _attempt(call, ("--native",) if paused else ("--nonblocking",), deadline_seconds)
    # A target that was not paused is not continued: another process may have stopped it on purpose.
    after = _continue_if_stopped(before[0], was_stopped or not may_pause, proc_root)
    if (
        may_pause
        and isinstance(answer, Fault)
        and not paused
        and answer.reason in _PASSING
        and _may_pause(pid, proc_root)
    ):
        paused = True
        answer = _attempt(call, (), min(deadline_seconds, BLOCKING_DEADLINE_SECONDS))
        after = _continue_if_stopped(before[0], was_stopped, proc_root)
    if isinstance(answer, Fault) and answer.reason == "ProcessGone" and after and after[1] not in ENDED_STATES:
        answer = Fault(
            subject=call.subject, reason="MainThreadEnded", detail="only its main thread has ended: py-spy needs it"
        )
    return PyspyAnswer(
        json=None if isinstance(answer, Fault) else answer,
        fault=answer if isinstance(answer, Fault) else None,
        duration_seconds=time.monotonic() - began,
        paused=paused,
        state_after=None if after is None else after[1],
    )


def find() -> Path | None:
    """Return the path of py-spy: in the folder of this interpreter, else on PATH; None if it is in neither."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("py-spy", path=folders)
    return Path(found) if found else None


def version(program: Path) -> tuple[int, ...] | None:
    """Return the version of a py-spy, e.g. (0, 4, 3); None if unknown. A known version is cached by path.

    `SILENT` means that py-spy did not respond within its deadline. That py-spy is not called again for a minute. All
    dumps of a round begin at once: the first one calls py-spy, and the others wait for its result.
    """
    with _LOCK:
        if time.monotonic() < _SILENT_UNTIL.get(program, 0.0):
            return SILENT
        parsed = _VERSIONS.get(program) or _version(program)
        if parsed == SILENT:
            _SILENT_UNTIL[program] = time.monotonic() + _SILENT_SECONDS
        elif parsed is not None:
            _VERSIONS[program] = parsed
        return parsed


def _version(program: Path) -> tuple[int, ...] | None:
    printed = _VERSION_READER.run([str(program), "--version"], deadline_seconds=_VERSION_DEADLINE_SECONDS)
    if isinstance(printed, Fault):
        return None if printed.reason == "CannotStart" else SILENT
    match = re.search(rb"py-spy (\d+)\.(\d+)(?:\.(\d+))?", printed.out)
    return None if match is None else tuple(int(part) for part in match.groups(b"0"))


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


def _refusal(
    pid: int, before: tuple[ProcessId, str] | None, program: Path | None, known_version: tuple[int, ...] | None
) -> Fault | None:
    """Return the reason why no dump is attempted; None if a dump may start."""
    subject = f"pid {pid}"
    if before is None or before[1] in ENDED_STATES:
        return Fault(subject=subject, reason="ProcessGone", detail="the process has ended", about="target")
    install = f"install it for hangwatch: {pip_install('py-spy>=0.4.1')}"
    if program is None:
        return Fault(subject=subject, reason="NoPyspy", detail="py-spy was not found", remedy=install)
    if known_version is None or (known_version != SILENT and known_version < OLDEST_VERSION):
        words = ".".join(str(part) for part in known_version) if known_version else "unknown"
        detail = f"{program} has version {words}; versions before 0.4 can leave a rank stopped for ever"
        return Fault(subject=subject, reason="PyspyTooOld", detail=detail, remedy=install)
    return DUMPER.refusal(before[0])


def _may_pause(pid: int, proc_root: Path) -> bool:
    """True if the target may be paused. A pause would never end while a thread is blocked in the kernel."""
    states = procfs.read_thread_states(pid, proc_root)
    return bool(states) and _NEVER_PAUSE.isdisjoint(states)


def _continue_if_stopped(target: ProcessId, was_stopped: bool, proc_root: Path) -> tuple[ProcessId, str] | None:
    """Continue a process that is stopped after an attempt, but was not stopped before.

    Return the process that has this pid, and its state; None if there is none.

    This also follows an attempt without a pause: the origin of the stop is unknown, and a rank that stays stopped
    blocks the job. The state is read twice, because a stop may take effect after py-spy has ended.
    """
    for pause_seconds in (_SETTLE_SECONDS, 0.0):
        if not was_stopped and _is_stopped(target, proc_root):
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.kill(target.pid, signal.SIGCONT)
        time.sleep(pause_seconds)
    return procfs.read_state(target.pid, proc_root)


def _is_stopped(target: ProcessId, proc_root: Path) -> bool:
    # Read before the state: a pending stop turns into T, never the reverse.
    pending = procfs.is_stop_pending(target.pid, proc_root)
    now = procfs.read_state(target.pid, proc_root)
    return now is not None and now[0] == target and (pending or now[1] == "T")


def _attempt(call: _Call, mode: tuple[str, ...], deadline_seconds: float) -> bytes | Fault:
    """Run py-spy in one mode. Run it again if it reports no interpreter.

    py-spy looks for the interpreter before it pauses the target. On a busy process it sometimes does not find it, with
    and without a pause.
    """
    end = time.monotonic() + deadline_seconds
    answer = _run(call, mode, deadline_seconds)
    for _ in range(_MORE_TRIES):
        remaining = end - time.monotonic()
        if isinstance(answer, bytes) or answer.reason != "NoInterpreter" or remaining <= 0:
            break
        threads = procfs.read_thread_count(call.target.pid, call.proc_root)
        if threads > MOST_THREADS:
            detail = f"it has {threads:,} threads; py-spy reads at most {MOST_THREADS:,}"
            return Fault(subject=call.subject, reason="TooManyThreads", detail=detail)
        answer = _run(call, mode, remaining)
    return answer


def _run(call: _Call, mode: tuple[str, ...], deadline_seconds: float) -> bytes | Fault:
    command = [str(call.program), "dump", "--json", *mode, *call.options, "--pid", str(call.target.pid)]
    runner = _NATIVE_DUMPER if "--native" in mode else DUMPER
    printed = runner.run(command, call.target, share=call.share, deadline_seconds=deadline_seconds, stop=call.stop)
    if isinstance(printed, Fault):
        return printed
    if printed.code < 0 and _OUT_OF_MEMORY in printed.err.decode("utf-8", "replace"):
        return Fault(subject=call.subject, reason="TooLarge", detail="py-spy needed more memory for it than is allowed")
    is_whole = printed.code == 0 and printed.out.strip()
    return printed.out if is_whole else explain(call.target.pid, printed.code, printed.err.decode("utf-8", "replace"))


def explain(pid: int, code: int, stderr: str) -> Fault:
    """Return the fault that a message of py-spy means.

    The fault has the first sentence of the message, a CamelCase reason, and a remedy if there is one.
    """
    lines = [line.strip() for line in stderr.partition("Stack backtrace:")[0].splitlines() if line.strip()]
    lines = [re.sub(r"^(Error: |Caused by:|\d+: )", "", line).strip() for line in lines]
    crash = [f"py-spy was {child.describe_signal(code)}"] if code < 0 else []
    whole = ": ".join(line for line in [*crash, *lines] if line)
    if not whole:
        return Fault(
            subject=f"pid {pid}", reason="DumpFailed", detail=f"py-spy ended with status {code} and no message"
        )
    return pyspy_json.fault_of_message(f"pid {pid}", whole)
