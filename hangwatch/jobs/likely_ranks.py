"""Processes that may be ranks of a job without a known launcher, such as workers of an inference server. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable

from hangwatch.jobs import process_role
from hangwatch.jobs.process_tree import Tree
from hangwatch.model import Process

_IDLE = "::IDLE"  # an actor of Ray without a task


def find_likely_ranks(processes: Iterable[Process], gpu_pids: Collection[int]) -> list[Process]:
    """Return the processes that hold a GPU or are titled like a worker, sorted by pid.

    A worker's title has a tensor or pipeline parallel number. If no title has one: a title that several processes have,
    apart from its numbers, and that has `::` or "worker" in it.
    """
    tree = Tree(list(processes))
    titles = {process.id.pid: title for process in tree if (title := process_role.title_of(process)) is not None}
    workers = {pid for pid, title in titles.items() if title.is_worker}
    if not workers:
        families = Counter(title.family for title in titles.values())
        similar = {pid: title for pid, title in titles.items() if families[title.family] > 1}
        working = {pid: title for pid, title in similar.items() if not title.text.endswith(_IDLE)}
        workers = {pid for pid, title in working.items() if title.is_scoped or "worker" in title.text.lower()}
    likely = [process for process in tree if process.id.pid in workers or process.id.pid in gpu_pids]
    return sorted(likely, key=lambda process: process.id.pid)


def find_ranks_below(pid: int, processes: Iterable[Process], gpu_pids: Collection[int]) -> list[int]:
    """Return the pids of the likely ranks among the descendants of a process. Empty if it holds a GPU itself."""
    tree = Tree(list(processes))
    parent = tree.get(pid)
    if parent is None or pid in gpu_pids:
        return []
    return [process.id.pid for process in find_likely_ranks(tree.descendants(parent), gpu_pids)]


def describe(process: Process) -> str:
    """Return the title of a process, else its program."""
    title = process_role.title_of(process)
    return title.text if title is not None else process.comm
