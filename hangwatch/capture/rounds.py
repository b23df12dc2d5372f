"""Capture of a job: dumps of every rank and its workers, in several rounds, in parallel, under a deadline."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from hangwatch import words
from hangwatch.capture import rank_dumps, stack_limits
from hangwatch.capture.connections import JobConnections
from hangwatch.capture.process_dump import ProcessDumper
from hangwatch.capture.request import CaptureRequest
from hangwatch.model import (
    STOPPED_STATES,
    Capture,
    GpuSweep,
    Job,
    PortCounters,
    PortTraffic,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    TrafficSweep,
    Waiting,
)
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.network import infiniband, sockets
from hangwatch.probes.process import pyspy
from hangwatch.stacks.link_traffic import port_traffic
from hangwatch.stacks.process_activity import find_process_activity

_PEERS_LISTED = 8


def capture(job: Job, request: CaptureRequest) -> Capture:
    """Take the stacks of every rank of `job` and of its workers, in the requested number of rounds.

    If a job has no ranks, its launcher is dumped instead, with the state of its sockets to its peers.

    A rank that cannot be dumped stays in the result, with its state in the kernel and the fault. A rank without a
    process is `gone`. Processes that start or end during the capture raise no error.
    """
    began, began_unix = time.monotonic(), time.time()
    rounds = _Rounds(job, request)
    by_ports = rounds.take_all()
    proc_root = request.paths.proc_root
    silent = rank_dumps.find_silent_mounts(rounds.taken, proc_root)
    waiting = _measure_wait(job, proc_root)
    present = [
        replace(dump, waiting=waiting, gpu=replace(dump.gpu, ports=by_ports)) for dump in rounds.rank_dumps(silent)
    ]
    return Capture(
        job_id=job.job_id,
        job_key=job.key,
        node=request.node,
        started_unix_seconds=began_unix,
        duration_seconds=time.monotonic() - began,
        rounds=len(rounds.taken),
        ranks=(*present, *rank_dumps.absent_ranks(job, request.node)),
        world_size=job.world_size,
        notes=_notes(job, request, rounds),
    )


class _Rounds:
    """The rounds of one capture. `targets` are the processes of `ranks` and their workers.

    `taken` has the dumps of each finished round, by process. `left_out` is the number of workers that need no dump.
    """

    def __init__(self, job: Job, request: CaptureRequest) -> None:
        settings, paths = request.settings, request.paths
        self._request = request
        self._wanted = settings.rounds if request.rounds is None else request.rounds
        is_counting = settings.counters and (self._wanted > 1 or request.needs_second_round is not None)
        self._links = LinkCounters(request.gpus.read_traffic, paths.sys_root, is_counting=is_counting)
        self.ranks = job.ranks or tuple(Rank(id=process, rank=None, local_rank=None) for process in job.processes)
        workers = [worker.id for rank in self.ranks for worker in rank.workers[: settings.max_workers_per_rank]]
        # All ranks come first, so that their dumps are close together in time.
        self.targets = list(dict.fromkeys([*(rank.id for rank in self.ranks), *workers]))
        self._around = JobConnections(job, self.targets, paths.proc_root, paths.sys_root, request.search_seconds)
        self._taker = ProcessDumper(
            request,
            paths.pyspy_path or pyspy.find(),
            self._around,
            share=job.share,
            reader_uid=job.uid,
            ranks=frozenset(rank.id for rank in job.ranks),
            unreadable=set(),
            too_large={},
            awaited={},
            stack_budget=stack_limits.divide_budget(
                request.kept_stacks_bytes, len(self.ranks), len(workers), max(self._wanted, 2)
            ),
        )
        self._whole = request.all_processes or request.activities is None
        self._sweeps: list[GpuSweep] = []
        self.left_out = 0
        self.taken: list[dict[ProcessId, ProcessDump]] = []

    def take_all(self) -> PortTraffic | None:
        """Take all rounds. Return the traffic of this node's ports (None: not counted)."""
        request, settings = self._request, self._request.settings
        # A native dump needs 340 MB, so native dumps do not run in parallel.
        parallel = 1 if request.mode.native else settings.parallel
        with ThreadPoolExecutor(parallel, thread_name_prefix="dump") as pool:
            while len(self.taken) < self._wanted:
                if self.taken and request.stop.wait(settings.pause_seconds):
                    break
                self._take_round(pool)
        return self._links.measure_ports() if len(self.taken) > 1 else None

    def _take_round(self, pool: ThreadPoolExecutor) -> None:
        request = self._request
        self._around.begin_round()
        end = time.monotonic() + request.settings.round_deadline_seconds
        with self._links.counting(len(self.taken), pool):
            self.taken.append({})
            if not self._whole:
                self._take(pool, [rank.id for rank in self.ranks], end)
                self._leave_out_workers()
            self._take(pool, [target for target in self.targets if target not in self.taken[-1]], end)
            sweep = request.gpus.read_sweep() if request.gpus.read_sweep else None
            self._sweeps += [sweep] if sweep else []
        needs_second = request.needs_second_round
        if needs_second is not None and self._wanted == 1 and needs_second(self.rank_dumps({})):
            self._wanted = 2

    def _take(self, pool: ThreadPoolExecutor, targets: Sequence[ProcessId], end: float) -> None:
        dumps = pool.map(self._taker.take, targets, [end] * len(targets))
        self.taken[-1].update(zip(targets, dumps, strict=True))

    def _leave_out_workers(self) -> None:
        """Leave out the workers for which no dumped process waits, in this round and later ones."""
        first, every = self.taken[-1], self.targets
        needless = {worker.pid for rank in self.ranks for worker in self._find_needless(rank, first[rank.id])}
        needless -= {dump.waits.file_lock.holder_pid for dump in first.values() if dump.waits.file_lock}
        waiting = {target.pid for target in every} - needless
        while waiting:
            waiting = set[int]().union(*(self._around.find_awaited(pid, needless) for pid in waiting))
            needless -= waiting
        self.targets = [target for target in every if target.pid not in needless]
        self.left_out, self._whole = len(every) - len(self.targets), True

    def _find_needless(self, rank: Rank, dump: ProcessDump) -> list[ProcessId]:
        """Return the workers of a rank that need no dump, if neither a child, a lock nor a worker is known to hold it.

        In a collective these are all. While it reads from one file or pipe: the workers that wait for it. A thread of
        any worker may answer over a socket.
        """
        table, waits, call = self._request.activities, dump.waits, dump.main.call
        if table is None or call is None or not dump.threads or dump.fault is not None:
            return []
        if call.workers or waits.awaited or waits.file_lock or waits.asks_rank:
            return []
        workers = [worker.id for worker in rank.workers]
        if (
            dump.state == "S"
            and not waits.stuck_on
            and find_process_activity(dump.threads, table).doing.row.is_collective
        ):
            return workers
        if call.kind != "receives" or len(call.descriptors) != 1 or call.object == "socket":
            return []
        return [worker for worker in workers if self._around.waits_for(worker.pid, rank.id.pid)]

    def rank_dumps(self, silent: Mapping[int, filesystems.Mount]) -> list[RankDump]:
        """Return the dumps of the ranks so far. `silent` has the file systems that do not respond, by pid."""
        carried, levels = list(filter(None, self._links.traffic)), self._request.gpus.levels
        readings = (rank_dumps.measure_gpus(rank, self._sweeps, levels, carried) for rank in self.ranks)
        return [
            rank_dumps.make_rank_dump(rank, self.taken, self._request.node, gpu, silent)
            for rank, gpu in zip(self.ranks, readings, strict=True)
        ]


