"""Simulated GPUs. Their power follows what the ranks of a simulated node are doing.

The levels are those of an H100 with a limit of 700 W. In measured hung jobs a GPU draws 14 to 29 % of its limit.
Its utilisation is 100 % on ranks that wait in NCCL, and often 0 % on the rank for which they wait.
"""

import random
import time
from typing import NamedTuple

from hangwatch.model import Fault, GpuSample, GpuSweep, SamplerStatus
from hangwatch.probes.base.gpu_source import NO_DETAILS, DetailsT
from hangwatch.tools.demo.phases import Phase, PhaseAge
from hangwatch.tools.demo.simulated_node import SimulatedNode

LIMIT_WATTS = 700.0
# NVML averages power over a second, and queued kernels continue for a moment
DRAINED_SECONDS = 1.0


class Load(NamedTuple):
    """The power of a GPU, the range of its random noise, and the utilisation that the driver reports."""

    watts: float
    spread_watts: float
    utilization_ratio: float


TRAINING = Load(600.0, 30.0, 0.98)
WAITING = Load(120.0, 10.0, 1.0)
STUCK = Load(85.0, 2.0, 0.0)
IDLE = Load(70.0, 2.0, 0.0)
EVALUATION = Load(165.0, 12.0, 0.35)

MODEL_LOADED = Load(118.0, 4.0, 0.0)

_AT_ONCE = {Phase.STARTING: MODEL_LOADED, Phase.EVALUATION: EVALUATION}


def load(seen: PhaseAge, alive: bool = True) -> Load:
    """Return the load of a rank's GPU, by the rank's phase and the age of that phase; idle for a dead rank."""
    if not alive:
        return IDLE
    if seen.phase in _AT_ONCE:
        return _AT_ONCE[seen.phase]
    if seen.age_seconds < DRAINED_SECONDS:
        return TRAINING
    return WAITING if seen.phase is Phase.COLLECTIVE else STUCK


class SimulatedGpus:
    """One simulated GPU for each rank. It replaces the driver as the daemon's source of samples."""

    def __init__(self, *nodes: SimulatedNode, seed: int = 0) -> None:
        self._ranks = [(node, local_rank) for node in nodes for local_rank in range(node.ranks)]
        self._random = random.Random(seed)  # noqa: S311 - noise of a sensor

    def start(self) -> None:
        """Do nothing, because there is no sampler: each call of `latest` makes a sweep."""

    def stop(self) -> None:
        """Do nothing, because there is no sampler."""

    def latest(self) -> GpuSweep:
        """Return a new sweep of all GPUs."""
        return GpuSweep(
            taken_monotonic_seconds=time.monotonic(),
            taken_unix_seconds=time.time(),
            gpus=tuple(self._sample(index, *rank) for index, rank in enumerate(self._ranks)),
            driver_version="simulated",
        )

    def status(self) -> SamplerStatus:
        """Return the status of the sampler: always alive."""
        return SamplerStatus(alive=True)

    def query(self, kind: type[DetailsT], deadline_seconds: float) -> Fault:
        """Return a fault, because simulated GPUs have no details."""
        return Fault(
            subject="simulated GPUs",
            reason=NO_DETAILS,
            detail=f"no {kind.__name__} within {deadline_seconds:g} s: the demo simulates only power",
        )

    def _sample(self, index: int, node: SimulatedNode, local_rank: int) -> GpuSample:
        alive = node.is_alive(local_rank)
        now = load(node.phases.read(local_rank), alive)
        return GpuSample(
            index=index,
            uuid=f"GPU-demo-{index}",
            name="Simulated H100",
            power_watts=now.watts + self._random.uniform(-now.spread_watts, now.spread_watts),
            power_limit_watts=LIMIT_WATTS,
            utilization_ratio=now.utilization_ratio,
            memory_used_bytes=60 << 30 if alive else 0,
            memory_total_bytes=80 << 30,
            sm_clock_hertz=1.98e9,
            temperature_celsius=35.0 + now.watts / 20,
            pids=(node.pids[local_rank],) if alive else (),
        )
