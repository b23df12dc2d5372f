"""The GPU checks over the fake driver, on whole nodes. Only the right check may report a fault."""

import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import pytest

from hangwatch.checks import gpu_health
from hangwatch.checks.framework.registry import select, settings_for
from hangwatch.checks.framework.runner import Window, run
from hangwatch.config import Settings
from hangwatch.model import CheckResult, CheckStatus, Job
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node.machine import Clock, Node
from tests import pci_tree
from tests.conftest import wait_for
from tests.fake_driver import (
    BOX_ADDRESSES,
    CHIPSET,
    HGX_ADDRESSES,
    P2P_NVLINK,
    P2P_WRITE,
    FakeDriver,
    h100,
    pcie_box,
    uuid_of,
)
from tests.node_tree import job, rank

GPU_CHECKS = ("fabric", "gpu_health", "gpu_power", "nvlink_status", "nvlink_topology", "pcie")
OK, UNKNOWN, WARNING, CRITICAL = CheckStatus.OK, CheckStatus.UNKNOWN, CheckStatus.WARNING, CheckStatus.CRITICAL


def judged(results: dict[str, CheckResult]) -> dict[str, tuple[CheckStatus, str]]:
    return {name: (result.verdict.status, result.verdict.reason) for name, result in results.items()}


class Machine:
    """A node with the fake driver. Its checks run repeatedly, with a clock that the test advances.

    A driver that blocks is given up after `deadline_seconds`. On a busy machine one that works may take seconds, too.
    """

    def __init__(self, driver: FakeDriver, root: Path) -> None:
        self.driver, self.sys_root, self.proc_root = driver, root / "sys", root / "proc"
        self.proc_root.mkdir()
        (self.proc_root / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2\n\nprocessor : 1\n")
        self.deadline_seconds = 20.0
        self.now = 1000.0
        self.jobs: tuple[Job, ...] = ()
        self.windows: dict[str, Window] = {}
        self.settings = settings_for(Settings(), "test")

    @cached_property
    def sampler(self) -> NvmlSampler:
        return NvmlSampler(sample_seconds=0.2, deadline_seconds=self.deadline_seconds, environ=self.driver.environ)

    def run(self, *names: str) -> dict[str, CheckResult]:
        self.sampler.start()  # started here, so that the first sweep sees the test's scenario
        clock = Clock(monotonic=lambda: self.now, unix=lambda: 1.7e9 + self.now)
        node = Node(sys_root=self.sys_root, proc_root=self.proc_root, gpus=self.sampler, clock=clock, jobs=self.jobs)
        return {
            check.name: run(check, node, self.settings[check.name], self.windows.setdefault(check.name, Window(check)))
            for check in select(names or GPU_CHECKS)
        }

    def read_checks(self, *names: str) -> dict[str, tuple[CheckStatus, str]]:
        """Return status and reason of each check."""
        return judged(self.run(*names))

    def expect(self, name: str, expected: tuple[CheckStatus, str], *words: str) -> CheckResult:
        """Run a check. Assert its status and reason, and that its message or remedy contains the words."""
        result = self.run(name)[name]
        assert (result.verdict.status, result.verdict.reason) == expected
        shown = f"{result.verdict.message}\n{result.verdict.remedy}"
        assert not [word for word in words if word not in shown], shown
        return result


@pytest.fixture
def machine(fake_driver: FakeDriver, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(fake_driver, tmp_path)
    yield made
    made.sampler.stop()


@pytest.fixture
def hgx(machine: Machine) -> Machine:
    pci_tree.hgx(machine.sys_root, HGX_ADDRESSES)
    (machine.proc_root / "4242").mkdir(parents=True)
    (machine.proc_root / "4242/comm").write_text("nv-fabricmanage\n")
    return machine


@pytest.fixture
def box(machine: Machine) -> Machine:
    machine.driver.write(pcie_box())
    pci_tree.box(machine.sys_root, BOX_ADDRESSES)
    return machine


HEALTHY_HGX = {
    "fabric": (OK, "FabricCompleted"),
    "gpu_health": (OK, "GpusHealthy"),
    "gpu_power": (OK, "PowerRead"),
    "nvlink_status": (OK, "LinksUp"),
    "nvlink_topology": (OK, "TopologyStable"),
    "pcie": (OK, "LinksAtFullSpeed"),
}
HEALTHY_BOX = {**HEALTHY_HGX, "fabric": (OK, "NotPresent"), "nvlink_status": (OK, "NoNvlink")}


def settled(machine: Machine, name: str, holds: Callable[[CheckResult], bool], what: str) -> CheckResult:
    """Run the check `name` until `holds` is true for its result, because the sampler needs time. Return it."""
    results: list[CheckResult] = []

    def probe() -> bool:
        results.append(machine.run(name)[name])
        return holds(results[-1])

    wait_for(probe, what)
    return results[-1]


def test_eight_h100_with_all_nvlinks(hgx: Machine) -> None:
    results = hgx.run()
    assert judged(results) == HEALTHY_HGX
    assert results["gpu_power"].verdict.message == "8 GPUs draw 4800 W of 5600 W allowed; the lowest is GPU 0 at 600 W"
    assert "144 NVLinks up on 8 GPUs (NVLink 4.0)" in results["nvlink_status"].verdict.message
    assert "28 pairs NV18" in results["nvlink_topology"].verdict.message
    assert not [fault for result in results.values() for fault in result.faults]


def test_a_pcie_box_without_nvlink(box: Machine) -> None:
    results = box.run()
    assert judged(results) == HEALTHY_BOX
    assert "peer-to-peer works in 12 of 12 directions" in results["nvlink_status"].verdict.message
    assert "4 pairs SYS, 2 pairs NODE" in results["nvlink_topology"].verdict.message


def test_one_link_down(hgx: Machine) -> None:
    hgx.driver.add("gpu 3 link 7 state 0")
    results = hgx.run()
    assert {name: result.verdict.status for name, result in results.items()} == {
        **dict.fromkeys(GPU_CHECKS, OK),
        "nvlink_status": CRITICAL,
        "nvlink_topology": WARNING,  # the matrix shows NV17 in a row of NV18
    }
    verdict = results["nvlink_status"].verdict
    assert verdict.reason == "LinkDown"
    assert verdict.message == "GPU 3: 17 of 18 NVLinks are up (down: link 7)"
    assert "nvidia-smi nvlink -s -i 3" in verdict.remedy
    assert results["nvlink_topology"].verdict.reason == "FewerLinks"
    up = {
        dict(point.labels)["gpu"]: point.value
        for point in results["nvlink_status"].points
        if point.name == "gpu_nvlinks_up"
    }
    assert up["3"] == 17
    assert up["4"] == 18


def test_one_gpu_lost(hgx: Machine) -> None:
    hgx.driver.add("gpu 5 fault all 15")
    results = hgx.run()
    verdict = results["gpu_health"].verdict
    assert (verdict.status, verdict.reason) == (CRITICAL, "GpuIsLost")
    assert verdict.message.startswith("GPU 5 does not respond")
    assert "XID 79" in verdict.remedy
    for name in set(GPU_CHECKS) - {"gpu_health"}:  # seven readings and one fault: neither sick nor healthy
        assert (results[name].verdict.status, results[name].verdict.reason) == (UNKNOWN, "GpuIsLost"), name
        assert [fault.subject for fault in results[name].faults] == ["gpu 5"], name
    assert len(results["gpu_power"].table) == 8
    assert [point.value for point in results["gpu_health"].points if point.name == "gpu_lost"] == [1]


def test_a_row_remap_is_pending(hgx: Machine) -> None:
    hgx.driver.add("gpu 2 remapped_rows 0 1 1 0", "gpu 2 ecc uncorrected volatile 1")
    assert hgx.read_checks() == {**HEALTHY_HGX, "gpu_health": (WARNING, "RowRemapPending")}
    assert "--gpu-reset -i 2" in hgx.run("gpu_health")["gpu_health"].verdict.remedy


@pytest.mark.parametrize(
    ("lines", "check", "expected", "words"),
    [
        (["gpu 1 field 230 1"], "gpu_health", (CRITICAL, "RecoveryNeeded"), "requests GpuReset"),
        (["gpu 1 field 230 2"], "gpu_health", (CRITICAL, "RecoveryNeeded"), "requests NodeReboot"),
        (["gpu 1 remapped_rows 2 8 0 1"], "gpu_health", (CRITICAL, "RowRemapFailed"), "no spare memory row"),
        (["gpu 1 ecc uncorrected volatile 3"], "gpu_health", (WARNING, "UncorrectableEcc"), "3 uncorrectable"),
        (["gpu 1 clocks_event_reasons 0x48"], "gpu_health", (WARNING, "HwThermalSlowdown"), "too hot (55 C)"),
        (["gpu 1 clocks_event_reasons 0x88"], "gpu_health", (WARNING, "HwPowerBrakeSlowdown"), "power supply"),
        (["gpu all persistence_mode 0"], "gpu_health", (WARNING, "PersistenceModeOff"), "0, 1, 2, 3, 4, 5, 6, 7"),
        (["gpu 6 power_limit_watts 350"], "gpu_power", (WARNING, "PowerLimitLowered"), "GPU 6 has a power limit of 350 W"),
        (["gpu 4 pcie_width 8"], "pcie", (WARNING, "LinkBelowMaximum"), "gen 5 x8 under load; maximum gen 5 x16"),
        (["gpu 4 pcie_generation 1"], "pcie", (WARNING, "LinkBelowMaximum"), "gen 1 x16"),
        (["gpu 0 fabric state 1"], "fabric", (CRITICAL, "FabricNotStarted"), "GPU 0"),
        (["gpu all fabric state 2"], "fabric", (WARNING, "FabricInProgress"), "registration with the fabric is in progress"),
        (["gpu 0 fabric status 999"], "fabric", (CRITICAL, "FabricError"), "NVML error 999"),
        (["gpu 0 fabric health_mask 0x1"], "fabric", (WARNING, "FabricUnhealthy"), "DegradedBandwidth"),
        (["gpu 0 fabric health_mask 0x500"], "fabric", (WARNING, "FabricUnhealthy"), "InsufficientNvLinks"),
        (["gpu 0 fabric clique 7"], "fabric", (WARNING, "FabricSplit"), "2 NVLink cliques"),
        ([f"gpu all peer all p2p {P2P_NVLINK} 4"], "nvlink_status", (WARNING, "PeerAccessRefused"), "28 pairs"),
        ([f"gpu 2 peer 6 p2p {P2P_WRITE} {CHIPSET}"], "nvlink_status", (WARNING, "PeerAccessRefused"), "write: Chipset"),
    ],
)  # fmt: skip
def test_one_trouble_and_one_check_that_says_so(
    hgx: Machine, lines: list[str], check: str, expected: tuple[CheckStatus, str], words: str
) -> None:
    hgx.driver.add(*lines)
    results = hgx.run()
    assert judged(results) == {**HEALTHY_HGX, check: expected}
    assert words in results[check].verdict.message
    assert results[check].verdict.remedy


def test_idle_links_that_slowed_down_are_no_finding(hgx: Machine) -> None:
    hgx.driver.add("gpu all utilization_ratio 0", "gpu all pcie_generation 1")
    assert hgx.read_checks("pcie") == {"pcie": (OK, "LinksIdle")}


def test_link_errors_are_judged_as_rates(hgx: Machine) -> None:
    hgx.driver.add("gpu 3 link 2 errors 0 100000")  # old replays
    assert hgx.read_checks("nvlink_status") == {"nvlink_status": (OK, "LinksUp")}
    hgx.now += 60
    hgx.driver.add("gpu 3 link 2 errors 0 101200")
    hgx.expect("nvlink_status", (WARNING, "LinkErrors"), "20.0 corrected NVLink errors per second")
    hgx.now += 60
    assert hgx.read_checks("nvlink_status") == {"nvlink_status": (OK, "LinksUp")}
    hgx.now += 60
    hgx.driver.add("gpu 3 link 2 errors 0 5")  # a reload of the driver sets the counters to zero
    assert hgx.read_checks("nvlink_status") == {"nvlink_status": (OK, "LinksUp")}


def test_link_recoveries_and_failed_recoveries(hgx: Machine) -> None:
    hgx.run("nvlink_status")
    hgx.now += 60
    hgx.driver.add("gpu 3 link 2 errors 1 2")
    assert hgx.read_checks("nvlink_status") == {"nvlink_status": (WARNING, "LinkRecoveries")}
    hgx.now += 60
    hgx.driver.add("gpu 3 link 2 field 214 1", "gpu 3 link 3 field 214 0")
    assert hgx.read_checks("nvlink_status") == {"nvlink_status": (CRITICAL, "LinkRecoveryFailed")}


def test_pcie_replays_are_judged_as_a_rate(hgx: Machine) -> None:
    hgx.driver.add("gpu 3 pcie_replays 5000")
    assert hgx.read_checks("pcie") == {"pcie": (OK, "LinksAtFullSpeed")}
    hgx.now += 60
    hgx.driver.add("gpu 3 pcie_replays 5100")
    hgx.expect("pcie", (WARNING, "PcieReplays"), "100 PCIe replays per minute")


def test_acs_between_a_gpu_and_its_network_card(machine: Machine) -> None:
    pci_tree.hgx(machine.sys_root, HGX_ADDRESSES, acs=pci_tree.ACS_REDIRECT)
    machine.expect("pcie", (WARNING, "AcsRedirects"), "ACS on 8 PCIe bridges", "setpci")


def test_an_iommu_that_translates_on_an_amd_box(machine: Machine) -> None:
    machine.driver.write(pcie_box())
    pci_tree.box(machine.sys_root, BOX_ADDRESSES, iommu="DMA-FQ")
    machine.expect("pcie", (WARNING, "IommuTranslates"), "iommu=pt amd_iommu=on")


def test_in_a_virtual_machine_iommu_and_acs_are_not_ours_to_judge(machine: Machine) -> None:
    machine.driver.write(pcie_box())
    pci_tree.box(machine.sys_root, BOX_ADDRESSES, iommu="DMA-FQ")
    (machine.proc_root / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\nflags\t\t: fpu hypervisor\n")
    assert machine.read_checks("pcie") == {"pcie": (OK, "LinksAtFullSpeed")}


def test_all_links_down_where_nvswitches_are(hgx: Machine) -> None:
    hgx.driver.add("gpu all link all state 0")
    hgx.expect("nvlink_status", (CRITICAL, "LinkDown"), "GPU 0: 0 of 18 NVLinks are up")


def test_two_of_four_cards_joined_by_a_bridge(box: Machine) -> None:
    box.driver.add(
        "gpu 0 field 91 4", "gpu 1 field 91 4", "gpu 0 link all state 1", "gpu 1 link all state 1",
        "gpu 0 link all remote_type 0", "gpu 1 link all remote_type 0",
        f"gpu 0 link all remote 0000:{BOX_ADDRESSES[1]}", f"gpu 1 link all remote 0000:{BOX_ADDRESSES[0]}",
    )  # fmt: skip
    results = box.run()
    assert results["nvlink_status"].verdict.reason == "LinksUp"
    assert results["nvlink_topology"].verdict.status is OK
    assert results["nvlink_topology"].table[1][:5] == ("GPU0", "X", "NV4", "SYS", "SYS")


def test_before_hopper_nvswitches_need_a_running_fabric_manager(hgx: Machine) -> None:
    hgx.driver.write([line for line in h100() if "fabric" not in line])
    assert hgx.read_checks("fabric") == {"fabric": (OK, "FabricManagerRuns")}
    shutil.rmtree(hgx.proc_root / "4242")
    assert hgx.read_checks("fabric") == {"fabric": (CRITICAL, "FabricManagerNotRunning")}


def test_registered_gpus_without_a_fabric_manager_are_a_warning(hgx: Machine) -> None:
    shutil.rmtree(hgx.proc_root / "4242")
    assert hgx.read_checks("fabric") == {"fabric": (WARNING, "FabricManagerNotRunning")}


def test_gpu_on_the_bus_that_the_driver_does_not_list_is_critical(hgx: Machine) -> None:
    hgx.driver.write(h100(7))
    hgx.expect("gpu_health", (CRITICAL, "GpuNotListed"), "0000:df:00.0")


@pytest.mark.parametrize("is_on_bus", [True, False])
def test_gpu_that_vanishes_under_a_job_is_named_with_its_rank(machine: Machine, is_on_bus: bool) -> None:
    if is_on_bus:
        pci_tree.hgx(machine.sys_root, HGX_ADDRESSES, switches=0)
    machine.jobs = (job(rank(10, 3, gpu_uuids=(uuid_of(7),))),)
    assert machine.read_checks("gpu_health") == {"gpu_health": (OK, "GpusHealthy")}
    before = machine.read_checks()
    machine.driver.write(h100(7))
    machine.sampler.stop()  # its child lists the GPUs every 30 s, and a new child at once
    del machine.sampler
    now = machine.run("gpu_health")["gpu_health"].verdict
    assert now.status is CRITICAL
    assert "no longer present: GPU 7 at 0000:df:00.0, used by local rank 3 of job 77" in now.message
    later = machine.read_checks()
    assert not [name for name, (status, _) in later.items() if status is OK and before[name][1] != "NotPresent"]


def test_fewer_gpus_than_expected_are_critical(machine: Machine) -> None:
    machine.settings["gpu_health"] = gpu_health.Settings(expected_gpus=9)
    verdict = machine.run("gpu_health")["gpu_health"].verdict
    assert (verdict.status, verdict.message) == (CRITICAL, "the driver lists 8 GPUs, expected_gpus is 9")


def test_healthy_gpus_are_told_with_the_number_on_the_bus(hgx: Machine) -> None:
    assert hgx.run("gpu_health")["gpu_health"].verdict.message.startswith("8 GPUs of 8 on the PCI bus healthy")


@pytest.mark.golden
def test_the_matrix_reads_as_nvidia_smi_shows_it(hgx: Machine, golden: Callable[[str, str], None]) -> None:
    rows = hgx.run("nvlink_topology")["nvlink_topology"].table
    golden("nvlink_topology.txt", "".join("\t".join(row).rstrip() + "\n" for row in rows))


def test_a_change_of_the_matrix_stays_a_finding(hgx: Machine) -> None:
    assert hgx.read_checks("nvlink_topology") == {"nvlink_topology": (OK, "TopologyStable")}
    (hgx.sys_root / "class/infiniband/mlx5_7/device").unlink()
    verdict = hgx.run("nvlink_topology")["nvlink_topology"].verdict
    assert verdict.reason in ("NoNearNetworkCard", "NetworkCardGone")
    assert "network card mlx5_7 is missing" in verdict.message
    assert "GPU 7 has no RDMA card on its PCIe switch" in verdict.message
    assert hgx.run("nvlink_topology")["nvlink_topology"].verdict.message == verdict.message


def test_a_gpu_that_does_not_have_a_thing_exports_none_of_it(box: Machine) -> None:
    box.driver.write([line for line in pcie_box() if not any(word in line for word in ("ecc", "remapped", "replays"))])
    results = box.run()
    assert results["gpu_health"].verdict.status is OK
    names = {point.name for result in results.values() for point in result.points}
    assert "gpu_uncorrected_memory_errors" not in names
    assert "gpu_remapped_rows" not in names
    assert "gpu_pcie_replays_total" not in names
    assert "gpu_persistence_mode" in names


def test_a_call_that_should_answer_and_does_not_is_unknown(hgx: Machine) -> None:
    hgx.driver.add("gpu 1 fault nvmlDeviceGetRemappedRows 999")
    result = hgx.expect("gpu_health", (UNKNOWN, "Unknown"))
    assert "nvmlDeviceGetRemappedRows" in result.faults[0].detail


def test_details_that_block_the_driver_are_given_up_and_power_goes_on(hgx: Machine) -> None:
    hgx.deadline_seconds = 2.0
    assert hgx.read_checks("gpu_power") == {"gpu_power": (OK, "PowerRead")}
    hgx.driver.add("gpu 1 fault nvmlDeviceGetGpuFabricInfoV sleep")
    (fault,) = hgx.expect("fabric", (UNKNOWN, "NoAnswer")).faults
    assert fault.subject == "gpu 1" and "GpuFabric" in fault.detail
    settled(hgx, "gpu_power", lambda result: result.verdict.status is OK, "power to be sampled again")
    (again,) = hgx.expect("fabric", (UNKNOWN, "Stalled")).faults  # and it is not queried again at once
    assert "made the driver block" in again.detail
    assert hgx.sampler.status().restarts


def test_a_wedged_driver_is_critical_for_health_alone(hgx: Machine) -> None:
    hgx.deadline_seconds = 2.0
    assert hgx.read_checks() == HEALTHY_HGX
    hgx.driver.add("fault nvmlEventSetWait_v2 sleep")  # a call without a GPU argument
    wait_for(lambda: hgx.sampler.status().stalled, "the stall")
    said = hgx.read_checks()
    assert said.pop("gpu_health") == (CRITICAL, "DriverStalled")
    assert set(said.values()) == {(UNKNOWN, "Stalled")}


def test_a_wedged_gpu_is_named_and_the_others_are_judged(hgx: Machine) -> None:
    hgx.deadline_seconds = 2.0
    assert hgx.read_checks("gpu_health") == {"gpu_health": (OK, "GpusHealthy")}
    hgx.driver.add("gpu 1 fault all sleep")
    wait_for(lambda: getattr(hgx.sampler.latest(), "faults", ()), "a sweep without GPU 1")
    results = hgx.run()
    verdict = results["gpu_health"].verdict
    assert (verdict.status, verdict.reason) == (CRITICAL, "NoAnswer")
    assert "GPU 1 does not respond" in verdict.message and "dmesg" in verdict.remedy
    assert {len(result.faults) for result in results.values()} == {1}
    read = {dict(point.labels)["gpu"] for point in results["nvlink_status"].points if dict(point.labels).get("gpu")}
    assert read == {"0", "2", "3", "4", "5", "6", "7"}


def test_gpus_on_the_bus_without_a_driver(hgx: Machine) -> None:
    hgx.driver.vanish()
    results = hgx.run()
    verdict = results["gpu_health"].verdict
    assert (verdict.status, verdict.reason) == (CRITICAL, "DriverMissing")
    assert "8 NVIDIA GPUs" in verdict.message
    assert {results[name].verdict.status for name in GPU_CHECKS if name != "gpu_health"} == {UNKNOWN}


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_node_without_gpus_has_none_of_it(machine: Machine, has_driver: bool) -> None:
    machine.driver.write(h100(0)) if has_driver else machine.driver.vanish()
    assert set(machine.read_checks().values()) == {(OK, "NotPresent")}
