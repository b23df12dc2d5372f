"""Ranks that were forked and execute no new program: those of notebook_launcher, ddp_fork or a Pool of processes.
Pure.

Each rank writes its number into its own environment. The kernel does not show that number, only the environment at
the start of the parent's program. So only the driver's list of GPU processes shows that these processes are ranks.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_tree import Tree, is_within, start_order
from hangwatch.model import GpuSample, Process, list_by_key


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
