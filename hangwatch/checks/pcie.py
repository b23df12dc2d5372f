"""The PCIe link of each GPU, and the bus settings that break peer-to-peer transfers (ACS, IOMMU translation)."""

import re
from collections.abc import Iterator, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import GPU, Check, Metric, Metrics, Rows, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Value
from hangwatch.probes.base import pseudo_files
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuBus
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

# GPU utilization from which its link must run at full speed; idle links slow down
LOADED_RATIO = 0.2
REPLAYS_PER_MINUTE = 8.0
VIRTUAL = re.compile(r"^flags\s*:.*\shypervisor\b", re.MULTILINE)  # in /proc/cpuinfo


class Slot(Value, frozen=True):
    """One GPU and the PCIe path to it. A field is None if /sys does not show it.

    `redirecting_bridges` are on the paths from this GPU to GPUs and network cards on the same PCIe switch. With
    ACS, these bridges send peer-to-peer traffic to the CPU.
    """

    gpu: GpuBus
    iommu_translates: bool | None = None
    redirecting_bridges: tuple[str, ...] | None = None


class Sample(contract.Sample, frozen=True):
    """All GPUs at one time. `virtual` is true in a virtual machine, `amd` on an AMD processor."""

    taken_monotonic_seconds: float = 0.0
    slots: tuple[Slot, ...] = ()
    virtual: bool = False
    amd: bool = False

    @property
    def gpus(self) -> tuple[GpuBus, ...]:
        """The GPUs of all slots."""
        return tuple(slot.gpu for slot in self.slots)


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the PCIe links from the driver, and the bridges above the GPUs from /sys."""
    details = query.details(node, Details[GpuBus])
    if not isinstance(details, Details):
        return details
    cpu = pseudo_files.read_or_empty(node.proc_root / "cpuinfo").partition("\n\n")[0]
    return Sample(
        taken_monotonic_seconds=node.clock.monotonic(),
        slots=tuple(_slots(node, details.gpus)),
        virtual=VIRTUAL.search(cpu) is not None,
        amd="AuthenticAMD" in cpu,
        faults=details.faults,
    )


def _slots(node: Node, gpus: Sequence[GpuBus]) -> Iterator[Slot]:
    paths = [pci.path_of(node.sys_root, gpu.pci_address or "-") for gpu in gpus]
    devices = [path for path in (*paths, *(nic.path for nic in pci.nics(node.sys_root))) if path is not None]
    for gpu, path in zip(gpus, paths, strict=True):
        if path is None:
            yield Slot(gpu=gpu)
            continue
        between = {step for other in devices for step in pci.steps_below_switch(path, other)}
        redirecting = pci.redirecting_bridges(node.sys_root, path)
        yield Slot(
            gpu=gpu,
            iommu_translates=pci.iommu_translates(node.sys_root, path.address),
            redirecting_bridges=None if redirecting is None else tuple(step for step in redirecting if step in between),
        )


METRICS = (
    Metrics[Sample, GpuBus](
        Metric(
            "gpu_pcie_generation",
            "current PCIe generation of the link; lower while the GPU is idle",
            lambda gpu: gpu.generation,
        ),
        Metric("gpu_pcie_lanes", "PCIe lanes in use", lambda gpu: gpu.width),
        Metric("gpu_pcie_replays_total", "PCIe packets sent again", lambda gpu: gpu.replays),
        subjects=lambda sample: sample.gpus,
        labels=GPU,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Judge link speed, replays and bus settings. Each finding is WARNING: jobs still run."""
    sample = window[-1]
    findings = [*_slow_links(sample), *_translation(sample), *_redirects(sample)]
    if len(window) > 1:
        findings += _replays(window[-2], sample)
    gpus = sample.gpus
    loaded = sum(_loaded(gpu) for gpu in gpus if gpu.width_max)
    speeds = sorted({f"gen {gpu.generation_max} x{gpu.width_max}" for gpu in gpus if gpu.width_max})
    full = f"{loaded} under load at full speed" if loaded else "none under load, so the speed was not checked"
    links = f"{', '.join(speeds)}; {full}" if speeds else "links of unknown speed"
    return worst(
        findings, ok("LinksAtFullSpeed" if loaded else "LinksIdle", f"{words.count(len(gpus), 'GPU')} on {links}")
    )


def _loaded(gpu: GpuBus) -> bool:
    return gpu.utilization_ratio is not None and gpu.utilization_ratio >= LOADED_RATIO


