"""Processes that have the rank slot of another process above them. Pure.

Helpers hold no slot: the fork server and the resource tracker of multiprocessing, workers of multiprocessing, and the
processes of hangwatch itself. They inherit the variables of a rank, and may outlive it.
"""

from collections.abc import Iterator, Sequence

from hangwatch.jobs import process_role
from hangwatch.jobs.process_tree import INIT_PID, Tree
from hangwatch.model import Process, ProcessId
from hangwatch.tables.launchers import SLOT_NAMES

Slot = tuple[str | None, ...]
"""The values of the variables of rank slots; () if none is set."""


def find_branches(processes: Sequence[Process]) -> list[list[Process]]:
    """Return each Python process below which another program of Python has its slot: last, after its descendants."""
    tree = Tree(processes)
    branches: dict[ProcessId, list[Process]] = {}
    for process in tree:
        slot = slot_of(process)
        if not slot or process_role.is_multiprocessing(process) or not process_role.is_python(process):
            continue
        above = list(tree.ancestors(process))
        branches |= {
            up.id: [process, *above[: at + 1]]
            for at, up in enumerate(above)
            if slot_of(up) == slot and up.cmdline != process.cmdline and process_role.is_python(up)
        }
    return list(branches.values())


def find_helpers(tree: Tree) -> dict[int, Process]:
    """Return the helpers that have a rank slot, by pid."""
    helpers: dict[int, Process] = {}
    for process in tree:
        if process_role.is_loader_worker(process) or _is_orphan(process, tree):
            helpers[process.id.pid] = process
        elif process_role.starts_helpers(process) and not _is_forked(process, tree):
            slot = slot_of(process)
            below = (one for one in tree.descendants(process) if slot_of(one) == slot)
            helpers |= {one.id.pid: one for one in (process, *below)}
    return helpers


def find_families(tree: Tree) -> Iterator[tuple[Process, list[Process]]]:
    """Yield (process, descendants) for each process below which several Python programs have its slot.

    It is the topmost process with the slot. If the scan shows none, it is their parent, which may not have the slot.
    Workers of mp.spawn that map PyTorch are a family without a slot.
    """
    families: dict[tuple[ProcessId, Slot], tuple[Process, list[Process]]] = {}
    for process in tree:
        slot = slot_of(process)
        may_hold = slot or (process.libraries and process_role.is_spawned(process))
        if not may_hold or process_role.is_loader_worker(process) or not process_role.is_python(process):
            continue
        above = [up for up in tree.ancestors(process) if slot and slot_of(up) == slot]
        top = above[-1] if above else tree.parent(process)
        if top is not None and top.id.pid != INIT_PID and (above or not slot_of(top)):
            families.setdefault((top.id, slot), (top, []))[1].append(process)
    return (family for family in families.values() if len(family[1]) > 1)


def slot_of(process: Process) -> Slot:
    """Return the values of the variables of rank slots; () if none is set."""
    values = tuple(map(process.environ.get, SLOT_NAMES)) if process.environ else ()
    return values if any(values) else ()


def _is_forked(process: Process, tree: Tree) -> bool:
    """True for a worker that a fork server has forked: its own slot may be a rank's."""
    parent = tree.parent(process)
    return bool(process.libraries) or (parent is not None and parent.cmdline == process.cmdline)


def _is_orphan(process: Process, tree: Tree) -> bool:
    """True for a worker of multiprocessing that outlived the rank, and had the slot at its start.

    A rank of mp.spawn sets its slot after its start, so it is read together with the libraries. The launcher may be
    the init process of a container: then it is the parent of each orphan.
    """
    if not process.environ or process.libraries or not process_role.is_spawned(process):
        return False
    parent = tree.parent(process)
    return parent is None or not process_role.is_python(parent) or process_role.find_launcher(parent) is not None
