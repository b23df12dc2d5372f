"""The values that all parts of one daemon share."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec

from hangwatch.config import Settings
from hangwatch.probes.base.gpu_source import GpuSource
from hangwatch.schedule.scheduler import Schedule
from hangwatch.stacks.activity import Table
from hangwatch.state.board import Board, Snapshot
from hangwatch.state.steps import Action

P = ParamSpec("P")


class DaemonContext(NamedTuple):
    """The values that all parts of one daemon share: settings, board, schedule and sources of data.

    `do_actions` carries out the actions that a step of the board returns. `clock` returns CLOCK_MONOTONIC in
    seconds. `stop` is set when the daemon is asked to end. `running_steps` has a pair (job, step) for each step that
    runs now and may produce an incident of this job. Shutdown waits for them.
    """

    settings: Settings
    node: str
    board: Board
    schedule: Schedule
    gpus: GpuSource
    proc_root: Path
    activities: Table
    stop: threading.Event
    do_actions: Callable[[Iterable[Action]], None]
    clock: Callable[[], float]
    running_steps: list[tuple[str, str]]

    @contextmanager
    def running(self, job: str, step: str) -> Iterator[None]:
        """Add a step to `running_steps` for the duration of a `with` block."""
        self.running_steps.append((job, step))
        try:
            yield
        finally:
            self.running_steps.remove((job, step))

    def change(
        self,
        step: Callable[Concatenate[Snapshot, P], tuple[Snapshot, tuple[Action, ...]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Change the board by a step, and carry out the actions that it returns."""
        self.do_actions(self.board.change(step, *args, **kwargs))