def _notes(job: Job, request: CaptureRequest, rounds: _Rounds) -> tuple[str, ...]:
    """Return notes on what the dumps do not show, for the reader of the report."""
    notes, taken, settings = list(job.notes), rounds.taken, request.settings
    if rounds.left_out:
        notes.append(
            f"{words.count(rounds.left_out, 'worker')} for which no rank waits not dumped: `dump --all-processes` does"
        )
    workers = [len(rank.workers) for rank in job.ranks]
    left_out = sum(max(0, count - settings.max_workers_per_rank) for count in workers)
    if left_out:
        notes.append(
            f"{left_out} of {sum(workers)} worker processes were not dumped: max_workers_per_rank is "
            f"{settings.max_workers_per_rank}"
        )
    absent = sum(map(len, job.absent))
    if absent > rank_dumps.ABSENT_LISTED:
        notes.append(
            f"{words.count(absent, 'local rank')} should be here and have no process: the first "
            f"{rank_dumps.ABSENT_LISTED} are listed"
        )
    if request.stop.is_set():
        notes.append(f"the capture was interrupted after {len(taken)} rounds: hangwatch was asked to stop")
    stopped = sorted(
        {
            identity.pid
            for dumps in taken
            for identity, dump in dumps.items()
            if dump.state_after == "T" and dump.state is not None and dump.state not in STOPPED_STATES
        }
    )
    if stopped:
        pids = " ".join(str(pid) for pid in stopped)
        notes.append(f"stopped since the capture began: to let them run on, type: kill -CONT {pids}")
    return tuple(notes)


