"""NVLink: each link up or down, its errors as rates, and which pairs of GPUs reach each other's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import GpuLinks, NvLink, NvLinkDetails, PeerAccess
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

GPU = ("gpu", "uuid")
LINKS = Metric(name="gpu_nvlinks", help="NVLinks that the GPU has", labels=GPU)
LINKS_UP = Metric(name="gpu_nvlinks_up", help="NVLinks that are up", labels=GPU)
ERRORS = Metric(
    name="gpu_nvlink_errors_total", help="Errors of all NVLinks of the GPU", labels=(*GPU, "kind"), kind="counter"
)
REFUSED = Metric(name="gpu_peer_access_refused", help="Other GPUs that this one cannot reach", labels=(*GPU, "access"))

COUNTERS = ("replays", "recoveries", "crc_flit_errors", "crc_data_errors", "failed_recoveries", "symbol_errors")
NOISE = ("replays", "crc_flit_errors", "crc_data_errors")
"""Errors that the link corrects by itself: a finding only at a high rate."""

RESEAT = "nvidia-smi nvlink -s -i {gpu}; drain the node and reset the GPU or reboot; if it stays, reseat or replace it"
ERROR_REMEDY = "nvidia-smi nvlink -e -i {gpu}; look for XID 74 in `dmesg`; drain the node if it goes on"


class Settings(contract.Settings, frozen=True):
    """NVLink states, error rates and peer-to-peer access."""

    expected_links: Annotated[
        int, Meta(ge=0, le=64, description="NVLinks that each GPU must have up; 0: as many as its equals")
    ] = 0
    errors_per_second: Annotated[
        float, Meta(ge=0.0, description="corrected errors (replays, CRC) of one GPU above this rate are a finding")
    ] = 10.0


class Sample(contract.Sample, frozen=True):
    """The links of all GPUs at one time. `switches` is how many NVSwitches show on PCI."""

    taken_monotonic_seconds: float = 0.0
    gpus: tuple[GpuLinks, ...] = ()
    switches: int = 0


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Ask every GPU for its links and its access to the others; a single GPU without NVLink has nothing to tell."""
    del settings
    details = query.details(node, NvLinkDetails)
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


def points(sample: Sample) -> Iterable[Point]:
    """Links and errors per GPU; per link would be many series that nobody looks at."""
    for gpu in sample.gpus:
        own = {"gpu": str(gpu.index), "uuid": gpu.uuid}
        if gpu.links:
            yield LINKS.point(len(gpu.links), **own)
            yield LINKS_UP.point(_up(gpu), **own)
        for kind, total in _totals(gpu).items():
            yield ERRORS.point(total, kind=kind, **own)
        for access in ("nvlink", "read", "write"):
            answers = [getattr(peer, access) for peer in gpu.peers]
            if any(answer is not None for answer in answers):
                yield REFUSED.point(sum(answer not in (None, "Ok") for answer in answers), access=access, **own)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """A link down or failing is CRITICAL, errors and refused access between linked GPUs are WARNING."""
    sample = window[-1]
    findings = [*_links_down(sample, settings), *_access_refused(sample.gpus)]
    if len(window) > 1:
        findings += _errors(window[-2], sample, settings)
    return worst(findings, _healthy(sample))


def _healthy(sample: Sample) -> CheckVerdict:
    gpus = sample.gpus
    pairs = [peer for gpu in gpus for peer in gpu.peers if peer.read is not None]
    reached = sum(peer.read == "Ok" and peer.write in ("Ok", None) for peer in pairs)
    access = f"peer-to-peer works in {reached} of {len(pairs)} directions" if pairs else "one GPU has no peers"
    if not any(_up(gpu) for gpu in gpus):
        return ok("NoNvlink", f"no NVLink between {len(gpus)} GPUs; {access}")
    up = sum(_up(gpu) for gpu in gpus)
    versions = sorted({link.version for gpu in gpus for link in gpu.links if link.up and link.version})
    return ok("LinksUp", f"{up} NVLinks up on {len(gpus)} GPUs (NVLink {', '.join(versions) or 'unknown'}); {access}")


def _up(gpu: GpuLinks) -> int:
    return sum(link.up for link in gpu.links)


def _switched(gpu: GpuLinks) -> bool:
    return any(link.peer == "switch" for link in gpu.links)


