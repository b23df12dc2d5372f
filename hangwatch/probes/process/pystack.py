"""The stacks of one process by pystack's engine, for what py-spy cannot read: free-threaded builds, unknown versions.

The only place that starts it, always without a pause: it reads memory while the target runs on. pystack is an optional
dependency (`pip install 'pystack>=1.7,<2'`), looked for beside this interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from hangwatch import words
from hangwatch.model import Fault
from hangwatch.probes import child
from hangwatch.probes.process import procfs, pyspy
from hangwatch.probes.process.pyspy import PyspyAnswer

CHILD = Path(__file__).with_name("pystack_child.py")
REASONS = frozenset({"DumpFailed", "NoInterpreter", "NotPython", "TooManyThreads"})
"""Of py-spy's faults: where it did not understand the process, not where it may not or could not look."""

_NEEDED = frozenset({"NoInterpreter", "TooManyThreads"})
_INSTALL = "pystack reads free-threaded builds and what py-spy does not know: pip install 'pystack>=1.7,<2'"
_LONGEST_DETAIL = 200
# Both hang for the same cause.
_RUNNER = child.Runner("pystack", answer="stacks", abandoned=pyspy.DUMPER.abandoned, bounds_memory=False)


def is_installed() -> bool:
    """Whether this interpreter has it. It is not imported."""
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
    """The stacks in place of a fault of py-spy, in the form of its JSON; else that fault, with what was tried besides.

    Bounded and left behind as a py-spy is; `share` as for `pyspy.dump`. It never pauses the target.
    """
    fault, found = before.fault, procfs.read_state(pid, proc_root)
    if fault is None or fault.reason not in REASONS or found is None:
        return before
    if not is_installed():
        remedy = "; ".join(filter(None, (fault.remedy, _INSTALL)))
        return replace(before, fault=replace(fault, remedy=remedy)) if fault.reason in _NEEDED else before
    began = time.monotonic()
    printed = _RUNNER.refusal(found[0]) or _RUNNER.run(
        [sys.executable, "-I", str(CHILD), str(pid)],
        found[0],
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
        is_stuck = printed.reason in child.STUCK_REASONS
        return replace(answer, fault=printed if is_stuck else _beside(fault, printed.detail))
    if printed.code != 0:
        return replace(answer, fault=_beside(fault, printed.err.decode("utf-8", "replace").strip()))
    return replace(answer, json=printed.out, fault=None)


def _beside(fault: Fault, said: str) -> Fault:
    return replace(fault, detail=f"{fault.detail}; pystack: {words.elided(said, _LONGEST_DETAIL)}")
