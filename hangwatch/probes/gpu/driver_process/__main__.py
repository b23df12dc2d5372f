"""Start the process that owns the NVIDIA driver: `... -m hangwatch.probes.gpu.driver_process BEGIN` (JSON)."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Let the kernel kill this process when its parent dies, even if it is blocked in the driver. Then serve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from hangwatch.probes.gpu.driver_process import service

    service.main()


if __name__ == "__main__":
    main()
