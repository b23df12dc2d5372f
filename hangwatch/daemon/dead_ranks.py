"""Looks after ranks that died: what they left is read, the owners of the jobs in turn."""

from __future__ import annotations

import logging
import threading
import time

from hangwatch import crash, words
from hangwatch.daemon.context import Common
from hangwatch.model import Job
from hangwatch.probes.process.crash_artifacts import RankSnapshots
from hangwatch.schedule import FairQueue
from hangwatch.state import steps

log = logging.getLogger(__package__)  # one name for all parts: people filter by it

MOST_DEAD_JOBS = 16  # of one owner, that wait for being read
_STEP = "the reading of what its dead ranks left"


class DeadRanks:
    """The dead ranks of one daemon; `last_seen` is what the scans of /proc know of them from when they lived."""

    def __init__(self, common: Common, last_seen: RankSnapshots) -> None:
        self._common, self._last_seen = common, last_seen
        self._turns: FairQueue[Job] = FairQueue(1)

    def look_after(self, job: Job) -> None:
        """Let a job whose ranks are gone wait for being read; of an owner with too many the job is left out."""
        if not self._common.settings.crashes.read:
            return
        self._common.handovers.begin(job.name.in_log, _STEP)
        if self._turns.add(job.share, job, MOST_DEAD_JOBS):
            self._common.beats.run_once("remains", self._in_turn)
        else:
            self._common.handovers.end(job.name.in_log, _STEP)
            self._leave_out(job)

    def read_last(self) -> None:
        """Begin to read what still waits, in a thread: the beats have ended, and the end waits for `handovers`."""
        threading.Thread(target=self._in_turn, name="last dead ranks", daemon=True).start()

    def _in_turn(self) -> None:
        """The dead ranks whose owner's turn it is: his file system may give no answer, and keeps one thread at most.

        All of them where the daemon is ending: no beat comes any more.
        """
        while self._read_next() and self._common.stop.is_set():
            pass

    def _read_next(self) -> bool:
        """Read those of one job; False where none waits whose owner may have another one."""
        turn = self._turns.take()
        if turn is None:
            return False
        try:
            self._read(turn.item)
        finally:
            self._common.handovers.end(turn.item.name.in_log, _STEP)
            if self._turns.end(turn) and not self._common.stop.is_set():
                self._common.beats.run_once("remains", self._in_turn)
        return True

    def _leave_out(self, job: Job) -> None:
        """Say that a job is left out: a user's jobs that end by the hundred must not fill the memory, nor the log."""
        unread = self._common.board.change(steps.left_unread)
        if unread.bit_count() == 1:  # the first, and at doubling numbers
            what = f"what its dead ranks left is not read: {MOST_DEAD_JOBS} jobs of {job.owner} wait for that"
            log.warning("%s: %s (%s since the start)", job.name.in_log, what, words.count(unread, "job"))

    def _read(self, job: Job) -> None:
        """What ranks left that are gone; a crash makes an incident, an end in order none."""
        common = self._common
        cores = common.settings.crashes.cores
        found = crash.collect_artifacts(job, common.node, self._last_seen, cores=cores, proc_root=common.proc_root)
        verdict = crash.judge(job, found)
        if verdict is None:
            for why in dict.fromkeys(why for left in found for why in left.refused):
                log.info("%s: its ranks ended, and nothing tells of a crash: %s", job.name.in_log, why)
            return
        incident = crash.make_incident(job, common.node, found, verdict, common.activities, unix_now=time.time())
        log.warning("%s: %s", job.name.in_log, verdict.message)
        common.do(common.board.change(steps.crashed, incident, now=common.clock()))
