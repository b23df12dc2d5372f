"""Writer of incidents: to disk, together with the power before them. Then it calls their hooks."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hangwatch import hooks
from hangwatch.daemon.context import DaemonContext
from hangwatch.formats.incident_file import StoreError
from hangwatch.hooks import HookResult, Hooks
from hangwatch.model import ENDED_STATES, Incident, JobState, ProcessId
from hangwatch.probes.base import procfs
from hangwatch.report.html import render_files
from hangwatch.state import steps
from hangwatch.state.arrival_status import build_arrival_status
from hangwatch.state.board import Snapshot, extend, extend_collectives
from hangwatch.state.steps import SaveIncident
from hangwatch.store import Store, StoreTakenError

log = logging.getLogger(__package__)  # one logger for the whole package: users filter by its name

PRUNE_SECONDS = 3600.0
PRUNED_BY_AGE = 3
STORE_SECONDS = 60.0
LAST_SECONDS = 5.0  # at shutdown, for the incidents that are not written yet
_POLL_SECONDS = 0.02
LOCK_SECONDS = 3.0  # the longest wait at the start for a file system that may never respond


class IncidentWriter:
    """The writer of a daemon's incidents. It also restores incidents that an earlier daemon did not close."""

    def __init__(self, common: DaemonContext, store: Store) -> None:
        self._common, self._board, self._store = common, common.board, store
        self._has_read_back = False
        self._pending: deque[SaveIncident] = deque()  # the first is being written
        self._unmarked: deque[SaveIncident] = deque()
        self._writing = threading.Lock()
        wanted = common.settings.hooks
        common.board.set(hook_runs=hooks.zero_counts(wanted))
        self._hooks = Hooks(wanted, partial(common.schedule.run_once, "hooks"), self._record_hook)

    def refuse_second_daemon(self) -> None:
        """Lock the state directory. Raise StoreTakenError if another daemon uses it; other errors are only logged.

        A thread takes the lock, because the file system may never respond. After a failure, `_tend_store` tries again.
        """
        taken: list[StoreTakenError] = []

        def lock() -> None:
            try:
                self._store.lock.take()
            except StoreTakenError as error:
                taken.append(error)
            except StoreError as error:
                log.debug("no lock yet: %s", error)

        asking = threading.Thread(target=lock, name="lock", daemon=True)
        asking.start()
        asking.join(LOCK_SECONDS)
        if taken:
            raise taken[0]

    def schedule_tasks(self) -> None:
        """Schedule the maintenance of the store, and open the store at once."""
        schedule = self._common.schedule
        schedule.run_every(STORE_SECONDS, "store", "store", self._tend_store)
        schedule.run_once("store", self._tend_store)
        schedule.run_every(PRUNE_SECONDS, "store", "prune", self._prune, PRUNED_BY_AGE)

    def save(self, wanted: SaveIncident) -> None:
        """Queue an incident for writing."""
        self._unmarked.append(wanted)
        self._pending.append(wanted)
        self._common.schedule.run_once("store", self._write_pending)

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Write the queued incidents for at most `seconds` at shutdown. Then log the incidents that were not written.

        A thread writes them, because the schedule has stopped.
        """
        ends = time.monotonic() + seconds
        last = threading.Thread(target=self._write_last, args=(ends,), name="last incidents", daemon=True)
        last.start()
        last.join(seconds)
        given_up = {wanted.incident.incident_id: wanted.incident for wanted in tuple(self._pending)}
        why = f"the store did not write it within {seconds:g} s"
        if (problem := self._board.snapshot.store_problem) is not None:
            incidents = (entry.incident for entry in self._board.snapshot.jobs.values())
            given_up |= {incident.incident_id: incident for incident in incidents if incident is not None}
            why = problem
        for incident in given_up.values():
            where = f"the last state of incident {incident.incident_id} was not written"
            log.error("%s: %s: %s", incident.job.name.in_log, where, why)
        for job, step in tuple(self._common.running_steps):
            log.error("%s: a possible incident is lost: %s did not end within %g s", job, step, seconds)

    def _write_last(self, ends: float) -> None:
        """Write the queued incidents, and those of running steps, until `ends` (`time.monotonic()`) at the latest."""
        self._write_pending()
        while self._common.running_steps and time.monotonic() < ends:
            time.sleep(_POLL_SECONDS)
            self._write_pending()
        self._write_pending()

    def _write_pending(self) -> None:
        """Write the queued incidents, first a marker for each: a crash of the daemon loses none unnoticed."""
        with self._writing:
            while self._pending:
                while self._unmarked:
                    self._mark(self._unmarked.popleft().incident)
                wanted = self._pending[0]
                try:
                    incident = self._with_series(wanted.incident) if wanted.is_watched else wanted.incident
                    self._write(incident, wanted.moved_to)
                finally:
                    self._pending.popleft()

    def _mark(self, incident: Incident) -> None:
        if self._board.snapshot.store_problem is None:
            try:
                self._store.mark(incident)
            except StoreError as error:
                self._log_store_problem(str(error))

    def resume(self, incidents: Iterable[Incident]) -> None:
        """Continue the incidents of an earlier daemon, if their processes live and a scan has found them."""
        processes = {process for incident in incidents for process in incident.job.processes}
        living = frozenset(filter(self._is_alive, processes))
        common, settings = self._common, self._common.settings.detector
        now, unix_now = common.clock(), time.time()
        common.change(steps.restore_incidents, incidents, living, now=now, unix_now=unix_now, settings=settings)

    def _resume_silences(self) -> None:
        """Continue the silences of an earlier daemon. A file that cannot be read is only logged."""
        try:
            self._board.put(steps.restore_silences, self._store.silences.read())
        except StoreError as error:
            log.warning("%s", error)
        if self._board.snapshot.silences:
            self._store.silences.write(self._board)

    def _is_alive(self, process: ProcessId) -> bool:
        found = procfs.read_state(process.pid, self._common.proc_root)
        return found is not None and found[0] == process and found[1] not in ENDED_STATES

    def _with_series(self, incident: Incident) -> Incident:
        """Return an incident with the job's latest power, collectives and earlier late ranks, as on the board now."""
        entry = self._board.snapshot.jobs.get(incident.job.key)
        if entry is None:
            return incident
        series = self._board.power_series(entry, self._common.settings.detector)
        collectives = extend_collectives(incident.collectives, self._board.collective_series(entry))
        arrival = incident.arrival
        if arrival is None and entry.arrival_order is not None:
            arrival = build_arrival_status(entry.arrival_order, entry.job)
        incident = replace(incident, power=extend(incident.power, series), collectives=collectives, arrival=arrival)
        self._board.put(Snapshot.with_series, incident)
        return incident

    def _write(self, incident: Incident, moved_to: JobState | None) -> None:
        """Write an incident, then call its hook. If the write fails, the hook is called without a folder."""
        folder = None
        if self._board.snapshot.store_problem is None:  # else `_tend_store` saves it when the store works again
            try:
                folder = self._store.save(incident, render_files(incident))
            except StoreError as error:
                self._log_store_problem(str(error))
            else:
                log.info("incident %s: %s", incident.incident_id, folder)
        if moved_to in (JobState.HUNG, JobState.STALLED) and incident.job.key in self._board.snapshot.silences:
            log.info("%s: its hook is not called: the job is silenced", incident.job.name.in_log)
        else:
            self._hooks.call(incident, moved_to, folder)
        if folder is not None:
            self._prune()

    def _record_hook(self, ended: HookResult) -> None:
        """Record the result of a hook in the log and in its incident. Store its output in the incident's folder."""
        call = ended.call
        self._board.put(Snapshot.count, "hook_runs", (call.event, ended.outcome))
        level = logging.INFO if ended.outcome == "ok" else logging.WARNING
        log.log(level, "%s: %s", call.incident.job.name.in_log, ended.message)
        if ended.output and call.folder is not None:
            self._common.schedule.run_once("store", self._keep_output, call.folder, f"{call.key}.txt", ended.output)
        self._common.change(steps.record_note, call.incident, ended.message, unix_now=time.time())

    def _keep_output(self, folder: Path, name: str, output: bytes) -> None:
        try:
            self._store.add_output(folder.name, name, output)
        except StoreError as error:
            log.warning("the output of a hook cannot be stored: %s", error)

    def _tend_store(self) -> None:
        """Open the store and write the incidents of the board. After a failure, the next attempt is in a minute."""
        if self._board.snapshot.store_problem is None:
            return
        try:
            self._store.lock.take()
            self._store.make_writable()
            if not self._has_read_back:
                self.resume(self._store.left_open(self._common.node))
                self._board.put(steps.restore_hangs, self._store.past_hangs())
                self._resume_silences()
                self._has_read_back = True
            elif self._board.snapshot.silences:
                self._store.silences.write(self._board)
        except StoreError as error:
            self._log_store_problem(str(error))
            return
        self._log_store_problem(None)
        for entry in self._board.snapshot.jobs.values():
            if entry.incident is not None:
                self.save(SaveIncident(incident=entry.incident))

    def _log_store_problem(self, problem: str | None) -> None:
        """Record the store's problem on the board, and log a new problem. None: the store works."""
        if problem is not None and problem != self._board.snapshot.store_problem:
            log.error("incidents are not stored: %s\n  monitoring continues; the next attempt is in a minute", problem)
        self._board.set(store_problem=problem)

    def _prune(self, by_age: int = 0) -> None:
        """Remove the incidents that exceed the limits of the store; see `Store.prune`."""
        if self._board.snapshot.store_problem is not None:
            return
        entries = self._board.snapshot.jobs.values()
        incidents = (*(entry.incident for entry in entries), *self._board.snapshot.unresumed_incidents)
        still_open = frozenset(incident.incident_id for incident in incidents if incident is not None)
        try:
            removed = self._store.prune(still_open, by_age=by_age)
        except StoreError as error:
            log.warning("old incidents cannot be removed: %s", error)
        else:
            if removed:
                log.info("removed %d old incidents", len(removed))
