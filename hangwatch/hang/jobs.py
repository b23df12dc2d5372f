"""Pure: a snapshot of processes -> the training jobs of this node, with their ranks, workers and GPUs."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from hangwatch import words
from hangwatch.hang import devices, launchers
from hangwatch.hang.launchers import Seat
from hangwatch.hang.owners import Owner, owner_of
from hangwatch.model import GpuSample, GpuSweep, Job, Process, ProcessId, Rank, Worker

_MAX_NAME = 48  # of what a launcher gave; a checksum and a pid may follow
_INIT = 1
_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


def find_jobs(
    processes: Sequence[Process], gpus: GpuSweep | None = None, *, node: str = "", ticks_per_second: int = 100
) -> tuple[Job, ...]:
    """The jobs among `processes` on the node of that name, by job_id.

    A job is what has the variables of a launcher (see launchers.toml), or what mp.spawn started and holds GPUs; its
    ranks are processes of one owner (see `owners`), whatever others write into their environments. `ticks_per_second`
    is the unit of `start_ticks`: a process that began after `gpus` was read cannot be the one that the driver meant by
    its pid.
    """
    tree = _Tree(processes)
    samples = _samples(gpus, tree, ticks_per_second)
    crews = _seated_crews(tree, samples)
    seated = {process.id.pid for crew in crews for process, _ in crew.members}
    crews += _spawned_crews(tree, samples, seated)
    crews += _hidden_crews(tree, crews)
    ranks = {process.id.pid for crew in crews for process, _ in crew.members}
    jobs = [_job(name, crew, tree, samples, ranks) for crew, name in zip(crews, _names(crews, tree, node), strict=True)]
    return tuple(sorted(jobs, key=lambda job: (job.job_id, job.ranks[0].id)))


def job_of_pids(processes: Sequence[Process], pids: Sequence[int]) -> Job:
    """These pids as the ranks of one job, whatever they are; a pid that has no process becomes a rank that is gone."""
    tree = _Tree(processes)
    chosen = dict.fromkeys(pids)
    ranks = []
    for pid in chosen:
        process = tree.get(pid)
        if process is None:
            ranks.append(Rank(id=ProcessId(pid=pid, start_ticks=-1), rank=None, local_rank=None))
        else:
            seat = launchers.seat(process, None)
            ranks.append(_rank(process, seat, place=None, tree=tree, samples=(), ranks=set(chosen)))
    return Job(
        job_id=_safe("pids-" + "-".join(map(str, chosen))), launcher="pids", launcher_id=None, ranks=tuple(ranks)
    )


class _Crew(NamedTuple):
    """The processes of one job. A member without a seat knows only its place in the order of start."""

    launcher: str
    head: Process | None
    members: list[tuple[Process, Seat | None]]
    owner: Owner
    notes: tuple[str, ...] = ()

    @property
    def began_ticks(self) -> int:
        """When its first rank started."""
        return min(process.id.start_ticks for process, _ in self.members)


class _Seated(NamedTuple):
    process: Process
    seat: Seat
    head: Process | None
    owner: Owner


class _Tree:
    """Who is whose child, among what still runs. A parent that is younger than its child is another process."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._by_pid = {process.id.pid: process for process in processes if process.state not in ("Z", "X")}
        self._children: dict[int, list[Process]] = {}
        for process in self._by_pid.values():
            parent = self.parent(process)
            if parent is not None:
                self._children.setdefault(parent.id.pid, []).append(process)

    def __iter__(self) -> Iterator[Process]:
        return iter(self._by_pid.values())

    def get(self, pid: int) -> Process | None:
        return self._by_pid.get(pid)

    def parent(self, process: Process) -> Process | None:
        parent = self._by_pid.get(process.parent_pid)
        return parent if parent is not None and parent.id.start_ticks <= process.id.start_ticks else None

    def ancestors(self, process: Process) -> Iterator[Process]:
        """From the parent upwards. A snapshot is not taken at one moment, so a circle is thinkable: each once."""
        seen = {process.id.pid}
        parent = self.parent(process)
        while parent is not None and parent.id.pid not in seen:
            yield parent
            seen.add(parent.id.pid)
            parent = self.parent(parent)

    def children(self, process: Process) -> Sequence[Process]:
        return self._children.get(process.id.pid, ())

    def descendants(self, process: Process, stop: Iterable[int] = ()) -> Iterator[Process]:
        """All below a process, nearest first, without the subtrees of the pids in `stop`."""
        seen = {process.id.pid, *stop}
        queue = [process]
        for parent in queue:
            for child in self._children.get(parent.id.pid, ()):
                if child.id.pid not in seen:
                    seen.add(child.id.pid)
                    queue.append(child)
                    yield child


