"""Find the training jobs of this node in a snapshot of its processes, with their ranks, workers and GPUs. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import config, words
from hangwatch.jobs import owners, process_role, rank_gpus, user_limits
from hangwatch.jobs.membership import Membership, claim_order, holds_gpu, pids_of_ranks
from hangwatch.jobs.membership_search import find_memberships
from hangwatch.jobs.process_role import RankSlot
from hangwatch.jobs.process_tree import INIT_PID, Tree, start_order
from hangwatch.model import FoundJobs, GpuSample, GpuSweep, Job, Process, ProcessId, Rank, Worker, gaps, spans

DEFAULT_LIMITS = config.Jobs()
# Characters of the name that a launcher gave; a checksum and a pid may follow
_MAX_NAME = 48
_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


def find_jobs(
    processes: Sequence[Process],
    gpus: GpuSweep | None = None,
    *,
    limits: config.Jobs = DEFAULT_LIMITS,
    node: str = "",
    ticks_per_second: int = 100,
    endpoints: Mapping[ProcessId, str] = MappingProxyType({}),
    hosts: Mapping[ProcessId, ProcessId] = MappingProxyType({}),
    ancestors: Mapping[ProcessId, ProcessId] = MappingProxyType({}),
) -> FoundJobs:
    """Return the jobs and engines among `processes`, by job_id, and the number of jobs and ranks over a limit.

    A job is a set of processes with the variables of a launcher (see launchers.toml), ranks of mp.spawn or fork, or
    a launcher without ranks; see `membership`. All ranks have one owner (see `owners`), even if other users copy
    the job's environment. `node` is the name of this node.

    `ticks_per_second` is the unit of `start_ticks`. With it, a process that began after `gpus` was read is ignored:
    the driver listed another process under the same pid. `endpoints` are the stores to which the processes of
    `needs_endpoint` are connected. `hosts` are the processes that host the stores of ranks without variables,
    `ancestors` the common ancestors of processes with a process group.
    """
    tree = Tree(processes)
    samples = _samples(gpus, tree, ticks_per_second)
    memberships, left_out = user_limits.apply_limits(
        find_memberships(tree, samples, endpoints, hosts, ancestors), tree, samples, limits
    )
    ranks = pids_of_ranks(memberships)
    names = _names(memberships, tree, node, lambda membership: claim_order(membership, samples, endpoints))
    jobs = [_job(name, membership, tree, samples, ranks) for membership, name in zip(memberships, names, strict=True)]
    jobs.sort(key=lambda job: (job.job_id, job.processes[0]))
    return FoundJobs(
        jobs=tuple(job for job in jobs if not job.is_engine),
        engines=tuple(job for job in jobs if job.is_engine),
        left_out=left_out,
    )


def with_distinct_name(job: Job) -> Job:
    """Return this job with another name and key, because another job has the same ones."""
    name = _make_distinct(_Name(job.job_id, job.key), job.processes[0].pid)
    return replace(job, job_id=name.job_id, job_key=name.job_key)


def job_of_pids(processes: Sequence[Process], pids: Sequence[int]) -> Job:
    """Return a job with the processes `pids` as its ranks. A pid without a process becomes a rank that is gone."""
    tree = Tree(processes)
    chosen = dict.fromkeys(pids)
    ranks = []
    for pid in chosen:
        process = tree.get(pid)
        if process is None:
            ranks.append(Rank(id=ProcessId(pid=pid, start_ticks=-1), rank=None, local_rank=None))
        else:
            slot = process_role.find_rank_slot(process)
            if slot is not None and slot.variables.started_by_first and process_role.node_number(process.environ, slot):
                # After the first node, the rank depends on the unknown number of ranks on each node
                slot = None
            ranks.append(_rank(process, slot, place=None, tree=tree, samples=(), ranks=set(chosen)))
    return Job(
        job_id=_safe("pids-" + "-".join(map(str, chosen))), launcher="pids", launcher_id=None, ranks=tuple(ranks)
    )


# --- one job --------------------------------------------------------------------------------------------------------


def _job(name: _Name, membership: Membership, tree: Tree, samples: Sequence[GpuSample], ranks: set[int]) -> Job:
    first, first_slot = _first(membership)
    # Arguments are not read: they may contain keys of trackers and hubs.
    program = process_role.program_name(
        (first if first_slot and not process_role.is_spawned(first) else membership.launcher_process or first).cmdline
    )
    local_size = first_slot.local_world_size if first_slot else None
    job_ranks = [
        _rank(process, slot, place=place if membership.has_places else None, tree=tree, samples=samples, ranks=ranks)
        for place, (process, slot) in enumerate(membership.members)
    ]
    job_ranks, notes = _without_other_users(job_ranks, tree)
    present = sorted({rank.local_rank for rank in job_ranks if rank.local_rank is not None})
    return Job.copy_from(
        name,
        membership,
        first_slot,
        launcher_id=membership.launcher_process.id if membership.launcher_process else None,
        ranks=tuple(job_ranks),
        absent_local_ranks=spans(gaps(present, local_size or 0)),
        command=program,
        user=None if first.uid is None or owners.pod_of(first) else f"uid {first.uid}",
        environ=first.environ,
        owner=membership.owner.name,
        uid=_uid(membership),
        share=membership.owner.share,
        holds_gpu=holds_gpu(membership, samples),
        notes=(*membership.notes, *(first_slot.doubts if first_slot else ()), *notes),
        more_launcher_ids=tuple(head.id for head in membership.more_launcher_processes),
        libraries=tuple(sorted({each for process, _ in membership.members for each in process.libraries})) or None,
        program=membership.engine
        or ("" if program == "-c" or membership.waiting is not None else words.plain_word(program)),
    )


def _first(membership: Membership) -> tuple[Process, RankSlot | None]:
    """Return the first rank and its rank slot; for a job without ranks, its launcher and None."""
    return membership.members[0] if membership.members else (membership.processes[0], None)


def _without_other_users(ranks: list[Rank], tree: Tree) -> tuple[list[Rank], tuple[str, ...]]:
    """Return the ranks without workers of other users, and a note with the number of these workers.

    A worker may run as another user through sudo, for example. The job's owner can read all stacks in an incident,
    and must not see those.
    """
    kept = [
        replace(rank, workers=tuple(worker for worker in rank.workers if _is_own(worker, rank, tree))) for rank in ranks
    ]
    others = sum(len(rank.workers) for rank in ranks) - sum(len(rank.workers) for rank in kept)
    note = f"child processes of its ranks that run as another user are not dumped: {others}"
    return kept, (note,) if others else ()


def _is_own(worker: Worker, rank: Rank, tree: Tree) -> bool:
    process, above = tree.get(worker.id.pid), tree.get(rank.id.pid)
    return process is not None and above is not None and process.uid == above.uid and not process.is_setuid


def _uid(membership: Membership) -> int | None:
    """Return the user id of all ranks; None if they differ, or in a pod, which may have its own user ids."""
    uids = {None if process.is_setuid else process.uid for process in membership.processes}
    return uids.pop() if len(uids) == 1 and not membership.owner.place else None


def _rank(
    process: Process,
    slot: RankSlot | None,
    *,
    place: int | None,
    tree: Tree,
    samples: Sequence[GpuSample],
    ranks: set[int],
) -> Rank:
    local_rank = slot.local_rank if slot else place
    others = ranks - {process.id.pid}
    below = [child for child in tree.descendants(process, others) if not process_role.is_resource_tracker(child)]
    # Loader workers first, then other Python: if the number of dumps is limited, these explain a rank best.
    below.sort(
        key=lambda child: (not process_role.is_loader_worker(child), not process_role.is_python(child), child.id)
    )
    pids = {process.id.pid, *(child.id.pid for child in below)}
    return Rank(
        id=process.id,
        rank=slot.rank if slot else None,
        local_rank=local_rank,
        gpu_uuids=rank_gpus.find_gpus(pids, process.environ, local_rank, samples),
        workers=tuple(Worker(child.id, _title(child) or child.comm, process_role.is_python(child)) for child in below),
        title=_title(process),
        pod=owners.pod_of(process),
    )


def _title(process: Process) -> str | None:
    """Return the title that a process has set for itself, without an actor's method; None without a usable title."""
    title = process_role.title_of(process)
    return title.text.partition(".")[0] if title else None


