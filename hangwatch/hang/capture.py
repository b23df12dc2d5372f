"""Ranks -> dumps: every rank of a job and its workers, in rounds, several at a time, everything under a deadline."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import config, pyspy_output, words
from hangwatch.flight_record import RankRecords
from hangwatch.hang import jobs, launched, recorded
from hangwatch.hang.power import GpuLevels
from hangwatch.hang.surroundings import Surroundings
from hangwatch.hang.traffic import gpu_use, link_rates, port_traffic
from hangwatch.model import (
    BLOCKED_STATES,
    ENDED_STATES,
    FUSE_WAITS,
    STOPPED_STATES,
    Capture,
    Fault,
    GpuSweep,
    GpuUse,
    Job,
    NcclRas,
    PortCounters,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    Thread,
    TrafficSweep,
    Waiting,
    Worker,
    WorkerDump,
)
from hangwatch.probes import (
    filesystems,
    freezer,
    infiniband,
    main_thread,
    native_stack,
    nccl_ras,
    procs,
    pyspy,
    pystack,
    sockets,
    torch_recorder,
)
from hangwatch.probes.process_scan import ProcessScan

ABSENT_LISTED = 64
PEERS_LISTED = 8
_DESCRIPTORS_KEPT = 16
_MOST_FAULTS = 4  # of the recorders of one rank
_FAULT_CHARACTERS = 256

ObserveDump = Callable[[float, Fault | None], None]
"""Called after each dump with its duration in seconds and what went wrong, if anything."""


def capture(
    job: Job,
    *,
    settings: config.Capture,
    node: str,
    proc_root: Path = procs.PROC,
    sys_root: Path = Path("/sys"),
    gpus: GpuSweep | None = None,
    latest_gpus: Callable[[], GpuSweep | None] | None = None,
    gpu_levels: Mapping[str, GpuLevels] | None = None,
    read_traffic: Callable[[], TrafficSweep | None] | None = None,
    native: bool = False,
    include_locals: bool = False,
    may_pause: bool = True,
    rounds: int | None = None,
    looks_again: bool = False,
    stop: threading.Event | None = None,
    slots: threading.Semaphore | None = None,
    observe_dump: ObserveDump | None = None,
    pyspy_path: Path | None = None,
    ask_nccl: bool = False,
) -> Capture:
    """Take the stacks of every rank of `job` and of its workers, `rounds` times (default: the settings').

    Of a job without ranks its launcher stands in their place, with what its sockets show of whom it waits for.

    A rank that cannot be dumped keeps its place: what the kernel says of it, and the fault. A rank whose process does
    not exist any more, or that was absent before, is `gone`. Once `stop` is set it returns what it has, within a
    second. Without `may_pause` no process is paused or signalled: what could only be read so is not. `slots` bounds the
    dumps at the same time over all captures that share it. GPU numbers are the mean of the sweeps that `latest_gpus`
    gives after each round, else those of `gpus`; `gpu_levels` are the levels of the job's GPUs by uuid. `read_traffic`
    is asked in each round, in a thread beside the dumps, until it has no answer. With `looks_again` a second round
    follows a single one where a flight recorder shows that its rank may stand (`recorded.stands`). With `ask_nccl`, and
    more than one round, NCCL itself is asked beside the later rounds, where no flight recorder of NCCL was read in the
    first. Never raises for what it finds: processes come and go.
    """
    stop = stop or threading.Event()
    began, began_unix = time.monotonic(), time.time()
    ranks = job.ranks or tuple(Rank(id=launcher, rank=None, local_rank=None) for launcher in job.processes)
    targets = _targets(ranks, settings.max_workers_per_rank)
    around = Surroundings(job, targets, proc_root, sys_root)
    taker = _Taker(
        settings,
        proc_root,
        stop,
        slots,
        observe_dump,
        pyspy_path,
        around,
        sys_root,
        share=job.share,
        native=native,
        include_locals=include_locals,
        may_pause=may_pause,
        reader_uid=job.uid,
        ranks=frozenset(rank.id for rank in job.ranks),
        unreadable=set(),
    )
    wanted = settings.rounds if rounds is None else rounds
    may_count, counted_since = settings.counters and wanted > 1, began
    ports: tuple[PortCounters, ...] = ()
    sweeps: list[GpuSweep] = []
    traffic: list[TrafficSweep | None] = []
    taken: list[dict[ProcessId, ProcessDump]] = []
    asked: Future[_Said] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="nccl-ras") as beside:
        # Native dumps need 340 MB each: one at a time.
        with ThreadPoolExecutor(1 if native else settings.parallel, thread_name_prefix="dump") as pool:
            while len(taken) < wanted:
                number = len(taken)
                if number > 0 and stop.wait(settings.pause_seconds):
                    break
                around.begin_round()
                end = time.monotonic() + settings.round_deadline_seconds
                read = pool.submit(read_traffic) if may_count and read_traffic and None not in traffic else None
                read_ports = pool.submit(infiniband.TRAFFIC.read, sys_root) if may_count and number == 0 else None
                dumps = pool.map(taker.take, targets, [end] * len(targets))
                taken.append(dict(zip(targets, dumps, strict=True)))
                sweep = latest_gpus() if latest_gpus else gpus
                sweeps += [sweep] if sweep else []
                traffic += [read.result()] if read else []
                ports = read_ports.result() if read_ports else ports
                if looks_again and wanted == 1 and any(recorded.stands(dump.recorders) for dump in taken[0].values()):
                    wanted, may_count, counted_since = 2, settings.counters, time.monotonic()
                    traffic += [read_traffic()] if may_count and read_traffic else []
                    ports = infiniband.TRAFFIC.read(sys_root) if may_count else ()
                if number == 0 and wanted > 1 and ask_nccl and not _tells_of_nccl(taken[0].values()):
                    asked = beside.submit(_asked_nccl, job, settings, stop, proc_root)
        by_ports = (
            port_traffic(ports, infiniband.TRAFFIC.read(sys_root), time.monotonic() - counted_since) if ports else None
        )
    said = asked.result() if asked is not None else _Said({}, None)
    silent = _silent_mounts(targets, taken, proc_root)
    waiting = _measured(job, proc_root)
    carried = [one for one in traffic if one is not None]
    numbers = {rank.id: _gpu_numbers(rank, sweeps, gpu_levels or {}, carried) for rank in ranks}
    present = [
        replace(
            _rank_dump(rank, taken, node, numbers[rank.id], silent),
            waiting=waiting,
            ports=by_ports,
            nccl_ras=said.of_ranks.get(rank.id),
            nccl_ras_fault=said.fault,
        )
        for rank in ranks
    ]
    return Capture(
        job_id=job.job_id,
        job_key=job.key,
        node=node,
        started_unix_seconds=began_unix,
        duration_seconds=time.monotonic() - began,
        rounds=len(taken),
        ranks=(*present, *_absent_ranks(job, node)),
        world_size=job.world_size,
        notes=_notes(job, settings, taken, interrupted=stop.is_set()),
    )


class _Said(NamedTuple):
    """What NCCL said of the ranks of a job, or why it said nothing."""

    of_ranks: dict[ProcessId, NcclRas]
    fault: Fault | None


def _tells_of_nccl(dumps: Iterable[ProcessDump]) -> bool:
    return any(recorder.library == "nccl" and recorder.records for dump in dumps for recorder in dump.recorders)


def _asked_nccl(job: Job, settings: config.Capture, stop: threading.Event, proc_root: Path) -> _Said:
    """What NCCL says of itself, until its deadline; of a job without NCCL nothing, and no fault."""
    ranks = [rank.id for rank in job.ranks]
    if not settings.nccl_ras:
        return _Said({}, nccl_ras.OFF if nccl_ras.has_nccl(ranks, proc_root) else None)
    found = nccl_ras.answers(
        ranks,
        job.share,
        wanted=settings.nccl_ras_answers,
        pause_seconds=settings.nccl_ras_pause_seconds,
        min_age_seconds=settings.nccl_ras_min_age_seconds,
        end=time.monotonic() + settings.nccl_ras_deadline_seconds,
        stop=stop,
        proc_root=proc_root,
    )
    if found is None or isinstance(found, Fault):
        return _Said({}, found)
    return _Said(launched.of_ranks(found, nccl_ras.names(ranks, proc_root), ranks, job.world_size), None)


def job_of_pids(pids: Sequence[int], proc_root: Path = procs.PROC) -> Job:
    """These processes as if they were the ranks of one job, with their workers, for a capture that a person asks for.

    A pid that does not exist becomes a rank that is gone.
    """
    return jobs.job_of_pids(ProcessScan(proc_root).processes(pids), pids)


class _Taker(NamedTuple):
    """What all dumps of one capture have in common."""

    settings: config.Capture
    proc_root: Path
    stop: threading.Event
    slots: threading.Semaphore | None
    observe: ObserveDump | None
    pyspy_path: Path | None
    around: Surroundings
    sys_root: Path
    share: str
    native: bool
    include_locals: bool
    may_pause: bool
    reader_uid: int | None
    ranks: frozenset[ProcessId]
    unreadable: set[ProcessId]

    def take(self, target: ProcessId, end: float) -> ProcessDump:
        """One process in one round; `end` is the round's deadline on CLOCK_MONOTONIC."""
        counters = procs.read_counters(target.pid, self.proc_root)
        now = time.monotonic()
        if counters.id != target or (counters.state or "X") in ENDED_STATES:
            gone = Fault(
                subject=f"pid {target.pid}", reason="ProcessGone", detail="the process has ended", about="target"
            )
            return ProcessDump(taken_monotonic_seconds=now, fault=gone)
        if (fault := self._anothers(target)) is not None:
            return ProcessDump(taken_monotonic_seconds=now, fault=fault, state=counters.state)
        call = main_thread.read_call(target.pid, self.proc_root)
        dump = ProcessDump(
            taken_monotonic_seconds=now,
            state=counters.state,
            wchan=counters.wchan,
            kernel_stack=counters.kernel_stack,
            cpu_seconds=counters.cpu_seconds,
            io_bytes=counters.io_bytes,
            fetched_bytes=counters.fetched_bytes,
            call=call,
        )
        dump = self.around.exchanged(target.pid, dump)
        recorders, recorder_faults = self._recorders(target, end - time.monotonic())
        with self._slot(end - now):
            before = main_thread.read_counters(target.pid, self.proc_root)
            threads, answer = self._stacks(target, counters.state, end - time.monotonic())
            after = main_thread.read_counters(target.pid, self.proc_root)
        if (fault := self._anothers(target)) is not None:  # it has become so meanwhile: execve keeps the pid
            return ProcessDump(taken_monotonic_seconds=now, fault=fault, state=counters.state)
        if self.observe is not None:
            self.observe(answer.duration_seconds, answer.fault)
        return replace(
            dump,
            threads=threads,
            fault=answer.fault,
            state_after=answer.state_after,
            called=self._called(target, answer.fault),
            duration_seconds=answer.duration_seconds,
            call=None if call is None else replace(call, descriptors=call.descriptors[:_DESCRIPTORS_KEPT]),
            main_before=before,
            main_after=after,
            frozen_cgroup=freezer.frozen_cgroup(
                target.pid, counters.state, counters.wchan, self.proc_root, self.sys_root
            ),
            recorders=recorders,
            recorder_faults=recorder_faults,
            waits_in_torch=native_stack.waits_in_torch(target.pid, self.proc_root) if target in self.ranks else None,
        )

    def _recorders(self, target: ProcessId, left_seconds: float) -> tuple[tuple[RankRecords, ...], tuple[Fault, ...]]:
        """What the flight recorders of a rank show, and why one could not be read.

        Of its workers, and where the round is over, nothing.
        """
        if target not in self.ranks or self.stop.is_set() or left_seconds <= 0:
            return (), ()
        read = torch_recorder.SHARED.read(target, self.share, recorded.NEWEST_KEPT)
        faults = (one for one in read if isinstance(one, Fault))
        return (
            tuple(recorded.shortened(one) for one in read if not isinstance(one, Fault)),
            tuple(replace(one, detail=words.elided(one.detail, _FAULT_CHARACTERS)) for one in faults)[:_MOST_FAULTS],
        )

    def _anothers(self, target: ProcessId) -> Fault | None:
        """Why the job's owner, who may read the incident, must not see this process: to the kernel it is not his."""
        ids = procs.read_user_ids(target.pid, self.proc_root)
        if not self.reader_uid or not ids or set(ids) == {self.reader_uid}:
            return None
        detail = "it runs as another user than its job, whose owner reads the incident"
        remedy = f"as root: py-spy dump --pid {target.pid}"
        return Fault(subject=f"pid {target.pid}", reason="AnotherUsers", detail=detail, remedy=remedy)

    @contextmanager
    def _slot(self, left_seconds: float) -> Iterator[None]:
        """One of the places for a dump; without one when the round is over, which `_stacks` says."""
        has_one = self.slots is not None and self.slots.acquire(timeout=max(0.0, left_seconds))
        try:
            yield
        finally:
            if has_one and self.slots is not None:
                self.slots.release()

    def _called(self, target: ProcessId, fault: Fault | None) -> str | None:
        if fault is None or fault.reason not in pyspy.STUCK_REASONS:
            return None
        mount = filesystems.called(self.proc_root, target.pid)
        return mount.device if mount else None

    def _stacks(
        self, target: ProcessId, state: str | None, left_seconds: float
    ) -> tuple[tuple[Thread, ...], pyspy.PyspyAnswer]:
        subject = f"pid {target.pid}"
        if self.stop.is_set() or left_seconds <= 0:
            why = ("Interrupted", "hangwatch was asked to stop") if self.stop.is_set() else _LATE
            fault = Fault(subject=subject, reason=why[0], detail=why[1])
            return (), pyspy.PyspyAnswer(json=None, fault=fault, duration_seconds=0.0, state_after=state)
        answer = pyspy.dump(
            target.pid,
            deadline_seconds=min(self.settings.dump_deadline_seconds, left_seconds),
            native=self.native,
            include_locals=self.include_locals,
            may_pause=self.may_pause,
            pyspy_path=self.pyspy_path,
            stop=self.stop,
            proc_root=self.proc_root,
            share=self.share,
        )
        answer = self._second(target, answer, left_seconds - answer.duration_seconds)
        if answer.json is None:
            return (), answer
        try:
            return pyspy_output.parse_json(answer.json, procs.read_inner_pid(target.pid, self.proc_root)), answer
        except pyspy_output.DumpError as error:
            return (), replace(answer, json=None, fault=Fault(subject=subject, reason="BadDump", detail=str(error)))

    def _second(self, target: ProcessId, answer: pyspy.PyspyAnswer, left_seconds: float) -> pyspy.PyspyAnswer:
        """What pystack reads where py-spy could not; a process that neither can read is asked for once."""
        if answer.fault is None or not self.settings.pystack or target in self.unreadable or left_seconds <= 0:
            return answer
        second = pystack.dump(
            target.pid,
            answer,
            deadline_seconds=min(self.settings.dump_deadline_seconds, left_seconds),
            stop=self.stop,
            proc_root=self.proc_root,
            share=self.share,
        )
        if second.fault is not None and second.fault.reason in pystack.REASONS:
            self.unreadable.add(target)
        return second


_MOUNT_DEADLINE_SECONDS = 3.0
_LATE = ("RoundDeadline", "the round was over before its turn came")


def _targets(ranks: Sequence[Rank], max_workers: int) -> list[ProcessId]:
    """All ranks first, close together in time; then their workers."""
    workers = (worker.id for rank in ranks for worker in rank.workers[:max_workers])
    return list(dict.fromkeys([*(rank.id for rank in ranks), *workers]))


def _measured(job: Job, proc_root: Path) -> Waiting | None:
    """What a launcher without ranks waits for, by its own sockets: nobody connects to an address that a user wrote."""
    if job.waiting is None or job.launcher_id is None:
        return None
    since = job.launcher_id.start_ticks / procs.TICKS_PER_SECOND
    waiting, port = replace(job.waiting, seconds=max(0.0, time.monotonic() - since)), job.waiting.port
    held = None if port is None else sockets.held_at(port, job.launcher_id.pid, proc_root)
    return waiting if port is None or held is None else _with_sockets(waiting, port, held)


def _with_sockets(waiting: Waiting, port: int, held: Sequence[sockets.Connection]) -> Waiting:
    """What sockets at the port of its endpoint tell; one that serves it is its own first client, too."""
    use = sockets.use_of(port, held)
    if use == "serving":
        own = {one.local for one in held}
        ends = {one.remote for one in held if one.local[1] == port and one.state == sockets.ESTABLISHED} - own
    else:
        state = sockets.ESTABLISHED if use == "connected" else sockets.SYN_SENT
        ends = {one.remote for one in held if one.remote[1] == port and one.state == state}
    peers = sorted({sockets.address_of(end) for end in ends})
    return replace(waiting, socket=use, peers=tuple(peers[:PEERS_LISTED]))


def _silent_mounts(
    targets: Sequence[ProcessId], taken: Sequence[dict[ProcessId, ProcessDump]], proc_root: Path
) -> dict[int, filesystems.Mount]:
    """Of each process on which py-spy hangs the file system that gives no answer, by pid: asked, not told by a name."""
    stuck = [target.pid for target in targets if any(_hung(one[target].fault) for one in taken)]
    return filesystems.SHARED.silent(proc_root, stuck, _MOUNT_DEADLINE_SECONDS) if stuck else {}


def _hung(fault: Fault | None) -> bool:
    return fault is not None and fault.reason in pyspy.STUCK_REASONS


def _says_mount(dump: ProcessDump, mount: filesystems.Mount | None) -> ProcessDump:
    if mount is None or dump.fault is None or not _hung(dump.fault):
        return dump
    detail = f"{dump.fault.detail}; its program or a library lies on {mount}, which gives no answer"
    return replace(dump, fault=replace(dump.fault, detail=detail))


def _waits_for(rounds: Sequence[ProcessDump], mount: filesystems.Mount | None) -> bool:
    """Whether the kernel shows a process in a call on this file system in every round."""
    if mount is None:
        return False
    places = FUSE_WAITS if mount.type.startswith("fuse") else frozenset[str]()
    return all(dump.state in BLOCKED_STATES or dump.called == mount.device or dump.wchan in places for dump in rounds)


class _GpuNumbers(NamedTuple):
    power_watts: float | None
    utilization_ratio: float | None
    busy_power_ratio: float | None
    works_lightly: bool
    nvlink_bytes_per_second: float | None
    pcie_bytes_per_second: float | None
    gpu_use: GpuUse | None


def _gpu_numbers(
    rank: Rank, sweeps: Sequence[GpuSweep], levels: Mapping[str, GpuLevels], carried: Sequence[TrafficSweep]
) -> _GpuNumbers:
    """Means over all sweeps and all GPUs of a rank; of its links, those of its busiest GPU."""
    held = [gpu for sweep in sweeps for gpu in sweep.gpus if gpu.uuid in rank.gpu_uuids]
    known = [(levels[gpu.uuid], gpu.power_watts) for gpu in held if gpu.uuid in levels and gpu.power_watts is not None]
    return _GpuNumbers(
        _mean([gpu.power_watts for gpu in held]),
        _mean([gpu.utilization_ratio for gpu in held]),
        _mean([level.ratio(watts) for level, watts in known]),
        bool(known) and all(level.is_light for level, _ in known),
        *link_rates(rank.gpu_uuids, carried),
        gpu_use(rank.gpu_uuids, carried),
    )


def _rank_dump(
    rank: Rank,
    taken: Sequence[dict[ProcessId, ProcessDump]],
    node: str,
    numbers: _GpuNumbers,
    silent: Mapping[int, filesystems.Mount],
) -> RankDump:
    mount = silent.get(rank.id.pid)
    rounds = tuple(_says_mount(one[rank.id], mount) for one in taken)
    return RankDump(
        id=RankId(node=node, rank=rank.rank, local_rank=rank.local_rank, pid=rank.id.pid),
        rounds=rounds,
        workers=tuple(
            _worker_dump(worker, tuple(one[worker.id] for one in taken), silent.get(worker.id.pid))
            for worker in rank.workers
            if taken and worker.id in taken[0]
        ),
        gone=bool(rounds) and _is_gone(rounds[-1]),
        **numbers._asdict(),
        silent_mount=str(mount) if mount else None,
        waits_for_mount=_waits_for(rounds, mount),
    )


def _worker_dump(worker: Worker, rounds: tuple[ProcessDump, ...], mount: filesystems.Mount | None) -> WorkerDump:
    return WorkerDump(
        pid=worker.id.pid,
        comm=worker.comm,
        rounds=tuple(_says_mount(dump, mount) for dump in rounds),
        waits_for_mount=_waits_for(rounds, mount),
    )


def _is_gone(dump: ProcessDump) -> bool:
    """By what /proc says, not by what py-spy complains of."""
    return (dump.state_after or "X") in ENDED_STATES


def _absent_ranks(job: Job, node: str) -> tuple[RankDump, ...]:
    """The ranks that should be on this node and have no process, with their number where it was seen or others tell it.

    As many as a node has ranks, at most: how many should be there is a number in an environment.
    """
    offsets = {
        rank.rank - rank.local_rank for rank in job.ranks if rank.rank is not None and rank.local_rank is not None
    }
    offset = offsets.pop() if len(offsets) == 1 else None
    seen = {one.local_rank: one for one in job.ended if not one.is_worker}

    def absent(place: int) -> RankDump:
        known = seen.get(place)
        rank = known.rank if known is not None else None if offset is None else offset + place
        pid = None if known is None else known.id.pid
        died = None if known is None else known.died
        return RankDump(id=RankId(node=node, rank=rank, local_rank=place, pid=pid), gone=True, died=died)

    return tuple(map(absent, itertools.islice(itertools.chain.from_iterable(job.absent), ABSENT_LISTED)))


def _notes(
    job: Job, settings: config.Capture, taken: Sequence[dict[ProcessId, ProcessDump]], *, interrupted: bool
) -> tuple[str, ...]:
    """What a reader of the dumps must know and cannot see in them."""
    notes = list(job.notes)
    workers = [len(rank.workers) for rank in job.ranks]
    left_out = sum(max(0, count - settings.max_workers_per_rank) for count in workers)
    if left_out:
        notes.append(
            f"{left_out} of {sum(workers)} worker processes were not dumped: max_workers_per_rank is "
            f"{settings.max_workers_per_rank}"
        )
    absent = sum(map(len, job.absent))
    if absent > ABSENT_LISTED:
        missing = words.count(absent, "local rank")
        notes.append(f"{missing} should be here and have no process: the first {ABSENT_LISTED} are listed")
    if interrupted:
        notes.append(f"the capture was interrupted after {len(taken)} rounds: hangwatch was asked to stop")
    stopped = sorted(
        {
            identity.pid
            for one in taken
            for identity, dump in one.items()
            if dump.state_after == "T" and dump.state is not None and dump.state not in STOPPED_STATES
        }
    )
    if stopped:
        pids = " ".join(str(pid) for pid in stopped)
        notes.append(f"stopped since the capture began: to let them run on, type: kill -CONT {pids}")
    return tuple(notes)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