# --- ranks that know who they are ----------------------------------------------------------------------------------


def _seated_crews(tree: _Tree, samples: Sequence[GpuSample]) -> list[_Crew]:
    groups: dict[tuple[object, ...], list[_Seated]] = {}
    for seated in _seated(tree):
        groups.setdefault(_crew_key(seated), []).append(seated)
    led = {_owned_run(seated) for group in groups.values() for seated in group if seated.head is not None}
    crews = []
    for group in groups.values():
        # What a dead launcher left behind of a run that lives on is no job of its own.
        if group[0].head is None and _owned_run(group[0]) in led:
            continue
        for part in _without_doubles(group, tree):
            members = _ranks_of(part, tree, samples)
            if members and not launchers.is_server(members[0][0]):
                crews.append(_Crew(_launcher_name(part[0]), part[0].head, list(members), part[0].owner))
    return _joined(crews)


def _joined(crews: list[_Crew]) -> list[_Crew]:
    """Crews of one owner, run and size that have different ranks are one job: containers or pods with a part each.

    The older holds its ranks: who claims one of them, while its process lives, is a job of its own.
    """
    jobs: dict[tuple[object, ...], list[_Crew]] = {}
    for crew in sorted(crews, key=lambda crew: (crew.began_ticks, crew.members[0][0].id.pid)):
        process, seat = crew.members[0]
        assert seat is not None
        run = (*_run(process, seat), *launchers.rendezvous(process.environ))
        same_run = jobs.setdefault((crew.owner.name, *run, seat.world_size), [])
        place = next((place for place, job in enumerate(same_run) if not _shared_ranks(job, crew)), None)
        if place is None:
            same_run.append(_second_claimant(crew, same_run[0]) if same_run else crew)
        else:
            job = same_run[place]
            members = sorted((*job.members, *crew.members), key=_rank_number)
            same_run[place] = job._replace(members=members)
    return [job for same_run in jobs.values() for job in same_run]


def _shared_ranks(job: _Crew, crew: _Crew) -> list[int]:
    return sorted({_rank_number(member) for member in job.members} & {_rank_number(member) for member in crew.members})


def _rank_number(member: tuple[Process, Seat | None]) -> int:
    _, seat = member
    return -1 if seat is None else seat.rank


def _second_claimant(crew: _Crew, first: _Crew) -> _Crew:
    ranks, pid = words.fold(_shared_ranks(first, crew)), first.members[0][0].id.pid
    return crew._replace(
        notes=(f"claims ranks {ranks} of a run of the same name whose processes live (pid {pid}): a job of its own",)
    )


def _seated(tree: _Tree) -> Iterator[_Seated]:
    kinds = {process.id.pid: kind for process in tree if (kind := launchers.launcher_kind(process))}
    above = {up.id.pid for pid in kinds for up in tree.ancestors(_known(tree, pid))}
    for process in tree:
        if process.id.pid in kinds or launchers.is_loader_worker(process) or launchers.is_resource_tracker(process):
            continue
        head = next((up for up in tree.ancestors(process) if up.id.pid in kinds), None)
        seat = launchers.seat(process, kinds[head.id.pid] if head else None)
        # A process above a launcher has the seat of its node (Kubernetes, srun), not of a rank. A rank may start a
        # job within the job, though; its seat has a local rank.
        if seat is None:
            continue
        is_ranks = seat.variables.read_by_torch and seat.local_rank is not None
        if is_ranks or process.id.pid not in above:
            yield _Seated(process, seat, head, owner_of(process))