def _samples(gpus: GpuSweep | None, tree: Tree, ticks_per_second: int) -> list[GpuSample]:
    """Return the GPUs, without pids that now belong to a younger process than the one that the driver listed."""
    if gpus is None:
        return []
    last_ticks = gpus.taken_monotonic_seconds * ticks_per_second
    listed = {pid: tree.get(pid) for gpu in gpus.gpus for pid in gpu.pids}
    alive = {pid for pid, process in listed.items() if process is not None and process.id.start_ticks <= last_ticks}
    return [replace(gpu, pids=tuple(pid for pid in gpu.pids if pid in alive)) for gpu in gpus.gpus]


# --- names ----------------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """The display name of a job, its key, and the name that its user chose."""

    job_id: str
    job_key: str
    job_name: str = ""


def _names(
    memberships: list[Membership], tree: Tree, node: str, order: Callable[[Membership], tuple[int, ...]]
) -> list[_Name]:
    """Return the name of each job. If the job's variables allow that, it is the same on all nodes of the job.

    If several jobs have the same key, the job with the best claim keeps it. The names of the others get a pid,
    because a copy of a job's variables must not change the name of that job.
    """
    names = [_name(membership, tree, node) for membership in memberships]
    best: dict[str, Membership] = {}
    for name, membership in sorted(zip(names, memberships, strict=True), key=lambda named: order(named[1])):
        best.setdefault(name.job_key, membership)
    return [
        name if best[name.job_key] is membership else _make_distinct(name, membership.processes[0].id.pid)
        for name, membership in zip(names, memberships, strict=True)
    ]


