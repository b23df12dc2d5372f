"""Pure: jobs whose first rank on a node is the program itself, which starts the others (Lightning without a launcher).

No variable tells that it is a rank: only that its children have all places on the node but the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_role import Seat
from hangwatch.jobs.process_tree import INIT_PID, Tree
from hangwatch.model import Process
from hangwatch.tables.launchers import TABLE


class _Family(NamedTuple):
    """What ranks have in common that one process started."""

    parent_pid: int
    owner: Owner
    address: str
    port: str
    node: int
    world_size: int


def seated(tree: Tree, started: Iterable[tuple[Process, Seat]]) -> Iterator[tuple[Process, Seat]]:
    """All ranks of such jobs with their seats; `started` are those that were started by a first one.

    Who started them is rank 0 of the node where it is Python, of their owner, and says of no seat itself. It set the
    variables of the meeting place in its own environment, too, where the kernel does not show them. A first one that
    has died, so that init is their parent, is absent. How many ranks a node has is told by the highest of them; of
    other nodes than the first the numbers follow from it, and where it cannot be right they are no job.
    """
    families: defaultdict[_Family, list[tuple[Process, Seat]]] = defaultdict(list)
    for process, seat in started:
        family = _family(process, seat, tree)
        if family is not None:
            families[family].append((process, seat))
    for family, others in families.items():
        first = tree.get(family.parent_pid)
        local_size = 1 + max(seat.rank for _, seat in others)
        is_whole = family.world_size % local_size == 0 and (family.node + 1) * local_size <= family.world_size
        if (family.node and not is_whole) or (first is not None and process_role.seat(first, None) is not None):
            continue
        members = others
        if first is not None and owner_of(first) == family.owner and _may_lead(first):
            told = {TABLE.rendezvous.address: family.address, TABLE.rendezvous.port: family.port}
            seat = others[0][1]._replace(rank=0, local_rank=0)
            members = [(replace(first, environ=told | dict(first.environ)), seat), *others]
        for process, seat in members:
            size = local_size if is_whole else None
            yield process, seat._replace(rank=family.node * local_size + seat.rank, local_world_size=size)


def _family(process: Process, seat: Seat, tree: Tree) -> _Family | None:
    address, port = process_role.rendezvous(process.environ)
    node = process_role.node_number(process.environ, seat)
    if not address or not port or node is None or seat.world_size is None:
        return None
    if not seat.local_rank or not process_role.is_python(process) or process_role.is_loader_worker(process):
        return None
    parent = tree.parent(process)
    parent_pid = INIT_PID if parent is None else parent.id.pid
    return _Family(parent_pid, owner_of(process), address, port, node, seat.world_size)


def _may_lead(process: Process) -> bool:
    is_helper = process_role.is_loader_worker(process) or process_role.launcher_kind(process) is not None
    return process_role.is_python(process) and not is_helper
