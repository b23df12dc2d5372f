"""InfiniBand and RoCE ports: state, rate and error counters.

A port that goes down during a job hangs all its ranks. A link that loses lanes or retrains slows down all of them.
Counters are judged by their growth within the last ten minutes, not by their value.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, counter_growth, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckStatus, CheckVerdict, Fault, list_by_key
from hangwatch.probes.network import infiniband
from hangwatch.probes.network.infiniband import Port
from hangwatch.probes.node.machine import Node

LINK_COUNTERS = ("link_downed", "link_error_recovery")
INFINIBAND = "InfiniBand"  # on Ethernet, ports with one lane or without a cable are common
REMEDY = "`ibstat`, `ibdiagnet`; check the cable, the transceiver and the switch port"


class Settings(contract.Settings, frozen=True):
    """Expected ports of this node, and the limit on errors."""

    expected_active_ports: Annotated[
        int, describe("critical if fewer ports than this are active; 0: unknown", 0, 1024)
    ] = 0
    expected_gigabits_per_second: Annotated[
        float, describe("warning if an active port is slower than this; 0: unknown", 0.0, 10000.0)
    ] = 0.0
    errors: Annotated[
        int, describe("warning if a port has more errors of one kind than this within ten minutes", 0)
    ] = 100


class Sample(contract.Sample, frozen=True):
    """All ports at one time. `monotonic_seconds` is the time of the read (CLOCK_MONOTONIC)."""

    ports: tuple[Port, ...]
    monotonic_seconds: float


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read every port."""
    reply = infiniband.read(node.sys_root)
    if not isinstance(reply, infiniband.Ports):
        return reply
    return Sample(ports=reply.ports, monotonic_seconds=node.clock.monotonic(), faults=reply.faults)


METRICS = (
    Metrics[Sample, Port](
        Metric("infiniband_port_active", "1 while the port is ACTIVE", lambda port: port.state == "ACTIVE"),
        Metric(
            "infiniband_port_rate_bytes_per_second",
            "current rate of the port",
            lambda port: port.rate_bytes_per_second,
        ),
        Metric(
            "infiniband_port_events_total",
            "error counters of the port",
            lambda port: dict(port.counters),
            by=("counter",),
        ),
        subjects=lambda sample: sample.ports,
        labels={"device": lambda port: port.device, "port": lambda port: str(port.port)},
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Find ports that went down or became slower, missing ports, rates below the expected rate, and growing errors."""
    sample = window[-1]
    active = [port for port in sample.ports if port.state == "ACTIVE"]
    findings = [*_states(window, settings), *_rates(window, settings), *_counters(window, settings)]
    down = [port.name for port in sample.ports if port.state != "ACTIVE"]
    unused = f"; {', '.join(down)} not active" if down else ""
    rates = " at " + ", ".join(sorted({port.rate for port in active})) if active else ""
    return worst(findings, ok("PortsActive", f"{len(active)} of {len(sample.ports)} ports active{rates}{unused}"))


def _states(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    sample = window[-1]
    were_active = {port.name for before in window for port in before.ports if port.state == "ACTIVE"}
    now = {port.name: port for port in sample.ports}
    for name in sorted(were_active):
        port = now.get(name)
        if port is None:
            yield critical("PortGone", f"{name} no longer exists; it was ACTIVE before", REMEDY)
        elif port.state != "ACTIVE":
            message = f"{name} is {port.state} ({port.physical_state}); it was ACTIVE before"
            yield critical("PortWentDown", message, REMEDY)
    for port in sample.ports:
        if port.state in ("INIT", "ARMED"):
            remedy = "the subnet manager has not brought it up: `sminfo`, `systemctl status opensm`"
            yield warning("PortNotActivated", f"{port.name} has a link but is only {port.state}", remedy)
    active = sum(port.state == "ACTIVE" for port in sample.ports)
    if active < settings.expected_active_ports:
        yield critical("PortsMissing", f"{active} ports active, {settings.expected_active_ports} expected", REMEDY)
    elif not active and not were_active and any(port.link_layer == INFINIBAND for port in sample.ports):
        yield warning("NoPortActive", f"none of {len(sample.ports)} ports is active", REMEDY)


def _rates(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    rates = list_by_key((port.name, port.rate_bytes_per_second or 0.0) for sample in window for port in sample.ports)
    expected = settings.expected_gigabits_per_second * 1e9 / 8
    for port in window[-1].ports:
        if port.state != "ACTIVE" or port.rate_bytes_per_second is None:
            continue
        if port.rate_bytes_per_second < max(rates[port.name]):
            before = max(rates[port.name]) * 8 / 1e9
            yield warning("RateFell", f"{port.name} runs at {port.rate}; it ran at {before:g} Gb/sec before", REMEDY)
        elif port.rate_bytes_per_second < expected:
            message = f"{port.name} runs at {port.rate}; expected {settings.expected_gigabits_per_second:g} Gb/sec"
            yield warning("RateLow", message, REMEDY)
        elif port.lanes == 1 and port.link_layer == INFINIBAND:
            yield warning("LanesLost", f"{port.name} uses a single lane ({port.rate})", REMEDY)


def _counters(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    seconds = window[-1].monotonic_seconds - window[0].monotonic_seconds
    readings = [
        {(port.name, name): count for port in sample.ports for name, count in port.counters} for sample in window
    ]
    for (name, counter), growth in sorted(counter_growth(readings).items()):
        message = f"{name}: {counter} grew by {growth} within {seconds:.0f} s"
        if counter in LINK_COUNTERS and growth:
            yield warning("LinkFlapped", message, REMEDY)
        elif growth > settings.errors:
            yield warning("PortErrors", f"{message} (limit {settings.errors})", REMEDY)


def table(sample: Sample) -> contract.Rows:
    """Return one row per port, with the counters that are not 0."""
    yield "port", "link layer", "state", "physical", "rate", "counters"
    for port in sample.ports:
        counters = ", ".join(f"{name} {count}" for name, count in port.counters if count)
        yield port.name, port.link_layer, port.state, port.physical_state, port.rate, counters


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    window=11,
    parts=lambda sample: {port.name: port.name for port in sample.ports if port.state == "ACTIVE"},
    vanished=CheckStatus.CRITICAL,
    absent="this node has no InfiniBand or RoCE adapter",
)
