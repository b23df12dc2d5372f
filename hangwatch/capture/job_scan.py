"""Repeated search for the jobs of this node, for the daemon, `dump` and `check`."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture.node_numbers import NodeNumbers
from hangwatch.capture.store_clients import StoreAddresses, StoreClients
from hangwatch.capture.wrappers import Wrappers
from hangwatch.jobs import discovery, owners, process_role, user_limits
from hangwatch.jobs.discovery import DEFAULT_LIMITS
from hangwatch.jobs.membership_search import needs_endpoint
from hangwatch.model import FoundJobs, GpuSweep, Job, NotMonitored, Process, ProcessId
from hangwatch.probes.base import owner_turns, procfs
from hangwatch.probes.base.owner_turns import GrowingPause
from hangwatch.probes.network import sockets
from hangwatch.probes.network.sockets import Connection, Tables
from hangwatch.probes.process.live_environ import LiveEnvironments
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.probes.process.user_names import UserNames

ENDPOINTS_PER_SCAN = 64
_SECONDS_OF_SINGLE_SCAN = 10.0


class JobScan:
    """The search for the jobs of this node. It remembers facts that never change.

    `processes` is the underlying scan of processes, for callers that need processes outside of jobs. `note_ranks` is
    called with each rank and its share. `is_single` is true for the scan of a command: it has more time, and does not
    count connections.
    """

    def __init__(
        self,
        proc_root: Path = procfs.PROC,
        limits: config.Jobs = DEFAULT_LIMITS,
        *,
        is_single: bool = False,
        note_ranks: Callable[[Iterable[tuple[Process, str]]], None] | None = None,
    ) -> None:
        self._proc_root, self._is_single, self._note_ranks = proc_root, is_single, note_ranks
        seconds = max(limits.scan_budget_seconds, _SECONDS_OF_SINGLE_SCAN if is_single else 0.0)
        self._limits = replace(limits, scan_budget_seconds=seconds)
        self.processes = ProcessScan(proc_root)
        self._endpoints: dict[ProcessId, str] = {}
        self._searched: dict[ProcessId, int] = {}  # last scan that searched for its endpoint
        self._scans = 0
        self._seen = SeenConnections()
        self._libraries, self._wrappers = JobLibraries(proc_root), Wrappers(proc_root)
        self._node_numbers = NodeNumbers(proc_root)
        self._user_names = UserNames(proc_root)
        self._store_clients, self._store_addresses = StoreClients(), StoreAddresses()

    def find(self, sweep: GpuSweep | None, node: str) -> FoundJobs:
        """Return the jobs on `node`. A process that holds a GPU in `sweep` is read even without a known launcher."""
        holders = frozenset(pid for gpu in sweep.gpus for pid in gpu.pids) if sweep else frozenset[int]()
        scanned = self.processes.processes(
            holders,
            share_of=lambda process: owners.owner_of(process).share,
            max_per_owner=self._limits.max_processes_per_owner,
            budget_seconds=self._limits.scan_budget_seconds,
            related_only=True,
        )
        members, ancestors = self._node_numbers.remove(scanned)
        tables = sockets.Tables(self._proc_root)
        processes = self._wrappers.mark(self._store_addresses.add_to(members, tables))
        self._endpoints = self._find_endpoints(processes, tables)
        found_jobs = discovery.find_jobs(
            processes,
            sweep,
            limits=self._limits,
            node=node,
            ticks_per_second=procfs.TICKS_PER_SECOND,
            endpoints=self._endpoints,
            hosts=self._store_clients.find_hosts(processes, tables, self._limits.scan_budget_seconds / 4),
            ancestors=ancestors,
        )
        jobs = self._libraries.add_to(found_jobs.jobs, self._limits.scan_budget_seconds / 4)
        jobs = self._user_names.add_to(jobs)
        if not self._is_single:
            jobs = self._seen.add_counts(jobs, tables, self._limits.scan_budget_seconds)
        if self._note_ranks is not None:
            shares = {rank.id: job.share for job in jobs for rank in job.ranks}
            self._note_ranks((process, shares[process.id]) for process in processes if process.id in shares)
        unread = [NotMonitored(owner=owner, processes=count) for owner, count in self.processes.unread.items()]
        return replace(found_jobs, jobs=jobs, left_out=user_limits.fold_by_owner([*found_jobs.left_out, *unread]))

    def _find_endpoints(self, processes: Sequence[Process], tables: sockets.Tables) -> dict[ProcessId, str]:
        """Return {process: endpoint of its store} for the processes that need an endpoint.

        A scan searches for at most `ENDPOINTS_PER_SCAN` new endpoints, in limited time. Owners take turns. For each
        owner, the process with the oldest attempt comes first, so a process that never connects does not delay the
        others.
        """
        ends = time.monotonic() + self._limits.scan_budget_seconds
        self._scans += 1
        ports = {process.id: port for process in processes if (port := needs_endpoint(process)) is not None}
        endpoints = {process: self._endpoints[process] for process in ports if process in self._endpoints}
        self._searched = {process: scan for process, scan in self._searched.items() if process in ports}
        new = sorted(
            (process for process in processes if process.id in ports and process.id not in endpoints),
            key=lambda process: self._searched.get(process.id, 0),
        )
        in_turn = owner_turns.order_by_turns((owners.owner_of(process).share, process.id) for process in new)
        for _, process in in_turn[:ENDPOINTS_PER_SCAN]:
            self._searched[process] = self._scans
            endpoint = sockets.store_endpoint(process.pid, ports[process], tables)
            if endpoint is not None:
                endpoints[process] = endpoint
            if time.monotonic() > ends:
                break
        return endpoints


class _Known(NamedTuple):
    libraries: tuple[str, ...] | None = None
    pause: GrowingPause = GrowingPause()


class JobLibraries:
    """The libraries that the first rank of each job maps, which show if the job uses PyTorch or JAX.

    A rank maps them some time after its start. So its maps are read again, with growing pauses, until one is found.
    """

    def __init__(self, proc_root: Path) -> None:
        self._live = LiveEnvironments(proc_root)
        self._known: dict[ProcessId, _Known] = {}

    def add_to(self, jobs: Sequence[Job], budget_seconds: float) -> tuple[Job, ...]:
        """Return the jobs with their libraries. Those of jobs that are not reached in `budget_seconds` stay unknown."""
        now, lacking = time.monotonic(), {job.ranks[0].id for job in jobs if job.ranks and not job.libraries}
        self._known = {process: self._known.get(process, _Known()) for process in lacking}
        for process, known in sorted(self._known.items(), key=lambda item: item[1].pause.due_monotonic_seconds):
            is_due = not known.libraries and known.pause.due_monotonic_seconds <= now
            if is_due and time.monotonic() < now + budget_seconds:
                self._known[process] = _Known(self._live.find_libraries(process), known.pause.begin(now))
        found = {process: known.libraries for process, known in self._known.items() if known.libraries is not None}
        return tuple(
            replace(job, libraries=found[job.ranks[0].id]) if job.ranks and job.ranks[0].id in found else job
            for job in jobs
        )


class SeenConnections:
    """The most connections to other ranks or the store of each rank, by all scans: a later capture shows a lost one."""

    def __init__(self) -> None:
        self._most: dict[ProcessId, int] = {}

    def add_counts(self, jobs: Sequence[Job], tables: Tables, budget_seconds: float) -> tuple[Job, ...]:
        """Return the jobs with `most_peers` of each rank. Jobs not reached in time keep their last counts."""
        end = time.monotonic() + budget_seconds
        kept = {rank.id: self._most.get(rank.id, 0) for job in jobs for rank in job.ranks}
        for job in jobs:
            if (job.world_size or 0) > 1 and time.monotonic() < end:
                for process, count in _count_peers(job, tables).items():
                    kept[process] = max(kept[process], count)
        self._most = kept
        return tuple(
            replace(job, ranks=tuple(replace(rank, most_peers=kept[rank.id]) for rank in job.ranks)) for job in jobs
        )


def _count_peers(job: Job, tables: Tables) -> dict[ProcessId, int]:
    """Count the connections of each rank to other ranks, as in `Waits.peers`."""
    processes = (*(rank.id for rank in job.ranks), *job.launcher_ids)
    held = {process: [one for one in tables.read_held(process.pid) if one.is_open] for process in processes}
    ends = {one.local: process for process, each in held.items() for one in each}
    _, port = process_role.rendezvous(job.environ)

    def is_peer(process: ProcessId, connection: Connection) -> bool:
        local, remote = connection.local, connection.remote
        if ends.get(remote) == process:
            return False
        return job.has_ranks_on_other_nodes or str(remote[1]) == port or remote in ends or remote[0] == local[0]

    return {rank.id: sum(is_peer(rank.id, one) for one in held[rank.id]) for rank in job.ranks}
