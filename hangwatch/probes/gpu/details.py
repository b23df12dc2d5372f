"""What the driver knows of GPUs beyond the power sample: links, places, health, buses, fabric, XIDs.

Checks ask for these now and then (`GpuSource.query`); they pass from `child.collect` to `checks` and no further.
"""

from __future__ import annotations

from msgspec import field

from hangwatch.model import Fault, Value


class NvLink(Value, frozen=True):
    """One NVLink of one GPU. `version` as people write it ("4.0"); counters are totals since the driver was loaded.

    `peer` is "gpu", "switch" or "cpu", `peer_pci` its PCI address. Counters are None where this generation has others.
    """

    link: int
    up: bool
    version: str | None = None
    peer: str | None = None
    peer_pci: str | None = None
    replays: int | None = None
    recoveries: int | None = None
    crc_flit_errors: int | None = None
    crc_data_errors: int | None = None
    failed_recoveries: int | None = None
    symbol_errors: int | None = None


class PeerAccess(Value, frozen=True):
    """What `nvidia-smi topo -p2p n|r|w` shows of one pair: "Ok", or why it is refused ("ChipsetNotSupported").

    None where the driver does not say.
    """

    peer: int
    nvlink: str | None = None
    read: str | None = None
    write: str | None = None


class GpuLinks(Value, frozen=True):
    """The NVLinks of one GPU and its access to every other; no links on a GPU without NVLink."""

    index: int
    uuid: str
    name: str | None = None
    links: tuple[NvLink, ...] = ()
    peers: tuple[PeerAccess, ...] = ()


class NvLinkDetails(Value, frozen=True):
    """The NVLinks of all GPUs."""

    gpus: tuple[GpuLinks, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuPlace(Value, frozen=True):
    """Where one GPU sits: its bus, its CPUs and memory, and how near the others are.

    `paths` maps the index of another GPU to "PIX", "PXB", "PHB", "NODE" or "SYS", nearest first. `direct_links` counts
    NVLinks by the PCI address they lead to, `switch_links` those that lead to an NVSwitch.
    """

    index: int
    uuid: str
    pci_address: str | None = None
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None
    gpu_numa_node: int | None = None
    paths: dict[int, str] = field(default_factory=dict)
    direct_links: dict[str, int] = field(default_factory=dict)
    switch_links: int = 0


class TopologyDetails(Value, frozen=True):
    """The places of all GPUs."""

    gpus: tuple[GpuPlace, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuHealth(Value, frozen=True):
    """What the driver thinks of one GPU.

    `recovery_action` is "None", "GpuReset", "NodeReboot", ...; `clocks_event_reasons` NVML's bit mask. Errors are
    counts: `uncorrected_errors` since the last reset of the GPU, the others over its life.
    """

    index: int
    uuid: str
    name: str | None = None
    recovery_action: str | None = None
    uncorrected_errors: int | None = None
    lifetime_uncorrected_errors: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    clocks_event_reasons: int | None = None
    persistence_mode: bool | None = None
    temperature_celsius: float | None = None


class HealthDetails(Value, frozen=True):
    """The health of all GPUs."""

    gpus: tuple[GpuHealth, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuOccupancy(Value, frozen=True):
    """Who computes on one GPU, and how much of its memory is taken.

    `pids` are the processes with a context, for compute or graphics, as the initial pid namespace numbers them; None
    where the driver does not list them (MIG, vGPU). `memory_used_bytes` is without what the driver reserves for itself;
    None before driver 510, which does not tell them apart.
    """

    index: int
    uuid: str
    pids: tuple[int, ...] | None = None
    memory_used_bytes: int | None = None


class OccupancyDetails(Value, frozen=True):
    """Who computes on which GPU."""

    gpus: tuple[GpuOccupancy, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuBus(Value, frozen=True):
    """The PCIe link of one GPU: generation and lanes now and at most, replays since the driver was loaded."""

    index: int
    uuid: str
    pci_address: str | None = None
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    replays: int | None = None
    utilization_ratio: float | None = None
    nvlinks_up: int = 0


class PcieDetails(Value, frozen=True):
    """The PCIe links of all GPUs."""

    gpus: tuple[GpuBus, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuFabric(Value, frozen=True):
    """How one GPU stands with its NVSwitch fabric: `state` "NotStarted", "InProgress" or "Completed"; None without one.

    `error` is the NVML error with which it was completed, 0 when well; `health_problems` are words of the health mask.
    """

    index: int
    uuid: str
    state: str | None = None
    error: int = 0
    clique: int | None = None
    cluster_uuid: str | None = None
    health_problems: tuple[str, ...] = ()


class FabricDetails(Value, frozen=True):
    """The fabric as all GPUs see it."""

    gpus: tuple[GpuFabric, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuFirmware(Value, frozen=True):
    """What is burnt into one GPU. `inforom` is the version of its InfoROM image, `cuda_version` its driver's newest."""

    index: int
    uuid: str
    name: str | None = None
    vbios: str | None = None
    inforom: str | None = None
    cuda_version: str | None = None


class FirmwareDetails(Value, frozen=True):
    """The firmware of all GPUs."""

    gpus: tuple[GpuFirmware, ...] = ()
    faults: tuple[Fault, ...] = ()


class XidEvent(Value, frozen=True):
    """One XID as the driver itself told it; index and PCI address are None where it does not name the GPU."""

    code: int
    seen_monotonic_seconds: float
    index: int | None = None
    pci_address: str | None = None


class XidDetails(Value, frozen=True):
    """The XIDs since sampling began, oldest first, the newest few hundred; a second source beside the kernel's log."""

    events: tuple[XidEvent, ...] = ()
    faults: tuple[Fault, ...] = ()
