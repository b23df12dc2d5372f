"""How a process of the simulated node presents itself to the kernel. Standard library only: ranks import it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def become(comm: str, parent: int) -> None:
    """Be named `comm`, die with `parent`, and let py-spy in where only ancestors may trace (Yama); see prctl(2)."""
    Path("/proc/self/comm").write_text(comm)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)
    if os.getppid() != parent:  # it died before the first prctl
        os.kill(os.getpid(), signal.SIGKILL)
