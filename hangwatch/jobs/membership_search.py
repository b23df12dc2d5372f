"""Find which processes of a snapshot belong to which job, and the rank slot of each process. Pure.

A user can write anything into an environment. So processes belong to one job only if the kernel shows one owner for
them. The rank slot of a living process is not given to another process.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hangwatch import words
from hangwatch.jobs import engine_workers, nested_slots, process_role, program_launched
from hangwatch.jobs.membership import Membership, join_parts, pids_of_ranks, rank_number, run_key
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.jobs.process_role import RankSlot
from hangwatch.jobs.process_tree import INIT_PID, Tree, is_within, start_order
from hangwatch.model import GpuSample, Process, ProcessId, list_by_key


class _SlotHolder(NamedTuple):
    process: Process
    slot: RankSlot
    launcher_process: Process | None
    owner: Owner
    launcher: str


def find_memberships(
    tree: Tree,
    samples: Sequence[GpuSample],
    endpoints: Mapping[ProcessId, str],
    hosts: Mapping[ProcessId, ProcessId],
    ancestors: Mapping[ProcessId, ProcessId],
) -> list[Membership]:
    """Return the processes of each job in a snapshot.

    `samples` list the processes on each GPU. `endpoints` are the stores to which processes are connected. `hosts` are
    the processes that host the stores of ranks without variables. `ancestors` are the common ancestors of processes
    with a process group.
    """
    memberships = _memberships_by_slot(tree, samples, endpoints)
    memberships += _connected_memberships(tree, hosts, pids_of_ranks(memberships))
    memberships += _spawned_memberships(tree, samples, pids_of_ranks(memberships))
    memberships += _connected_memberships(tree, ancestors, pids_of_ranks(memberships))
    families = program_launched.find_siblings(tree, samples, pids_of_ranks(memberships))
    memberships += [_of_siblings("fork", head, members) for head, members in families]
    memberships += _hidden_memberships(tree, memberships)
    engines = engine_workers.find_engines(tree, pids_of_ranks(memberships))
    memberships += [
        _of_siblings("engine", head, members, has_places=False, engine=name) for name, head, members in engines
    ]
    memberships += _waiting_memberships(tree, memberships)
    return memberships


def _of_siblings(launcher: str, head: Process | None, members: Sequence[Process], **others: Any) -> Membership:
    return Membership(launcher, head, [(process, None) for process in members], owner_of(members[0]), **others)


# --- ranks with a rank slot in their environment --------------------------------------------------------------------


def _memberships_by_slot(
    tree: Tree, samples: Sequence[GpuSample], endpoints: Mapping[ProcessId, str]
) -> list[Membership]:
    helpers = nested_slots.find_helpers(tree)
    groups = list_by_key((_membership_key(holder), holder) for holder in _find_slot_holders(tree, helpers))
    launched_runs = {
        _owned_run(holder) for group in groups.values() for holder in group if holder.launcher_process is not None
    }
    memberships = []
    for group in groups.values():
        # The remaining processes of a dead launcher are not a separate job if the run continues.
        if group[0].launcher_process is None and _owned_run(group[0]) in launched_runs:
            continue
        for part in _without_doubles(group, tree):
            members = _ranks_of(part, tree, samples)
            if members and not _is_of_server(members[0][0], tree):
                launcher, head = part[0].launcher, part[0].launcher_process
                if head is None and launcher == "plain":
                    launcher, head = _find_starter([process for process, _ in members], tree)
                memberships.append(Membership(launcher, head, list(members), part[0].owner))
    return _with_helpers(join_parts(memberships, samples, endpoints), tree, helpers)


def _with_helpers(memberships: list[Membership], tree: Tree, helpers: Mapping[int, Process]) -> list[Membership]:
    """Add a note to each job with a rank that has ended, but left helpers."""
    by_run, noted = _helpers_by_run(tree, helpers), []
    for membership in memberships:
        process, slot = membership.members[0]
        key = () if slot is None else (membership.owner, *run_key(process, slot))
        notes = _describe_ended(by_run.get(key, {}), {rank_number(member) for member in membership.members})
        noted.append(membership._replace(notes=(*membership.notes, *notes)))
    return noted


def list_ended_ranks(processes: Sequence[Process]) -> list[str]:
    """Return a sentence on each rank that has ended, but left helpers, for a node without jobs."""
    tree = Tree(processes)
    runs = _helpers_by_run(tree, nested_slots.find_helpers(tree))
    return [text for by_rank in runs.values() for text in _describe_ended(by_rank)]


def _helpers_by_run(tree: Tree, helpers: Mapping[int, Process]) -> dict[tuple[object, ...], dict[int, set[int]]]:
    by_run: dict[tuple[object, ...], dict[int, set[int]]] = {}
    ours = {pid for pid, process in helpers.items() if process_role.program(process.cmdline) == "hangwatch"}
    for process in helpers.values():
        slot = process_role.find_rank_slot(process)
        if slot is not None and not is_within(process, ours, tree):
            run = by_run.setdefault((owner_of(process), *run_key(process, slot)), {})
            run.setdefault(slot.rank, set()).add(process.id.pid)
    return by_run


def _describe_ended(by_rank: Mapping[int, Iterable[int]], living: Collection[int] = ()) -> list[str]:
    ended = sorted((rank, pids) for rank, pids in by_rank.items() if rank not in living)
    return [f"rank {rank} has ended, its helpers live (pids {words.fold(pids)})" for rank, pids in ended]


def _is_of_server(process: Process, tree: Tree) -> bool:
    """True for a server, a notebook, a worker of an engine, and processes that a server has spawned or forked."""
    if engine_workers.find_engine(process, tree) is not None:
        return True
    is_started = False
    for parent in tree.ancestors(process):
        is_child = process_role.is_spawned(process) or _is_fork(process, parent)
        if process_role.serves_requests(process) or not is_child:
            break
        process, is_started = parent, True
    return process_role.serves_requests(process) or (process_role.is_server(process) and not is_started)


def _find_starter(members: Sequence[Process], tree: Tree) -> tuple[str, Process | None]:
    """Return the Python process that has spawned or forked all these ranks, and the name of this way to start them."""
    parents = {parent.id: parent for process in members if (parent := tree.parent(process)) is not None}
    parent = parents.popitem()[1] if len(parents) == 1 else None
    if parent is None or parent.id.pid == INIT_PID or len(members) < 2:
        return "plain", None
    if all(process_role.is_spawned(process) for process in members):
        return "spawn", parent
    is_forked = all(_is_fork(process, parent) for process in members)
    return ("fork", parent) if is_forked else ("plain", None)


def needs_endpoint(process: Process) -> int | None:
    """Return the port of a rank's store, if only its connection to the store shows the job of this rank; else None.

    Such a rank is in a pod or container. Its job may have ranks in several of them. All ranks of a run have a
    connection to one store. A process that copies their variables has none.
    """
    port = process_role.rendezvous(process.environ)[1]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        return None
    if not owner_of(process).place or process_role.is_loader_worker(process) or not process_role.is_python(process):
        return None
    return int(port)


def _find_slot_holders(tree: Tree, helpers: Collection[int]) -> Iterator[_SlotHolder]:
    launchers = {process.id.pid: row for process in tree if (row := process_role.find_launcher(process))}
    above = {up.id.pid for process in tree if process.id.pid in launchers for up in tree.ancestors(process)}
    started: list[tuple[Process, RankSlot]] = []
    for process in tree:
        if (
            not process.environ  # then it has no slot: true of most processes of a node, at each scan
            or process.id.pid in launchers
            or process.id.pid in helpers
            or process_role.is_idle(process)
        ):
            continue
        head = next((up for up in tree.ancestors(process) if up.id.pid in launchers), None)
        row = launchers[head.id.pid] if head else None
        slot = process_role.find_rank_slot(process, row)
        # A process above a launcher has the number of its node (Kubernetes, srun), not of a rank. Exception: a rank
        # that starts a job within the job. It has a local rank.
        if slot is None:
            continue
        if slot.variables.started_by_first:
            started += [(process, slot)] if row is None or not row.starts_only_ranks else []
            continue
        is_ranks = slot.variables.read_by_torch and slot.local_rank is not None
        if is_ranks or process.id.pid not in above:
            launcher = row.name if row else process_role.guess_launcher(process.environ, slot)
            only_head = None if row and row.is_shared else head
            yield _SlotHolder(process, slot, only_head, owner_of(process), launcher)
    for process, slot in program_launched.find_ranks(tree, started):
        launcher = process_role.guess_launcher(process.environ, slot)
        yield _SlotHolder(process, slot, None, owner_of(process), launcher)


def _membership_key(holder: _SlotHolder) -> tuple[object, ...]:
    """Return a key that is equal for the processes of one job: owner and launcher, else owner, run and world size."""
    if holder.launcher_process is not None:
        return holder.owner, holder.launcher_process.id
    return *_owned_run(holder), holder.slot.world_size


def _owned_run(holder: _SlotHolder) -> tuple[object, ...]:
    return holder.owner, *run_key(holder.process, holder.slot)


def _without_doubles(group: list[_SlotHolder], tree: Tree) -> list[list[_SlotHolder]]:
    """Split a group without a launcher by parent process, if it has a rank twice, or ranks of two attempts.

    Containers may share addresses and ports, so the group may be several jobs. An attempt number counts only
    between processes of one parent, because any process can write such a number.
    """
    ranks = [holder.slot.rank for holder in _topmost(group, tree)]
    is_one = len({holder.slot.attempt for holder in group}) == 1 and len(ranks) == len(set(ranks))
    if group[0].launcher_process is not None or is_one:
        return [group]
    by_parent: dict[ProcessId | None, list[_SlotHolder]] = {}
    pids = {holder.process.id.pid for holder in group}
    for holder in group:
        outside = next((up for up in tree.ancestors(holder.process) if up.id.pid not in pids), None)
        by_parent.setdefault(outside.id if outside else None, []).append(holder)
    return list(by_parent.values())


def _ranks_of(
    group: list[_SlotHolder], tree: Tree, samples: Sequence[GpuSample]
) -> list[tuple[Process, RankSlot | None]]:
    """Return one process for each rank of the latest attempt.

    It is the topmost process with the rank slot that the driver lists on a GPU, else the topmost Python process that
    is not a wrapper.
    """
    group = [holder for holder in group if holder.slot.variables.read_by_torch] or group
    attempt = max(holder.slot.attempt for holder in group)
    on_gpu = {pid for gpu in samples for pid in gpu.pids}
    group = [
        holder
        for holder in group
        if holder.slot.attempt == attempt
        and (
            holder.process.id.pid in on_gpu
            or (process_role.is_python(holder.process) and not holder.process.is_wrapper)
        )
    ]
    holds = {(up.id.pid, holder.slot.rank) for holder in group for up in _above_gpu_holder(holder, on_gpu, tree)}
    group = [holder for holder in group if (holder.process.id.pid, holder.slot.rank) not in holds]
    chosen: dict[int, _SlotHolder] = {}
    # A helper that outlived its parent is a child of init, and younger. It must not take the rank slot.
    by_start = sorted(_topmost(group, tree), key=lambda holder: -holder.process.id.start_ticks)
    for holder in sorted(by_start, key=lambda holder: holder.process.parent_pid == INIT_PID):
        chosen.setdefault(holder.slot.rank, holder)
    return [(chosen[rank].process, chosen[rank].slot) for rank in sorted(chosen)]


def _above_gpu_holder(holder: _SlotHolder, on_gpu: set[int], tree: Tree) -> Iterator[Process]:
    """Yield the processes above a program on a GPU that are not on a GPU. Forks and workers are no such programs."""
    process = holder.process
    if process.id.pid in on_gpu and not process_role.is_multiprocessing(process):
        yield from (up for up in tree.ancestors(process) if up.id.pid not in on_gpu and up.cmdline != process.cmdline)


def _topmost(group: list[_SlotHolder], tree: Tree) -> list[_SlotHolder]:
    slots = {holder.process.id.pid: holder.slot.rank for holder in group}
    return [
        holder
        for holder in group
        if not any(slots.get(up.id.pid) == holder.slot.rank for up in tree.ancestors(holder.process))
    ]


# --- ranks that got their number as an argument ---------------------------------------------------------------------


def _connected_memberships(tree: Tree, heads: Mapping[ProcessId, ProcessId], ranks: set[int]) -> Iterator[Membership]:
    """Yield the jobs of processes that are connected to a listening socket of one of them, the host first.

    `heads` are these hosts, or the common ancestors of processes that hold a process group.
    """
    by_head: defaultdict[ProcessId, list[Process]] = defaultdict(list)
    for process_id, head_id in heads.items():
        process = tree.get(process_id.pid)
        if process is not None and process.id == process_id and not is_within(process, ranks, tree):
            by_head[head_id].append(process)
    for head_id, members in by_head.items():
        members.sort(key=lambda process: (process.id != head_id, start_order(process)))
        is_host, above = heads.get(head_id) == head_id, tree.get(head_id.pid)
        if len(members) < 2 or (is_host and members[0].id != head_id) or _is_of_server(members[0], tree):
            continue
        launcher, head = _find_starter(members, tree)
        note = "its ranks are not in their environment"
        if is_host:
            note += f"; pid {head_id.pid} is likely rank 0, because it hosts the store"
        elif head is None and above is not None:
            row = process_role.find_launcher(above)
            launcher, head = row.name if row else launcher, None if row and row.is_shared else above
        yield _of_siblings(launcher, head, members, notes=(note,), has_places=launcher == "spawn" and not is_host)


# --- ranks of mp.spawn, which only have a place in the order of start -----------------------------------------------


def _spawned_memberships(tree: Tree, samples: Sequence[GpuSample], ranks: set[int]) -> list[Membership]:
    siblings = list_by_key(
        (process.parent_pid, process)
        for process in tree
        if process_role.is_spawned(process) and not is_within(process, ranks, tree)
    )
    holders = tree.gpu_holders(samples)
    memberships = []
    for parent_pid, group in siblings.items():
        head = tree.get(parent_pid) if parent_pid != INIT_PID else None
        # those that hold a GPU, also by a descendant; else those with a rendezvous address
        members = [process for process in group if process.id.pid in holders]
        members = members or [process for process in group if process_role.rendezvous(process.environ)[0]]
        members.sort(key=start_order)
        if len(members) < 2 or (head and process_role.is_server(head)) or _is_of_server(members[0], tree):
            continue
        memberships.append(_of_siblings("spawn", head, members))
    return memberships


# --- ranks with an environment that may not be read -----------------------------------------------------------------


def _hidden_memberships(tree: Tree, memberships: Sequence[Membership]) -> list[Membership]:
    """Return the jobs of launchers with Python children that show no environment: not readable, or overwritten.

    They are monitored from the start. When such a job hangs, its page must say that its ranks cannot be dumped.
    """
    heads = {
        head.id
        for membership in memberships
        for head in (membership.launcher_process, *membership.more_launcher_processes)
        if head is not None
    }
    hidden = []
    for process in tree:
        row = process_role.find_launcher(process)
        if row is None or not row.starts_only_ranks or process.id in heads:
            continue
        children = (child for child in tree.children(process) if process_role.may_be_rank(child))
        ranks = [child for child in children if child.faults or process_role.has_overwritten_environ(child)]
        if ranks:
            hidden.append(_of_siblings(row.name, process, sorted(ranks, key=start_order)))
    return hidden


# --- launchers that have no rank ------------------------------------------------------------------------------------


def _waiting_memberships(tree: Tree, memberships: Sequence[Membership]) -> list[Membership]:
    """Return launchers without a child: torchrun that waits for another node, or mpirun before its tasks start.

    A launcher with a child is left out. `accelerate launch` on one GPU gives its child no rank, DeepSpeed's runner
    has only ssh as a child, and srun starts shells. Of nested launchers, only the innermost is returned. Processes
    below a rank belong to that rank's job.
    """
    ranks, waiting_launchers = pids_of_ranks(memberships), []
    for process in tree:
        waiting = process_role.find_waiting(process)
        if waiting is None or is_within(process, ranks, tree) or _is_fork(process, tree.parent(process)):
            continue
        if all(_is_fork(child, process) for child in tree.children(process)):
            waiting_launchers.append(Membership(waiting.launcher, process, [], owner_of(process), waiting=waiting))
    return waiting_launchers


def _is_fork(process: Process, parent: Process | None) -> bool:
    """True if the process was forked and still has the name and the arguments of its parent: no execve(2) yet."""
    return parent is not None and (process.comm, process.cmdline) == (parent.comm, parent.cmdline)