def _links_down(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    """GPUs with fewer links up than they should have.

    Bridges join only some GPUs of a PCIe box, so a GPU with no link at all is a finding only where a switch is.
    """
    for gpu in sample.gpus:
        equals = [_up(other) for other in sample.gpus if other.name == gpu.name]
        expected = settings.expected_links or max(equals)
        if not expected and sample.switches:
            expected = len(gpu.links)
        switched = bool(sample.switches) or any(_switched(other) for other in sample.gpus)
        up = _up(gpu)
        if up >= expected or not (up or switched or settings.expected_links):
            continue
        down = ", ".join(str(link.link) for link in gpu.links if not link.up)
        which = f" (down: link {down})" if down and up else ""
        yield critical(
            "LinkDown", f"GPU {gpu.index}: {up} of {expected} NVLinks are up{which}", RESEAT.format(gpu=gpu.index)
        )


def _access_refused(gpus: Sequence[GpuLinks]) -> Iterator[CheckVerdict]:
    """GPUs with links up that may not use them, or may not write over them; one sentence for each cause."""
    linked = {gpu.index for gpu in gpus if _up(gpu) and _switched(gpu)}
    refused: dict[str, list[str]] = {}
    for gpu in gpus:
        for peer in gpu.peers:
            pair = (gpu.index, peer.peer)
            if pair[0] < pair[1] and linked.issuperset(pair) and (cause := _refusal(peer)):
                refused.setdefault(cause, []).append(f"{pair[0]}-{pair[1]}")
    for cause, pairs in refused.items():
        shown = ", ".join(pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        yield warning(
            "PeerAccessRefused",
            f"{len(pairs)} pairs of GPUs on the same NVSwitch cannot use it: {cause} ({shown})",
            "nvidia-smi topo -p2p n; is the fabric manager of the same version as the driver?",
        )


def _refusal(peer: PeerAccess) -> str | None:
    for access, answer in (("NVLink", peer.nvlink), ("read", peer.read), ("write", peer.write)):
        if answer not in (None, "Ok"):
            return f"{access}: {answer}"
    return None


def _totals(gpu: GpuLinks) -> Counter[str]:
    """Error counters added up over the links of a GPU; without those that this generation does not have."""
    totals: Counter[str] = Counter()
    for link in gpu.links:
        for kind in COUNTERS:
            count = getattr(link, kind)
            if count is not None:
                totals[kind] += count
    return totals


def _errors(before: Sample, after: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    """What grew between two samples; a counter that fell was reset, and counts from there."""
    seconds = after.taken_monotonic_seconds - before.taken_monotonic_seconds
    earlier = {gpu.uuid: _totals(gpu) for gpu in before.gpus}
    for gpu in after.gpus:
        if gpu.uuid not in earlier or seconds <= 0:
            continue
        was, remedy = earlier[gpu.uuid], ERROR_REMEDY.format(gpu=gpu.index)
        grown = {kind: total - was[kind] if total >= was[kind] else total for kind, total in _totals(gpu).items()}
        if grown.get("failed_recoveries"):
            yield critical(
                "LinkRecoveryFailed",
                f"GPU {gpu.index}: {grown['failed_recoveries']} NVLink recoveries failed within {seconds:.0f} s",
                remedy,
            )
        if grown.get("recoveries"):
            yield warning(
                "LinkRecoveries",
                f"GPU {gpu.index}: {grown['recoveries']} NVLink recoveries within {seconds:.0f} s; each stops traffic",
                remedy,
            )
        noise = sum(grown.get(kind, 0) for kind in NOISE) / seconds
        if noise > settings.errors_per_second:
            yield warning("LinkErrors", f"GPU {gpu.index}: {noise:.1f} corrected NVLink errors per second", remedy)


def table(sample: Sample) -> Rows:
    """One row per link: what `nvidia-smi nvlink -s` and `-e` show; then one per pair, as `topo -p2p` does."""
    header = ("GPU", "link", "state", "version", "peer", *COUNTERS)
    rows = [(str(gpu.index), *_link_cells(link)) for gpu in sample.gpus for link in gpu.links]
    pairs = [
        (str(gpu.index), f"to GPU {peer.peer}", f"nvlink {peer.nvlink}", f"read {peer.read}", f"write {peer.write}")
        for gpu in sample.gpus
        for peer in gpu.peers
    ]
    return [header, *rows, *((*pair, *[""] * len(COUNTERS)) for pair in pairs)]


def _link_cells(link: NvLink) -> tuple[str, ...]:
    peer = " ".join(part for part in (link.peer, link.peer_pci) if part)
    counts = (getattr(link, kind) for kind in COUNTERS)
    return (
        str(link.link),
        "up" if link.up else "down",
        link.version or "",
        peer,
        *("" if count is None else str(count) for count in counts),
    )


CHECK = Check(
    name="nvlink_status",
    every_seconds=60.0,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(LINKS, LINKS_UP, ERRORS, REFUSED),
    absent="this node has no NVIDIA GPU, or a single one without NVLink",
    table=table,
)
