"""Read the PCI bus from /sys: positions of devices, their drivers, and obstacles to peer-to-peer traffic."""

import itertools
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from hangwatch.model import Value
from hangwatch.probes.base import pseudo_files
from hangwatch.tables import xids

NVIDIA = 0x10DE
DISPLAY_CLASS = 0x03  # VGA and 3D controllers
BRIDGE_OTHER_CLASS = 0x0680  # NVSwitch

ACS_CAPABILITY = 0x000D
# P2P request and completion redirect (PCIe base specification, ACS control register)
ACS_REDIRECTS = 0x0004 | 0x0008
CONFIG_EXTENDED_START = 0x100

TRANSLATED = ("DMA", "DMA-FQ")
"""Types of an IOMMU group that translate addresses. All other types are pass-through (kernel sysfs ABI)."""


_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE)


class PciPath(Value, frozen=True):
    """A device and the bridges above it.

    `steps` are the sysfs names from the host bridge ("pci0000:15") to the device. `numa_node` is None if unknown.
    """

    address: str
    steps: tuple[str, ...]
    numa_node: int | None = None


class Nic(Value, frozen=True):
    """An RDMA device: its name in /sys/class/infiniband, and its position on the bus."""

    name: str
    path: PciPath


def path_of(sys_root: Path, address: str) -> PciPath | None:
    """Return the position of the device at this address ("0000:1b:00.0"); None if there is no such device."""
    return _path(sys_root / "bus/pci/devices" / address)


def _path(link: Path) -> PciPath | None:
    try:
        folder = link.resolve(strict=True)
    except OSError:
        return None
    parts = folder.parts
    root = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    if root is None:
        return None
    node = _number(folder / "numa_node")
    return PciPath(address=folder.name, steps=parts[root:], numa_node=node if node is not None and node >= 0 else None)


def distance(device: PciPath, other: PciPath) -> str:
    """Return the distance of two devices in the words of `nvidia-smi topo -m`.

    The path between them crosses: for PIX at most one PCIe switch; for PXB several, but no host bridge; for PHB a host
    bridge; for NODE host bridges of one NUMA node; for SYS several NUMA nodes.
    """
    if device.steps[0] != other.steps[0]:
        return "NODE" if device.numa_node is not None and device.numa_node == other.numa_node else "SYS"
    shared = _shared_steps(device, other)
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(device.steps), len(other.steps)) - shared <= 2 else "PXB"


def _shared_steps(device: PciPath, other: PciPath) -> int:
    pairs = zip(device.steps, other.steps, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def steps_below_switch(device: PciPath, other: PciPath) -> tuple[str, ...]:
    """Return the bridges between `device` and the PCIe switch shared with `other`; empty if they share none."""
    shared = _shared_steps(device, other)
    return device.steps[shared:-1] if shared > 1 and device.address != other.address else ()


def nics(sys_root: Path) -> tuple[Nic, ...]:
    """Return the RDMA devices on the PCI bus, sorted by name."""
    folder = sys_root / "class/infiniband"
    paths = ((name, _path(folder / name / "device")) for name in pseudo_files.names_or_empty(folder))
    return tuple(Nic(name=name, path=path) for name, path in paths if path is not None)


def nvme_disks(sys_root: Path) -> dict[str, str]:
    """Return PCI address -> name of the NVMe disks in this machine, without those that the driver gave up (`dead`)."""
    folder = sys_root / "class/nvme"
    paths = ((name, _path(folder / name / "device")) for name in pseudo_files.names_or_empty(folder))
    return {
        path.address: name
        for name, path in paths
        if path is not None and pseudo_files.read_or_empty(folder / name / "state").strip() != "dead"
    }


def nvidia_gpus(sys_root: Path) -> tuple[str, ...]:
    """Return the addresses of the NVIDIA GPUs that are not passed to a virtual machine, without virtual functions."""
    return tuple(
        device.name
        for device in _nvidia_devices(sys_root)
        if (_number(device / "class") or 0) >> 16 == DISPLAY_CLASS
        and Path(pseudo_files.read_link(device / "driver")).name != "vfio-pci"
        and not (device / "physfn").exists()
    )


def nvswitches(sys_root: Path) -> tuple[str, ...]:
    """Return the addresses of the NVSwitches that are visible on the PCI bus (Ampere and Hopper)."""
    return tuple(
        device.name
        for device in _nvidia_devices(sys_root)
        if (_number(device / "class") or 0) >> 8 == BRIDGE_OTHER_CLASS
    )


def nvidia_uuids(proc_root: Path) -> dict[str, str]:
    """Return the UUID of each GPU by its PCI address (`0000:3b:00`), from the driver's files; empty without a driver.

    NVML may hang; these files do not: /proc/driver/nvidia/gpus/<address>/information.
    """
    folder = proc_root / "driver" / "nvidia" / "gpus"
    matches = (
        (name, _UUID.search(pseudo_files.read_or_empty(folder / name / "information")))
        for name in pseudo_files.names_or_empty(folder)
    )
    return {xids.shorten_address(name): match[1] for name, match in matches if match is not None}


def _nvidia_devices(sys_root: Path) -> Iterable[Path]:
    folder = sys_root / "bus/pci/devices"
    return (
        folder / name for name in pseudo_files.names_or_empty(folder) if _number(folder / name / "vendor") == NVIDIA
    )


def iommu_translates(sys_root: Path, address: str) -> bool | None:
    """True if an IOMMU translates the addresses of a device's transfers; None without an IOMMU or before Linux 5.11."""
    kind = pseudo_files.read_or_empty(sys_root / "bus/pci/devices" / address / "iommu_group/type").strip()
    return kind in TRANSLATED if kind else None


def redirecting_bridges(sys_root: Path, path: PciPath) -> tuple[str, ...] | None:
    """Return the bridges above a device that redirect peer-to-peer traffic to the root complex (ACS).

    None if their configuration space is not readable. Reading it requires root.
    """
    redirecting = []
    for step in path.steps[1:-1]:
        config = pseudo_files.read_bytes(sys_root / "bus/pci/devices" / step / "config", step)
        if not isinstance(config, bytes) or len(config) <= CONFIG_EXTENDED_START:
            return None
        if acs_redirects(config):
            redirecting.append(step)
    return tuple(redirecting)


def acs_redirects(config: bytes) -> bool:
    """True if a device's configuration space enables ACS request or completion redirect."""
    offset, seen = CONFIG_EXTENDED_START, set[int]()
    while CONFIG_EXTENDED_START <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + 6)
            return bool(control & ACS_REDIRECTS)
        offset = header >> 20
    return False


def _number(path: Path) -> int | None:
    try:
        return int(pseudo_files.read_or_empty(path), 0)
    except ValueError:
        return None
