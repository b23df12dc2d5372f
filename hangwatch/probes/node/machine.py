"""The node as checks see it: where its kernel interfaces lie, its GPUs, its jobs, its clock.

Roots are arguments, so that a check runs on a fixture tree as it runs on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model import Job
from hangwatch.probes import torch_recorder
from hangwatch.probes.gpu.source import GpuSource
from hangwatch.probes.node import filesystems, kmsg


@dataclass(frozen=True)
class Clock:
    """Both clocks, in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(frozen=True)
class Node:
    """Everything a check may look at. `gpus` is None where there is no driver; `jobs` are those known right now.

    `file_root` is the folder of /etc, /run and /usr, `state_directory` where incidents are kept. `dump_after_seconds`
    is how long after a job went quiet its stacks have been taken: hold plus one capture; None where nobody watches.
    `kernel_log` and `filesystems` remember between two looks (how far the log was read, who was left behind at a dead
    mount), and so do `recorders` (where a flight recorder lies): all nodes made here share them.
    """

    proc_root: Path = Path("/proc")
    sys_root: Path = Path("/sys")
    dev_root: Path = Path("/dev")
    file_root: Path = Path("/")
    gpus: GpuSource | None = None
    jobs: tuple[Job, ...] = ()
    clock: Clock = Clock()
    state_directory: Path | None = None
    dump_after_seconds: float | None = None
    kernel_log: kmsg.KernelLog = kmsg.SHARED
    filesystems: filesystems.Onlookers = filesystems.SHARED
    recorders: torch_recorder.Recorders = torch_recorder.SHARED
