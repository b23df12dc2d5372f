"""Facts about this host that a report shows: names and versions, nothing secret."""

from __future__ import annotations

import os
import platform
import socket


def node_name() -> str:
    """The short host name, as torchrun's and Slurm's own logs show it."""
    return socket.gethostname().partition(".")[0] or "localhost"


def facts(driver_version: str | None) -> tuple[tuple[str, str], ...]:
    """Name and value of what helps to compare two incidents."""
    pairs = [
        ("host", socket.gethostname()),
        ("kernel", platform.release()),
        ("cpus", str(os.cpu_count() or "unknown")),
        ("load average", "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())),
    ]
    if driver_version:
        pairs.append(("NVIDIA driver", driver_version))
    return tuple(pairs)