def _known(tree: _Tree, pid: int) -> Process:
    process = tree.get(pid)
    assert process is not None
    return process


def _crew_key(seated: _Seated) -> tuple[object, ...]:
    """What makes processes one crew: their launcher, else their run. Never the environment alone."""
    if seated.head is not None:
        return seated.owner, seated.head.id
    return seated.owner, None, *_run(seated.process, seated.seat), seated.seat.world_size


def _owned_run(seated: _Seated) -> tuple[object, ...]:
    return seated.owner, *_run(seated.process, seated.seat)


def _run(process: Process, seat: Seat) -> tuple[str, ...]:
    """What tells one run of an owner from another where no launcher is left to tell it."""
    run_id = launchers.run_id(process.environ, seat)
    return (run_id,) if run_id else launchers.rendezvous(process.environ)


def _launcher_name(seated: _Seated) -> str:
    if seated.head is not None:
        return launchers.launcher_kind(seated.head) or "plain"
    return launchers.launcher_of(seated.process.environ, seated.seat)


def _without_doubles(group: list[_Seated], tree: _Tree) -> list[list[_Seated]]:
    """Split what has no launcher and has a rank twice, or two attempts: jobs in containers share addresses and ports.

    What stands together afterwards has one parent. An attempt counts only among siblings: anybody can write a number.
    """
    is_one = len({seated.seat.attempt for seated in group}) == 1 and not _has_doubles(group, tree)
    if group[0].head is not None or is_one:
        return [group]
    by_parent: dict[ProcessId | None, list[_Seated]] = {}
    pids = {seated.process.id.pid for seated in group}
    for seated in group:
        outside = next((up for up in tree.ancestors(seated.process) if up.id.pid not in pids), None)
        by_parent.setdefault(outside.id if outside else None, []).append(seated)
    return list(by_parent.values())


def _has_doubles(group: list[_Seated], tree: _Tree) -> bool:
    tops = [seated.seat.rank for seated in _topmost(group, tree)]
    return len(tops) > len(set(tops))


def _ranks_of(group: list[_Seated], tree: _Tree, samples: Sequence[GpuSample]) -> list[tuple[Process, Seat | None]]:
    """One process per rank: of the latest attempt, a Python one, the topmost of those that inherited the seat."""
    group = [seated for seated in group if seated.seat.variables.read_by_torch] or group
    attempt = max(seated.seat.attempt for seated in group)
    on_gpu = {pid for gpu in samples for pid in gpu.pids}
    group = [
        seated
        for seated in group
        if seated.seat.attempt == attempt and (launchers.is_python(seated.process) or seated.process.id.pid in on_gpu)
    ]
    chosen: dict[int, _Seated] = {}
    # A helper that outlived its parent hangs under init and is younger: it must not take the seat.
    for seated in sorted(_topmost(group, tree), key=_orphans_last_youngest_first):
        chosen.setdefault(seated.seat.rank, seated)
    return [(chosen[rank].process, chosen[rank].seat) for rank in sorted(chosen)]


def _orphans_last_youngest_first(seated: _Seated) -> tuple[bool, int]:
    return seated.process.parent_pid == _INIT, -seated.process.id.start_ticks


def _topmost(group: list[_Seated], tree: _Tree) -> list[_Seated]:
    seats = {seated.process.id.pid: seated.seat.rank for seated in group}
    return [
        seated
        for seated in group
        if not any(seats.get(up.id.pid) == seated.seat.rank for up in tree.ancestors(seated.process))
    ]


# --- ranks of mp.spawn, which only know their place in the order of start -------------------------------------------