def _measure_wait(job: Job, proc_root: Path) -> Waiting | None:
    """Return the wait of a launcher without ranks, with the state of its sockets; None for a job with ranks.

    The sockets show if its peers respond. hangwatch never connects to the endpoint itself, because a user wrote that
    address. A launcher that serves the port is also its own first client, which is not listed as a peer.
    """
    if job.waiting is None or job.launcher_id is None:
        return None
    since = job.launcher_id.start_ticks / procfs.TICKS_PER_SECOND
    waiting, port = replace(job.waiting, seconds=max(0.0, time.monotonic() - since)), job.waiting.port
    held = None if port is None else sockets.sockets_at_port(port, job.launcher_id.pid, sockets.Tables(proc_root))
    if port is None or held is None:
        return waiting
    use = sockets.classify_port_use(port, held)
    state = sockets.SYN_SENT if use in ("silent", "none") else sockets.ESTABLISHED
    local_ends = {connection.local for connection in held} if use == "serving" else set()
    at_port = (each for each in held if (each.local if use == "serving" else each.remote)[1] == port)
    ends = {each.remote for each in at_port if each.state == state} - local_ends
    peers = sorted({sockets.format_address(end) for end in ends})
    return replace(waiting, socket=use, peers=tuple(peers[:_PEERS_LISTED]))


class LinkCounters:
    """The traffic counters of one capture: of GPU links and of this node's network ports.

    GPU links are read in each round until a read fails, which is None in `traffic`. Ports are read twice: in the first
    round and at the end. Without `is_counting`, nothing is read.
    """

    def __init__(
        self, read_traffic: Callable[[], TrafficSweep | None] | None, sys_root: Path, *, is_counting: bool
    ) -> None:
        self._read_traffic, self._sys_root, self._is_counting = read_traffic, sys_root, is_counting
        self._since = time.monotonic()
        self.traffic: list[TrafficSweep | None] = []
        self._ports: tuple[PortCounters, ...] = ()

    @contextmanager
    def counting(self, number: int, pool: Executor) -> Iterator[None]:
        """Read the counters in threads of `pool` while the `with` block takes the dumps of round `number`, from 0."""
        reading = reading_ports = None
        if self._is_counting and self._read_traffic and None not in self.traffic:
            reading = pool.submit(self._read_traffic)
        if self._is_counting and number == 0:
            reading_ports = pool.submit(infiniband.TRAFFIC.read, self._sys_root)
        yield
        if reading is not None:
            self.traffic.append(reading.result())
        if reading_ports is not None:
            self._ports = reading_ports.result()

    def measure_ports(self) -> PortTraffic | None:
        """Return the traffic of the ports since counting began; None if no port was read twice."""
        if not self._ports:
            return None
        return port_traffic(self._ports, infiniband.TRAFFIC.read(self._sys_root), time.monotonic() - self._since)
