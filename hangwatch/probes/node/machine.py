"""The node as checks see it: its kernel interfaces, GPUs, jobs and clock.

Roots are arguments, so that a check also runs on a fixture tree.
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
    """Everything that a check may read. `gpus` is missing without a driver; `jobs` are those known now.

    `file_root` is the folder of /etc, /run and /usr; `state_directory` holds the incidents. `dump_after_seconds` is the
    time from a job's quiet to its stacks (hold plus one capture), missing without a detector. All nodes share
    `kernel_log` (how far it was read), `filesystems` (children abandoned at dead mounts) and `recorders` (places of
    flight recorders).
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
    filesystems: filesystems.FilesystemReader = filesystems.SHARED
    recorders: torch_recorder.Recorders = torch_recorder.SHARED
