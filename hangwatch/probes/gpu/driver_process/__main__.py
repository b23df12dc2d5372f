"""Start the process that owns the NVIDIA driver: `python -m hangwatch.probes.gpu.driver_process BEGIN`.

BEGIN is the JSON of `messages.Begin`. Without the driver's library the process ends with `NO_LIBRARY_STATUS`, before
the imports of `service`: they are four fifths of its CPU time.
"""

import ctypes
import sys

from hangwatch.probes.gpu import NO_LIBRARY_STATUS

PR_SET_PDEATHSIG = 1  # prctl(2)
SIGKILL = 9  # importing `signal` would take a fifth of the time of a process without the library


def main() -> None:
    """Let the kernel kill this process when its parent dies, even if it is blocked in the driver. Then serve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # pynvml loads the same name
    except OSError:
        sys.exit(NO_LIBRARY_STATUS)
    from hangwatch.probes.gpu.driver_process import service

    service.main()


if __name__ == "__main__":
    main()
