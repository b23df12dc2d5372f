"""Synchronization of this node's clock, and its offset from the time source.

If clocks differ, logs of several nodes cannot be compared, and token lifetimes, rendezvous and file systems break.
The check reads the kernel (adjtimex; ntpd and systemd-timesyncd set the clock through it), and chronyd if it responds.
It detects a jump by comparison with the monotonic clock. `hangwatch check --nodes` compares the clocks of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault
from hangwatch.probes.node import chrony, timex
from hangwatch.probes.node.machine import Node

KEEP_TIME = (
    "systemctl enable --now chronyd (on the host); then `chronyc -n sources` must mark a source with *; "
    "for systemd-timesyncd: `timedatectl set-ntp true`"
)
RTCSYNC = "the kernel does not know it: set `rtcsync` in chrony.conf"
STEP_TIME = "chronyc -n tracking; `chronyc makestep` corrects the clock at once (a jump: do it between jobs)"
STEP_SECONDS = 0.5  # of the wall clock against the monotonic clock


class Settings(contract.Settings, frozen=True):
    """Limits of the clock offset."""

    warning_seconds: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="warning if the offset is larger than this")
    ] = 0.05
    critical_seconds: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="critical if the offset is larger than this")
    ] = 1.0
    require_synchronized: Annotated[
        bool, describe("false: ignore an unsynchronized clock, for example if a hypervisor sets it")
    ] = True


class Sample(contract.Sample, frozen=True):
    """The wall clock and the monotonic clock at one time, and the reply of each time source.

    `kernel` and `chrony` are None if this node does not have that source.
    """

    unix_seconds: float
    monotonic_seconds: float
    kernel: timex.Timex | None = None
    chrony: chrony.Tracking | None = None


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Query the kernel and chronyd. If chronyd responds, a fault of adjtimex is not reported."""
    kernel, tracking = timex.read(), chrony.read_tracking()
    has_tracking = isinstance(tracking, chrony.Tracking)
    return Sample(
        unix_seconds=node.clock.unix(),
        monotonic_seconds=node.clock.monotonic(),
        kernel=kernel if isinstance(kernel, timex.Timex) else None,
        chrony=tracking if isinstance(tracking, chrony.Tracking) else None,
        faults=tuple(answer for answer in (kernel, tracking) if isinstance(answer, Fault) and not has_tracking),
    )


METRICS = (
    Metrics[Sample, chrony.Tracking | timex.Timex](
        Metric(
            "clock_synchronized",
            "1 while the clock is synchronized: chronyd follows a source, else no STA_UNSYNC",
            lambda daemon: daemon.synchronized,
        ),
        subjects=lambda sample: [sample.chrony or sample.kernel],
    ),
    Metrics[Sample, Sample](
        Metric(
            "clock_offset_seconds",
            "time by which the source is ahead of this clock; source kernel: the correction that remains",
            lambda sample: dict(_offsets(sample)),
            by=("source",),
        ),
    ),
    Metrics[Sample, timex.Timex](
        Metric(
            "clock_estimated_error_seconds",
            "the kernel's estimated error (adjtimex esterror)",
            lambda kernel: kernel.estimated_error_seconds,
        ),
        Metric(
            "clock_maximum_error_seconds",
            "the kernel's maximum error (adjtimex maxerror)",
            lambda kernel: kernel.maximum_error_seconds,
        ),
        subjects=lambda sample: [sample.kernel],
    ),
)


def _offsets(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield (source, offset in seconds). A positive offset means that the source is ahead of this node's clock."""
    if sample.kernel is not None:
        yield "kernel", sample.kernel.offset_seconds
    if sample.chrony is not None:
        yield "chrony", -sample.chrony.offset_seconds


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge clock jumps within the window, the synchronization, and the offsets.

    The state of chronyd outweighs that of the kernel: without `rtcsync`, chronyd does not clear STA_UNSYNC.
    """
    sample = window[-1]
    findings = [*_steps(window), *_unsynchronized(sample, settings), *_far_off(sample, settings)]
    offsets = list(_offsets(sample))
    farthest = max((abs(offset) for _, offset in offsets), default=0.0)
    sources = ", ".join(source for source, _ in offsets) or "none"
    message = f"clock synchronized: offset at most {farthest * 1000:.3f} ms (sources: {sources})"
    if sample.chrony is not None and sample.kernel is not None and not sample.kernel.synchronized:
        message += f"; {RTCSYNC}"
    return worst(findings, ok("ClockInStep", message))


def _steps(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    for before, after in pairwise(window):
        elapsed = after.monotonic_seconds - before.monotonic_seconds
        step = (after.unix_seconds - before.unix_seconds) - elapsed
        if abs(step) > STEP_SECONDS:
            ago = window[-1].monotonic_seconds - after.monotonic_seconds
            message = f"the clock jumped by {step:+.3f} s about {ago:.0f} s ago (limit {STEP_SECONDS:g} s)"
            yield warning("ClockStepped", message, "journalctl -u chronyd --since -1h; look for a second time daemon")


def _unsynchronized(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    if not settings.require_synchronized:
        return
    if sample.chrony is not None:
        if not sample.chrony.synchronized:
            message = "clock not synchronized: chronyd is running but has no source"
            yield warning("ClockUnsynchronized", message, KEEP_TIME)
    elif sample.kernel is not None and not sample.kernel.synchronized:
        message = "clock not synchronized: no time daemon corrects it, so it drifts; offset unknown"
        yield warning("ClockUnsynchronized", message, KEEP_TIME)


def _far_off(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    for source, offset in _offsets(sample):
        message = f"the clock is {abs(offset):.3f} s {'behind' if offset > 0 else 'ahead of'} {source}"
        if abs(offset) > settings.critical_seconds:
            yield critical("ClockFarOff", f"{message} (limit {settings.critical_seconds:g} s)", STEP_TIME)
        elif abs(offset) > settings.warning_seconds:
            yield warning("ClockOff", f"{message} (limit {settings.warning_seconds:g} s)", STEP_TIME)


CHECK = Check(observe, METRICS, judge, settings=Settings, window=10)
