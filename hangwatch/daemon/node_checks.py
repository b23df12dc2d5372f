"""Checks of the node as scheduled tasks. A check that found no job runs again soon after a job starts."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hangwatch.checks.framework import registry, runner
from hangwatch.checks.framework.contract import ABSENT, Settings
from hangwatch.daemon.context import DaemonContext
from hangwatch.probes.node.machine import Node
from hangwatch.state import steps
from hangwatch.state.board import Snapshot

CHECK_AGAIN_SECONDS = 30.0  # after a job was found; by then the job has begun to work
CHECKED_AGAIN_PACE_SECONDS = 60.0  # the shortest time between two such runs of one check


class CheckRunner:
    """The runner of a daemon's checks: those that are enabled in `settings`, which is by name."""

    def __init__(self, common: DaemonContext, settings: Mapping[str, Settings]) -> None:
        self._common, self._settings = common, settings
        enabled = {name for name, section in settings.items() if section.enabled}
        self._checks = {name: check for name, check in registry.checks().items() if name in enabled}
        self._windows = {name: runner.Window(check) for name, check in self._checks.items()}
        self._began: dict[str, float] = {}
        self._again_at: dict[str, float] = {}

    def schedule_tasks(self) -> None:
        """Schedule every check."""
        for check in self._checks.values():
            self._common.schedule.run_every(
                check.every_seconds, "checks", f"check-{check.name}", self._check, check.name
            )

    def run_all(self) -> None:
        """Start a run of every check. Before the first scan no check knows the jobs of the node."""
        for name in self._checks:
            self._common.schedule.run_once("checks", self._check, name)

    def _check(self, name: str) -> None:
        """Run one check and record its result on the board."""
        self._began[name] = time.time()
        settings = self._common.settings
        node = Node(
            proc_root=self._common.proc_root,
            gpus=self._common.gpus,
            jobs=tuple(entry.job for entry in self._common.board.snapshot.living),
            state_directory=Path(settings.store.directory),
            dump_after_seconds=settings.dump_after_seconds,
        )
        result = runner.run(self._checks[name], node, self._settings[name], self._windows[name])
        self._common.board.put(steps.record_check, result, now=self._common.clock())
        if self._common.board.snapshot.living_keys - {job.key for job in node.jobs}:
            self.run_absent_soon((name,))

    def run_absent_soon(self, names: Iterable[str]) -> None:
        """Run those of these checks soon that found nothing to check (ABSENT), because a job has started.

        Each check gets at most one such early run a minute, even if a user's jobs start and end every second.
        """
        now, found = self._common.clock(), self._common.board.snapshot.checks
        for name in names:
            last = self._again_at.get(name)
            is_due = last is None or now - last >= CHECKED_AGAIN_PACE_SECONDS
            if is_due and name in found and found[name].verdict.reason == ABSENT:
                self._again_at[name] = now
                self._common.schedule.run_within(CHECK_AGAIN_SECONDS, f"check-{name}")

    def report_overrun(self, task: str) -> bool:
        """Record that a check has not ended when it is due again. Return False if `task` is not a check."""
        name = task.removeprefix("check-")
        if name not in self._checks:
            return False
        now = time.time()
        stalled = runner.stalled_result(self._checks[name], self._began.get(name, now), now)
        self._common.board.put(Snapshot.with_check, stalled)
        return True
