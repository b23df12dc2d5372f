"""Wiring and lifecycle: probes feed the board on a schedule, captures run one at a time, readers are served.

One beat per power sample steps the detector; a slow beat scans /proc; each check has its own. Whatever can block runs
in a thread of its own pool, and what blocks for ever is left behind at exit: the last line of a daemon is `os._exit`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from msgspec.structs import replace

from hangwatch import metrics, progress, status
from hangwatch.board import Board, Snapshot, extend
from hangwatch.checks import discovery, runner
from hangwatch.checks.contract import Settings as CheckSettings
from hangwatch.config import Settings
from hangwatch.hang import activity
from hangwatch.hang.detector import TakeCapture, Transition
from hangwatch.http import Server
from hangwatch.look import Look, find_jobs, look_at
from hangwatch.model import CheckResult, Fault, Incident, Job, JobState
from hangwatch.probes import host, procs
from hangwatch.probes.node import Node
from hangwatch.probes.nvml.source import GpuSource
from hangwatch.probes.sdnotify import Notifier
from hangwatch.progress import Deed, SaveIncident
from hangwatch.report import html, text
from hangwatch.report.dumps import dump_files
from hangwatch.status import Status
from hangwatch.store import Store, StoreError, open_writable

log = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0
STATUS_SECONDS = 10.0
BEATS_MISSED = 10.0  # so many sample periods without a beat, and the daemon calls itself unhealthy
CHECK_THREADS = 8
SCAN_DEADLINE_SECONDS = 10.0


class Daemon:
    """One hangwatch on one node.

    `gpus` is where power comes from: the driver's sampler, or the demo's simulated node. `check_settings` are the
    checks to run, by name; none run without it. `clock` is CLOCK_MONOTONIC in seconds.
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
        self.store: Store | None = None
        self._gpus = gpus
        self._proc_root = proc_root
        self._notifier = notifier or Notifier()
        self._clock = clock
        self._activities = activity.load(settings.activities.rules)
        self._check_settings = check_settings or {}
        self._checks = {name: one for name, one in discovery.checks().items() if self._is_on(name)}
        self._windows = {name: runner.new_window(one) for name, one in self._checks.items()}
        self._check_began: dict[str, float] = {}
        self._scan = procs.ProcessScan(proc_root)
        self._scanning = threading.Lock()
        self._stop = threading.Event()
        self._server: Server | None = None
        self._beat_at = clock()
        self._last_sweep_at: float | None = None
        self._said_no_driver: str | None = None
        self._scheduler = _scheduler()

    def _is_on(self, name: str) -> bool:
        settings = self._check_settings.get(name)
        return settings is not None and settings.enabled

    # --- lifecycle ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the store, serve, and start every beat. Raises StoreError or ServeError, before anything runs."""
        kept = self.settings.store
        self.store = open_writable(
            Path(kept.directory),
            max_incidents=kept.max_incidents,
            max_bytes=kept.max_bytes,
            max_age_days=kept.max_age_days,
        )
        self._server = Server(
            self.settings.http,
            metrics.registry(self.board, self._clock, self.settings.detector),
            status=self.status,
            unhealthy=self.unhealthy,
            incidents=self.store,
        )
        self.port = self._server.start()
        self._gpus.start()
        self._scheduler.add_listener(self._on_trouble, EVENT_JOB_MAX_INSTANCES | EVENT_JOB_ERROR)
        self._every(self.settings.gpu.sample_seconds, self._beat, "beat", "beat")
        self._every(self.settings.jobs.discover_seconds, self._discover, "discover", "default", at_once=True)
        self._every(PRUNE_SECONDS, self._prune, "prune", "default")
        self._every(STATUS_SECONDS, self._tell_systemd, "status", "default")
        if self._notifier.watchdog_seconds is not None:
            self._every(self._notifier.watchdog_seconds, self._ping_watchdog, "watchdog", "default")
        self._schedule_checks()
        self._scheduler.start()
        log.info("watching %s, metrics on %s:%d", self.node, self.settings.http.listen, self.port)
        self._notifier.ready()

    def wait(self) -> None:
        """Block until `ask_to_stop`."""
        self._stop.wait()

    def ask_to_stop(self) -> None:
        """Make `wait` return; safe in a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """End every beat and the server; a thread that hangs in the kernel is not waited for."""
        self._stop.set()
        self._notifier.stopping()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        if self._server is not None:
            self._server.stop()
        self._gpus.stop()

    def _every(self, seconds: float, call: Callable[[], None], name: str, pool: str, *, at_once: bool = False) -> None:
        self._scheduler.add_job(call, "interval", seconds=seconds, id=name, executor=pool)
        if at_once:
            self._scheduler.add_job(call, id=f"{name}-now", executor=pool)

    # --- beats -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """One power sample: step every job, and do what follows."""
        self._beat_at = self._clock()
        sweep, sampler = self._gpus.latest(), self._gpus.status()
        self._say_driver(sampler.fault)
        if sweep is None or sweep.taken_monotonic_seconds == self._last_sweep_at:
            self.board.set(sampler=sampler)
        else:
            self._last_sweep_at = sweep.taken_monotonic_seconds
            self.board.remember_power(sweep)
            gap = max(10.0, 3 * self.settings.gpu.sample_seconds)
            self._do(
                self.board.change(
                    lambda snapshot: progress.sampled(
                        snapshot, sweep, sampler, now=self._clock(), settings=self.settings.detector, gap_seconds=gap
                    )
                )
            )

    def _ping_watchdog(self) -> None:
        """On a beat of its own: power may be sampled once a minute, and systemd will not wait that long."""
        if self.unhealthy() is None:
            self._notifier.watchdog()

    def _discover(self) -> None:
        """One scan of /proc: which jobs are there?"""
        if not self._scanning.acquire(timeout=SCAN_DEADLINE_SECONDS):
            log.error("a scan of /proc has not come back for %g s: jobs are seen as they were", SCAN_DEADLINE_SECONDS)
            return
        try:
            sweep = self.board.snapshot.sweep
            found = find_jobs(self._scan, sweep)
            now, unix_now = self._clock(), time.time()
            ticks = procs.TICKS_PER_SECOND
            self._do(self.board.change(lambda snapshot: progress.discovered(snapshot, found, now, unix_now, ticks)))
        finally:
            self._scanning.release()

    def _prune(self) -> None:
        if self.store is None:
            return
        open_folders = frozenset(
            entry.incident.incident_id for entry in self.board.snapshot.jobs.values() if entry.incident is not None
        )
        try:
            removed = self.store.prune(time.time(), open_folders)
        except StoreError as error:
            log.warning("old incidents cannot be removed: %s", error)
        else:
            if removed:
                log.info("removed %d old incidents", len(removed))

    def _tell_systemd(self) -> None:
        entries = self.board.snapshot.jobs.values()
        states = ", ".join(f"{entry.job.job_id} {entry.watch.state.value}" for entry in list(entries)[:5])
        self._notifier.status(f"{len(entries)} jobs{': ' + states if states else ''}")

    # --- deeds -------------------------------------------------------------------------------------------------

    def _do(self, deeds: Iterable[Deed]) -> None:
        for deed in deeds:
            if isinstance(deed, TakeCapture):
                # Ranks that came or went since the last slow beat must be known before they are dumped.
                self._scheduler.add_job(self._look, args=[deed], id=f"look-{deed.job_id}", executor="capture")
            elif isinstance(deed, SaveIncident):
                self._scheduler.add_job(self._save, args=[deed.incident], executor="capture")
            elif isinstance(deed, Transition):
                loud = deed.state in (JobState.HUNG, JobState.STALLED)
                level = logging.WARNING if loud else logging.INFO
                log.log(level, "job %s: %s -> %s: %s", deed.job_id, deed.before.value, deed.state.value, deed.message)

    def _look(self, wanted: TakeCapture) -> None:
        """Take the stacks of every rank of one job and judge them; if that fails, the job is not forgotten over it."""
        try:
            judged = self._judged(wanted)
        except Exception:  # whatever it was, this hang must not be lost with it
            log.exception("job %s: its stacks could not be taken or judged; please report this", wanted.job_id)
            now, unix_now, settings = self._clock(), time.time(), self.settings.detector
            self._do(
                self.board.change(
                    lambda snapshot: progress.unjudged(
                        snapshot, wanted.job_id, now=now, unix_now=unix_now, settings=settings
                    )
                )
            )
        else:
            if judged is not None:
                log.info("job %s: %s", wanted.job_id, judged.verdict.message)

    def _judged(self, wanted: TakeCapture) -> Look | None:
        self._discover()
        entry = self.board.snapshot.jobs.get(wanted.job_id)
        if entry is None or self._stop.is_set():
            return None
        log.info("job %s: taking stacks of %d ranks: %s", wanted.job_id, len(entry.job.ranks), wanted.reason)
        look = self.look_at(entry.job)
        if look is None:
            return None
        self._discover()  # a job that ended while it was looked at has ended, and is not hung
        now, settings = self._clock(), self.settings.detector
        self._do(self.board.change(lambda snapshot: progress.captured(snapshot, look, now=now, settings=settings)))
        return look

    def look_at(self, job: Job) -> Look | None:
        """Capture and judge one job; None when the daemon was asked to stop meanwhile."""
        look = look_at(
            job,
            settings=self.settings.capture,
            activities=self._activities,
            node=self.node,
            sweep=self.board.snapshot.sweep,
            proc_root=self._proc_root,
            stop=self._stop,
            observe_dump=self._count_dump,
        )
        return None if self._stop.is_set() else look

    def _count_dump(self, seconds: float, fault: Fault | None) -> None:
        def counted(snapshot: Snapshot) -> tuple[Snapshot, None]:
            snapshot = replace(snapshot, dumps=snapshot.dumps.add(seconds))
            return (snapshot if fault is None else snapshot.count("dump_failures", fault.reason)), None

        self.board.change(counted)

    def _save(self, incident: Incident) -> None:
        """Write the incident with the power that led to it; a full disk costs this incident's folder, nothing else."""
        entry = self.board.snapshot.jobs.get(incident.job.job_id)
        if entry is not None:
            series = self.board.power_series(entry, self.settings.detector)
            incident = replace(incident, power=extend(incident.power, series))
            self.board.change(lambda snapshot: (_with_power(snapshot, incident), None))
        if self.store is None:
            return
        try:
            folder = self.store.save(
                incident,
                {
                    "report.txt": text.render(incident),
                    "report.html": html.render(incident),
                    **dump_files(incident),
                },
            )
        except StoreError as error:
            log.error("incident %s cannot be kept: %s", incident.incident_id, error)
        else:
            log.info("incident %s: %s", incident.incident_id, folder)

    # --- checks ------------------------------------------------------------------------------------------------

    def _schedule_checks(self) -> None:
        """Each check on its own beat, the first runs spread over a few seconds."""
        for check in self._checks.values():
            self._scheduler.add_job(
                self._check,
                "interval",
                args=[check.name],
                seconds=check.every_seconds,
                id=f"check-{check.name}",
                executor="checks",
            )
            self._scheduler.add_job(self._check, args=[check.name], executor="checks")

    def _check(self, name: str) -> None:
        check = self._checks[name]
        self._check_began[name] = time.time()
        self._post(runner.run(check, self._node_view(), self._check_settings[name], self._windows[name]))

    def _post(self, result: CheckResult) -> None:
        self.board.change(lambda board: (replace(board, checks={**board.checks, result.check: result}), None))

    def _node_view(self) -> Node:
        return Node(
            proc_root=self._proc_root,
            gpus=self._gpus,
            jobs=tuple(e.job for e in self.board.snapshot.jobs.values() if e.watch.state is not JobState.ENDED),
            state_directory=Path(self.settings.store.directory),
            dump_after_seconds=self.settings.dump_after_seconds,
        )

    def _on_trouble(self, event: Any) -> None:
        """A beat that raised, or one that has not come back while its next turn is due."""
        name = str(event.job_id).removeprefix("check-")
        if isinstance(event, JobExecutionEvent) and event.exception is not None:
            log.error("%s failed; please report this: %s\n%s", name, event.exception, event.traceback)
        elif name in self._checks:
            now = time.time()
            self._post(runner.stalled(self._checks[name], self._check_began.get(name, now), now))
        elif name != "beat":  # a late beat is what `unhealthy` tells
            log.warning("%s has not come back from its last turn", name)

    # --- answers -----------------------------------------------------------------------------------------------

    def unhealthy(self) -> str | None:
        """What is wrong with the daemon itself, in a sentence; None when it beats."""
        late = self._clock() - self._beat_at
        limit = max(30.0, BEATS_MISSED * self.settings.gpu.sample_seconds)
        return f"no beat for {late:.0f} s" if late > limit else None

    def status(self) -> Status:
        """What this daemon sees, without stacks and command lines."""
        return status.view(self.board.snapshot, self.node, self._clock())

    def _say_driver(self, fault: Fault | None) -> None:
        """Say once that there is no driver, and once that it is back; everything that needs no GPU works on."""
        said = f"{fault.reason}: {fault.detail}" if fault else None
        if said == self._said_no_driver:
            return
        self._said_no_driver = said
        if fault is not None:
            log.warning("no GPU readings: %s. %s", fault.detail, fault.remedy)
        else:
            log.info("GPU readings are back")


def _with_power(snapshot: Snapshot, incident: Incident) -> Snapshot:
    entry = snapshot.jobs.get(incident.job.job_id)
    if entry is None or entry.incident is None or entry.incident.incident_id != incident.incident_id:
        return snapshot
    return snapshot.with_job(replace(entry, incident=replace(entry.incident, power=incident.power)))


def _scheduler() -> BackgroundScheduler:
    """One thread for captures: never two at a time. A late beat runs late rather than not at all."""
    logging.getLogger("apscheduler").setLevel(logging.ERROR)  # it logs each run, and max-instances, which we report
    return BackgroundScheduler(
        executors={
            "beat": ThreadPoolExecutor(1),
            "default": ThreadPoolExecutor(3),
            "capture": ThreadPoolExecutor(1),
            "checks": ThreadPoolExecutor(CHECK_THREADS),
        },
        job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        timezone="UTC",
    )
