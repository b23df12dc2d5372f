"""Find the control group that freezes a process, and the time for which CPU quotas have stopped it.

See Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst and scheduler/sched-bwc.rst. A frozen
process looks like a sleeping one: its state is `S` in version 2, `D` in version 1.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from hangwatch import words
from hangwatch.probes.base import pseudo_files

_ASLEEP = frozenset("SD")
# State and wchan of a frozen process, see kernel/signal.c and kernel/freezer.c.
_HELD = frozenset({("S", "get_signal"), ("S", "do_freezer_trap"), ("D", "__refrigerator")})

_DEEPEST = 64
# The state file of every group in a frozen tree, its line, and the file that holds "1" in the group that was frozen.
_V2 = ("cgroup.events", "frozen 1", "cgroup.freeze")
_V1 = ("freezer.state", "FROZEN", "freezer.self_freezing")
_SHOWN = 200


def frozen_cgroup(pid: int, state: str | None, wchan: str | None, proc_root: Path, sys_root: Path) -> str | None:
    """Return the control group that freezes this process, as its folder below /sys/fs/cgroup; None if not frozen.

    `state` and `wchan` are those of its main thread. In a container the groups' files may not be visible. Then `state`
    and `wchan` decide, and the folder is that of the process's own group.
    """
    if state not in _ASLEEP:
        return None
    own_folder, mount = "", f"{sys_root}/fs/cgroup"
    unified = "/unified" if os.path.isdir(f"{mount}/unified") else ""  # noqa: PTH112 - for each process
    for controllers, path in _own_groups(pid, proc_root):
        if controllers == "":
            hierarchy, files = unified, _V2
        elif "freezer" in controllers.split(","):
            hierarchy, files = "/freezer", _V1
        else:
            continue
        frozen_path = _find_frozen(mount + hierarchy, path, *files)
        if frozen_path is not None:
            return words.elided(hierarchy + frozen_path, _SHOWN)
        if files == _V1 or not own_folder:
            own_folder = hierarchy + path
    return words.elided(own_folder, _SHOWN) if own_folder and (state, wchan) in _HELD else None


def _find_frozen(mount: str, path: str, state_file: str, state: str, own_file: str) -> str | None:
    """Return the nearest group, from `path` upwards, that was frozen itself; None if the process is not frozen.

    All groups below a frozen group have the line `state` in `state_file`, too.
    """
    folders = _folders_upwards(path)
    if not folders or state not in pseudo_files.read_or_empty(f"{mount}/{folders[0]}/{state_file}").splitlines():
        return None
    frozen = (folder for folder in folders if pseudo_files.read_or_empty(f"{mount}/{folder}/{own_file}").strip() == "1")
    return f"/{next(frozen, folders[0])}"


def read_throttled_seconds(pid: int, proc_root: Path, sys_root: Path) -> float | None:
    """Return the time for which the groups of a process, from its own upwards, were throttled; None if not visible."""
    unified = sys_root / "fs/cgroup/unified"
    mount = unified if unified.is_dir() else unified.parent
    for controllers, path in _own_groups(pid, proc_root):
        if "cpu" in controllers.split(","):
            seconds = _sum(sys_root / "fs/cgroup/cpu", path, "throttled_time", 1e9)
        else:
            seconds = _sum(mount, path, "throttled_usec", 1e6) if controllers == "" else None
        if seconds is not None:
            return seconds
    return None


def _sum(mount: Path, path: str, name: str, per_second: float) -> float | None:
    texts = [pseudo_files.read_or_empty(mount / folder / "cpu.stat") for folder in _folders_upwards(path)]
    rows = [line.split() for text in texts for line in text.splitlines()]
    numbers = [pseudo_files.number(row[1]) for row in rows if len(row) == 2 and row[0] == name]
    known = [number for number in numbers if number is not None]
    return sum(known) / per_second if known else None


def _own_groups(pid: int, proc_root: Path) -> Iterator[tuple[str, str]]:
    """Yield the controllers ("" in version 2) and the path of each group of a process, see cgroups(7)."""
    for line in pseudo_files.read_or_empty(proc_root / str(pid) / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        yield controllers, path


def _folders_upwards(path: str) -> list[str]:
    """Return the path of the group and of its parents, below the mount; empty if it is outside this namespace."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or len(parts) > _DEEPEST:
        return []
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
