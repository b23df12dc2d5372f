"""Jobs in which the program starts itself: its first process on a node is local rank 0 and starts the others. Pure.

Lightning without a launcher does this. No variable shows that the first process is a rank. This follows from its
children: they have all local ranks except 0.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_role import RankSlot
from hangwatch.jobs.process_tree import INIT_PID, Tree
from hangwatch.model import Process, list_by_key
from hangwatch.tables.launchers import TABLE


class _Family(NamedTuple):
    """The values that are equal for all ranks started by one process."""

    parent_pid: int
    owner: Owner
    address: str
    port: str
    node: int
    world_size: int


def find_ranks(tree: Tree, started: Iterable[tuple[Process, RankSlot]]) -> Iterator[tuple[Process, RankSlot]]:
    """Yield all ranks of such jobs with their rank slots. `started` are the ranks that a local rank 0 has started.

    Their parent is local rank 0 if it is a Python process of the same owner without a rank slot of another kind. It set
    their variables in its own environment, too, which only its memory shows. If it has died, init is the parent, and
    local rank 0 is absent. The highest rank gives the number of ranks on the node. On nodes after the first, the global
    ranks follow from that number; if it cannot be right, the processes are not a job.
    """
    families = list_by_key((_family(process, slot, tree), (process, slot)) for process, slot in started)
    for family, others in families.items():
        if family is None:
            continue
        first = tree.get(family.parent_pid)
        local_size = 1 + max(slot.rank for _, slot in others)
        is_whole = family.world_size % local_size == 0 and (family.node + 1) * local_size <= family.world_size
        own_slot = process_role.find_rank_slot(first) if first is not None else None
        is_of_another = own_slot is not None and (own_slot.rank > 0 or not own_slot.variables.started_by_first)
        if is_of_another or (family.node and not is_whole):
            continue
        members = others
        if first is not None and owner_of(first) == family.owner and process_role.may_be_rank(first):
            rendezvous = {TABLE.rendezvous.address: family.address, TABLE.rendezvous.port: family.port}
            slot = others[0][1]._replace(rank=0, local_rank=0)
            members = [(replace(first, environ=rendezvous | dict(first.environ)), slot), *others]
        for process, slot in members:
            size = local_size if is_whole else None
            yield process, slot._replace(rank=family.node * local_size + slot.rank, local_world_size=size)


def _family(process: Process, slot: RankSlot, tree: Tree) -> _Family | None:
    address, port = process_role.rendezvous(process.environ)
    node = process_role.node_number(process.environ, slot)
    if not address or not port or node is None or slot.world_size is None:
        return None
    if not slot.local_rank or not process_role.is_python(process) or process_role.is_loader_worker(process):
        return None
    parent = tree.parent(process)
    parent_pid = INIT_PID if parent is None else parent.id.pid
    return _Family(parent_pid, owner_of(process), address, port, node, slot.world_size)
