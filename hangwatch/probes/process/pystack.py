"""Take the stacks of a process with pystack if py-spy cannot read it: free-threaded builds, unknown versions.

No other module starts pystack. It never pauses the target: it reads memory while the target runs. pystack is an
optional dependency (`python -m pip install 'pystack>=1.7,<2'`) of this interpreter.
"""

import importlib.util
import sys
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from hangwatch import words
from hangwatch.formats.pyspy_json import USE_GDB
from hangwatch.model import Fault
from hangwatch.probes.base import child, child_runner, procfs
from hangwatch.probes.process import pyspy
from hangwatch.probes.process.dump_obstacles import INSTALL_PYSTACK
from hangwatch.probes.process.pyspy import PyspyAnswer

CHILD = Path(__file__).with_name("pystack_child.py")
REASONS = frozenset({"DumpFailed", "DumperCrashed", "NoInterpreter", "NoMainThread", "NotPython", "TooManyThreads"})
"""Reasons of py-spy's faults for a process that it could read but did not understand."""

_NEEDED = frozenset({"NoInterpreter", "TooManyThreads"})
_LONGEST_DETAIL = 200
_MOST_MEMORY_BYTES = 512 << 20  # a torch rank needs 24 MiB
# The abandoned children are shared with py-spy, since both hang for the same cause.
_RUNNER = child_runner.Runner(
    "pystack", answer="stacks", abandoned=pyspy.DUMPER.abandoned, most_memory_bytes=_MOST_MEMORY_BYTES
)


def is_installed() -> bool:
    """True if this interpreter has pystack. The package is not imported."""
    return importlib.util.find_spec("pystack") is not None


def dump(
    pid: int,
    before: PyspyAnswer,
    *,
    deadline_seconds: float,
    stop: threading.Event | None = None,
    proc_root: Path = procfs.PROC,
    share: str = "",
) -> PyspyAnswer:
    """Return stacks in the form of py-spy's JSON. If pystack fails, return py-spy's fault with pystack's error added.

    Deadline, abandoned children and `share` are as in `pyspy.dump`. The target is never paused.
    """
    fault, state = before.fault, procfs.read_state(pid, proc_root)
    if fault is None or fault.reason not in REASONS or state is None:
        return before
    if not is_installed():
        remedy = "; ".join(filter(None, (fault.remedy, INSTALL_PYSTACK)))
        return replace(before, fault=replace(fault, remedy=remedy)) if fault.reason in _NEEDED else before
    began = time.monotonic()
    printed = _RUNNER.refusal(state[0]) or _RUNNER.run(
        [sys.executable, "-I", str(CHILD), str(pid)],
        state[0],
        share=share or f"uid {procfs.read_user_id(pid, proc_root)}",
        deadline_seconds=deadline_seconds,
        stop=stop,
    )
    now = procfs.read_state(pid, proc_root)
    answer = replace(
        before,
        duration_seconds=before.duration_seconds + time.monotonic() - began,
        state_after=None if now is None else now[1],
    )
    if isinstance(printed, Fault):
        is_stuck = printed.reason in child_runner.STUCK_REASONS
        return replace(answer, fault=printed if is_stuck else _with_pystack_error(fault, printed.detail))
    if printed.code != 0:
        message = printed.err.decode("utf-8", "replace").strip()
        crash = child.describe_signal(printed.code) if printed.code < 0 else ""
        return replace(answer, fault=_with_pystack_error(fault, ": ".join(filter(None, (crash, message)))))
    return replace(answer, json=printed.out, fault=None)


def _with_pystack_error(fault: Fault, message: str) -> Fault:
    detail = f"{fault.detail}; pystack: {words.elided(message, _LONGEST_DETAIL)}"
    return replace(fault, detail=detail, remedy=fault.remedy if fault.reason == "NotPython" else USE_GDB)