def _spawned_crews(tree: _Tree, samples: Sequence[GpuSample], ranks: set[int]) -> list[_Crew]:
    siblings: dict[int, list[Process]] = {}
    for process in tree:
        if launchers.is_spawned(process) and not _is_within(process, ranks, tree):
            siblings.setdefault(process.parent_pid, []).append(process)
    crews = []
    for parent_pid, group in siblings.items():
        head = tree.get(parent_pid) if parent_pid != _INIT else None
        members = _spawned_ranks(group, tree, samples)
        if len(members) > 1 and not (head and launchers.is_server(head)):
            crews.append(_Crew("spawn", head, [(process, None) for process in members], owner_of(members[0])))
    return crews


def _spawned_ranks(group: list[Process], tree: _Tree, samples: Sequence[GpuSample]) -> list[Process]:
    """Those that hold a GPU; if none does, all that were started with an address to meet at."""
    on_gpu = {pid for gpu in samples for pid in gpu.pids}
    members = [process for process in group if not on_gpu.isdisjoint(_pids(process, tree))]
    members = members or [process for process in group if launchers.rendezvous(process.environ)[0]]
    return sorted(members, key=_start)


def _start(process: Process) -> tuple[int, int]:
    return process.id.start_ticks, process.id.pid


def _is_within(process: Process, ranks: set[int], tree: _Tree) -> bool:
    return process.id.pid in ranks or any(up.id.pid in ranks for up in tree.ancestors(process))


# --- ranks whose environment may not be read ------------------------------------------------------------------------


def _hidden_crews(tree: _Tree, known: Sequence[_Crew]) -> list[_Crew]:
    """The Python children of a launcher, where this daemon lacks the right to read who they are.

    That they cannot be dumped must be told when the job hangs, not kept silent for the whole of its life.
    """
    heads = {crew.head.id for crew in known if crew.head is not None}
    crews = []
    for process in tree:
        kind = launchers.launcher_kind(process)
        if kind is None or not launchers.starts_only_ranks(kind) or process.id in heads:
            continue
        ranks = [child for child in tree.children(process) if child.faults and _may_be_rank(child)]
        if ranks:
            ranks.sort(key=_start)
            crews.append(_Crew(kind, process, [(rank, None) for rank in ranks], owner_of(ranks[0])))
    return crews


def _may_be_rank(process: Process) -> bool:
    helper = launchers.is_loader_worker(process) or launchers.is_resource_tracker(process)
    return launchers.is_python(process) and not helper and launchers.launcher_kind(process) is None


# --- one job --------------------------------------------------------------------------------------------------------


def _job(name: _Name, crew: _Crew, tree: _Tree, samples: Sequence[GpuSample], ranks: set[int]) -> Job:
    first, first_seat = crew.members[0]
    local_world_size = first_seat.local_world_size if first_seat else None
    found = [
        _rank(process, seat, place=place, tree=tree, samples=samples, ranks=ranks)
        for place, (process, seat) in enumerate(crew.members)
    ]
    present = {rank.local_rank for rank in found}
    return Job(
        job_id=name.job_id,
        launcher=crew.launcher,
        launcher_id=crew.head.id if crew.head else None,
        ranks=tuple(found),
        world_size=first_seat.world_size if first_seat else None,
        local_world_size=local_world_size,
        absent_local_ranks=tuple(place for place in range(local_world_size or 0) if place not in present),
        # Arguments stay where they are: they hold keys of trackers and hubs.
        command=launchers.program((crew.head or first).cmdline if first_seat is None else first.cmdline),
        user=first.user or (None if first.uid is None else f"uid {first.uid}"),
        environ=first.environ,
        job_key=name.job_key,
        owner=crew.owner.name,
        notes=crew.notes,
    )


