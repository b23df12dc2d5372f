"""Ranks -> dumps: every rank of a job and its workers, in rounds, several at a time, everything under a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from hangwatch import config, words
from hangwatch.capture import launcher_wait, nccl_query, rank_dumps, silent_mounts, stack_limits
from hangwatch.capture.connections import Surroundings
from hangwatch.capture.gpu_links import Links
from hangwatch.capture.process_dump import ObserveDump, Taker
from hangwatch.detector.power_level import GpuLevels
from hangwatch.jobs import discovery
from hangwatch.model import STOPPED_STATES, Capture, GpuSweep, Job, ProcessDump, ProcessId, Rank, RankDump, TrafficSweep
from hangwatch.probes.node.filesystems import Mount
from hangwatch.probes.process import procfs
from hangwatch.probes.process.process_scan import ProcessScan


def capture(
    job: Job,
    *,
    settings: config.Capture,
    node: str,
    proc_root: Path = procfs.PROC,
    sys_root: Path = Path("/sys"),
    gpus: GpuSweep | None = None,
    latest_gpus: Callable[[], GpuSweep | None] | None = None,
    gpu_levels: Mapping[str, GpuLevels] | None = None,
    read_traffic: Callable[[], TrafficSweep | None] | None = None,
    native: bool = False,
    include_locals: bool = False,
    may_pause: bool = True,
    rounds: int | None = None,
    looks_again: Callable[[Sequence[RankDump]], bool] | None = None,
    stop: threading.Event | None = None,
    slots: threading.Semaphore | None = None,
    observe_dump: ObserveDump | None = None,
    pyspy_path: Path | None = None,
    ask_nccl: bool = False,
    capture_bytes: int = stack_limits.OF_OWNER_BYTES,
) -> Capture:
    """Take the stacks of every rank of `job` and of its workers, `rounds` times (default: the settings').

    Of a job without ranks its launcher stands in their place, with what its sockets show of whom it waits for.

    A rank that cannot be dumped keeps its place: what the kernel says of it, and the fault. A rank whose process does
    not exist any more, or that was absent before, is `gone`. Once `stop` is set it returns what it has, within a
    second. Without `may_pause` no process is paused or signalled: what could only be read so is not. `slots` bounds the
    dumps at the same time over all captures that share it. GPU numbers are the mean of the sweeps that `latest_gpus`
    gives after each round, else those of `gpus`; `gpu_levels` are the levels of the job's GPUs by uuid. `read_traffic`
    is asked in each round, in a thread beside the dumps, until it has no answer. `looks_again` is asked
    after a single round, with what it showed of the ranks, whether a second one follows. With `ask_nccl`, and
    more than one round, NCCL itself is asked beside the later rounds, where no flight recorder of NCCL was read in the
    first. Of its stacks about `capture_bytes` are kept (`stack_bounds`). Never raises for what it finds: processes come
    and go.
    """
    stop = stop or threading.Event()
    began, began_unix = time.monotonic(), time.time()
    wanted = settings.rounds if rounds is None else rounds
    links = Links(read_traffic, sys_root, is_counting=settings.counters and wanted > 1)
    ranks = job.ranks or tuple(Rank(id=process, rank=None, local_rank=None) for process in job.processes)
    targets = _targets(ranks, settings.max_workers_per_rank)
    around = Surroundings(job, targets, proc_root, sys_root)
    taker = Taker(
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
        room=stack_limits.room(capture_bytes, len(ranks), len(targets) - len(ranks), max(wanted, 2)),
    )
    sweeps: list[GpuSweep] = []
    taken: list[dict[ProcessId, ProcessDump]] = []
    asked: Future[nccl_query.Said] | None = None

    def of_ranks(silent: Mapping[int, Mount]) -> list[RankDump]:
        carried = links.of_gpus()
        numbers = (rank_dumps.gpu_numbers(rank, sweeps, gpu_levels or {}, carried) for rank in ranks)
        return [
            rank_dumps.of_rank(rank, taken, node, of_gpus, silent) for rank, of_gpus in zip(ranks, numbers, strict=True)
        ]

    with ThreadPoolExecutor(1, thread_name_prefix="nccl-ras") as beside:
        # Native dumps need 340 MB each: one at a time.
        with ThreadPoolExecutor(1 if native else settings.parallel, thread_name_prefix="dump") as pool:
            while len(taken) < wanted:
                number = len(taken)
                if number > 0 and stop.wait(settings.pause_seconds):
                    break
                around.begin_round()
                end = time.monotonic() + settings.round_deadline_seconds
                links.begin_round(number, pool)
                dumps = pool.map(taker.take, targets, [end] * len(targets))
                taken.append(dict(zip(targets, dumps, strict=True)))
                sweep = latest_gpus() if latest_gpus else gpus
                sweeps += [sweep] if sweep else []
                links.end_round()
                if looks_again is not None and wanted == 1 and looks_again(of_ranks({})):
                    wanted = 2
                    if settings.counters:
                        links.begin()
                if number == 0 and wanted > 1 and ask_nccl and not nccl_query.is_recorded(taken[0].values()):
                    asked = beside.submit(nccl_query.asked, job, settings, stop, proc_root)
        by_ports = links.of_ports()
    said = asked.result() if asked is not None else nccl_query.Said({}, None)
    silent = silent_mounts.silent(targets, taken, proc_root)
    waiting = launcher_wait.waits_for(job, proc_root)
    present = [
        replace(
            dump,
            waiting=waiting,
            ports=by_ports,
            nccl_ras=said.of_ranks.get(rank.id),
            nccl_ras_fault=said.fault,
        )
        for rank, dump in zip(ranks, of_ranks(silent), strict=True)
    ]
    return Capture(
        job_id=job.job_id,
        job_key=job.key,
        node=node,
        started_unix_seconds=began_unix,
        duration_seconds=time.monotonic() - began,
        rounds=len(taken),
        ranks=(*present, *rank_dumps.absent(job, node)),
        world_size=job.world_size,
        notes=_notes(job, settings, taken, interrupted=stop.is_set()),
    )


def _targets(ranks: Sequence[Rank], max_workers: int) -> list[ProcessId]:
    """All ranks first, close together in time; then their workers."""
    workers = (worker.id for rank in ranks for worker in rank.workers[:max_workers])
    return list(dict.fromkeys([*(rank.id for rank in ranks), *workers]))


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
    if absent > rank_dumps.ABSENT_LISTED:
        missing = words.count(absent, "local rank")
        notes.append(f"{missing} should be here and have no process: the first {rank_dumps.ABSENT_LISTED} are listed")
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


def job_of_pids(pids: Sequence[int], scan: ProcessScan | None = None) -> Job:
    """These processes as if they were the ranks of one job, with their workers, for a capture that a person asks for.

    A pid that does not exist becomes a rank that is gone. A `scan` that has read this node's processes before reads
    only what is new.
    """
    return discovery.job_of_pids((scan or ProcessScan()).processes(pids), pids)
