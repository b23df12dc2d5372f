"""Reader of the crash artifacts of dead ranks. Job owners take turns."""

import logging
import threading
import time
from collections.abc import Callable

from hangwatch import crash, words
from hangwatch.daemon.context import DaemonContext
from hangwatch.model import Job
from hangwatch.probes.process.crash_artifacts import RankSnapshots
from hangwatch.schedule.owner_limits import FairQueue
from hangwatch.state import steps
from hangwatch.state.actions import ReadCrashArtifacts

log = logging.getLogger(__package__)  # one logger for the whole package: users filter by its name

MOST_DEAD_JOBS = 16  # queued jobs of one owner
_STEP = "reading the crash artifacts of its dead ranks"


class DeadRanks:
    """The queue of jobs with dead ranks. `last_seen` is what the scans of /proc recorded while each rank lived."""

    def __init__(self, common: DaemonContext) -> None:
        self._common = common
        self.last_seen = RankSnapshots(common.proc_root, common.settings.jobs.max_ranks_per_owner)
        self._turns: FairQueue[ReadCrashArtifacts] = FairQueue(1, self._read_queued, self._begin)

    def enqueue(self, wanted: ReadCrashArtifacts) -> None:
        """Queue a job with dead ranks, unless `MOST_DEAD_JOBS` jobs of its owner are already waiting."""
        if not self._common.settings.crashes.read:
            return
        step = (wanted.job.name.in_log, _STEP)
        self._common.running_steps.append(step)
        if not self._turns.add(wanted.job.share, wanted, MOST_DEAD_JOBS):
            self._common.running_steps.remove(step)
            self._drop(wanted.job)

    def start_last_read(self) -> None:
        """Read all queued jobs at shutdown, when the schedule no longer runs tasks.

        The daemon waits for these threads: each read is one of its `running_steps`.
        """
        self._begin(self._turns.do_next)

    def _begin(self, call: Callable[[], None]) -> None:
        """Begin a read in another thread. The owner's file system may not respond: each owner can block only one."""
        if self._common.stop.is_set():
            threading.Thread(target=call, name="last dead ranks", daemon=True).start()
        else:
            self._common.schedule.run_once("crashes", call)

    def _read_queued(self, wanted: ReadCrashArtifacts) -> None:
        try:
            self._read(wanted)
        finally:
            self._common.running_steps.remove((wanted.job.name.in_log, _STEP))

    def _drop(self, job: Job) -> None:
        """Count a job that was not queued, and log the first, second, fourth, eighth ... such job.

        A user with hundreds of failing jobs must fill neither the memory nor the log.
        """
        unread = self._common.board.change(steps.count_unread_crash)
        if unread.bit_count() == 1:  # powers of two: 1, 2, 4, 8, ...
            what = f"crash artifacts of its dead ranks are not read: {MOST_DEAD_JOBS} jobs of {job.owner} are waiting"
            log.warning("%s: %s (%s since the start)", job.name.in_log, what, words.count(unread, "job"))

    def _read(self, wanted: ReadCrashArtifacts) -> None:
        """Read the crash artifacts of a job's dead ranks. If they show a crash, record an incident; else only log."""
        common, job = self._common, wanted.job
        cores = common.settings.crashes.cores
        found = crash.collect_artifacts(job, common.node, self.last_seen, cores=cores, proc_root=common.proc_root)
        verdict = crash.judge(job, found, was_open=wanted.was_open)
        if verdict is None:
            for why in dict.fromkeys(why for left in found for why in left.refused):
                log.info("%s: its ranks ended without signs of a crash: %s", job.name.in_log, why)
            return
        incident = crash.make_incident(job, common.node, found, verdict, common.activities, unix_now=time.time())
        log.warning("%s: %s", job.name.in_log, verdict.message)
        common.change(steps.record_crash, incident, now=common.clock())
