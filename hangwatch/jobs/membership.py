"""The processes of one job, and the jobs that are joined from parts in several pods or containers. Pure."""

import functools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner
from hangwatch.jobs.process_role import RankSlot
from hangwatch.model import GpuSample, Process, ProcessId, Waiting


class Membership(NamedTuple):
    """The processes of one job. A member without a rank slot is a rank that is known only by its order of start.

    A membership without members is a launcher (`launcher_process`) without ranks; `waiting` has its options. `engine`
    is the name of the inference engine for which the members work. `more_launcher_processes` are the launchers of the
    other parts of the job. `has_places` is false if the order of start says nothing about ranks.
    """

    launcher: str
    launcher_process: Process | None
    members: list[tuple[Process, RankSlot | None]]
    owner: Owner
    notes: tuple[str, ...] = ()
    waiting: Waiting | None = None
    more_launcher_processes: tuple[Process, ...] = ()
    has_places: bool = True
    engine: str = ""

    @property
    def processes(self) -> list[Process]:
        """The job's ranks, or its launcher if it has no ranks."""
        launcher = [self.launcher_process] if self.launcher_process is not None else []
        return [process for process, _ in self.members] or launcher

    @property
    def began_ticks(self) -> int:
        """The start time of the job's first rank, else of its launcher, in ticks since boot."""
        return min(process.id.start_ticks for process in self.processes)


def pids_of_ranks(memberships: Iterable[Membership]) -> set[int]:
    """Return the pids of the ranks of these jobs."""
    return {process.id.pid for membership in memberships for process, _ in membership.members}


def claim_order(
    membership: Membership, samples: Sequence[GpuSample], endpoints: Mapping[ProcessId, str]
) -> tuple[int, ...]:
    """Return the sort key of a job among jobs that claim the same name or rank slot. The best claim comes first.

    A job that the driver lists on a GPU has the best claim, then a job that is connected to a store, then the oldest.
    """
    connected = any(process.id in endpoints for process, _ in membership.members)
    return not holds_gpu(membership, samples), not connected, membership.began_ticks, membership.processes[0].id.pid


def holds_gpu(membership: Membership, samples: Sequence[GpuSample]) -> bool:
    """True if the driver lists one of the job's ranks on a GPU."""
    return any(process.id.pid in gpu.pids for gpu in samples for process, _ in membership.members)


def join_parts(
    memberships: list[Membership], samples: Sequence[GpuSample], endpoints: Mapping[ProcessId, str]
) -> list[Membership]:
    """Join jobs of one run and size that have different ranks: the parts of a job in several pods or containers.

    Parts are joined only if the kernel shows that they belong together: by one owner and place, or by connections
    to one store. A job in two pods is two jobs until its ranks have connected to the store. A copy of its variables
    by another user always stays another job.

    If several jobs claim the same ranks, the job with the best claim has them. The others are separate jobs while
    the processes of the first live.
    """
    runs: dict[tuple[object, ...], _Run] = {}
    for membership in sorted(memberships, key=lambda membership: claim_order(membership, samples, endpoints)):
        process, slot = membership.members[0]
        assert slot is not None
        run = (*run_key(process, slot), *process_role.rendezvous(process.environ))
        stores = frozenset(endpoints[process.id] for process, _ in membership.members if process.id in endpoints)
        runs.setdefault((membership.owner.name, *run, slot.world_size), _Run()).place(membership, stores)
    return [part.as_membership() for run in runs.values() for part in run.parts]


class _Run:
    """The jobs that claim to be one run. The job with the best claim comes first.

    A user can create thousands of jobs that claim the same rank. `_jobs` avoids comparing each job with all others. It
    maps a rank, an owner or a set of stores to the jobs that have it, as a bit set: bit n stands for job n.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self._jobs: defaultdict[Hashable, int] = defaultdict(int)

    def place(self, membership: Membership, stores: frozenset[str]) -> None:
        """Add a part to the first job that has none of its ranks and shares its owner or its stores.

        If there is no such job, the part becomes a new job.
        """
        ranks = {rank_number(member) for member in membership.members}
        taken = functools.reduce(operator.or_, (self._jobs[rank] for rank in ranks))
        related = self._jobs[membership.owner] | (self._jobs[stores] if stores else 0)
        fitting = related & ~taken
        if fitting:
            number = (fitting & -fitting).bit_length() - 1
            self._jobs[self.parts[number].stores] &= ~(1 << number)
            part = self.parts[number]
            part.memberships.append(membership)
            part.ranks |= ranks
            part.stores |= stores
        else:
            number = len(self.parts)
            if self.parts:
                membership = _add_note(membership, ranks, self.parts[0])
            self.parts.append(_Part(membership, ranks, stores))
        for key in (*ranks, membership.owner, self.parts[number].stores):
            self._jobs[key] |= 1 << number


class _Part:
    """A job that is joined from parts. The first part has the best claim."""

    def __init__(self, membership: Membership, ranks: set[int], stores: frozenset[str]) -> None:
        self.memberships, self.ranks, self.stores = [membership], ranks, stores

    def as_membership(self) -> Membership:
        """Return the processes of all parts as one membership."""
        first = self.memberships[0]
        members = sorted((member for membership in self.memberships for member in membership.members), key=rank_number)
        launchers = (membership.launcher_process for membership in self.memberships[1:])
        more = tuple(launcher for launcher in launchers if launcher is not None)
        return first._replace(members=members, more_launcher_processes=more) if len(self.memberships) > 1 else first


def rank_number(member: tuple[Process, RankSlot | None]) -> int:
    """Return the rank of a member; -1 without a rank slot."""
    _, slot = member
    return -1 if slot is None else slot.rank


def _add_note(membership: Membership, ranks: set[int], first: _Part) -> Membership:
    """Return the membership with a note that says why it is not a part of the first job of its run."""
    pid = first.memberships[0].members[0][0].id.pid
    shared = words.fold(sorted(first.ranks & ranks))
    if shared:
        reason = f"another run of the same name already has ranks {shared} (pid {pid})"
    else:
        reason = f"it has the run name of pid {pid}, but hangwatch saw no store to which both are connected"
    return membership._replace(notes=(f"a separate job: {reason}",))


def run_key(process: Process, slot: RankSlot) -> tuple[str, ...]:
    """Return a key that distinguishes the runs of one owner without a launcher: the run id, else the rendezvous."""
    run_id = process_role.run_id(process.environ, slot)
    return (run_id,) if run_id else process_role.rendezvous(process.environ)
