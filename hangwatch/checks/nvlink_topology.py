"""Connections between GPUs and network cards, as `nvidia-smi topo -m` shows them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Value
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuPlace
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

NEAR = ("PIX", "PXB")
"""Paths on which a network card reaches the memory of a GPU without the host bridge of the CPU."""

REMEMBERED_RUNS = 13
"""The samples of one hour, at one run every five minutes. A change is a finding for that hour."""


class NicPlace(Value, frozen=True):
    """A network card, its paths to the GPUs (by GPU index), and its paths to the other cards (by name)."""

    name: str
    gpus: dict[int, str]
    nics: dict[str, str]


class Sample(contract.Sample, frozen=True):
    """The paths between all GPUs and network cards."""

    gpus: tuple[GpuPlace, ...] = ()
    nics: tuple[NicPlace, ...] = ()


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the GPUs from the driver, and the network cards from /sys."""
    details = query.details(node, Details[GpuPlace])
    if not isinstance(details, Details):
        return details
    paths = {gpu.index: pci.path_of(node.sys_root, gpu.pci_address or "-") for gpu in details.gpus}
    cards = pci.nics(node.sys_root)
    nics = tuple(
        NicPlace(
            name=card.name,
            gpus={index: pci.distance(path, card.path) for index, path in paths.items() if path is not None},
            nics={other.name: pci.distance(card.path, other.path) for other in cards if other is not card},
        )
        for card in cards
    )
    return Sample(gpus=details.gpus, nics=nics, faults=details.faults)


def connection(gpu: GpuPlace, other: GpuPlace) -> str:
    """Return the connection of two GPUs, such as "NV18" or "PIX"; "X" for one GPU with itself, "" if not known."""
    if gpu.index == other.index:
        return "X"
    links = gpu.direct_links.get(other.pci_address or "", 0) + min(gpu.switch_links, other.switch_links)
    return f"NV{links}" if links else gpu.paths.get(other.index, "")


METRICS = (
    Metrics[Sample, Sample](
        Metric(
            "gpu_pairs",
            "Pairs of GPUs by connection, in the terms of nvidia-smi topo -m",
            lambda sample: dict(_count_pairs(sample)),
            by=("path",),
        ),
    ),
)


def _count_pairs(sample: Sample) -> Counter[str]:
    pairs = ((gpu, other) for gpu in sample.gpus for other in sample.gpus if gpu.index < other.index)
    return Counter(path for gpu, other in pairs if (path := connection(gpu, other)))


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Find changed or asymmetric connections, and GPUs with worse connections than the others."""
    sample = window[-1]
    pairs = ", ".join(f"{count} pairs {path}" for path, count in _count_pairs(sample).most_common())
    devices = f"{words.count(len(sample.gpus), 'GPU')} and {words.count(len(sample.nics), 'network card')}"
    stable = f"{pairs}; no connection has changed, and no GPU has fewer links than another"
    healthy = ok("TopologyStable", f"{devices}: {stable if pairs else 'no connection between GPUs is known'}")
    findings = [*_asymmetric(sample), *_fewer_links(sample), *_far_from_cards(sample)]
    for earlier in window[:-1]:
        findings += _changes(earlier, sample)
    return worst(dict.fromkeys(findings), healthy)


def _asymmetric(sample: Sample) -> Iterator[CheckVerdict]:
    for gpu in sample.gpus:
        for other in sample.gpus:
            there, back = connection(gpu, other), connection(other, gpu)
            if gpu.index < other.index and there != back:
                yield warning(
                    "Asymmetric",
                    f"GPU {gpu.index} reaches GPU {other.index} over {there}, but in the other direction over {back}",
                    "nvidia-smi topo -m; nvidia-smi nvlink -s",
                )


def _fewer_links(sample: Sample) -> Iterator[CheckVerdict]:
    """Find GPUs with fewer links to the NVSwitches than the others. Links by bridges are not compared."""
    most = max((gpu.switch_links for gpu in sample.gpus), default=0)
    for gpu in sample.gpus:
        if gpu.switch_links < most:
            yield warning(
                "FewerLinks",
                f"GPU {gpu.index} has {gpu.switch_links} links to the NVSwitches, the other GPUs have {most}",
                f"hangwatch check nvlink_status --verbose; nvidia-smi nvlink -s -i {gpu.index}",
            )


def _far_from_cards(sample: Sample) -> Iterator[CheckVerdict]:
    """Find a single GPU without a network card on its PCIe switch. Its card failed or was moved."""
    far = [gpu.index for gpu in sample.gpus if not any(nic.gpus.get(gpu.index) in NEAR for nic in sample.nics)]
    if len(far) == 1 and len(sample.gpus) >= 4:
        yield warning(
            "NoNearNetworkCard",
            f"GPU {far[0]} has no RDMA card on its PCIe switch; the {len(sample.gpus) - 1} other GPUs have one",
            "ls -l /sys/class/infiniband; lspci | grep -i mellanox; compare with a healthy node",
        )


def _changes(earlier: Sample, now: Sample) -> Iterator[CheckVerdict]:
    """Find connections that differ between two samples, and network cards that are missing now."""
    cells_now = _cells(now)
    for row, cells in _cells(earlier).items():
        for column, path in cells.items():
            path_now = cells_now.get(row, {}).get(column, path)
            if path_now != path:
                yield warning(
                    "TopologyChanged",
                    f"the path from {row} to {column} is {path_now}; it was {path} within the last hour",
                    "nvidia-smi topo -m; look for XID 74 and PCIe errors in `dmesg`",
                )
    missing = {nic.name for nic in earlier.nics} - {nic.name for nic in now.nics}
    for name in sorted(missing):
        message = f"network card {name} is missing; it was present within the last hour"
        yield warning("NetworkCardGone", message, "dmesg | grep -i -e mlx5 -e pcie")


def _cells(sample: Sample) -> dict[str, dict[str, str]]:
    """Return the matrix of connections: row name -> column name -> connection."""
    rows = {
        f"GPU{gpu.index}": {
            **{f"GPU{other.index}": connection(gpu, other) for other in sample.gpus},
            **{nic.name: nic.gpus.get(gpu.index, "") for nic in sample.nics},
        }
        for gpu in sample.gpus
    }
    for nic in sample.nics:
        rows[nic.name] = {
            **{f"GPU{gpu.index}": nic.gpus.get(gpu.index, "") for gpu in sample.gpus},
            **{other.name: "X" if other is nic else nic.nics.get(other.name, "") for other in sample.nics},
        }
    return rows


def table(sample: Sample) -> Rows:
    """Return the matrix of connections, with the local CPUs and NUMA nodes of each GPU."""
    matrix = _cells(sample)
    affinity = {
        f"GPU{gpu.index}": (words.fold(gpu.cpus), _shown(gpu.numa_node), _shown(gpu.gpu_numa_node))
        for gpu in sample.gpus
    }
    yield "", *matrix, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
    for name, cells in matrix.items():
        yield name, *cells.values(), *affinity.get(name, ("", "", ""))


def _shown(number: int | None) -> str:
    return "N/A" if number is None else str(number)


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    every_seconds=300.0,
    window=REMEMBERED_RUNS,
    parts=contract.gpu_parts,
    absent="this node has no NVIDIA GPU",
)
