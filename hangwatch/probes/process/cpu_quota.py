"""Read for how long CPU quotas have stopped a process: cpu.stat of its control groups.

See Documentation/admin-guide/cgroup-v2.rst and Documentation/scheduler/sched-bwc.rst.
"""

from pathlib import Path

from hangwatch.probes.base import pseudo_files
from hangwatch.probes.process.cgroup_freezer import folders_upwards

SYS = Path("/sys")


def read_throttled_seconds(pid: int, proc_root: Path, sys_root: Path = SYS) -> float | None:
    """Return the time for which the groups of a process, from its own upwards, were throttled; None if not visible."""
    unified = sys_root / "fs/cgroup/unified"
    mount = unified if unified.is_dir() else unified.parent
    for line in pseudo_files.read_or_empty(proc_root / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" in controllers.split(","):
            seconds = _sum(sys_root / "fs/cgroup/cpu", path, "throttled_time", 1e9)
        else:
            seconds = _sum(mount, path, "throttled_usec", 1e6) if controllers == "" else None
        if seconds is not None:
            return seconds
    return None


def _sum(mount: Path, path: str, name: str, per_second: float) -> float | None:
    texts = [pseudo_files.read_or_empty(mount / folder / "cpu.stat") for folder in folders_upwards(path)]
    rows = [line.split() for text in texts for line in text.splitlines()]
    numbers = [pseudo_files.number(row[1]) for row in rows if len(row) == 2 and row[0] == name]
    known = [number for number in numbers if number is not None]
    return sum(known) / per_second if known else None
