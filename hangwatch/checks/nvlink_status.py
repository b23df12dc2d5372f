"""State and error rates of the NVLinks, and peer-to-peer access between GPUs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import (
    GPU,
    Check,
    Metric,
    Metrics,
    Rows,
    counter_growth,
    critical,
    ok,
    warning,
    worst,
)
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, list_by_key
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuLinks, PeerAccess
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

COUNTERS = ("replays", "recoveries", "crc_flit_errors", "crc_data_errors", "failed_recoveries", "symbol_errors")
NOISE = ("replays", "crc_flit_errors", "crc_data_errors")
"""Errors that the link corrects. They are a finding only at a high rate."""

RESEAT = "nvidia-smi nvlink -s -i {gpu}; drain the node and reset the GPU or reboot; then reseat or replace the GPU"
ERROR_REMEDY = "nvidia-smi nvlink -e -i {gpu}; look for XID 74 in `dmesg`; drain the node if the errors continue"
ERRORS_PER_SECOND = 10.0  # corrected errors (replays, CRC) of one GPU


class Settings(contract.Settings, frozen=True):
    """Expected NVLinks."""

    expected_links: Annotated[
        int, describe("number of NVLinks of a GPU that must be up; 0: as many as other GPUs of its model have", 0, 64)
    ] = 0


class Sample(contract.Sample, frozen=True):
    """The links of all GPUs at one time. `switches` is the number of NVSwitches on the PCI bus."""

    taken_monotonic_seconds: float = 0.0
    gpus: tuple[GpuLinks, ...] = ()
    switches: int = 0


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the links and the peer access of every GPU. Return None if no GPU has links or peer GPUs."""
    details = query.details(node, Details[GpuLinks])
    if details is None or isinstance(details, Fault):
        return details
    if not details.faults and not any(gpu.links or gpu.peers for gpu in details.gpus):
        return None
    return Sample(
        taken_monotonic_seconds=node.clock.monotonic(),
        gpus=details.gpus,
        switches=len(pci.nvswitches(node.sys_root)),
        faults=details.faults,
    )


METRICS = (
    # Links have no series of their own, because there are too many.
    Metrics[Sample, GpuLinks](
        Metric("gpu_nvlinks", "NVLinks that the GPU has", lambda gpu: len(gpu.links) or None),
        Metric("gpu_nvlinks_up", "NVLinks that are up", lambda gpu: _up(gpu) if gpu.links else None),
        Metric(
            "gpu_nvlink_errors_total", "Errors of all NVLinks of the GPU", lambda gpu: dict(_totals(gpu)), by=("kind",)
        ),
        Metric(
            "gpu_peer_access_refused",
            "Other GPUs that this GPU cannot reach",
            lambda gpu: dict(_count_refusals(gpu)),
            by=("access",),
        ),
        subjects=lambda sample: sample.gpus,
        labels=GPU,
    ),
)


