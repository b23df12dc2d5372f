"""What all parts of one daemon have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from hangwatch.config import Settings
from hangwatch.probes.gpu.source import GpuSource
from hangwatch.schedule import Beats
from hangwatch.stacks.activity import Table
from hangwatch.state.board import Board
from hangwatch.state.steps import Action


class Common(NamedTuple):
    """The board, the schedule, and where to look; `do` does what a step of the board asks for.

    `clock` is CLOCK_MONOTONIC in seconds; `stop` is set when the daemon was asked to end.
    """

    settings: Settings
    node: str
    board: Board
    beats: Beats
    gpus: GpuSource
    proc_root: Path
    activities: Table
    stop: threading.Event
    do: Callable[[Iterable[Action]], None]
    clock: Callable[[], float]
