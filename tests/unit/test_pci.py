"""The PCI bus in a /sys tree: distances between devices, access control, IOMMU, NVIDIA devices."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.node import pci
from hangwatch.probes.node.pci import PciPath
from tests import pci_tree
from tests.fake_driver import HGX_ADDRESSES


def path(*steps: str, numa_node: int | None = 0) -> PciPath:
    return PciPath(address=steps[-1], steps=steps, numa_node=numa_node)


GPU = path("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (path("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.1"), "PIX"),  # one slot
        (path("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:19:00.0"), "PIX"),  # one switch
        (
            path("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:02.0", "0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0"),
            "PXB",  # a switch below the switch
        ),
        (path("pci0000:15", "0000:15:02.0", "0000:20:00.0"), "PHB"),
        (path("pci0000:40", "0000:40:01.0", "0000:41:00.0"), "NODE"),
        (path("pci0000:90", "0000:90:01.0", "0000:91:00.0", numa_node=1), "SYS"),
        (path("pci0000:40", "0000:40:01.0", "0000:41:00.0", numa_node=None), "SYS"),  # the firmware gives no node
    ],
)  # fmt: skip
def test_distance_in_the_words_of_nvidia_smi(other: PciPath, expected: str) -> None:
    assert pci.distance(GPU, other) == expected
    assert pci.distance(other, GPU) == expected


def test_pci_paths_gpus_and_nics_of_a_node(tmp_path: Path) -> None:
    pci_tree.hgx(tmp_path, HGX_ADDRESSES)

    gpu = pci.path_of(tmp_path, "0000:9d:00.0")

    assert (gpu.steps[0], gpu.steps[-1], gpu.numa_node) == ("pci0000:9a", "0000:9d:00.0", 1)
    cards = pci.nics(tmp_path)
    assert [card.name for card in cards] == [f"mlx5_{number}" for number in range(8)]
    assert pci.distance(gpu, cards[4].path) == "PIX"
    assert pci.steps_below_switch(gpu, cards[4].path) == ("0000:9c:00.0",)
    assert pci.steps_below_switch(gpu, cards[0].path) == ()
    assert len(pci.nvidia_gpus(tmp_path)) == 8
    assert len(pci.nvswitches(tmp_path)) == 4


def test_pci_values_without_a_bus_are_empty(tmp_path: Path) -> None:
    assert pci.path_of(tmp_path, "0000:01:00.0") is None
    assert pci.nics(tmp_path) == ()
    assert pci.nvidia_gpus(tmp_path) == ()
    assert pci.nvswitches(tmp_path) == ()
    assert pci.iommu_translates(tmp_path, "0000:01:00.0") is None


def test_a_software_rdma_device_sits_on_no_bus(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband/rxe0").mkdir(parents=True)
    pci_tree.add_nic(tmp_path, "mlx5_0", "pci0000:00", "0000:00:05.0")
    assert [card.name for card in pci.nics(tmp_path)] == ["mlx5_0"]


def test_gpus_passed_to_a_virtual_machine_are_skipped(tmp_path: Path) -> None:
    pci_tree.add_device(tmp_path, "pci0000:00", "0000:00:05.0", driver="vfio-pci")
    pci_tree.add_device(tmp_path, "pci0000:00", "0000:00:06.0", driver="nvidia")
    pci_tree.add_device(tmp_path, "pci0000:00", "0000:00:07.0", vendor=0x1002)
    assert pci.nvidia_gpus(tmp_path) == ("0000:00:06.0",)


@pytest.mark.parametrize(("kind", "expected"), [("DMA", True), ("DMA-FQ", True), ("identity", False)])
def test_iommu_group_type_tells_translation(tmp_path: Path, kind: str, expected: bool) -> None:
    pci_tree.add_device(tmp_path, "pci0000:00", "0000:00:05.0", iommu=kind)
    assert pci.iommu_translates(tmp_path, "0000:00:05.0") is expected


def test_redirecting_bridges_are_found(tmp_path: Path) -> None:
    port = pci_tree.bridge(tmp_path, "pci0000:00", "0000:00:01.0", acs=0)
    switch = pci_tree.bridge(tmp_path, *port, "0000:01:00.0")
    inner = pci_tree.bridge(tmp_path, *switch, "0000:02:00.0", acs=pci_tree.ACS_REDIRECT)
    pci_tree.add_device(tmp_path, *inner, "0000:03:00.0")
    gpu = pci.path_of(tmp_path, "0000:03:00.0")
    assert gpu is not None
    assert pci.redirecting_bridges(tmp_path, gpu) == ("0000:02:00.0",)


def test_redirecting_bridges_without_root_are_unknown(tmp_path: Path) -> None:
    port = pci_tree.bridge(tmp_path, "pci0000:00", "0000:00:01.0")
    pci_tree.add_device(tmp_path, *port, "0000:01:00.0")
    (tmp_path / "bus/pci/devices/0000:00:01.0/config").write_bytes(bytes(64))
    gpu = pci.path_of(tmp_path, "0000:01:00.0")
    assert gpu is not None
    assert pci.redirecting_bridges(tmp_path, gpu) is None


@pytest.mark.parametrize(
    ("control", "expected"), [(None, False), (0x0000, False), (0x0010, False), (0x0004, True), (0x001D, True)]
)
def test_acs_control_register_is_parsed(control: int | None, expected: bool) -> None:
    assert pci.acs_redirects(pci_tree.config_space(control)) is expected


@given(st.binary(max_size=4096))
def test_acs_redirects_of_any_bytes_returns(config: bytes) -> None:
    assert pci.acs_redirects(config) in (True, False)


def test_acs_redirects_of_a_circular_list_returns() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert pci.acs_redirects(bytes(config)) is False


steps = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(lambda names: ("pci0000:00", *names))


@given(steps, steps)
def test_distance_is_the_same_both_ways(first: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert pci.distance(path(*first), path(*other)) == pci.distance(path(*other), path(*first))