def _slow_links(sample: Sample) -> Iterator[CheckVerdict]:
    for gpu in sample.gpus:
        pairs = ((gpu.generation, gpu.generation_max), (gpu.width, gpu.width_max))
        if any(now is not None and most is not None and now < most for now, most in pairs) and _loaded(gpu):
            maximum = f"maximum gen {gpu.generation_max} x{gpu.width_max}"
            yield warning(
                "LinkBelowMaximum",
                f"GPU {gpu.index}: PCIe link at gen {gpu.generation} x{gpu.width} under load; {maximum}",
                f"nvidia-smi -q -i {gpu.index} | grep -A8 'GPU Link Info'; drain the node and reboot; then reseat",
            )


def _replays(before: Sample, after: Sample) -> Iterator[CheckVerdict]:
    """Judge the number of replays between two samples."""
    minutes = (after.taken_monotonic_seconds - before.taken_monotonic_seconds) / 60
    readings = [
        {(gpu.index, gpu.uuid): gpu.replays for gpu in sample.gpus if gpu.replays is not None}
        for sample in (before, after)
    ]
    for (index, _), growth in contract.counter_growth(readings).items():
        if minutes > 0 and (rate := growth / minutes) > REPLAYS_PER_MINUTE:
            yield warning(
                "PcieReplays",
                f"GPU {index}: {rate:.0f} PCIe replays per minute (limit {REPLAYS_PER_MINUTE:g}): "
                "the link drops packets",
                "dmesg | grep -i -e aer -e pcie; reseat the GPU or its riser",
            )


def _translation(sample: Sample) -> Iterator[CheckVerdict]:
    """Find GPUs without NVLink behind an IOMMU that translates their transfers.

    Translation breaks peer-to-peer over PCIe: NCCL hangs in its first collective. A virtual machine is not judged.
    """
    if sample.virtual or len(sample.slots) < 2:
        return
    affected = [slot.gpu.index for slot in sample.slots if slot.iommu_translates and not slot.gpu.nvlinks_up]
    if affected:
        parameter = "iommu=pt amd_iommu=on (or iommu=off)" if sample.amd else "iommu=pt (or intel_iommu=off)"
        yield warning(
            "IommuTranslates",
            f"the IOMMU translates transfers of GPU {_listed(affected)}, which are connected only by PCIe: "
            "peer-to-peer transfers hang or corrupt data",
            f"boot with {parameter}, or switch the IOMMU off in the BIOS; until then NCCL_P2P_DISABLE=1",
        )


def _redirects(sample: Sample) -> Iterator[CheckVerdict]:
    """Find bridges that send peer-to-peer traffic to the CPU (ACS), as a virtual machine needs: no finding there."""
    if sample.virtual:
        return
    affected = [slot for slot in sample.slots if slot.redirecting_bridges]
    bridges = sorted({bridge for slot in affected for bridge in slot.redirecting_bridges or ()})
    if bridges:
        yield warning(
            "AcsRedirects",
            f"ACS on {len(bridges)} PCIe bridges ({_listed(bridges)}) sends peer-to-peer transfers of GPU "
            f"{_listed([slot.gpu.index for slot in affected])} through the CPU: this is slow and a known cause of "
            "hangs",
            "switch ACS off in the BIOS, or for each bridge: setpci -s ADDRESS ECAP_ACS+0x6.w=0000 (after every boot)",
        )


def _listed(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items[:8]) + (", ..." if len(items) > 8 else "")


def table(sample: Sample) -> Rows:
    """Return one row per GPU."""
    yield "GPU", "address", "generation", "lanes", "replays", "IOMMU", "ACS redirects at"
    translates = {None: "none or unknown", True: "translates", False: "passes through"}
    for slot in sample.slots:
        gpu, bridges = slot.gpu, slot.redirecting_bridges
        yield (
            gpu.index,
            gpu.pci_address,
            f"{gpu.generation} of {gpu.generation_max}" if gpu.generation is not None else "",
            f"{gpu.width} of {gpu.width_max}" if gpu.width is not None else "",
            gpu.replays,
            translates[slot.iommu_translates],
            "unknown (needs root)" if bridges is None else ", ".join(bridges) or "none",
        )


CHECK = Check(observe, METRICS, judge, table, parts=contract.gpu_parts, absent="this node has no NVIDIA GPU")
