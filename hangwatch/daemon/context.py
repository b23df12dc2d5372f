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


class RunningSteps:
    """The steps that run now and may produce an incident, each with its job's name. Shutdown waits for them."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []

    def begin(self, job: str, step: str) -> None:
        """Register a step that may produce an incident of this job."""
        self._open.append((job, step))

    def end(self, job: str, step: str) -> None:
        """Remove a step that has ended: it has passed its incident to the store, or has produced none."""
        self._open.remove((job, step))

    @contextmanager
    def running(self, job: str, step: str) -> Iterator[None]:
        """Register a step for the duration of a `with` block."""
        self.begin(job, step)
        try:
            yield
        finally:
            self.end(job, step)

    def open_steps(self) -> tuple[tuple[str, str], ...]:
        """Return (job, step) for each running step."""
        return tuple(self._open)


class DaemonContext(NamedTuple):
    """The values that all parts of one daemon share: settings, board, schedule and sources of data.

    `do_actions` carries out the actions that a step of the board returns. `clock` returns CLOCK_MONOTONIC in
    seconds. `stop` is set when the daemon is asked to end.
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
    running_steps: RunningSteps

    def change(
        self,
        step: Callable[Concatenate[Snapshot, P], tuple[Snapshot, tuple[Action, ...]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Change the board by a step, and carry out the actions that it returns."""
        self.do_actions(self.board.change(step, *args, **kwargs))
