"""Known reasons why py-spy and pystack cannot read a process, found before its stack is needed. Each has a remedy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.formats import python_files
from hangwatch.formats.pyspy_json import USE_GDB
from hangwatch.model import Fault
from hangwatch.probes.base import procfs
from hangwatch.probes.base.interpreter import pip_install
from hangwatch.probes.process import proc_pid

# Limit of py-spy 0.4, also for the frames of a thread; above it, py-spy reports "no interpreter"
MOST_THREADS = 4096
INSTALL_PYSTACK = f"for free-threaded builds and newer Pythons: {pip_install('pystack>=1.7,<2')}"


class _Target(NamedTuple):
    threads: int
    mapped: Sequence[proc_pid.MappedFile]


class Obstacle(NamedTuple):
    """A known failure of both dumpers, or with `but_pystack` of py-spy alone."""

    reason: str
    detail: str
    remedy: str
    applies: Callable[[_Target], bool]
    but_pystack: bool = False


def _is_mapped_below_its_start(target: _Target) -> bool:
    """True if a part of the program is mapped below its first page. Both dumpers take the lowest part for that page."""
    program = [row for row in target.mapped if python_files.is_interpreter(row.path)]
    return bool(program) and program[0].offset > 0 and any(row.offset == 0 for row in program)


OBSTACLES = (
    Obstacle(
        "TooManyThreads",
        f"it has more threads than py-spy reads ({MOST_THREADS:,})",
        INSTALL_PYSTACK,
        lambda target: target.threads > MOST_THREADS,
        but_pystack=True,
    ),
    Obstacle(
        "FreeThreaded",
        "py-spy cannot read a free-threaded build of Python",
        INSTALL_PYSTACK,
        lambda target: any(python_files.is_free_threaded(row.path) for row in target.mapped),
        but_pystack=True,
    ),
    Obstacle(
        "StaticPython",
        "a callback of ctypes has mapped a page of its statically linked Python below the program (py-spy issue 865)",
        f"use a Python with libpython.so (--enable-shared; uv's builds have none); {USE_GDB}",
        _is_mapped_below_its_start,
    ),
)
"""The known failures. The first that applies counts."""


def find_obstacle(pid: int, proc_root: Path, *, has_pystack: bool) -> Fault | None:
    """Return the known reason why a process cannot be read; None if there is none or if it cannot be found out."""
    mapped = proc_pid.map_rows(proc_root, pid)
    target = _Target(procfs.read_thread_count(pid, proc_root), mapped if isinstance(mapped, tuple) else ())
    for obstacle in OBSTACLES:
        if not (obstacle.but_pystack and has_pystack) and obstacle.applies(target):
            return Fault.copy_from(obstacle, subject=f"pid {pid}")
    return None
