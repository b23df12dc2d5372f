"""GPUs of a job with a lower clock than the other GPUs of the job: all ranks wait for the slowest GPU.

NVML's clocks are compared, because a slow GPU does not show in the times at which ranks enqueue collectives. Only
samples in which all GPUs of the job are busy count. A GPU that draws more power than the others works more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import GPU, Check, Metric, Metrics, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, GpuName, GpuSample, Job, median
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuHealth
from hangwatch.probes.node.machine import Node

WINDOW = 62  # the samples of an hour
SLOW_RATIO = 0.1  # part of the median by which a clock is below it
SLOW_SECONDS = 300.0
BUSY_RATIO = 0.5  # utilization from which the clock of a GPU counts
MORE_POWER_RATIO = 1.05  # of the median
REMEDY = (
    "`hangwatch check gpu_health pcie`; `nvidia-smi -q -d CLOCK,PERFORMANCE,POWER -i {index}`; compare fans, inlet air "
    "and application clocks (`nvidia-smi -rac`) with the other GPUs"
)


class GpuSpeed(GpuName, frozen=True):
    """The clock of a GPU of a rank. The `usual` values are the medians over the GPUs of the same model and job."""

    rank: contract.RankName
    clock_hertz: float
    usual_hertz: float
    power_watts: float | None = None
    usual_watts: float | None = None
    slowdowns: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The clock as a ratio of the usual clock."""
        return self.clock_hertz / self.usual_hertz

    @property
    def does_more(self) -> bool:
        """True if it draws more power than usual."""
        return (self.power_watts or 0.0) > MORE_POWER_RATIO * (self.usual_watts or math.inf)


class Sample(contract.Sample, frozen=True):
    """The GPUs of all jobs with only busy GPUs, at one time (CLOCK_MONOTONIC, seconds)."""

    monotonic_seconds: float
    gpus: tuple[GpuSpeed, ...] = ()


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the clocks of the GPUs of each job with at least two GPUs."""
    jobs = [job for job in node.jobs if sum(len(rank.gpu_uuids) for rank in job.ranks) > 1]
    sweep = query.sweep(node) if jobs else None
    if sweep is None or isinstance(sweep, Fault):
        return sweep
    details = query.details(node, Details[GpuHealth])
    health = details.gpus if isinstance(details, Details) else ()
    slowdowns = {gpu.uuid: gpu.slowdowns for gpu in health}
    return Sample(
        monotonic_seconds=node.clock.monotonic(),
        gpus=tuple(speed for job in jobs for speed in _compare(job, sweep.gpus, slowdowns)),
        faults=sweep.faults,
    )


def _compare(job: Job, gpus: Sequence[GpuSample], slowdowns: Mapping[str, tuple[str, ...]]) -> Iterator[GpuSpeed]:
    """Yield the speed of each GPU of a job if all its GPUs are busy. Of two clocks the higher one is usual."""
    ranks = {uuid: rank for rank in job.ranks for uuid in rank.gpu_uuids}
    held = [gpu for gpu in gpus if gpu.uuid in ranks]
    if any((gpu.utilization_ratio or 0.0) < BUSY_RATIO for gpu in held):
        return
    for gpu in held:
        alike = [other for other in held if other.name == gpu.name]
        clocks = [other.sm_clock_hertz for other in alike if other.sm_clock_hertz]
        powers = [other.power_watts for other in alike if other.power_watts is not None]
        if gpu.sm_clock_hertz and len(clocks) > 1:
            yield GpuSpeed.copy_from(
                gpu,
                rank=contract.RankName.of_rank(job, ranks[gpu.uuid]),
                clock_hertz=gpu.sm_clock_hertz,
                usual_hertz=sorted(clocks)[len(clocks) // 2],
                usual_watts=median(powers) if powers else None,
                slowdowns=slowdowns.get(gpu.uuid, ()),
            )


METRICS = (
    Metrics[Sample, GpuSpeed](
        Metric(
            "gpu_clock_ratio",
            "SM clock as a ratio of the median over the busy GPUs of the same model and job",
            lambda gpu: gpu.ratio,
        ),
        subjects=lambda sample: sample.gpus,
        labels={**contract.RANK, **GPU},
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Find GPUs that are slow in all samples of `SLOW_SECONDS`. A single sample shows the clocks and judges nothing."""
    gpus = window[-1].gpus
    if not gpus:
        return ok("GpusNotBusy", "no job with several GPUs keeps all of them busy")
    findings = [finding for gpu in gpus for finding in _slow(gpu, window)]
    clocks = [gpu.clock_hertz / 1e6 for gpu in gpus]
    lowest = "" if min(clocks) == max(clocks) else f"{min(clocks):,.0f} to "
    message = f"{words.count(len(gpus), 'busy GPU')} of jobs at {lowest}{max(clocks):,.0f} MHz"
    if len(window) == 1:
        message += f"; a slow GPU shows only to the daemon, after {words.duration(SLOW_SECONDS)}: `hangwatch status`"
    return worst(findings, ok("ClocksAlike", message))


def _slow(gpu: GpuSpeed, window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    slow: list[GpuSpeed] = []
    seconds = 0.0
    for sample in reversed(window):
        then = next((each for each in sample.gpus if (each.rank, each.uuid) == (gpu.rank, gpu.uuid)), None)
        if then is None or then.ratio >= 1 - SLOW_RATIO or then.does_more:
            break
        slow.append(then)
        seconds = window[-1].monotonic_seconds - sample.monotonic_seconds
    if slow and seconds >= SLOW_SECONDS:
        clock, usual = (
            median(values) / 1e6
            for values in zip(*((each.clock_hertz, each.usual_hertz) for each in slow), strict=True)
        )
        reasons = f" ({', '.join(gpu.slowdowns)})" if gpu.slowdowns else ""
        message = (
            f"GPU {gpu.index} of {gpu.rank} has run at {clock:,.0f} MHz for {words.duration(seconds)}{reasons}, "
            f"the other GPUs of the job at {usual:,.0f} MHz"
        )
        yield warning("GpuSlow", message, REMEDY.format(index=gpu.index))


def table(sample: Sample) -> Rows:
    """Return one row per busy GPU."""
    yield "GPU", "job", "local rank", "SM clock", "usual", "power", "slowed by"
    for gpu in sample.gpus:
        power = None if gpu.power_watts is None else f"{gpu.power_watts:.0f} W"
        clock, usual = (f"{hertz / 1e6:,.0f} MHz" for hertz in (gpu.clock_hertz, gpu.usual_hertz))
        yield gpu.index, gpu.rank.job, gpu.rank.local_rank, clock, usual, power, ", ".join(gpu.slowdowns)


CHECK = Check(observe, METRICS, judge, table, window=WINDOW, absent="no job with several GPUs runs on this node")
