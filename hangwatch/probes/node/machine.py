"""The parts of a node that checks read: its kernel files, GPUs, jobs and clock.

All roots are fields, so that a check also runs on a fixture tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model import Job
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import filesystems
from hangwatch.probes.base.gpu_source import GpuSource
from hangwatch.probes.node import kmsg


@dataclass(frozen=True)
class Clock:
    """The monotonic and the Unix clock, in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(frozen=True)
class Node:
    """The parts of a node that a check may read.

    * `gpus` is None without a driver.
    * `jobs` are the jobs that the daemon monitors now.
    * `state_directory` holds the incidents.
    * `shell_pid` is the process that started a check by hand; None in the daemon.
    * `dump_after_seconds` is the time from a job's last progress to its stacks: the hold plus one capture. None without
      a detector.
    * `kernel_log`, `filesystems` and `recorders` are shared by all nodes of a process. They keep the position in the
      log, the children abandoned at dead mounts, and the addresses of flight recorders.
    """

    proc_root: Path = Path("/proc")
    sys_root: Path = Path("/sys")
    dev_root: Path = Path("/dev")
    gpus: GpuSource | None = None
    jobs: tuple[Job, ...] = ()
    clock: Clock = Clock()
    state_directory: Path | None = None
    shell_pid: int | None = None
    dump_after_seconds: float | None = None
    kernel_log: kmsg.KernelLog = kmsg.SHARED
    filesystems: filesystems.FilesystemReader = filesystems.SHARED
    recorders: torch_recorder.Recorders = torch_recorder.SHARED
