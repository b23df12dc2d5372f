"""GPUs as checks and captures ask about them: a value, None where this node has no GPU, or a fault."""

from __future__ import annotations

import msgspec

from hangwatch.model import Fault, GpuSweep, TrafficSweep
from hangwatch.probes.gpu.source import NO_DRIVER, DetailsT, GpuSource
from hangwatch.probes.node.machine import Node
from hangwatch.probes.node.pci import nvidia_gpus

DEADLINE_SECONDS = 5.0
"""Well below the ten seconds of a whole `hangwatch check`."""

TRAFFIC_DEADLINE_SECONDS = 1.0
"""Within a round of dumps, which waits for it. Without counters of PCIe each GPU takes 40 ms."""


def details(node: Node, kind: type[DetailsT]) -> DetailsT | Fault | None:
    """Details of all GPUs, of one kind of `hangwatch.probes.gpu.details`.

    None without GPUs: nothing samples them, or neither the driver nor the PCI bus knows of any. GPUs on the bus without
    a driver that answers for them are a Fault.
    """
    if node.gpus is None:
        return None
    reply = node.gpus.query(kind, DEADLINE_SECONDS)
    if not isinstance(reply, Fault):
        return reply
    if reply.reason == "NotSimulated":
        return None
    if reply.reason not in NO_DRIVER:
        return reply
    count = len(nvidia_gpus(node.sys_root))
    if not count:
        return None
    detail = f"the PCI bus has {count} NVIDIA GPUs, but no driver answers for them ({reply.detail})"
    return msgspec.structs.replace(reply, detail=detail)


def sweep(node: Node) -> GpuSweep | Fault | None:
    """The newest sample of all GPUs; outcomes as for `details`."""
    if node.gpus is None:
        return None
    status, latest = node.gpus.status(), node.gpus.latest()
    if latest is not None and status.alive and not status.stalled:
        return latest
    return details(node, GpuSweep)


def traffic(gpus: GpuSource) -> TrafficSweep | None:
    """What the links of all GPUs have carried; None where nothing samples them, or the driver does not answer."""
    reply = gpus.query(TrafficSweep, TRAFFIC_DEADLINE_SECONDS)
    return None if isinstance(reply, Fault) else reply
