"""How GPUs and network cards are connected: what `nvidia-smi topo -m` shows, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import GpuPlace, TopologyDetails
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

PAIRS = Metric(
    name="gpu_pairs", help="Pairs of GPUs by what connects them, in the words of nvidia-smi topo -m", labels=("path",)
)
NEAR = ("PIX", "PXB")
"""A network card this near reaches the GPU's memory without the CPU's host bridge."""

REMEMBERED_RUNS = 13
"""A change stays a finding for an hour, at one run every five minutes."""


class Settings(contract.Settings, frozen=True):
    """Connections among GPUs and network cards."""


class NicPlace(Value, frozen=True):
    """A network card: how near each GPU is by its index, and how near the other cards are by their names."""

    name: str
    gpus: dict[int, str]
    nics: dict[str, str]


class Sample(contract.Sample, frozen=True):
    """The places of all GPUs and network cards."""

    gpus: tuple[GpuPlace, ...] = ()
    nics: tuple[NicPlace, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Ask the driver about GPUs, and /sys about the network cards."""
    del settings
    details = query.details(node, TopologyDetails)
    if details is None or isinstance(details, Fault):
        return details
    if not details.gpus and not details.faults:
        return None
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
    """One cell of the matrix: "NV18", "PIX", ..., "X" for a GPU and itself, "" where the driver does not say."""
    if gpu.index == other.index:
        return "X"
    links = gpu.direct_links.get(other.pci_address or "", 0) + min(gpu.switch_links, other.switch_links)
    return f"NV{links}" if links else gpu.paths.get(other.index, "")


def points(sample: Sample) -> Iterable[Point]:
    """How many pairs there are of each kind of connection."""
    counts = Counter(connection(gpu, other) for gpu in sample.gpus for other in sample.gpus if gpu.index < other.index)
    for path, count in counts.items():
        if path:
            yield PAIRS.point(count, path=path)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """A matrix that changed, that is not the same both ways, or in which one GPU is worse off than its equals."""
    del settings
    sample = window[-1]
    counts = Counter(connection(gpu, other) for gpu in sample.gpus for other in sample.gpus if gpu.index < other.index)
    kinds = ", ".join(f"{count} pairs {path}" for path, count in counts.most_common() if path) or "no pairs"
    devices = f"{words.count(len(sample.gpus), 'GPU')} and {words.count(len(sample.nics), 'network card')}"
    healthy = ok("TopologyStable", f"{devices}: {kinds}; none worse off")
    findings = [*_one_way(sample), *_fewer_links(sample), *_far_from_cards(sample)]
    for earlier in window[:-1]:
        findings += _changes(earlier, sample)
    return worst(dict.fromkeys(findings), healthy)


def _one_way(sample: Sample) -> Iterator[CheckVerdict]:
    for gpu in sample.gpus:
        for other in sample.gpus:
            there, back = connection(gpu, other), connection(other, gpu)
            if gpu.index < other.index and there != back:
                yield warning(
                    "Asymmetric",
                    f"GPU {gpu.index} sees GPU {other.index} over {there}, the other way it is {back}",
                    "nvidia-smi topo -m; nvidia-smi nvlink -s",
                )


def _fewer_links(sample: Sample) -> Iterator[CheckVerdict]:
    """GPUs behind switches with fewer links than the others; bridges may leave GPUs out by design."""
    most = max((gpu.switch_links for gpu in sample.gpus), default=0)
    for gpu in sample.gpus:
        if gpu.switch_links < most:
            yield warning(
                "FewerLinks",
                f"GPU {gpu.index} reaches the NVSwitches over {gpu.switch_links} links, others over {most}",
                f"hangwatch check nvlink_status --verbose; nvidia-smi nvlink -s -i {gpu.index}",
            )


def _far_from_cards(sample: Sample) -> Iterator[CheckVerdict]:
    """A GPU without a network card on its PCIe switch where all others have one: a card has gone, or was moved."""
    near = {gpu.index: any(nic.gpus.get(gpu.index) in NEAR for nic in sample.nics) for gpu in sample.gpus}
    far = [index for index, has_one in near.items() if not has_one]
    if len(far) == 1 and len(near) >= 4:
        yield warning(
            "NoNearNetworkCard",
            f"GPU {far[0]} has no RDMA card on its PCIe switch, the {len(near) - 1} others have",
            "ls -l /sys/class/infiniband; lspci | grep -i mellanox; compare with a healthy node",
        )


def _changes(earlier: Sample, now: Sample) -> Iterator[CheckVerdict]:
    """Cells of the matrix that are not what they were, for GPUs and cards that are still there."""
    for row, cells in _cells(earlier).items():
        for column, was in cells.items():
            is_now = _cells(now).get(row, {}).get(column, was)
            if is_now != was:
                yield warning(
                    "TopologyChanged",
                    f"{row} to {column} was {was} within the last hour and is {is_now} now",
                    "nvidia-smi topo -m; look for XID 74 and PCIe errors in `dmesg`",
                )
    gone = {nic.name for nic in earlier.nics} - {nic.name for nic in now.nics}
    for name in sorted(gone):
        yield warning("NetworkCardGone", f"{name} was there within the last hour", "dmesg | grep -i -e mlx5 -e pcie")


def _cells(sample: Sample) -> dict[str, dict[str, str]]:
    """The matrix by the names of rows and columns."""
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
    """The matrix, with the CPUs and the memory node that are local to each GPU."""
    matrix = _cells(sample)
    affinity = {
        f"GPU{gpu.index}": (words.fold(gpu.cpus), _shown(gpu.numa_node), _shown(gpu.gpu_numa_node))
        for gpu in sample.gpus
    }
    header = ("", *matrix, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
    return [header, *((name, *cells.values(), *affinity.get(name, ("", "", ""))) for name, cells in matrix.items())]


def _shown(number: int | None) -> str:
    return "N/A" if number is None else str(number)


CHECK = Check(
    name="nvlink_topology",
    every_seconds=300.0,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(PAIRS,),
    absent="this node has no NVIDIA GPU",
    table=table,
    window=REMEMBERED_RUNS,
)
