"""Name, visibility and lifetime of a process of the simulated node. Standard library only, because ranks import it."""

import ctypes
import os
import signal
from pathlib import Path

PROCESSES = "proc"
"""The name of a folder in the folder of a simulated node: a view of /proc with only that node's processes."""

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def set_identity(comm: str, parent: int, folder: Path) -> None:
    """Name this process `comm`, add it to the simulated node's view of /proc, and let it die with `parent`.

    See prctl(2).

    Under Yama only ancestors may trace a process. PR_SET_PTRACER lets py-spy, which is not an ancestor, trace this
    process.
    """
    Path("/proc/self/comm").write_text(comm)
    (folder / PROCESSES / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)
    if os.getppid() != parent:  # the parent died before the first prctl
        os.kill(os.getpid(), signal.SIGKILL)
