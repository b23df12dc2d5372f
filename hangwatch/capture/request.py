"""The request for one capture: the data to read from a job's ranks, the limits, and the paths of this node."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import field

from hangwatch import config
from hangwatch.capture import stack_limits
from hangwatch.model import Fault, GpuLevels, GpuSweep, RankDump, TrafficSweep, Value
from hangwatch.probes.base import procfs
from hangwatch.probes.process.pyspy import DumpMode
from hangwatch.stacks.activity import Table


class NodePaths(Value, frozen=True):
    """Paths of this node's kernel interfaces. `pyspy_path` replaces the installed py-spy."""

    proc_root: Path = procfs.PROC
    sys_root: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    pyspy_path: Path | None = None


class GpuSources(Value, frozen=True, gc=True):
    """Sources of the GPU numbers of a capture.

    `read_sweep` is called after each round, and a rank gets the mean of the results. `read_traffic` is called in each
    round, in a thread parallel to the dumps, until it returns None. `levels` are the power levels of the job's GPUs, by
    uuid.
    """

    read_sweep: Callable[[], GpuSweep | None] | None = None
    read_traffic: Callable[[], TrafficSweep | None] | None = None
    levels: Mapping[str, GpuLevels] = field(default_factory=dict)


class CaptureRequest(Value, frozen=True, gc=True):
    """Settings of one capture of a job, and the resources that it shares with other captures.

    * `rounds`: number of rounds; None for the number in the settings. `needs_second_round`: called after a single
      planned round with its dumps. If it returns a reason, a second round follows.
    * `mode`: the content of each dump, and whether it may pause its process.
    * `all_processes`: False leaves out the workers for which no rank waits, see `capture.rounds`.
    * `search_seconds`: CPU time of all searches for the processes at the other ends of pipes and Unix sockets.
    * `activities`: the table that finds the thread for which a main thread waits; None: only main threads count.
    * `kept_stacks_bytes`: approximate limit in bytes of the stacks that are kept, see `stack_limits`.
    * `observe_dump`: called after each dump with its duration in seconds and its fault (None: no fault).
    * `stop`: once it is set, the capture returns within a second with the dumps so far. `slots`: limits the number of
      simultaneous dumps in all captures that share it; None: no limit.
    """

    node: str
    settings: config.Capture
    rounds: int | None = None
    needs_second_round: Callable[[Sequence[RankDump]], str] | None = None
    mode: DumpMode = DumpMode()
    all_processes: bool = True
    search_seconds: float = 1.0
    activities: Table | None = None
    kept_stacks_bytes: int = stack_limits.OF_OWNER_BYTES
    stop: threading.Event = field(default_factory=threading.Event)
    slots: threading.Semaphore | None = None
    observe_dump: Callable[[float, Fault | None], None] | None = None
    gpus: GpuSources = GpuSources()
    paths: NodePaths = NodePaths()
