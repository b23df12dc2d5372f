"""Wiring and lifecycle: four beats feed the board and look at jobs, and readers of the board are served.

A power sample steps the detector (`_sample`); a slow beat scans /proc (`_discover`); a suspicion takes and judges
stacks (`_look`); each check has a beat of its own (`_check`). What a beat finds goes through a pure step of `progress`
to the board, and what that step wants done is done (`_do`). A thread that blocks for ever is left behind at exit: the
last line of a daemon is `os._exit`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hangwatch import crash, hooks, metrics, progress, status, words
from hangwatch.beats import CAPTURES_PER_OWNER, Beats, Turns
from hangwatch.board import Board, Snapshot, extend
from hangwatch.checks import discovery, runner
from hangwatch.checks.contract import ABSENT
from hangwatch.checks.contract import Settings as CheckSettings
from hangwatch.config import Settings
from hangwatch.hang import activity
from hangwatch.hang.detector import TakeCapture, Transition
from hangwatch.hang.detector.samples import SAMPLE_GAP_SECONDS
from hangwatch.hang.power import GpuLevels, gpu_levels
from hangwatch.hang.watched import MotionCount
from hangwatch.hooks import Ended, Hooks
from hangwatch.http import Server
from hangwatch.incident_file import StoreError
from hangwatch.job_scan import JobScan
from hangwatch.look import Look, look_at
from hangwatch.model import ENDED_STATES, OPEN_STATES, Fault, Incident, Job, JobState, LeftOut, ProcessId
from hangwatch.own_jobs import OwnJobs
from hangwatch.probes import heap, host, procs, pyspy
from hangwatch.probes.node import Node
from hangwatch.probes.nvml import query
from hangwatch.probes.nvml.source import GpuSource
from hangwatch.probes.sdnotify import Notifier
from hangwatch.progress import Action, ReadRemains, SaveIncident
from hangwatch.report.folder import folder_files
from hangwatch.status import Status
from hangwatch.store import Store, StoreTakenError

log = logging.getLogger(__name__)

PRUNE_SECONDS = 3600.0
MOST_DEAD_JOBS = 16  # of one owner, that wait for being read
PRUNED_BY_AGE = 3
STORE_SECONDS = 60.0
CHECK_AGAIN_SECONDS = 30.0  # after a job came: it has begun by then
CHECKED_AGAIN_PACE_SECONDS = 60.0  # of one check at most, whatever comes and goes
LOCK_SECONDS = 3.0  # so long the start waits for a file system that may never answer
STATUS_SECONDS = 10.0
BEATS_MISSED = 10.0  # so many sample periods without a beat, and the daemon calls itself unhealthy
SCAN_DEADLINE_SECONDS = 10.0
STUCK_SECONDS = 60.0  # so long over its budget, and a scan or a capture does not come back


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
        kept = settings.store
        self.store = Store(
            Path(kept.directory),
            max_incidents=kept.max_incidents,
            max_bytes=kept.max_bytes,
            max_age_days=kept.max_age_days,
            shared=True,
            group=kept.group,
        )
        self._gpus = gpus
        self._proc_root = proc_root
        self._notifier = notifier or Notifier()
        self._clock = clock
        self._activities = activity.load(settings.activities.rules)
        self._check_settings = check_settings or {}
        self._checks = {name: check for name, check in discovery.checks().items() if self._is_on(name)}
        self._windows = {name: runner.new_window(check) for name, check in self._checks.items()}
        self._check_began: dict[str, float] = {}
        self._checked_again_at: dict[str, float] = {}
        self._scan = JobScan(proc_root, settings.jobs)
        self._scanning = threading.Lock()
        self._stop = threading.Event()
        self._server: Server | None = None
        self._sampled_at = clock()
        self._last_sweep_at: float | None = None
        self._driver_trouble: str | None = None
        self._has_read_back = False
        self._left_out_owners: frozenset[str] = frozenset()
        self._turns: Turns[TakeCapture] = Turns(CAPTURES_PER_OWNER)
        self._dead: Turns[Job] = Turns(1)
        self._slots = threading.BoundedSemaphore(settings.capture.parallel) if settings.capture.parallel else None
        self._beats = Beats(self._on_missed)
        self._own_jobs = OwnJobs(
            settings, self.node, self.board, self.store, scan=self._discover, look=self._look_asked_for, clock=clock
        )
        self.board.set(hook_runs=hooks.none_yet(settings.hooks))
        self._hooks = Hooks(settings.hooks, partial(self._beats.once, "hooks"), self._hook_ended)

    def _is_on(self, name: str) -> bool:
        settings = self._check_settings.get(name)
        return settings is not None and settings.enabled

    # --- the four beats ----------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """One power sample: step every job, and do what follows."""
        self._sampled_at = self._clock()
        sweep, sampler = self._gpus.latest(), self._gpus.status()
        self._say_driver(sampler.fault)
        if sweep is None or sweep.taken_monotonic_seconds == self._last_sweep_at:
            now, unix_now, detector = self._clock(), time.time(), self.settings.detector
            self._do(self.board.change(progress.unsampled, sampler, now=now, unix_now=unix_now, settings=detector))
            return
        self._last_sweep_at = sweep.taken_monotonic_seconds
        self.board.remember_power(sweep)
        wanted = self.board.change(
            progress.sampled,
            sweep,
            sampler,
            now=self._clock(),
            settings=self.settings.detector,
            gap_seconds=max(SAMPLE_GAP_SECONDS, 3 * self.settings.gpu.sample_seconds),
            look_seconds=self.settings.capture.usual_seconds,
        )
        self._do(wanted)

    def _discover(self) -> None:
        """One scan of /proc: which jobs are there?"""
        if not self._scanning.acquire(timeout=SCAN_DEADLINE_SECONDS):
            log.error("a scan of /proc has not come back for %g s: jobs are seen as they were", SCAN_DEADLINE_SECONDS)
            return
        try:
            with self._running("scan"):
                began = self._clock()
                found = self._scan.find(self.board.snapshot.sweep, self.node)
            now, unix_now = self._clock(), time.time()
            self.board.put(Snapshot.with_scan, now - began, found.left_out)
            self._say_left_out(found.left_out)
            before = self._living_jobs()
            self._do(self.board.change(progress.discovered, found.jobs, now, unix_now, procs.TICKS_PER_SECOND))
            if self._living_jobs() - before:
                self._check_again(self.board.snapshot.checks)
            if self.board.snapshot.left_open:
                self._resume(self.board.snapshot.left_open)
            self.board.set(dumpers_stuck=pyspy.left_behind())
        finally:
            self._scanning.release()

    def _look_in_turn(self) -> None:
        """The capture whose owner's turn it is; none where who waits has as many under way as one owner may."""
        turn = self._turns.take()
        if turn is None:
            return
        try:
            with self._running("capture"):
                self._look(turn.wanted)
        finally:
            heap.give_back()
            if self._turns.end(turn):
                self._beats.once("capture", self._look_in_turn)

    def _look(self, wanted: TakeCapture) -> None:
        """Take the stacks of every rank of one job and judge them; if that fails, the job is not forgotten over it."""
        settings = self.settings.detector
        try:
            self._discover()  # ranks that came or went since the last slow beat must be known before they are dumped
            entry = self.board.snapshot.jobs.get(wanted.job_key)
            if entry is None or self._stop.is_set():
                return
            job = entry.job
            whose = words.count(len(job.ranks), "rank") if job.ranks else "its launcher"
            log.info("job %s: taking stacks of %s: %s", job.job_id, whose, wanted.reason)
            levels = gpu_levels(entry.watch.gpus, settings)
            look = self.look_at(job, levels, may_pause=not wanted.is_glance)
            if look is None:
                return
            if wanted.is_glance:
                self._glanced(job.key, progress.motion_count(look.grouping))
                return
            self._discover()  # a job that ended while it was looked at has ended, and is not hung
            self._do(self.board.change(progress.captured, look, now=self._clock(), settings=settings))
            log.info("job %s: %s", job.job_id, look.verdict.message)
        except Exception:  # whatever it was, this hang must not be lost with it
            log.exception("job %s: its stacks could not be taken or judged; please report this", wanted.job_key)
            if wanted.is_glance:
                self._glanced(wanted.job_key, MotionCount(frozen=0, moving=0))
                return
            now, unix_now = self._clock(), time.time()
            self._do(
                self.board.change(progress.unjudged, wanted.job_key, now=now, unix_now=unix_now, settings=settings)
            )

    def _read_remains_in_turn(self) -> None:
        """The dead ranks whose owner's turn it is: his file system may give no answer, and keeps one thread at most."""
        turn = self._dead.take()
        if turn is None or self._stop.is_set():
            return
        try:
            self._read_remains(turn.wanted)
        finally:
            if self._dead.end(turn):
                self._beats.once("remains", self._read_remains_in_turn)

    def _drop_remains(self, job: Job) -> None:
        """Say that a job is left out: a user's jobs that end by the hundred must not fill the memory, nor the log."""
        unread = self.board.change(progress.left_unread)
        if unread.bit_count() == 1:  # the first, and at doubling numbers
            what = f"what its dead ranks left is not read: {MOST_DEAD_JOBS} jobs of {job.owner} wait for that"
            log.warning("job %s: %s (%s since the start)", job.job_id, what, words.count(unread, "job"))

    def _read_remains(self, job: Job) -> None:
        """What ranks left that are gone; a crash makes an incident, an end in order none."""
        cores = self.settings.crashes.cores
        found = crash.read(job, self.node, self._scan.last_seen, cores=cores, proc_root=self._proc_root)
        verdict = crash.judge(job, found)
        if verdict is None:
            for why in dict.fromkeys(why for left in found for why in left.refused):
                log.info("job %s: its ranks ended, and nothing tells of a crash: %s", job.job_id, why)
            return
        incident = crash.incident(job, self.node, found, verdict, self._activities, unix_now=time.time())
        log.warning("job %s: %s", job.job_id, verdict.message)
        self._do(self.board.change(progress.crashed, incident, now=self._clock()))

    def _glanced(self, job_key: str, seen: MotionCount) -> None:
        now, unix_now, settings = self._clock(), time.time(), self.settings.detector
        self._do(self.board.change(progress.glanced, job_key, seen, now=now, unix_now=unix_now, settings=settings))

    def _check(self, name: str) -> None:
        """One run of one check."""
        self._check_began[name] = time.time()
        node = self._node_view()
        result = runner.run(self._checks[name], node, self._check_settings[name], self._windows[name])
        self.board.put(progress.checked, result, now=self._clock())
        if self._living_jobs() - {job.key for job in node.jobs}:
            self._check_again((name,))

    def _check_again(self, names: Iterable[str]) -> None:
        """Let those of these checks that had nothing to look at look soon, since a job has come.

        A user's jobs that come and go by the second make no check run more than once a minute.
        """
        now, found = self._clock(), self.board.snapshot.checks
        for name in names:
            last = self._checked_again_at.get(name)
            is_due = last is None or now - last >= CHECKED_AGAIN_PACE_SECONDS
            if is_due and name in found and found[name].verdict.reason == ABSENT:
                self._checked_again_at[name] = now
                self._beats.within(CHECK_AGAIN_SECONDS, f"check-{name}")

    def _living_jobs(self) -> frozenset[str]:
        return frozenset(entry.job.key for entry in self.board.snapshot.living)

    # --- what follows from them --------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, TakeCapture):
                entry = self.board.snapshot.jobs.get(action.job_key)
                self._turns.add(entry.job.share if entry else "", action)
                self._beats.once("capture", self._look_in_turn)
            elif isinstance(action, ReadRemains):
                if not self.settings.crashes.read:
                    continue
                if self._dead.add(action.job.share, action.job, MOST_DEAD_JOBS):
                    self._beats.once("remains", self._read_remains_in_turn)
                else:
                    self._drop_remains(action.job)
            elif isinstance(action, SaveIncident):
                save = self._save if action.is_watched else self._keep
                self._beats.once("store", save, action.incident, action.moved_to)
            elif isinstance(action, Transition):
                loud = action.state in OPEN_STATES
                level = logging.WARNING if loud else logging.INFO
                states = f"{action.before.value} -> {action.state.value}"
                log.log(level, "job %s: %s: %s", action.job_id, states, action.message)

    @contextmanager
    def _running(self, beat: str) -> Iterator[None]:
        began = self._clock()
        self.board.put(Snapshot.with_running, beat, began)
        try:
            yield
        finally:
            self.board.put(Snapshot.with_over, beat, began)

    def _say_left_out(self, left_out: tuple[LeftOut, ...]) -> None:
        """Say once of each owner that some of his is not watched."""
        owners = frozenset(one.owner for one in left_out)
        for one in left_out:
            if one.owner not in self._left_out_owners:
                log.warning("not watched, since it is beyond the limits of [jobs]: %s", one)
        self._left_out_owners = owners

    def look_at(
        self,
        job: Job,
        levels: Mapping[str, GpuLevels] | None = None,
        *,
        may_pause: bool = True,
        rounds: int | None = None,
        looks_again: bool = False,
        ask_nccl: bool = True,
    ) -> Look | None:
        """Capture and judge one job whose GPUs have these levels; None when the daemon was asked to stop meanwhile."""
        look = look_at(
            job,
            settings=self.settings.capture,
            activities=self._activities,
            node=self.node,
            sweep=self.board.snapshot.sweep,
            latest_sweep=lambda: self.board.snapshot.sweep,
            gpu_levels=levels,
            read_traffic=partial(query.traffic, self._gpus),
            proc_root=self._proc_root,
            may_pause=may_pause,
            stop=self._stop,
            slots=self._slots,
            observe_dump=self._count_dump,
            rounds=rounds,
            looks_again=looks_again,
            ask_nccl=may_pause and ask_nccl,
        )
        return None if self._stop.is_set() else look

    def _look_asked_for(self, job: Job, rounds: int | None) -> Look | None:
        """A look that the owner of a job has asked for, and waits for."""
        with self._running("capture"):
            return self.look_at(job, rounds=rounds or 1, looks_again=rounds is None, ask_nccl=False)

    def _count_dump(self, seconds: float, fault: Fault | None) -> None:
        self.board.put(Snapshot.with_dump, seconds, fault)
        if fault is not None and fault.reason in pyspy.STUCK_REASONS:
            self.board.set(dumpers_stuck=pyspy.left_behind())

    def _save(self, incident: Incident, moved_to: JobState | None = None) -> None:
        """Write the incident with the power that led to it; a full disk costs this incident's folder, nothing else."""
        entry = self.board.snapshot.jobs.get(incident.job.key)
        if entry is not None:
            series = self.board.power_series(entry, self.settings.detector)
            incident = replace(incident, power=extend(incident.power, series))
            self.board.put(Snapshot.with_power, incident)
        self._keep(incident, moved_to)

    def _keep(self, incident: Incident, moved_to: JobState | None = None) -> None:
        """Write it, and then call the hook for which it is there to be read."""
        folder = None
        if self.board.snapshot.store_problem is None:  # else it is saved when the store is back, see `_tend_store`
            try:
                folder = self.store.save(incident, folder_files(incident))
            except StoreError as error:
                self._say_store(str(error))
            else:
                log.info("incident %s: %s", incident.incident_id, folder)
        self._hooks.call(incident, moved_to, folder)
        if folder is not None:
            self._prune()

    def _hook_ended(self, ended: Ended) -> None:
        """Tell what came of a hook, in the log and in the incident; what it printed is kept beside that."""
        call = ended.call
        self.board.put(Snapshot.with_hook, call.event, ended.outcome)
        log.log(logging.INFO if ended.is_ok else logging.WARNING, "job %s: %s", call.incident.job.job_id, ended.message)
        if ended.output and call.folder is not None:
            self._beats.once("store", self._keep_output, call.folder, f"{call.key}.txt", ended.output)
        self._do(self.board.change(progress.noted, call.incident, ended.message, unix_now=time.time()))

    def _keep_output(self, folder: Path, name: str, output: bytes) -> None:
        try:
            self.store.add_output(folder.name, name, output)
        except StoreError as error:
            log.warning("what a hook printed cannot be kept: %s", error)

    def _tend_store(self) -> None:
        """Open the store, and again once a minute after it failed. A full disk must not end the watch."""
        if self.board.snapshot.store_problem is None:
            return
        try:
            self.store.lock()
            self.store.make_writable()
            if not self._has_read_back:
                self._resume(self.store.left_open(self.node))
                self._has_read_back = True
        except StoreError as error:
            self._say_store(str(error))
            return
        self._say_store(None)
        for entry in self.board.snapshot.jobs.values():
            if entry.incident is not None:
                self._save(entry.incident)

    def _resume(self, incidents: Iterable[Incident]) -> None:
        """Go on with incidents that an earlier daemon left open, as far as their processes live and are found."""
        processes = {process for incident in incidents for process in incident.job.processes}
        living = frozenset(filter(self._lives, processes))
        now, unix_now = self._clock(), time.time()
        settings = self.settings.detector
        self._do(self.board.change(progress.resumed, incidents, living, now=now, unix_now=unix_now, settings=settings))

    def _lives(self, process: ProcessId) -> bool:
        found = procs.read_state(process.pid, self._proc_root)
        return found is not None and found[0] == process and found[1] not in ENDED_STATES

    def _say_store(self, problem: str | None) -> None:
        """Say once that incidents cannot be kept, and why."""
        if problem is not None and problem != self.board.snapshot.store_problem:
            log.error("incidents cannot be kept: %s\n  the watch goes on; tried again every minute", problem)
        self.board.set(store_problem=problem)

    def _prune(self, by_age: int = 0) -> None:
        """Keep the bounds of the store; a few that are old may go as well, see `Store.prune`."""
        if self.board.snapshot.store_problem is not None:
            return
        entries = self.board.snapshot.jobs.values()
        incidents = (*(entry.incident for entry in entries), *self.board.snapshot.left_open)
        still_open = frozenset(incident.incident_id for incident in incidents if incident is not None)
        try:
            removed = self.store.prune(still_open, by_age=by_age)
        except StoreError as error:
            log.warning("old incidents cannot be removed: %s", error)
        else:
            if removed:
                log.info("removed %d old incidents", len(removed))

    def _node_view(self) -> Node:
        return Node(
            proc_root=self._proc_root,
            gpus=self._gpus,
            jobs=tuple(entry.job for entry in self.board.snapshot.living),
            state_directory=Path(self.settings.store.directory),
            dump_after_seconds=self.settings.dump_after_seconds,
        )

    def _say_driver(self, fault: Fault | None) -> None:
        """Say once that there is no driver, and once that it is back; everything that needs no GPU works on."""
        trouble = f"{fault.reason}: {fault.detail}" if fault else None
        if trouble == self._driver_trouble:
            return
        self._driver_trouble = trouble
        if fault is not None:
            log.warning("no GPU readings, so no hang is noticed here: %s. %s", fault.detail, fault.remedy)
        else:
            log.info("GPU readings are back")

    def _on_missed(self, beat: str) -> None:
        """A beat has not come back while its next turn is due; a late sample is what `unhealthy` tells."""
        name = beat.removeprefix("check-")
        if name in self._checks:
            now = time.time()
            stalled = runner.stalled(self._checks[name], self._check_began.get(name, now), now)
            self.board.put(Snapshot.with_check, stalled)
        elif beat != "sample":
            log.warning("%s has not come back from its last turn", beat)

    # --- lifecycle ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve, and start every beat. Raises StoreTakenError, ServeError or PortTakenError, before anything runs."""
        self._refuse_second_daemon()
        self._server = Server(
            self.settings.http,
            metrics.registry(self.board, self._clock, self.settings.detector, self.settings.http.external_url),
            status=self.status,
            unhealthy=self.unhealthy,
            incidents=self.store,
        )
        self.port = self._server.start()
        self._own_jobs.start()
        self._gpus.start()
        beats = self._beats
        beats.every(self.settings.gpu.sample_seconds, "sample", "sample", self._sample)
        beats.every(self.settings.jobs.discover_seconds, "slow", "discover", self._discover)
        beats.once("slow", self._discover)
        for check in self._checks.values():
            beats.every(check.every_seconds, "checks", f"check-{check.name}", self._check, check.name)
            beats.once("checks", self._check, check.name)
        beats.every(STORE_SECONDS, "store", "store", self._tend_store)
        beats.once("store", self._tend_store)
        beats.every(PRUNE_SECONDS, "store", "prune", self._prune, PRUNED_BY_AGE)
        beats.every(STATUS_SECONDS, "slow", "status", self._tell_systemd)
        if self._notifier.watchdog_seconds is not None:
            beats.every(self._notifier.watchdog_seconds, "slow", "watchdog", self._ping_watchdog)
        beats.start()
        listen = self.settings.http.listen
        log.info("health on %s:%d", listen, self._server.health_port)
        log.info("watching %s, metrics on %s:%d", self.node, listen, self.port)
        self._notifier.ready()

    def _refuse_second_daemon(self) -> None:
        """Raise StoreTakenError where another daemon has the state directory; a disk that is broken or silent is none.

        It is asked in a thread, since the file system may never answer; then `_tend_store` asks again.
        """
        taken: list[StoreTakenError] = []

        def lock() -> None:
            try:
                self.store.lock()
            except StoreTakenError as error:
                taken.append(error)
            except StoreError as error:
                log.debug("no lock yet: %s", error)

        asking = threading.Thread(target=lock, name="lock", daemon=True)
        asking.start()
        asking.join(LOCK_SECONDS)
        if taken:
            raise taken[0]

    def wait(self, seconds: float | None = None) -> bool:
        """Block until `ask_to_stop`, or for so long; whether it was asked."""
        return self._stop.wait(seconds)

    def ask_to_stop(self) -> None:
        """Make `wait` return; safe in a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """End every beat and the server; a thread that hangs in the kernel is not waited for."""
        self._stop.set()
        self._notifier.stopping()
        self._beats.stop()
        self._own_jobs.stop()
        if self._server is not None:
            self._server.stop()
        self._gpus.stop()
        self.store.unlock()

    def _tell_systemd(self) -> None:
        entries = self.board.snapshot.jobs.values()
        states = ", ".join(f"{entry.job.job_id} {entry.watch.state.value}" for entry in list(entries)[:5])
        self._notifier.status(f"{len(entries)} jobs{': ' + states if states else ''}")

    def _ping_watchdog(self) -> None:
        """On a beat of its own: power may be sampled once a minute, and systemd will not wait that long."""
        if self.unhealthy() is None:
            self._notifier.watchdog()

    # --- answers -----------------------------------------------------------------------------------------------

    def unhealthy(self) -> str | None:
        """What is wrong with the daemon itself, in a sentence; None when it beats."""
        now, snapshot = self._clock(), self.board.snapshot
        late = now - self._sampled_at
        limit = max(30.0, BEATS_MISSED * self.settings.gpu.sample_seconds)
        if late > limit:
            return f"no beat for {late:.0f} s"
        for beat, limit in (("scan", STUCK_SECONDS), ("capture", STUCK_SECONDS + self.settings.capture_seconds)):
            late = snapshot.running_seconds(beat, now)
            if late > limit:
                return f"a {beat} has not come back for {late:.0f} s"
        return None

    def status(self) -> Status:
        """What this daemon sees, without stacks and command lines."""
        return status.view(self.board.snapshot, self.node, self._clock(), self.settings.detector)
