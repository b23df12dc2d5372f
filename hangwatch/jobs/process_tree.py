"""The parents and children of the processes in a snapshot. Pure."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from hangwatch.model import ENDED_STATES, GpuSample, Process, list_by_key

INIT_PID = 1
_MAX_DEPTH = 64


class Tree:
    """The running processes, by pid and by parent.

    A parent that is younger than its child is not its parent, but another process with the same pid.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._by_pid = {process.id.pid: process for process in processes if process.state not in ENDED_STATES}
        parents = ((self.parent(process), process) for process in self._by_pid.values())
        self._children = list_by_key((parent.id.pid, process) for parent, process in parents if parent is not None)

    def __iter__(self) -> Iterator[Process]:
        return iter(self._by_pid.values())

    def get(self, pid: int) -> Process | None:
        """Return the process with this pid; None if there is none."""
        return self._by_pid.get(pid)

    def parent(self, process: Process) -> Process | None:
        """Return the parent of a process; None if it is gone."""
        parent = self._by_pid.get(process.parent_pid)
        return parent if parent is not None and parent.id.start_ticks <= process.id.start_ticks else None

    def ancestors(self, process: Process) -> Iterator[Process]:
        """Yield the ancestors from the parent upwards, at most 64, because a user can create a chain of any length.

        A snapshot does not show a single moment, so it may contain a cycle. Each process is yielded once.
        """
        seen = {process.id.pid}
        parent = self.parent(process)
        while parent is not None and parent.id.pid not in seen and len(seen) <= _MAX_DEPTH:
            yield parent
            seen.add(parent.id.pid)
            parent = self.parent(parent)

    def children(self, process: Process) -> Sequence[Process]:
        """Return the direct children of a process."""
        return self._children.get(process.id.pid, ())

    def gpu_holders(self, samples: Iterable[GpuSample]) -> set[int]:
        """Return the pids of the running processes that hold a GPU, and of all their ancestors."""
        found: set[int] = set()
        for pid in (pid for gpu in samples for pid in gpu.pids):
            process = self.get(pid)
            while process is not None and process.id.pid not in found:
                found.add(process.id.pid)
                process = self.parent(process)
        return found

    def descendants(self, process: Process, stop: Iterable[int] = ()) -> Iterator[Process]:
        """Yield all descendants of a process, nearest first. Processes in `stop` (pids) and below them are left out."""
        seen = {process.id.pid, *stop}
        queue = [process]
        for parent in queue:
            for child in self._children.get(parent.id.pid, ()):
                if child.id.pid not in seen:
                    seen.add(child.id.pid)
                    queue.append(child)
                    yield child


def start_order(process: Process) -> tuple[int, int]:
    """Return a sort key for processes: the process that began first comes first."""
    return process.id.start_ticks, process.id.pid


def is_within(process: Process, pids: Collection[int], tree: Tree) -> bool:
    """True if the process or one of its ancestors is in `pids`."""
    return process.id.pid in pids or any(up.id.pid in pids for up in tree.ancestors(process))
