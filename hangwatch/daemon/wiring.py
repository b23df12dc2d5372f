"""Wiring of the parts of the daemon: start, stop and the scheduled tasks.

`_sample` feeds power samples and progress counters to the detector, `_discover` scans /proc. A suspicion starts a
capture (`CaptureRunner`). Each check is a task (`CheckRunner`). A task changes the board through a pure step of
`state.steps`, and `_do` carries out the actions that the step returns. A thread that blocks forever is abandoned at
exit: the daemon ends with `os._exit`.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hangwatch import metrics, words
from hangwatch.capture.job_scan import JobScan
from hangwatch.checks.framework.contract import Settings as CheckSettings
from hangwatch.config import Settings
from hangwatch.daemon.arrivals import ArrivalReader
from hangwatch.daemon.captures import CaptureRunner
from hangwatch.daemon.context import DaemonContext
from hangwatch.daemon.dead_ranks import DeadRanks
from hangwatch.daemon.incident_writer import IncidentWriter
from hangwatch.daemon.node_checks import CheckRunner
from hangwatch.daemon.rank_counters import RankCounters
from hangwatch.detector import TakeCapture, Transition
from hangwatch.detector.on_power import SAMPLE_GAP_SECONDS
from hangwatch.model import OPEN_STATES, Fault, NotMonitored
from hangwatch.probes.base import procfs
from hangwatch.probes.base.gpu_source import GpuSource
from hangwatch.probes.node import host
from hangwatch.probes.node.sdnotify import Notifier
from hangwatch.probes.process import pyspy
from hangwatch.schedule.scheduler import Schedule
from hangwatch.stacks import activity
from hangwatch.state import status, steps
from hangwatch.state.board import Board, Snapshot
from hangwatch.state.status import Status
from hangwatch.state.steps import Action, ReadCrashArtifacts, SaveIncident
from hangwatch.store import Store
from hangwatch.web.http_server import Server, usable_url
from hangwatch.web.user_socket import UserSocket

log = logging.getLogger(__package__)  # one logger for the whole package: users filter by its name

STATUS_SECONDS = 10.0
SOCKET_SECONDS = 30.0
# After this many sample periods without a sample, the daemon reports itself unhealthy
BEATS_MISSED = 10.0
SCAN_DEADLINE_SECONDS = 10.0
STUCK_SECONDS = 60.0  # a scan or capture that overruns its budget by this much is stuck


class Daemon:
    """The daemon of one node.

    `gpus` is the source of power readings: the driver's sampler, or the demo's simulated node. `check_settings`
    holds the checks to run, by name. Without it no check runs. `clock` is CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        gpus: GpuSource,
        *,
        node: str | None = None,
        proc_root: Path = Path("/proc"),
        notifier: Notifier | None = None,
        check_settings: Mapping[str, CheckSettings] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.node = node or host.node_name()
        self.board = Board()
        self.port: int | None = None
        self.store = Store(Path(settings.store.directory), settings.store, shared=True)
        self._gpus = gpus
        self._notifier = notifier or Notifier()
        self._clock = clock
        self._counters = RankCounters(settings, proc_root, clock)
        self._scanning = threading.Lock()
        self._scanned_at = -math.inf  # when the last scan that is on the board began
        self._stop = threading.Event()
        self._server: Server | None = None
        self._sampled_at = clock()
        self._last_sweep_at: float | None = None
        self._driver_trouble: str | None = None
        self._left_out_owners: frozenset[str] = frozenset()
        self._schedule = Schedule(self._on_missed)
        self._common = common = DaemonContext(
            settings=settings,
            node=self.node,
            board=self.board,
            schedule=self._schedule,
            gpus=gpus,
            proc_root=proc_root,
            activities=activity.load(settings.activities.rules),
            stop=self._stop,
            do_actions=self._do,
            clock=clock,
            running_steps=[],
        )
        self._checking = CheckRunner(common, check_settings or {})
        self._keeping = IncidentWriter(common, self.store)
        self._arrivals = ArrivalReader(common, self._counters)
        self._dead_ranks = DeadRanks(common)
        self._scan = JobScan(proc_root, settings.jobs, note_ranks=self._dead_ranks.last_seen.note)
        self.looking = CaptureRunner(common, self._discover)
        look = self.looking.capture_for_owner
        self._own_jobs = UserSocket(
            settings, self.node, self.board, self.store, scan=self._discover, diagnose=look, clock=clock
        )

    # --- scheduled tasks ---------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Feed the newest power sample to every job, and carry out the resulting actions."""
        self._sampled_at = self._clock()
        for silence in self.board.change(steps.drop_ended_silences, time.time()):
            log.info("%s: its silence has ended", silence.in_log)
        sweep, sampler = self._gpus.latest(), self._gpus.status()
        self._log_driver_fault(sampler.fault)
        self._apply_counters()
        if sweep is None or sweep.taken_monotonic_seconds == self._last_sweep_at:
            now, unix_now, settings = self._clock(), time.time(), self.settings.detector
            self._common.change(steps.record_missing_sample, sampler, now=now, unix_now=unix_now, settings=settings)
            return
        self._last_sweep_at = sweep.taken_monotonic_seconds
        self.board.remember_power(sweep)
        self._common.change(
            steps.record_sample,
            sweep,
            sampler,
            now=self._clock(),
            settings=self.settings.detector,
            gap_seconds=max(SAMPLE_GAP_SECONDS, 3 * self.settings.gpu.sample_seconds),
            capture_seconds=self.settings.capture.usual_seconds,
        )

    def _apply_counters(self) -> None:
        """Feed the newest progress counters to every job, and carry out the resulting actions."""
        settings = self.settings
        wanted = self.board.change(
            steps.record_counters,
            self._counters.latest(),
            now=self._clock(),
            unix_now=time.time(),
            settings=settings.detector,
            progress=settings.progress,
            capture_seconds=settings.capture.usual_seconds,
            gap_seconds=max(SAMPLE_GAP_SECONDS, 3 * settings.gpu.sample_seconds),
        )
        self.board.remember_collectives(time.time())
        self._do(wanted)

    def _discover(self, since: float | None = None) -> None:
        """Scan /proc for jobs, unless a scan began after `since` (CLOCK_MONOTONIC, seconds; default: now).

        If a scan is running, all waiting callers share the next scan.
        """
        wanted_at = self._clock() if since is None else since
        if self._scanned_at > wanted_at:
            return
        if not self._scanning.acquire(timeout=SCAN_DEADLINE_SECONDS):
            log.error("no scan of /proc ended within %g s: the list of jobs is not updated", SCAN_DEADLINE_SECONDS)
            return
        try:
            if self._scanned_at > wanted_at:
                return
            began = self._clock()
            with self.board.running("scan", began):
                found_jobs = self._scan.find(self.board.snapshot.sweep, self.node)
            now, unix_now = self._clock(), time.time()
            self.board.set(scan_seconds=now - began, left_out=found_jobs.left_out, engines=found_jobs.engines)
            self._log_not_monitored(found_jobs.left_out)
            before = self.board.snapshot.living_keys
            self._common.change(steps.record_scan, found_jobs.jobs, now, unix_now, procfs.TICKS_PER_SECOND)
            if self.board.snapshot.living_keys - before:
                self._checking.run_absent_soon(self.board.snapshot.checks)
            if self.board.snapshot.unresumed_incidents:
                self._keeping.resume(self.board.snapshot.unresumed_incidents)
            self.board.set(dumpers_stuck=pyspy.DUMPER.abandoned.count())
            if self._scanned_at == -math.inf:
                self._checking.run_all()
            self._scanned_at = began
        finally:
            self._scanning.release()

    # --- actions and log lines ---------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, TakeCapture):
                self.looking.enqueue(action)
            elif isinstance(action, ReadCrashArtifacts):
                self._dead_ranks.enqueue(action)
            elif isinstance(action, SaveIncident):
                self._keeping.save(action)
            elif isinstance(action, Transition):
                loud = action.state in OPEN_STATES or action.state is action.before
                level = logging.WARNING if loud else logging.INFO
                states = f"{action.before.value} -> {action.state.value}"
                log.log(level, "%s: %s: %s", action.job.in_log, states, action.message)

    def _log_not_monitored(self, left_out: tuple[NotMonitored, ...]) -> None:
        """Log that some jobs or ranks of an owner are not monitored, once for each owner."""
        for one in left_out:
            if one.owner not in self._left_out_owners:
                log.warning("not monitored: exceeds a limit in [jobs]: %s", one)
        self._left_out_owners = frozenset(one.owner for one in left_out)

    def _log_driver_fault(self, fault: Fault | None) -> None:
        """Log when the driver fails, and when it works again. Tasks that need no GPU continue."""
        trouble = f"{fault.reason}: {fault.detail}" if fault else None
        if trouble == self._driver_trouble:
            return
        self._driver_trouble = trouble
        if fault is not None:
            log.warning(
                "no GPU readings: hangs of jobs without a flight recorder are not detected: %s. %s",
                fault.detail,
                fault.remedy,
            )
        else:
            log.info("GPU readings work again")

    def _on_missed(self, task: str) -> None:
        """Report that a task has not ended when it is due again. `find_health_problem` reports late power samples."""
        if not self._checking.report_overrun(task) and task not in ("sample", "counters", "recorders", "arrivals"):
            runs = self.board.snapshot.late_tasks.get(task, 0) + 1
            self.board.put(Snapshot.count, "late_tasks", task)
            if runs == 1:
                log.warning("%s is still running at its next tick; see hangwatch_late_tasks_total", task)

    # --- lifecycle ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server and all tasks. Before that it may raise StoreTakenError, ServeError or PortTakenError."""
        self._keeping.refuse_second_daemon()
        server = Server(
            self.settings.http,
            metrics.registry(self.board, self._clock, self.settings.detector, usable_url(self.settings.http)),
            status=self.status,
            unhealthy=self.find_health_problem,
            incidents=self.store,
        )
        self.port = server.start()
        self._server = server
        self._own_jobs.start()
        self._gpus.start()
        schedule = self._schedule
        sample_seconds = self.settings.gpu.sample_seconds
        schedule.run_every(sample_seconds, "sample", "sample", self._sample)
        if self.settings.progress.read:
            schedule.run_every(sample_seconds, "counters", "counters", self._counters.read, self.board)
            schedule.run_every(sample_seconds, "recorders", "recorders", self._counters.look)
            schedule.run_every(self.settings.progress.arrival_seconds, "recorders", "arrivals", self._arrivals.read)
        schedule.run_every(self.settings.jobs.discover_seconds, "slow", "discover", self._discover)
        schedule.run_once("slow", self._discover)
        self._checking.schedule_tasks()
        self._keeping.schedule_tasks()
        schedule.run_every(STATUS_SECONDS, "slow", "status", self._tell_systemd)
        schedule.run_every(SOCKET_SECONDS, "slow", "user socket", self._own_jobs.restore)
        if self._notifier.watchdog_seconds is not None:
            schedule.run_every(self._notifier.watchdog_seconds, "slow", "watchdog", self._ping_watchdog)
        schedule.start()
        listen = self.settings.http.listen
        log.info("health on %s", words.place(listen, server.health_port))
        log.info("monitoring %s, metrics on %s", self.node, words.place(listen, self.port))
        self._notifier.ready()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until `ask_to_stop` is called, at most `seconds`. Return True if the daemon was asked to stop."""
        return self._stop.wait(seconds)

    def ask_to_stop(self) -> None:
        """Make `wait` return. A signal handler may call this function."""
        self._stop.set()

    def stop(self) -> None:
        """Stop every task and the server, without waiting for a thread that is blocked in the kernel."""
        self._stop.set()
        self._notifier.stopping()
        self._schedule.stop()
        self._dead_ranks.start_last_read()
        self._keeping.finish()
        self._own_jobs.stop()
        if self._server is not None:
            self._server.stop()
        self._gpus.stop()
        self.store.lock.give_back()

    def _tell_systemd(self) -> None:
        entries = self.board.snapshot.jobs.values()
        states = ", ".join(f"{entry.job.job_id} {entry.watch.state.value}" for entry in list(entries)[:5])
        self._notifier.status(f"{len(entries)} jobs{': ' + states if states else ''}")

    def _ping_watchdog(self) -> None:
        """Tell systemd's watchdog that the daemon is healthy, if it is. Power samples may be too rare for this."""
        if self.find_health_problem() is None:
            self._notifier.watchdog()

    # --- answers -----------------------------------------------------------------------------------------------

    def find_health_problem(self) -> str | None:
        """Return a sentence about a health problem of the daemon itself; None if it is healthy."""
        now, snapshot = self._clock(), self.board.snapshot
        late = now - self._sampled_at
        limit = max(30.0, BEATS_MISSED * self.settings.gpu.sample_seconds)
        if late > limit:
            return f"the sampling task has not run for {late:.0f} s"
        for task, limit in (("scan", STUCK_SECONDS), ("capture", STUCK_SECONDS + self.settings.capture_seconds)):
            late = snapshot.running_seconds(task, now)
            if late > limit:
                return f"a {task} has been running for {late:.0f} s"
        return None

    def status(self) -> Status:
        """Return the status of the jobs, GPUs and checks of this node, without stacks and command lines."""
        return status.build_status(self.board.snapshot, self.node, self._clock(), self.settings.detector)
