"""Whether this node's clock is kept, and how far it is from true time and from its peers.

Clocks that differ make logs of many nodes unreadable, and break token lifetimes, rendezvous and file systems that
compare times. Asked are the kernel (adjtimex: is anything keeping the clock, and how well; ntpd and systemd-timesyncd
steer the clock through it), chronyd where it answers, and by SNTP an optional list of peers. A clock that jumps is seen
by comparing it with the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.network import sntp
from hangwatch.probes.node import chrony, timex
from hangwatch.probes.node.machine import Node

SYNCHRONIZED = Metric(name="clock_synchronized", help="1 while something keeps the kernel's clock (no STA_UNSYNC)")
OFFSET = Metric(
    name="clock_offset_seconds", help="how far the source is ahead of this clock; kernel: still to be corrected",
    labels=("source",),
)  # fmt: skip
ESTIMATED = Metric(name="clock_estimated_error_seconds", help="the kernel's estimated error (adjtimex esterror)")
MAXIMUM = Metric(name="clock_maximum_error_seconds", help="the kernel's maximum error (adjtimex maxerror)")

KEEP_TIME = (
    "systemctl enable --now chronyd (for a container, on its host); then `chronyc -n sources` must mark one with *; "
    "or `timedatectl set-ntp true`, where systemd-timesyncd is to keep it"
)
STEP_TIME = "chronyc -n tracking; `chronyc makestep` sets it at once (a jump: best between jobs)"
MAX_PEERS = 16


class Settings(contract.Settings, frozen=True):
    """How far clocks may be apart, and who is asked besides the kernel and chronyd."""

    warning_seconds: Annotated[float, Meta(gt=0.0, le=3600.0, description="an offset larger than this: warning")] = 0.05
    critical_seconds: Annotated[float, Meta(gt=0.0, le=3600.0, description="an offset larger than this: critical")] = (
        1.0
    )
    step_seconds: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="a jump against the monotonic clock larger than this: warning")
    ] = 0.5
    require_synchronized: Annotated[
        bool, Meta(description="false: a clock that only the hypervisor keeps is no finding; then name peers")
    ] = True
    peers: Annotated[
        tuple[str, ...], Meta(max_length=MAX_PEERS, description="NTP servers or other nodes to ask: host or host:port")
    ] = ()


class Sample(contract.Sample, frozen=True):
    """Both clocks at one moment, and what was said of them; None where that source is not there."""

    unix_seconds: float
    monotonic_seconds: float
    kernel: timex.Timex | None = None
    chrony: chrony.Tracking | None = None
    peers: tuple[sntp.PeerOffset, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Ask the kernel, chronyd and the peers. A kernel that may not be asked matters only where chrony is silent too."""
    kernel, keeper = timex.read(), chrony.tracking()
    answers = sntp.query(settings.peers, unix_clock=node.clock.unix)
    faults = [answer for answer in (keeper, *answers.values()) if isinstance(answer, Fault)]
    if isinstance(kernel, Fault) and not isinstance(keeper, chrony.Tracking):
        faults.insert(0, kernel)
    return Sample(
        unix_seconds=node.clock.unix(),
        monotonic_seconds=node.clock.monotonic(),
        kernel=kernel if isinstance(kernel, timex.Timex) else None,
        chrony=keeper if isinstance(keeper, chrony.Tracking) else None,
        peers=tuple(answer for answer in answers.values() if isinstance(answer, sntp.PeerOffset)),
        faults=tuple(faults),
    )


def points(sample: Sample) -> Iterable[Point]:
    """What each source says, in seconds."""
    if sample.kernel is not None:
        yield SYNCHRONIZED.point(sample.kernel.synchronized)
        yield ESTIMATED.point(sample.kernel.estimated_error_seconds)
        yield MAXIMUM.point(sample.kernel.maximum_error_seconds)
    for source, offset in _offsets(sample):
        yield OFFSET.point(offset, source=source)


def _offsets(sample: Sample) -> Iterator[tuple[str, float]]:
    """How far each source is ahead of this clock."""
    if sample.kernel is not None:
        yield "kernel", sample.kernel.offset_seconds
    if sample.chrony is not None:
        yield "chrony", -sample.chrony.offset_seconds
    for peer in sample.peers:
        yield peer.peer, peer.offset_seconds


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """A jump within the window, a clock that nobody keeps, an offset that is too large."""
    sample = window[-1]
    findings = [*_steps(window, settings), *_unkept(sample, settings), *_far(sample, settings)]
    offsets = list(_offsets(sample))
    farthest = max((abs(offset) for _, offset in offsets), default=0.0)
    sources = ", ".join(source for source, _ in offsets) or "nobody"
    healthy = ok("ClockInStep", f"the clock is kept, at most {farthest * 1000:.3f} ms off (asked: {sources})")
    return worst(findings, healthy)


def _steps(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    for before, after in pairwise(window):
        elapsed = after.monotonic_seconds - before.monotonic_seconds
        step = (after.unix_seconds - before.unix_seconds) - elapsed
        if abs(step) > settings.step_seconds:
            ago = window[-1].monotonic_seconds - after.monotonic_seconds
            message = f"the clock jumped by {step:+.3f} s, {ago:.0f} s ago or a little more"
            yield warning("ClockStepped", message, "journalctl -u chronyd --since -1h; look for a second time daemon")


def _unkept(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    if not settings.require_synchronized:
        return
    if sample.kernel is not None and not sample.kernel.synchronized:
        yield warning("ClockUnsynchronized", "nothing keeps the kernel's clock: it drifts by itself", KEEP_TIME)
    elif sample.chrony is not None and not sample.chrony.synchronized:
        yield warning("ClockUnsynchronized", "chronyd runs, and is not synchronised to any source", KEEP_TIME)


def _far(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    for source, offset in _offsets(sample):
        # A time daemon that knows of an offset is correcting it; a peer's offset is what remains between two nodes.
        message = f"the clock is {abs(offset):.3f} s {'behind' if offset > 0 else 'ahead of'} what {source} says"
        if abs(offset) > settings.critical_seconds:
            yield critical("ClockFarOff", message, STEP_TIME)
        elif abs(offset) > settings.warning_seconds:
            yield warning("ClockOff", message, STEP_TIME)


def table(sample: Sample) -> contract.Rows:
    """The sources and their offsets."""
    rows = [("source", "is ahead of this clock by (s)", "remarks")]
    remarks = {}
    if sample.kernel is not None:
        kept = "synchronised" if sample.kernel.synchronized else "NOT synchronised"
        remarks["kernel"] = f"{kept}, estimated error {sample.kernel.estimated_error_seconds:.6f} s"
    if sample.chrony is not None:
        remarks["chrony"] = f"stratum {sample.chrony.stratum}, follows {sample.chrony.source}"
    remarks |= {peer.peer: f"stratum {peer.stratum}, round trip {peer.delay_seconds:.6f} s" for peer in sample.peers}
    return [*rows, *((source, f"{offset:+.6f}", remarks.get(source, "")) for source, offset in _offsets(sample))]


CHECK = Check(
    name="clock_skew",
    every_seconds=60,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(SYNCHRONIZED, OFFSET, ESTIMATED, MAXIMUM),
    table=table,
    window=10,
)
