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

MOST_PAIRS = 256
_START_SECONDS = 60.0
_WAITS = frozenset({"wait4", "waitid"})
_LOOPS = frozenset({"epoll_wait", "epoll_pwait", "futex"})
_PIDFDS = ("pidfd:", "anon_inode:[pidfd]")


class Wrappers:
    """The wrappers among the processes of this node."""

    def __init__(self, proc_root: Path) -> None:
        self._root = proc_root
        self._live = LiveEnvironments(proc_root)

    def mark(self, processes: Sequence[Process]) -> Sequence[Process]:
        """Return the processes, wrappers with `is_wrapper`."""
        pairs = nested_slots.find_pairs(processes)[:MOST_PAIRS]
        wrappers = {outer.id for outer, inner in pairs if self._is_wrapper(outer, inner)}
        return [replace(process, is_wrapper=True) if process.id in wrappers else process for process in processes]

    def _is_wrapper(self, outer: Process, inner: Process) -> bool:
        outer_trains, inner_trains = (bool(self._live.find_libraries(each.id)) for each in (outer, inner))
        if outer_trains == inner_trains:
            later_seconds = (inner.id.start_ticks - outer.id.start_ticks) / procfs.TICKS_PER_SECOND
            only_waits = self._only_waits(outer.id.pid, with_threads=not outer_trains)
            return only_waits and (not outer_trains or later_seconds < _START_SECONDS)
        return inner_trains

    def _only_waits(self, pid: int, *, with_threads: bool) -> bool:
        """True if the main thread waits for a child or reads from pipes, in which the output of the child arrives.

        With `with_threads`, also if it is in an event loop or waits for a thread, and another thread waits for a child.
        """
        call = main_thread.read_call(pid, self._root)
        if call is None:
            return False
        files = [blocked_call.link_of(pid, descriptor, self._root) for descriptor in call.descriptors]
        if call.name in _WAITS or (files and all(file.startswith("pipe:") for file in files)):
            return True
        if not with_threads or call.name not in _LOOPS:
            return False
        threads = main_thread.list_other_threads(pid, self._root, MOST_THREADS)
        calls = (main_thread.read_call(pid, self._root, thread) for thread in threads)
        return any(file.startswith(_PIDFDS) for file in files) or any(call and call.name in _WAITS for call in calls)
