"""Read facts of this host for reports: names, sizes and load; nothing secret."""

import os
import platform
import socket
import time
from pathlib import Path

from hangwatch import words
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.node import memory_pressure
from hangwatch.probes.node.memory_pressure import Memory

_CPUS = Path("/sys/devices/system/cpu")
_GIBIBYTE = 1 << 30


def node_name() -> str:
    """Return the host name up to its first dot, as torchrun and Slurm log it."""
    return socket.gethostname().partition(".")[0] or "localhost"


def read_facts(driver_version: str | None) -> tuple[tuple[str, str], ...]:
    """Return names and values that help to compare incidents; `driver_version` is the version of the NVIDIA driver."""
    return (
        ("host", socket.gethostname()),
        ("kernel", platform.release()),
        ("cpus", f"{os.cpu_count() or 'unknown'} ({_count_cores() or 'unknown'} cores)"),
        ("load average", "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())),
        ("memory", _describe_memory()),
        ("processes", str(len(procfs.list_pids(str(procfs.PROC))))),
        ("up for", words.duration(time.clock_gettime(time.CLOCK_BOOTTIME))),
        *([("NVIDIA driver", driver_version)] if driver_version else []),
    )


def _count_cores() -> int:
    """Return the number of physical cores, 0 if unknown. The CPUs of one core have the same siblings."""
    cpus = [name for name in pseudo_files.names_or_empty(_CPUS) if name[3:].isdecimal()]
    siblings = {pseudo_files.read_or_empty(_CPUS / cpu / "topology/thread_siblings_list") for cpu in cpus}
    return len(siblings - {""})


def _describe_memory() -> str:
    memory = memory_pressure.read(procfs.PROC)
    if not isinstance(memory, Memory):
        return "unknown"
    return f"{memory.available_bytes / _GIBIBYTE:.0f} of {memory.total_bytes / _GIBIBYTE:.0f} GiB available"