def _make_distinct(name: _Name, pid: int) -> _Name:
    return _Name(f"{name.job_id}-p{pid}", _key(name.job_key, str(pid)), name.job_name)


def _name(membership: Membership, tree: Tree, node: str) -> _Name:
    process, slot = _first(membership)
    environ = process.environ
    address, port = _meeting_place(membership)
    is_here = address.startswith(_LOOPBACK) or (
        slot is not None and slot.world_size in (slot.local_world_size, len(membership.members))
    )
    name = process_role.scheduler_job_id(environ) or (process_role.run_id(environ, slot) if slot else "")
    if membership.waiting is not None:
        name, is_here = name or membership.waiting.run_id, is_here or not membership.waiting.needs_several_nodes
    if not name and (slot or membership.waiting) and address and not is_here:
        name = "-".join(filter(None, (address, port)))
    if not name:
        is_here = True
        origin = _origin(membership, tree)
        # One shell may have started several jobs without a launcher. They have different ports.
        is_told_by_port = port and membership.launcher_process is None
        name = f"pid{origin.pid}-{origin.start_ticks}" + (f"-{port}" if is_told_by_port else "")
    key = _key(name, membership.owner.name, address, port, node if is_here else "")
    return _Name(_safe(name), key, _job_name(membership, node))


def _job_name(membership: Membership, node: str) -> str:
    """Return the name that the user chose for the job, from its first rank that has one, else from its launcher.

    "" without a name. Workers that Ray started before its job do not have the name of that job.
    """
    told = (
        process_role.job_name(one.environ, in_pod=bool(owners.pod_of(one)), node=node)
        for one in filter(None, (*membership.processes, membership.launcher_process))
    )
    return next(filter(None, told), "")


def _meeting_place(membership: Membership) -> tuple[str, str]:
    """Return address and port at which the ranks, or the launchers of all nodes, meet; "" for what is unknown."""
    if membership.waiting is None:
        return process_role.rendezvous(membership.processes[0].environ)
    if membership.waiting.port is None:
        return membership.waiting.endpoint, ""
    address, _, port = membership.waiting.endpoint.rpartition(":")
    return address, port


def _key(*parts: str) -> str:
    return words.checksum(repr(parts).encode())


def _origin(membership: Membership, tree: Tree) -> ProcessId:
    """Return the process that identifies the job: its launcher, the common parent of its ranks, or its first rank."""
    if membership.launcher_process is not None:
        return membership.launcher_process.id
    parents = {parent.id if (parent := tree.parent(process)) else None for process, _ in membership.members}
    parent_id = parents.pop() if len(parents) == 1 else None
    if parent_id is not None and parent_id.pid != INIT_PID:
        return parent_id
    return min((process for process, _ in membership.members), key=start_order).id


def _safe(text: str) -> str:
    """Return a name that is safe as a label and as a folder name. A changed name ends in a checksum of the text."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".-_")[:_MAX_NAME]
    return clean if clean == text else f"{clean}-{zlib.crc32(text.encode()):08x}".lstrip("-")
