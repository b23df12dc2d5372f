"""GPU values that are read on request, not sampled: links, topology, health, PCIe, fabric, firmware, XIDs.

Checks request these values with `GpuSource.query`.
"""

from typing import Generic, TypeVar

from msgspec import field

from hangwatch.model import Fault, GpuName, Value

GpuT = TypeVar("GpuT", bound=GpuName)


class Details(Value, Generic[GpuT], frozen=True):
    """The values of one class about all GPUs."""

    gpus: tuple[GpuT, ...] = ()
    faults: tuple[Fault, ...] = ()


class NvLink(Value, frozen=True):
    """An NVLink of a GPU.

    `version` is written as in documents ("4.0"). `peer` is "gpu", "switch" or "cpu"; `peer_pci` is its PCI address.
    Counters are totals since the driver was loaded; None for counters that this generation lacks.
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
    """The access to another GPU, as in `nvidia-smi topo -p2p n|r|w`.

    A value is "Ok", the obstacle ("ChipsetNotSupported"), or None if the driver does not report it.
    """

    peer: int
    nvlink: str | None = None
    read: str | None = None
    write: str | None = None


class GpuLinks(GpuName, frozen=True):
    """The NVLinks of a GPU and its access to every other GPU. `links` is empty on a GPU without NVLink."""

    name: str | None = None
    links: tuple[NvLink, ...] = ()
    peers: tuple[PeerAccess, ...] = ()


class GpuPlace(GpuName, frozen=True):
    """The location of a GPU: its bus, its CPUs and memory, and its distance to the other GPUs.

    `paths` maps the index of another GPU to "PIX", "PXB", "PHB", "NODE" or "SYS", nearest first. `direct_links` counts
    the NVLinks to another GPU, by its PCI address. `switch_links` counts the NVLinks to NVSwitches.
    """

    pci_address: str | None = None
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None
    gpu_numa_node: int | None = None
    paths: dict[int, str] = field(default_factory=dict)
    direct_links: dict[str, int] = field(default_factory=dict)
    switch_links: int = 0


SLOWDOWNS = {"HwSlowdown": 0x08, "SwThermalSlowdown": 0x20, "HwThermalSlowdown": 0x40, "HwPowerBrakeSlowdown": 0x80}
"""Bits of nvmlClocksEventReason* that slow the clocks. The others (idle, power cap, application clocks) are normal."""


class GpuHealth(GpuName, frozen=True):
    """The health of a GPU as the driver reports it.

    `recovery_action` is "None", "GpuReset", "NodeReboot", ... `clocks_event_reasons` is NVML's bit mask. Errors are
    counts: `uncorrected_errors` since the last reset of the GPU, the other counts over its life.
    """

    name: str | None = None
    pci_address: str | None = None
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

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The reasons in `SLOWDOWNS` that apply, without HwSlowdown if a more specific reason of the hardware does."""
        reasons = [reason for reason, bit in SLOWDOWNS.items() if (self.clocks_event_reasons or 0) & bit]
        is_specific = {"HwThermalSlowdown", "HwPowerBrakeSlowdown"}.intersection(reasons)
        return tuple(reason for reason in reasons if not (is_specific and reason == "HwSlowdown"))


class GpuOccupancy(GpuName, frozen=True):
    """The processes on a GPU, and the memory in use.

    `pids` are the processes with a context, for compute or graphics, in the initial pid namespace. None if the driver
    does not list them (MIG, vGPU). `memory_used_bytes` excludes the driver's reserve. None before driver 510, which
    does not separate the two.
    """

    pids: tuple[int, ...] | None = None
    memory_used_bytes: int | None = None


class GpuBus(GpuName, frozen=True):
    """The PCIe link of a GPU: current and highest generation and lanes, and replays since the driver was loaded."""

    pci_address: str | None = None
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    replays: int | None = None
    utilization_ratio: float | None = None
    nvlinks_up: int = 0


class GpuFabric(GpuName, frozen=True):
    """The registration of a GPU with its NVSwitch fabric.

    `state` is "NotStarted", "InProgress" or "Completed"; None without a fabric. `error` is the NVML error of the
    registration, 0 if none. `health_problems` are the problems in the health mask.
    """

    state: str | None = None
    error: int = 0
    clique: int | None = None
    cluster_uuid: str | None = None
    health_problems: tuple[str, ...] = ()


class GpuFirmware(GpuName, frozen=True):
    """The firmware of a GPU.

    `inforom` is the version of its InfoROM image. `cuda_version` is the newest CUDA version that its driver supports.
    """

    name: str | None = None
    vbios: str | None = None
    inforom: str | None = None
    cuda_version: str | None = None


class XidEvent(Value, frozen=True):
    """An XID that NVML reported. Index and PCI address are None if the event does not name the GPU."""

    code: int
    seen_monotonic_seconds: float
    index: int | None = None
    pci_address: str | None = None


class XidDetails(Value, frozen=True):
    """The newest XIDs since sampling began, at most a few hundred, oldest first. The other source is the kernel log."""

    events: tuple[XidEvent, ...] = ()
    faults: tuple[Fault, ...] = ()
