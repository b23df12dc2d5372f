"""Mark wrappers: Python processes with a rank slot that only wait for a child, which is the rank.

`conda run` and scripts of a site start a rank in this way. Wrapper and rank have the same variables. A rank that starts
another program has the same form, but it maps PyTorch or JAX, and starts the program long after its own start.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.capture.job_sockets import MOST_THREADS
from hangwatch.jobs import nested_slots
from hangwatch.model import Process
from hangwatch.probes.base import procfs
from hangwatch.probes.process import blocked_call, main_thread
from hangwatch.probes.process.live_environ import LiveEnvironments

MOST_BRANCHES = 256
_START_SECONDS = 60.0
_LOOPS = frozenset({"epoll_wait", "epoll_pwait", "futex"})


class Wrappers:
    """The wrappers among the processes of this node."""

    def __init__(self, proc_root: Path) -> None:
        self._root = proc_root
        self._live = LiveEnvironments(proc_root)

    def mark(self, processes: Sequence[Process]) -> Sequence[Process]:
        """Return the processes, wrappers with `is_wrapper`."""
        branches = nested_slots.find_branches(processes)[:MOST_BRANCHES]
        wrappers = {branch[-1].id for branch in branches if self._is_wrapper(branch)}
        return [replace(process, is_wrapper=True) if process.id in wrappers else process for process in processes]

    def _is_wrapper(self, branch: Sequence[Process]) -> bool:
        inner, outer = branch[0], branch[-1]
        outer_trains, inner_trains = (bool(self._live.find_libraries(each.id)) for each in (outer, inner))
        if outer_trains == inner_trains:
            later_seconds = (inner.id.start_ticks - outer.id.start_ticks) / procfs.TICKS_PER_SECOND
            only_waits = self._only_waits(branch, with_threads=not outer_trains)
            return only_waits and (not outer_trains or later_seconds < _START_SECONDS)
        return inner_trains

    def _only_waits(self, branch: Sequence[Process], *, with_threads: bool) -> bool:
        """True if the main thread waits for a child or reads from pipes, in which the output of the child arrives.

        The child is of the branch: a rank also waits for a compiler while its compile worker has the same variables.
        With `with_threads`, also if it is in an event loop or waits for a thread, and another thread waits for a child.
        """
        pid, below = branch[-1].id.pid, [process.id.pid for process in branch[:-1]]
        call = blocked_call.follow_child(pid, main_thread.read_call(pid, self._root), self._root)
        if call is None:
            return False
        if call.kind == "awaits_child":
            return call.child in (None, *(procfs.read_inner_pid(each, self._root) for each in below))
        files = [blocked_call.link_of(pid, descriptor, self._root) for descriptor in call.descriptors]
        if files and all(file.startswith("pipe:") for file in files):
            return any(blocked_call.has_open(each, files[0], blocked_call.WRITE, self._root) for each in below)
        threads = main_thread.list_other_threads(pid, self._root, MOST_THREADS) if call.name in _LOOPS else ()
        calls = (main_thread.read_call(pid, self._root, thread) for thread in threads if with_threads)
        return any(each is not None and each.kind == "awaits_child" for each in calls)
