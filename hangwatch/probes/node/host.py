"""Read facts of this host for reports: names, sizes and load; nothing secret.

No other module of this package imports psutil.
"""

from __future__ import annotations

import platform
import socket
import time


def node_name() -> str:
    """Return the host name up to its first dot, as torchrun and Slurm log it."""
    return socket.gethostname().partition(".")[0] or "localhost"


def kernel_release() -> str:
    """Return the release of the running kernel, as `uname -r` prints it."""
    return platform.release()


def facts(driver_version: str | None) -> tuple[tuple[str, str], ...]:
    """Return names and values that help to compare incidents; `driver_version` is the version of the NVIDIA driver."""
    import psutil  # only a diagnosis needs it

    memory, gibibyte = psutil.virtual_memory(), 1 << 30
    hours_up = (time.time() - psutil.boot_time()) / 3600
    pairs = [
        ("host", socket.gethostname()),
        ("kernel", platform.release()),
        ("cpus", f"{psutil.cpu_count() or 'unknown'} ({psutil.cpu_count(logical=False) or 'unknown'} cores)"),
        ("load average", "{:.1f} {:.1f} {:.1f}".format(*psutil.getloadavg())),
        ("memory", f"{memory.available / gibibyte:.0f} of {memory.total / gibibyte:.0f} GiB available"),
        ("processes", str(len(psutil.pids()))),
        ("up for", f"{hours_up:.0f} h"),
    ]
    if driver_version:
        pairs.append(("NVIDIA driver", driver_version))
    return tuple(pairs)
