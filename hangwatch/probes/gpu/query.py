"""GPU values for checks and captures: a value, None if this node has no GPU, or a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangwatch import words
from hangwatch.model import Fault, GpuSweep, TrafficSweep
from hangwatch.probes.base.gpu_source import NO_DETAILS, NO_DRIVER, DetailsT, GpuSource
from hangwatch.probes.gpu.details import Details
from hangwatch.probes.node.pci import nvidia_gpus

if TYPE_CHECKING:
    from hangwatch.probes.node.machine import Node

DEADLINE_SECONDS = 5.0
"""Deadline of a query. It must be far below the 10 s that `hangwatch check` may take."""

TRAFFIC_DEADLINE_SECONDS = 1.0
"""Deadline of a query for traffic, for which a round of dumps waits. Without PCIe counters each GPU takes 40 ms."""


def details(node: Node, kind: type[DetailsT]) -> DetailsT | Fault | None:
    """Return details of all GPUs, of one kind: `Details` of a class of `hangwatch.probes.gpu.details`, for example.

    None if GPUs are not sampled, or if neither the driver nor the PCI bus has any. A Fault if GPUs are on the bus but
    the driver does not respond.
    """
    if node.gpus is None:
        return None
    reply = node.gpus.query(kind, DEADLINE_SECONDS)
    if not isinstance(reply, Fault):
        return None if isinstance(reply, Details) and not (reply.gpus or reply.faults) else reply
    if reply.reason == NO_DETAILS:
        return None
    if reply.reason not in NO_DRIVER:
        return reply
    count = len(nvidia_gpus(node.sys_root))
    if not count:
        return None
    detail = f"the PCI bus has {words.count(count, 'NVIDIA GPU')}, but no driver responds ({reply.detail})"
    return msgspec.structs.replace(reply, detail=detail)


def sweep(node: Node) -> GpuSweep | Fault | None:
    """Return the newest sample of all GPUs. None and Fault mean the same as in `details`."""
    if node.gpus is None:
        return None
    status, latest = node.gpus.status(), node.gpus.latest()
    if latest is not None and status.alive and not status.stalled:
        return latest
    return details(node, GpuSweep)


def traffic(gpus: GpuSource) -> TrafficSweep | None:
    """Return the bytes that the links of all GPUs have carried; None if they could not be read."""
    reply = gpus.query(TrafficSweep, TRAFFIC_DEADLINE_SECONDS)
    return None if isinstance(reply, Fault) else reply
