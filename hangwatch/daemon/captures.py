"""Captures of jobs, and verdicts on them. Job owners take turns."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from hangwatch import words
from hangwatch.capture import source_lines, stack_limits
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.daemon.context import DaemonContext
from hangwatch.detector import TakeCapture
from hangwatch.detector.power_level import gpu_levels
from hangwatch.model import Fault, GpuLevels, Job
from hangwatch.probes.gpu import query
from hangwatch.probes.node import daemon_heap
from hangwatch.probes.process import pyspy
from hangwatch.probes.process.pyspy import DumpMode
from hangwatch.schedule.owner_limits import CAPTURES_PER_OWNER, FairQueue
from hangwatch.state import steps
from hangwatch.state.board import Snapshot
from hangwatch.state.incident_timeline import CAPTURES_KEPT
from hangwatch.verdict import second_round
from hangwatch.verdict.diagnosis import Diagnosis

NO_THREAD = (
    "job %s: its stacks could not be taken, because the kernel lets this daemon start no thread: look for a program on"
    " this node that starts processes without end, and compare pids.current with pids.max in the daemon's control group"
)
log = logging.getLogger(__package__)  # one logger for the whole package: users filter by its name


class _QueuedCapture(NamedTuple):
    request: TakeCapture
    asked_at: float


class CaptureRunner:
    """The runner of a daemon's captures. `scan(since)` scans for jobs, unless a scan began after `since`."""

    def __init__(self, common: DaemonContext, scan: Callable[[float], None]) -> None:
        self._common, self._scan = common, scan
        begin = partial(common.schedule.run_once, "capture")
        self._turns: FairQueue[_QueuedCapture] = FairQueue(CAPTURES_PER_OWNER, self._run_queued, begin)
        parallel = common.settings.capture.parallel
        self._slots = threading.BoundedSemaphore(parallel) if parallel else None

    def enqueue(self, request: TakeCapture) -> None:
        """Queue a capture. It runs when the job's owner has its turn."""
        entry = self._common.board.snapshot.jobs.get(request.job_key)
        self._turns.add(entry.job.share if entry else "", _QueuedCapture(request, self._common.clock()))

    def _run_queued(self, queued: _QueuedCapture) -> None:
        try:
            with self._common.board.running("capture", self._common.clock()):
                self._run_capture(queued.request, queued.asked_at)
        finally:
            daemon_heap.trim()

    def _run_capture(self, wanted: TakeCapture, asked_at: float) -> None:
        """Capture and judge one job. If that fails, record on the board that the job could not be judged."""
        common = self._common
        try:
            # ranks that started or ended since the last scheduled scan must be known before the dump
            self._scan(asked_at)
            entry = common.board.snapshot.jobs.get(wanted.job_key)
            if entry is None or common.stop.is_set():
                return
            job = entry.job
            target = words.count(len(job.ranks), "rank") if job.ranks else "its launcher"
            log.info("%s: taking stacks of %s: %s", job.name.in_log, target, wanted.reason)
            levels = gpu_levels(entry.watch.power.gpus, common.settings.detector)
            look = self.capture_job(job, levels, may_pause=not wanted.is_light, all_processes=wanted.result == "state")
            if look is None:
                return
            if wanted.result == "state":
                look = source_lines.add_evidence(look)
            with common.running(job.name.in_log, "the scan after its capture"):
                if wanted.result != "low_power":
                    self._scan(common.clock())  # a job that ended during its capture must not be judged as hung
                self._record(wanted, look)
            if wanted.result == "low_power":
                motion = steps.count_motion(look.grouping)
                log.info(
                    "%s: of its ranks %d do not progress, %d progress, and %d are unknown",
                    job.name.in_log,
                    motion.frozen,
                    motion.moving,
                    motion.unknown,
                )
            elif wanted.result == "state":
                log.info("%s: %s", job.name.in_log, look.verdict.message)
        except Exception as error:  # after any error, the suspicion must not be lost
            if str(error) == "can't start new thread":
                log.error(NO_THREAD, wanted.job_key)
            else:
                log.exception("job %s: its stacks could not be taken or judged; please report this", wanted.job_key)
            self._record(wanted, None)

    def _record(self, wanted: TakeCapture, look: Diagnosis | None) -> None:
        common = self._common
        now, unix_now = common.clock(), time.time()  # both clocks at one time: the start of the hang
        settings = common.settings.detector
        common.change(steps.record_capture, wanted, look, now=now, unix_now=unix_now, settings=settings)

    def capture_for_owner(self, job: Job, rounds: int | None) -> Diagnosis | None:
        """Capture a job while its owner waits for the result. Return None if the daemon is stopping.

        If `rounds` is None, one round is taken, and a second one if the first may mislead.
        """
        with self._common.board.running("capture", self._common.clock()):
            return self.capture_job(job, rounds=rounds or 1, may_add_round=rounds is None)

    def capture_job(
        self,
        job: Job,
        levels: Mapping[str, GpuLevels] | None = None,
        *,
        may_pause: bool = True,
        all_processes: bool = True,
        rounds: int | None = None,
        may_add_round: bool = False,
    ) -> Diagnosis | None:
        """Capture and judge one job. Return None if the daemon was asked to stop during the capture.

        `levels` are the power levels of the job's GPUs, by uuid. `rounds` is the number of rounds; None for the
        configured number. With `may_add_round`, a second round follows a single one that may mislead, see
        `second_round`.
        """
        common = self._common
        request = CaptureRequest(
            node=common.node,
            settings=common.settings.capture,
            rounds=rounds,
            needs_second_round=partial(second_round.find_reason, table=common.activities) if may_add_round else None,
            mode=DumpMode(may_pause=may_pause),
            all_processes=all_processes,
            kept_stacks_bytes=self._capture_bytes(job),
            stop=common.stop,
            slots=self._slots,
            observe_dump=self._count_dump,
            gpus=GpuSources(
                read_sweep=lambda: common.board.snapshot.sweep,
                read_traffic=partial(query.traffic, common.gpus),
                levels=levels or {},
            ),
            paths=NodePaths(proc_root=common.proc_root),
        )
        look = diagnose_job(job, request, common.activities)
        return None if common.stop.is_set() else look

    def _capture_bytes(self, job: Job) -> int:
        """Return the maximum bytes of stacks that one capture of a job may keep.

        The owner's limit is divided by the number of its jobs with an incident. Captures from before are not cut
        again: n jobs that hang one after the other keep up to 1 + 1/2 + ... + 1/n times the limit.
        """
        others = sum(
            entry.incident is not None and entry.job.share == job.share and entry.job.key != job.key
            for entry in self._common.board.snapshot.jobs.values()
        )
        return stack_limits.OF_OWNER_BYTES // ((1 + others) * CAPTURES_KEPT)

    def _count_dump(self, seconds: float, fault: Fault | None) -> None:
        self._common.board.put(Snapshot.with_dump, seconds, fault)
        if fault is not None and fault.reason in pyspy.STUCK_REASONS:
            self._common.board.set(dumpers_stuck=pyspy.DUMPER.abandoned.count())
