"""What all parts of one daemon have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hangwatch.config import Settings
from hangwatch.probes.gpu.source import GpuSource
from hangwatch.schedule import Schedule
from hangwatch.stacks.activity import Table
from hangwatch.state.board import Board
from hangwatch.state.steps import Action


class Handovers:
    """What is found out of jobs and not handed to the store yet, each with the job's name; the end waits for it."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []

    def begin(self, job: str, step: str) -> None:
        """An incident of this job may come of this step."""
        self._open.append((job, step))

    def end(self, job: str, step: str) -> None:
        """It has come, or none has."""
        self._open.remove((job, step))

    @contextmanager
    def running(self, job: str, step: str) -> Iterator[None]:
        """Both around a block."""
        self.begin(job, step)
        try:
            yield
        finally:
            self.end(job, step)

    def open_steps(self) -> tuple[tuple[str, str], ...]:
        """The job and the step of each that has not ended."""
        return tuple(self._open)


class Common(NamedTuple):
    """The board, the schedule, and where to look; `do` does what a step of the board asks for.

    `clock` is CLOCK_MONOTONIC in seconds; `stop` is set when the daemon was asked to end.
    """

    settings: Settings
    node: str
    board: Board
    beats: Schedule
    gpus: GpuSource
    proc_root: Path
    activities: Table
    stop: threading.Event
    do: Callable[[Iterable[Action]], None]
    clock: Callable[[], float]
    handovers: Handovers
