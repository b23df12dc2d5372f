"""A tree of /sys with a PCI bus, for probes and checks that take the root of /sys as an argument."""

import struct
from pathlib import Path

ACS_REDIRECT = 0x001D  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+: printed by lspci where ACS is enabled


def add_device(
    sys_root: Path,
    *steps: str,
    vendor: int = 0x10DE,
    class_code: int = 0x030200,
    numa_node: int = 0,
    acs: int | None = None,
    iommu: str | None = None,
    driver: str | None = None,
    config_size: int = 4096,
) -> Path:
    """Add a device and its link in bus/pci/devices. `steps` are its path: "pci0000:15", "0000:15:01.0"."""
    folder = sys_root / "devices" / Path(*steps)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vendor").write_text(f"{vendor:#06x}\n")
    (folder / "class").write_text(f"{class_code:#08x}\n")
    (folder / "numa_node").write_text(f"{numa_node}\n")
    (folder / "config").write_bytes(config_space(acs)[:config_size])
    if iommu is not None:
        (folder / "iommu_group").mkdir(exist_ok=True)
        (folder / "iommu_group/type").write_text(f"{iommu}\n")
    if driver is not None:
        (sys_root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(sys_root / "bus/pci/drivers" / driver)
    links = sys_root / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    if not (links / steps[-1]).is_symlink():
        (links / steps[-1]).symlink_to(folder)
    return folder


def add_nic(sys_root: Path, name: str, *steps: str, numa_node: int = 0) -> None:
    folder = add_device(sys_root, *steps, vendor=0x15B3, class_code=0x020700, numa_node=numa_node)
    card = sys_root / "class/infiniband" / name
    card.mkdir(parents=True)
    (card / "device").symlink_to(folder)


def config_space(acs: int | None) -> bytes:
    """Return 4 KiB of PCI configuration space with AER at 0x100, and ACS at 0x148 with control register `acs`."""
    space = bytearray(4096)
    following = 0x148 if acs is not None else 0
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | following << 20)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x005F, acs)
    return bytes(space)


def bridge(sys_root: Path, *steps: str, acs: int | None = None, numa_node: int = 0) -> tuple[str, ...]:
    """Add a PCI bridge. Return its path, below which devices can be added."""
    add_device(sys_root, *steps, vendor=0x1000, class_code=0x060400, acs=acs, numa_node=numa_node)
    return steps


def hgx(sys_root: Path, addresses: tuple[str, ...], *, switches: int = 4, acs: int | None = None) -> None:
    """Add a DGX H100: each GPU shares a PCIe switch with its RDMA card, NVSwitches have a separate bus."""
    for index, address in enumerate(addresses):
        bus = f"0000:{int(address[:2], 16) - 3:02x}"
        node = int(index >= len(addresses) // 2)
        port = bridge(sys_root, f"pci{bus}", f"{bus}:01.0", numa_node=node)
        upstream = bridge(sys_root, *port, f"0000:{int(address[:2], 16) - 2:02x}:00.0", numa_node=node)
        inner = f"0000:{int(address[:2], 16) - 1:02x}"
        to_gpu = bridge(sys_root, *upstream, f"{inner}:00.0", acs=acs, numa_node=node)
        to_card = bridge(sys_root, *upstream, f"{inner}:01.0", acs=acs, numa_node=node)
        add_device(sys_root, *to_gpu, f"0000:{address}.0", numa_node=node, iommu="identity")
        add_nic(sys_root, f"mlx5_{index}", *to_card, f"0000:{int(address[:2], 16) + 1:02x}:00.0", numa_node=node)
    for number in range(switches):
        add_device(sys_root, "pci0000:05", f"0000:0{5 + number}:00.0", class_code=0x068000)


def box(sys_root: Path, addresses: tuple[str, ...], *, iommu: str = "identity") -> None:
    """Add the PCI devices of a PCIe server. Each GPU has its own root port. There is no RDMA card."""
    for index, address in enumerate(addresses):
        bus = f"0000:{int(address[:2], 16) - 1:02x}"
        port = bridge(sys_root, f"pci{bus}", f"{bus}:01.0", numa_node=int(index >= len(addresses) // 2))
        node = int(index >= len(addresses) // 2)
        add_device(sys_root, *port, f"0000:{address}.0", class_code=0x030200, numa_node=node, iommu=iommu)
