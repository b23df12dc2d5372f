"""Which control group's freezer holds a process: cgroup.events and cgroup.freeze (v2), freezer.state (v1).

See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/freezer-subsystem.rst. To the kernel a frozen process sleeps:
state `S` in version 2, `D` in version 1; nothing in its state tells it from one that waits.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from hangwatch import words
from hangwatch.probes import pseudo_files

_ASLEEP = frozenset("SD")
# Where the kernel keeps what a freezer holds: (state, wchan), from kernel/signal.c and kernel/freezer.c.
_HELD = frozenset({("S", "get_signal"), ("S", "do_freezer_trap"), ("D", "__refrigerator")})
_LIMIT_BYTES = 4096
_DEEPEST = 64
_SHOWN = 200


def frozen_cgroup(pid: int, state: str | None, wchan: str | None, proc_root: Path, sys_root: Path) -> str | None:
    """The path of the control group that freezes this process, as /proc/PID/cgroup writes it; None where none does.

    `state` and `wchan` are those of its main thread: where the files of the groups are not to be seen, as in a
    container, the place in the kernel tells, and the path is that of the process itself.
    """
    if state not in _ASLEEP:
        return None
    own = ""
    for line in _read(proc_root / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found, own = _frozen_v2(sys_root / "fs/cgroup", path), own or path
        elif "freezer" in controllers.split(","):
            found, own = _frozen_v1(sys_root / "fs/cgroup/freezer", path), path
        else:
            continue
        if found is not None:
            return words.elided(found, _SHOWN)
    return words.elided(own, _SHOWN) if own and (state, wchan) in _HELD else None


def _frozen_v2(root: Path, path: str) -> str | None:
    """A group is frozen by itself or by one above it; its events say that all in it stand still."""
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
    """The group and those above it, below the mount; none where it lies outside of what this namespace shows."""
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts or len(inner.parts) > _DEEPEST:
        return []
    return [str(folder) for folder in (inner, *inner.parents) if str(folder) != "."]


def _read(path: Path) -> str:
    text = pseudo_files.read(path, "control group", _LIMIT_BYTES)
    return text if isinstance(text, str) else ""
