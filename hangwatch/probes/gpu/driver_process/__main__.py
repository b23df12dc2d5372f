"""Start the process that owns the NVIDIA driver: `python -m hangwatch.probes.gpu.driver_process BEGIN`.

BEGIN is the JSON of `messages.Begin`. Without the driver's library the process ends with `NO_LIBRARY_STATUS`, before
the imports of `service`: they are four fifths of its CPU time.
"""

from __future__ import annotations

import ctypes
import sys
import types

from hangwatch.probes.gpu import NO_LIBRARY_STATUS

PR_SET_PDEATHSIG = 1  # prctl(2)
SIGKILL = 9  # importing `signal` would take a fifth of the time of a process without the library


def replace_ctypes_util() -> None:
    """Put a module in place of ctypes.util that loads it when it is called.

    pynvml imports `find_library` from it, and does not call it. ctypes.util loads subprocess and tempfile: 1.8 MiB.
    """

    def find_library(name: str) -> str | None:
        del sys.modules["ctypes.util"]
        from ctypes import util

        return util.find_library(name)

    module = types.ModuleType("ctypes.util")
    module.find_library = find_library  # type: ignore[attr-defined]
    sys.modules["ctypes.util"] = module


def main() -> None:
    """Let the kernel kill this process when its parent dies, even if it is blocked in the driver. Then serve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # pynvml loads the same name
    except OSError:
        sys.exit(NO_LIBRARY_STATUS)
    replace_ctypes_util()
    from hangwatch.probes.gpu.driver_process import service

    service.main()


if __name__ == "__main__":
    main()
