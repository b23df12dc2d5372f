"""A memory control group below that of the test, in which the kernel counts a process and its children."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for


class MemoryCgroup:
    """A control group with a memory limit in bytes and no swap. See cgroup-v2.rst and cgroup-v1/memory.rst."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v2 = (folder / "memory.max").exists()
        self.events = folder / ("memory.events" if self._is_v2 else "memory.oom_control")
        self.usage = folder / ("memory.current" if self._is_v2 else "memory.usage_in_bytes")

    def limit(self, limit_bytes: int) -> None:
        (self.folder / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        for name, swap in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit_bytes)):
            if (self.folder / name).exists():  # the kernel counts swap
                (self.folder / name).write_text(str(swap))

    @property
    def peak_bytes(self) -> int:
        """Return the largest memory of the group so far, page cache included."""
        return int((self.folder / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")).read_text())

    @property
    def oom_kills(self) -> int:
        return int(dict(row.split() for row in self.events.read_text().splitlines())["oom_kill"])

    def joining(self, *command: str) -> list[str]:
        """Return a command that enters this group and then executes `command`."""
        return ["sh", "-c", f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *command]


def _own() -> Path:
    """Return the folder of the control group that counts this process's memory."""
    for row in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = row.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
    return Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().splitlines()[0].split(":", 2)[2])


@contextlib.contextmanager
def cgroup_below(folder: Path | str) -> Iterator[Path]:
    """Make an empty group, and remove it at the end once it is empty again. Skip the test if no group can be made.

    It has a unique name: workers of the suite have their own pid namespaces and the same pids.
    """
    try:
        group = Path(tempfile.mkdtemp(prefix="hangwatch-test-", dir=folder))
    except OSError as error:
        pytest.skip(f"needs a writable control group below {folder}: {error}")
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make a group that counts memory. Skip the test if no group can be limited."""
    with cgroup_below(_own()) as folder:
        group = MemoryCgroup(folder)
        try:
            group.limit(limit_bytes)
        except OSError as error:
            pytest.skip(f"needs the memory controller in a control group of its own (pid {os.getpid()}): {error}")
        yield group
