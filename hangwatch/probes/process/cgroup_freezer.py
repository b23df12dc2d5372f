"""Finds the control group that freezes a process: cgroup.events and cgroup.freeze (v2), freezer.state (v1).

See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/freezer-subsystem.rst. A frozen process looks like a sleeping
one: its state is `S` in version 2, `D` in version 1.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from hangwatch import words
from hangwatch.probes import pseudo_files

_ASLEEP = frozenset("SD")
# (state, wchan) of a frozen process, from kernel/signal.c and kernel/freezer.c.
_HELD = frozenset({("S", "get_signal"), ("S", "do_freezer_trap"), ("D", "__refrigerator")})
_LIMIT_BYTES = 4096
_DEEPEST = 64
_SHOWN = 200


def frozen_cgroup(pid: int, state: str | None, wchan: str | None, proc_root: Path, sys_root: Path) -> str | None:
    """Return the path of the control group that freezes this process, as in /proc/PID/cgroup; None if it is not frozen.

    `state` and `wchan` are those of its main thread. If the groups' files are not visible, as in a container, they
    decide, and the path is the process's own group.
    """
    if state not in _ASLEEP:
        return None
    own_path = ""
    for line in _read(proc_root / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            frozen_path, own_path = _frozen_v2(sys_root / "fs/cgroup", path), own_path or path
        elif "freezer" in controllers.split(","):
            frozen_path, own_path = _frozen_v1(sys_root / "fs/cgroup/freezer", path), path
        else:
            continue
        if frozen_path is not None:
            return words.elided(frozen_path, _SHOWN)
    return words.elided(own_path, _SHOWN) if own_path and (state, wchan) in _HELD else None


def _frozen_v2(root: Path, path: str) -> str | None:
    """Return the frozen group: this one or one above it. `frozen 1` in its events means that all of it is frozen."""
    mount = root / "unified" if (root / "unified").is_dir() else root
    folders = _upwards(path)
    if not folders or "frozen 1" not in _read(mount / folders[0] / "cgroup.events").splitlines():
        return None
    frozen = (folder for folder in folders if _read(mount / folder / "cgroup.freeze").strip() == "1")
    return f"/{next(frozen, folders[0])}"


def _frozen_v1(mount: Path, path: str) -> str | None:
    folders = _upwards(path)
    if not folders or _read(mount / folders[0] / "freezer.state").strip() != "FROZEN":
        return None
    frozen = (folder for folder in folders if _read(mount / folder / "freezer.self_freezing").strip() == "1")
    return f"/{next(frozen, folders[0])}"


def _upwards(path: str) -> list[str]:
    """Return the group and those above it, below the mount; empty if it is outside this namespace."""
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts or len(inner.parts) > _DEEPEST:
        return []
    return [str(folder) for folder in (inner, *inner.parents) if str(folder) != "."]


def _read(path: Path) -> str:
    text = pseudo_files.read(path, "control group", _LIMIT_BYTES)
    return text if isinstance(text, str) else ""
