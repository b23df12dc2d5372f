"""A request for one capture: what to take of a job's ranks, by which limits, and where this node's values are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import field

from hangwatch import config
from hangwatch.capture import stack_limits
from hangwatch.detector.power_level import GpuLevels
from hangwatch.model import Fault, GpuSweep, RankDump, TrafficSweep, Value
from hangwatch.probes.process import procfs
from hangwatch.probes.process.pyspy import DumpMode

ObserveDump: TypeAlias = Callable[[float, Fault | None], None]
"""Called after each dump with its duration in seconds and what went wrong, if anything."""


class NodePaths(Value, frozen=True):
    """Where this node is read; `pyspy_path` is a py-spy to run instead of the installed one."""

    proc_root: Path = procfs.PROC
    sys_root: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    pyspy_path: Path | None = None


class GpuSources(Value, frozen=True):
    """Where the GPU numbers of a capture come from.

    `read_sweep` is called after each round, and a rank's numbers are the mean of what it gave. `read_traffic` is called
    in each round, in a thread beside the dumps, until it has no answer. `levels` are those of the job's GPUs, by uuid.
    """

    read_sweep: Callable[[], GpuSweep | None] | None = None
    read_traffic: Callable[[], TrafficSweep | None] | None = None
    levels: Mapping[str, GpuLevels] = field(default_factory=dict)


class CaptureRequest(Value, frozen=True):
    """What one capture of a job takes, and what it shares with others.

    * `rounds`: how many; None for as many as the settings say. `needs_second_round` is asked after a single one, with
      what it showed of the ranks.
    * `mode`: what each dump shows, and whether it may pause its process.
    * `ask_nccl`: with more than one round, NCCL itself is asked beside the later ones where the first round read no
      flight recorder of NCCL.
    * `kept_stacks_bytes`: about so much of the stacks is kept, see `stack_limits`.
    * `stop`: once it is set, the capture returns what it has, within a second. `slots` bounds the dumps at the same
      time over all captures that share it.
    """

    node: str
    settings: config.Capture
    rounds: int | None = None
    needs_second_round: Callable[[Sequence[RankDump]], bool] | None = None
    mode: DumpMode = DumpMode()
    ask_nccl: bool = False
    kept_stacks_bytes: int = stack_limits.OF_OWNER_BYTES
    stop: threading.Event = field(default_factory=threading.Event)
    slots: threading.Semaphore | None = None
    observe_dump: ObserveDump | None = None
    gpus: GpuSources = GpuSources()
    paths: NodePaths = NodePaths()
