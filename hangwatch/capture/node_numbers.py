"""Find ranks without a number of their own by their process groups.

In some pods, RANK and WORLD_SIZE are the numbers of the node, and each process in the pod inherits them. They are not
the numbers of a rank if at least two processes below a process with these numbers hold a process group. Neither may be
below the other. Threads of torch and NCCL show a process group. A fork has no such threads, and a worker starts none.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.jobs import nested_slots
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_tree import Tree
from hangwatch.model import Process, ProcessId
from hangwatch.probes.process import environment, locked_memory
from hangwatch.probes.process.live_environ import LiveEnvironments
from hangwatch.probes.torch_recorder import threads
from hangwatch.tables import launchers

MOST_READ = 512  # processes; a scan reads their threads


class NodeNumbers:
    """The numbers of nodes in the environments of processes, and the variables of the ranks that inherit them."""

    def __init__(self, proc_root: Path) -> None:
        self._root = proc_root
        self._live = LiveEnvironments(proc_root)
        self._holders: dict[ProcessId, dict[str, str]] = {}
        self._of_nodes: dict[tuple[Owner, nested_slots.Slot], ProcessId] = {}

    def remove(self, processes: Sequence[Process]) -> tuple[Sequence[Process], dict[ProcessId, ProcessId]]:
        """Return the processes with numbers of their own only, and the common ancestor of those of a process group.

        A rank has the numbers that it set after its start.
        """
        tree = Tree(processes)
        alive = {process.id for process in tree}
        self._holders = {process: environ for process, environ in self._holders.items() if process in alive}
        self._of_nodes = {numbers: above for numbers, above in self._of_nodes.items() if above in alive}
        ancestors: dict[ProcessId, ProcessId] = {}
        budget = MOST_READ
        for above, below in nested_slots.find_families(tree):
            budget -= len(below)
            if budget < 0 or self._holds_group(above):
                continue
            holders = {process.id.pid: process for process in below if self._holds_group(process)}
            ranks = [
                each
                for each in holders.values()
                if holders.keys().isdisjoint(process.id.pid for process in tree.ancestors(each))
            ]
            slot = nested_slots.slot_of(below[0])
            if len(ranks) > 1 and (not slot or slot == self._slot(above)):
                ancestors |= {rank.id: above.id for rank in ranks}
                if slot:
                    self._of_nodes[owner_of(below[0]), slot] = above.id
        if not self._of_nodes:
            return processes, ancestors
        return [self._without_node(process) for process in processes], ancestors

    def _holds_group(self, process: Process) -> bool:
        """True if the process has, or had, a process group. Its variables are read when this is first true."""
        if process.id not in self._holders and threads.find_communicators(process.id, self._root):
            self._holders[process.id] = self._live.read_variables(process.id, owner_of(process).share)
        return process.id in self._holders

    def _slot(self, process: Process) -> nested_slots.Slot:
        """Return the slot of a process, which a scan does not read if it is neither Python nor a launcher."""
        if process.environ:
            return nested_slots.slot_of(process)
        target = locked_memory.Target(process.id, owner_of(process).share)
        environ = locked_memory.SHARED.read_one(
            target, lambda each: environment.read_allowed(each.pid, self._root, launchers.SLOT_NAMES)
        )
        return nested_slots.slot_of(replace(process, environ=environ)) if isinstance(environ, dict) else ()

    def _without_node(self, process: Process) -> Process:
        slot = nested_slots.slot_of(process)
        if not slot or (owner_of(process), slot) not in self._of_nodes:
            return process
        own = {**process.environ, **self._holders.get(process.id, {})}
        if nested_slots.slot_of(replace(process, environ=own)) != slot:
            return replace(process, environ=own)
        names = {*launchers.SLOT_NAMES, launchers.TABLE.rendezvous.address}
        return replace(process, environ={name: value for name, value in own.items() if name not in names})
