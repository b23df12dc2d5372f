"""Ranks that a program starts or forks itself, without a launcher. Pure.

With Lightning, the first process on a node is local rank 0 and starts the others. No variable shows that it is a rank.
This follows from its children: they have all local ranks except 0.

Other ranks were forked and execute no new program: those of notebook_launcher, ddp_fork or a Pool of processes. Each
writes its number into its own environment. The kernel does not show that number, only the environment at the start of
the parent's program. So only the driver's list of GPU processes shows that these processes are ranks.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_role import RankSlot
from hangwatch.jobs.process_tree import INIT_PID, Tree, is_within, start_order
from hangwatch.model import GpuSample, Process, list_by_key
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
    """Yield all ranks of jobs like Lightning's. `started` are the ranks that a local rank 0 has started.

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


def find_siblings(
    tree: Tree, samples: Sequence[GpuSample], ranks: Collection[int]
) -> list[tuple[Process, tuple[Process, ...]]]:
    """Return (Python process, its forks) for each process with forks that are ranks.

    The forks are two or more processes of one owner that hold GPUs and share none. A parent that holds a GPU itself
    is skipped: CUDA does not survive a fork, so its forks are helpers. Forks of a server or a notebook are skipped,
    and so are processes below the pids in `ranks`.
    """
    held = list_by_key((pid, gpu.uuid) for gpu in samples for pid in gpu.pids)
    siblings: defaultdict[tuple[int, Owner], list[Process]] = defaultdict(list)
    for pid in held:
        process = tree.get(pid)
        parent = None if process is None else tree.parent(process)
        if process is None or parent is None or parent.id.pid in held or not _is_forked(process, parent):
            continue
        if not is_within(process, ranks, tree):
            siblings[parent.id.pid, owner_of(process)].append(process)
    families = []
    for (parent_pid, _), group in siblings.items():
        parent, gpus = tree.get(parent_pid), [set(held[process.id.pid]) for process in group]
        if parent is not None and len(group) > 1 and sum(map(len, gpus)) == len(set().union(*gpus)):
            families.append((parent, tuple(sorted(group, key=start_order))))
    return families


def _is_forked(process: Process, parent: Process) -> bool:
    is_fork = bool(process.cmdline) and process.cmdline == parent.cmdline
    return is_fork and process_role.is_python(process) and not process_role.is_server(parent)