def _rank(
    process: Process,
    seat: Seat | None,
    *,
    place: int | None,
    tree: _Tree,
    samples: Sequence[GpuSample],
    ranks: set[int],
) -> Rank:
    local_rank = seat.local_rank if seat else place
    others = ranks - {process.id.pid}
    below = [child for child in tree.descendants(process, others) if not launchers.is_resource_tracker(child)]
    # Loader workers first, then other Python: where dumps are bounded, these are the ones that explain a rank.
    below.sort(key=lambda child: (not launchers.is_loader_worker(child), not launchers.is_python(child), child.id))
    pids = {process.id.pid, *(child.id.pid for child in below)}
    return Rank(
        id=process.id,
        rank=seat.rank if seat else None,
        local_rank=local_rank,
        gpu_uuids=devices.gpus_of(pids, process.environ, local_rank, samples),
        workers=tuple(Worker(id=child.id, comm=child.comm) for child in below),
    )


def _pids(process: Process, tree: _Tree) -> set[int]:
    return {process.id.pid, *(child.id.pid for child in tree.descendants(process))}


def _samples(gpus: GpuSweep | None, tree: _Tree, ticks_per_second: int) -> list[GpuSample]:
    """The GPUs, with only those pids that were the same process when the driver was asked."""
    if gpus is None:
        return []
    last_ticks = gpus.taken_monotonic_seconds * ticks_per_second
    alive = {process.id.pid for process in tree if process.id.start_ticks <= last_ticks}
    return [
        GpuSample(index=gpu.index, uuid=gpu.uuid, pids=tuple(pid for pid in gpu.pids if pid in alive))
        for gpu in gpus.gpus
    ]


# --- names ----------------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """The name of a job for people, and its key."""

    job_id: str
    job_key: str


def _names(crews: list[_Crew], tree: _Tree, node: str) -> list[_Name]:
    """A name for each job, the same on all its nodes where anything says it; two of one key get a pid each."""
    names = [_name(crew, tree, node) for crew in crews]
    count = Counter(name.job_key for name in names)
    return [
        name if count[name.job_key] == 1 else _told_apart(name, crew) for name, crew in zip(names, crews, strict=True)
    ]


def _told_apart(name: _Name, crew: _Crew) -> _Name:
    pid = crew.members[0][0].id.pid
    return _Name(f"{name.job_id}-p{pid}", _key(name.job_key, str(pid)))


def _name(crew: _Crew, tree: _Tree, node: str) -> _Name:
    process, seat = crew.members[0]
    environ = process.environ
    address, port = launchers.rendezvous(environ)
    is_here = address.startswith(_LOOPBACK) or (
        seat is not None and seat.world_size in (seat.local_world_size, len(crew.members))
    )
    name = launchers.scheduled_id(environ) or (launchers.run_id(environ, seat) if seat else "")
    if not name and seat and address and not is_here:
        name = "-".join(filter(None, (address, port)))
    if not name:
        is_here = True
        origin = _origin(crew, tree)
        # One shell may have started several jobs that have no launcher; their ports differ.
        is_told_by_port = port and crew.head is None
        name = f"pid{origin.pid}-{origin.start_ticks}" + (f"-{port}" if is_told_by_port else "")
    return _Name(_safe(name), _key(name, crew.owner.name, address, port, node if is_here else ""))


def _key(*parts: str) -> str:
    """A checksum that nobody can aim at: 64 bits of BLAKE2b, in hex."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _origin(crew: _Crew, tree: _Tree) -> ProcessId:
    """The launcher; else the one parent of all ranks; else the rank that started first."""
    if crew.head is not None:
        return crew.head.id
    parents = {parent.id if (parent := tree.parent(process)) else None for process, _ in crew.members}
    parent_id = parents.pop() if len(parents) == 1 else None
    if parent_id is not None and parent_id.pid != _INIT:
        return parent_id
    return min((process for process, _ in crew.members), key=_start).id


def _safe(text: str) -> str:
    """A name that serves as a label and in the name of a folder; a changed one ends in a checksum of the original."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".-_")[:_MAX_NAME]
    return clean if clean == text else f"{clean}-{zlib.crc32(text.encode()):08x}".lstrip("-")
