"""Processes that have the rank slot of another process above them. Pure.

Helpers hold no slot: the fork server and the resource tracker of multiprocessing, workers of multiprocessing, and the
processes of hangwatch itself. They inherit the variables of a rank, and may outlive it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.jobs import process_role
from hangwatch.jobs.process_tree import Tree
from hangwatch.model import Process
from hangwatch.tables.launchers import SLOT_NAMES


def find_pairs(processes: Sequence[Process]) -> list[tuple[Process, Process]]:
    """Return (process, descendant) for each Python process below which another program of Python has its slot."""
    tree, pairs = Tree(processes), {}
    for process in tree:
        slot = _slot(process)
        if not slot or process_role.is_multiprocessing(process) or not process_role.is_python(process):
            continue
        for up in tree.ancestors(process):
            if _slot(up) == slot and up.cmdline != process.cmdline and process_role.is_python(up):
                pairs[up.id] = up, process
    return list(pairs.values())


def find_helpers(tree: Tree) -> set[int]:
    """Return the pids of the helpers that have a rank slot."""
    helpers = set()
    for process in tree:
        if process_role.is_loader_worker(process) or _is_orphan(process, tree):
            helpers.add(process.id.pid)
        elif process_role.starts_helpers(process) and not _is_forked(process, tree):
            slot = _slot(process)
            helpers |= {process.id.pid, *(one.id.pid for one in tree.descendants(process) if _slot(one) == slot)}
    return helpers


def _slot(process: Process) -> tuple[str | None, ...]:
    """Return the values of the variables of rank slots; () if none is set."""
    values = tuple(map(process.environ.get, SLOT_NAMES)) if process.environ else ()
    return values if any(values) else ()


def _is_forked(process: Process, tree: Tree) -> bool:
    """True for a worker that a fork server has forked: its own slot may be a rank's."""
    parent = tree.parent(process)
    return bool(process.libraries) or (parent is not None and parent.cmdline == process.cmdline)


def _is_orphan(process: Process, tree: Tree) -> bool:
    """True for a worker of multiprocessing that outlived the rank, and had the slot at its start.

    A rank of mp.spawn sets its slot after its start, so it is read together with the libraries.
    """
    if not process.environ or process.libraries or not process_role.is_spawned(process):
        return False
    parent = tree.parent(process)
    return parent is None or not process_role.is_python(parent)
