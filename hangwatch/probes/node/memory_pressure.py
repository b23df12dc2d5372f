"""Read the available memory (/proc/meminfo) and memory stalls (/proc/pressure/memory, PSI)."""

import re
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes.base import pseudo_files

_ROW = re.compile(r"(some|full) avg10=[\d.]+ avg60=([\d.]+) avg300=[\d.]+ total=(\d+)")


class Stall(Value, frozen=True):
    """Memory stalls: the ratio of the last 60 s in which tasks waited for memory, and the total time since boot."""

    ratio_60s: float
    total_seconds: float


class Memory(Value, frozen=True):
    """Memory of the node, and its stalls; None if the kernel has no PSI (psi=0).

    `some` is the time in which at least one task waited, `full` the time in which all tasks waited.
    """

    total_bytes: int
    available_bytes: int
    some: Stall | None = None
    full: Stall | None = None

    @property
    def stalls(self) -> dict[str, Stall]:
        """The stalls that the kernel measures, by their kind."""
        kinds = {"some": self.some, "full": self.full}
        return {kind: stall for kind, stall in kinds.items() if stall is not None}


def read(proc_root: Path) -> Memory | Fault | None:
    """Return the state of both files; None if /proc/meminfo is missing."""
    meminfo = pseudo_files.read(proc_root / "meminfo", "memory")
    if not isinstance(meminfo, str):
        return meminfo
    pressure = pseudo_files.read(proc_root / "pressure" / "memory", "memory pressure")
    if isinstance(pressure, Fault):
        return pressure
    return parse(meminfo, pressure or "")


def parse(meminfo: str, pressure: str) -> Memory | Fault:
    """Parse the texts of both files; a Fault if /proc/meminfo lacks MemTotal or MemAvailable."""
    rows = {name: value.split() for name, _, value in (line.partition(":") for line in meminfo.splitlines())}
    try:
        total, available = (int(rows[name][0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        detail = "/proc/meminfo lacks MemTotal or MemAvailable"
        return Fault(subject="memory", reason="UnreadableMeminfo", detail=detail)
    stalls = {
        kind: Stall(ratio_60s=float(percent) / 100, total_seconds=int(total_us) / 1e6)
        for kind, percent, total_us in _ROW.findall(pressure)
    }
    return Memory(total_bytes=total, available_bytes=available, some=stalls.get("some"), full=stalls.get("full"))