def _count_refusals(gpu: GpuLinks) -> dict[str, int]:
    """Return the number of other GPUs that refuse each kind of access, for the kinds that the driver reports."""
    answers = {access: [getattr(peer, access) for peer in gpu.peers] for access in ("nvlink", "read", "write")}
    return {
        access: sum(answer not in (None, "Ok") for answer in of_peers)
        for access, of_peers in answers.items()
        if any(answer is not None for answer in of_peers)
    }


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge links, peer access and errors.

    CRITICAL: a link is down, or a recovery failed. WARNING: other errors, or refused access between linked GPUs.
    """
    sample = window[-1]
    findings = [*_links_down(sample, settings), *_access_refused(sample.gpus)]
    if len(window) > 1:
        findings += _errors(window[-2], sample)
    return worst(findings, _healthy(sample))


def _healthy(sample: Sample) -> CheckVerdict:
    gpus = sample.gpus
    pairs = [peer for gpu in gpus for peer in gpu.peers if peer.read is not None]
    reachable = sum(peer.read == "Ok" and peer.write in ("Ok", None) for peer in pairs)
    access = f"; peer-to-peer works in {reachable} of {len(pairs)} directions" if pairs else ""
    if not any(_up(gpu) for gpu in gpus):
        return ok("NoNvlink", f"no NVLink is up on this node{access}")
    up = sum(_up(gpu) for gpu in gpus)
    versions = sorted({link.version for gpu in gpus for link in gpu.links if link.up and link.version})
    return ok("LinksUp", f"{up} NVLinks up on {len(gpus)} GPUs (NVLink {', '.join(versions) or 'unknown'}){access}")


def _parts(sample: Sample) -> dict[str, str]:
    up = {
        f"{gpu.uuid} {link.link}": f"link {link.link} of GPU {gpu.index}"
        for gpu in sample.gpus
        for link in gpu.links
        if link.up
    }
    return contract.gpu_parts(sample) | up


def _up(gpu: GpuLinks) -> int:
    return sum(link.up for link in gpu.links)


def _switched(gpu: GpuLinks) -> bool:
    return any(link.peer == "switch" for link in gpu.links)


def _links_down(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    """Find GPUs with fewer links up than expected.

    On a node without NVSwitches, a GPU without links is not a finding: bridges connect only some GPUs of a PCIe server.
    """
    switched = bool(sample.switches) or any(_switched(gpu) for gpu in sample.gpus)
    for gpu in sample.gpus:
        most = max(_up(other) for other in sample.gpus if other.name == gpu.name)
        expected = settings.expected_links or most or (len(gpu.links) if sample.switches else 0)
        up = _up(gpu)
        if up >= expected or not (up or switched or settings.expected_links):
            continue
        down = ", ".join(str(link.link) for link in gpu.links if not link.up)
        message = f"GPU {gpu.index}: {up} of {expected} NVLinks are up" + (
            f" (down: link {down})" if down and up else ""
        )
        yield critical("LinkDown", message, RESEAT.format(gpu=gpu.index))


def _access_refused(gpus: Sequence[GpuLinks]) -> Iterator[CheckVerdict]:
    """Find pairs of GPUs on an NVSwitch without peer access. Yield one finding per cause."""
    linked = {gpu.index for gpu in gpus if _up(gpu) and _switched(gpu)}
    pairs_of_gpus = ((gpu.index, peer) for gpu in gpus for peer in gpu.peers)
    refused = list_by_key(
        (cause, f"{index}-{peer.peer}")
        for index, peer in pairs_of_gpus
        if index < peer.peer and linked.issuperset((index, peer.peer)) and (cause := _refusal(peer))
    )
    for cause, pairs in refused.items():
        shown = ", ".join(pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        yield warning(
            "PeerAccessRefused",
            f"peer-to-peer access refused between {len(pairs)} pairs of GPUs on the same NVSwitch: {cause} ({shown})",
            "nvidia-smi topo -p2p n; check that the fabric manager has the same version as the driver",
        )


def _refusal(peer: PeerAccess) -> str | None:
    for access, answer in (("NVLink", peer.nvlink), ("read", peer.read), ("write", peer.write)):
        if answer not in (None, "Ok"):
            return f"{access}: {answer}"
    return None


def _totals(gpu: GpuLinks) -> Counter[str]:
    """Return the error counters of a GPU, summed over its links, of those that its version of NVLink has."""
    counts = ((kind, getattr(link, kind)) for link in gpu.links for kind in COUNTERS)
    by_kind = list_by_key((kind, count) for kind, count in counts if count is not None)
    return Counter({kind: sum(its_counts) for kind, its_counts in by_kind.items()})


def _errors(before: Sample, after: Sample) -> Iterator[CheckVerdict]:
    """Judge the growth of error counters between two samples."""
    seconds = after.taken_monotonic_seconds - before.taken_monotonic_seconds
    readings = [
        {(gpu.uuid, kind): _totals(gpu)[kind] for gpu in sample.gpus for kind in COUNTERS} for sample in (before, after)
    ]
    grown = counter_growth(readings)
    for gpu in after.gpus if seconds > 0 else ():
        remedy = ERROR_REMEDY.format(gpu=gpu.index)
        growth = {kind: grown[gpu.uuid, kind] for kind in COUNTERS}
        if failed := growth.get("failed_recoveries"):
            message = f"GPU {gpu.index}: {failed} NVLink recoveries failed within {seconds:.0f} s"
            yield critical("LinkRecoveryFailed", message, remedy)
        if recoveries := growth.get("recoveries"):
            message = f"GPU {gpu.index}: {recoveries} NVLink recoveries within {seconds:.0f} s; each stops traffic"
            yield warning("LinkRecoveries", message, remedy)
        rate = sum(growth.get(kind, 0) for kind in NOISE) / seconds
        if rate > ERRORS_PER_SECOND:
            limit = f"limit {ERRORS_PER_SECOND:g}"
            message = f"GPU {gpu.index}: {rate:.1f} corrected NVLink errors per second ({limit})"
            yield warning("LinkErrors", message, remedy)


def table(sample: Sample) -> Rows:
    """Return one row per link, then one row per pair of GPUs.

    The columns are those of `nvidia-smi nvlink -s` and `-e`, and of `nvidia-smi topo -p2p`.
    """
    yield "GPU", "link", "state", "version", "peer", *COUNTERS
    for gpu in sample.gpus:
        for link in gpu.links:
            peer = " ".join(part for part in (link.peer, link.peer_pci) if part)
            counts = (getattr(link, kind) for kind in COUNTERS)
            yield gpu.index, link.link, "up" if link.up else "down", link.version, peer, *counts
    for gpu in sample.gpus:
        for to in gpu.peers:
            ways = (f"nvlink {to.nvlink}", f"read {to.read}", f"write {to.write}")
            yield gpu.index, f"to GPU {to.peer}", *ways, *[""] * len(COUNTERS)


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    parts=_parts,
    absent="this node has no NVIDIA GPU, or a single one without NVLink",
)
