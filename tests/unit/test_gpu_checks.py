"""The pure functions of the GPU checks, with unusual inputs and with cases that a fake node cannot have."""

from hangwatch.checks import fabric, gpu_health, gpu_power, nvlink_status, nvlink_topology, pcie
from hangwatch.checks.framework.contract import Settings
from hangwatch.model import CheckStatus, Fault, GpuSample
from hangwatch.probes.gpu.details import GpuBus, GpuFabric, GpuHealth, GpuLinks, GpuPlace, NvLink


def test_power_of_gpus_that_do_not_measure_it() -> None:
    sample = gpu_power.Sample(gpus=(GpuSample(index=0, uuid="GPU-0"),))
    verdict = gpu_power.judge([sample], Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.OK, "NoPowerReadings")
    assert list(gpu_power.METRICS[0].points(sample)) == []


def test_limits_of_different_models_are_not_compared() -> None:
    gpus = (
        GpuSample(index=0, uuid="GPU-0", name="H100", power_watts=70.0, power_limit_watts=700.0),
        GpuSample(index=1, uuid="GPU-1", name="L4", power_watts=17.0, power_limit_watts=72.0),
        GpuSample(index=2, uuid="GPU-2", name="T4", power_watts=20.0),
    )
    for count, draw in ((2, "87 W of 772 W allowed"), (3, "107 W")):
        verdict = gpu_power.judge([gpu_power.Sample(gpus=gpus[:count])], Settings())
        assert verdict.status is CheckStatus.OK
        assert verdict.message == f"{count} GPUs draw {draw}; the lowest is GPU 1 at 17 W"


def test_a_recovery_action_newer_than_this_program_is_still_critical() -> None:
    gpu = GpuHealth(index=4, uuid="GPU-4", recovery_action="Action9")
    verdict = gpu_health.judge([gpu_health.Sample(gpus=(gpu,))], gpu_health.Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.CRITICAL, "RecoveryNeeded")
    assert "Action9" in verdict.message
    assert "reboot" in verdict.remedy


def test_a_power_cap_and_idle_clocks_are_no_fault() -> None:
    gpu = GpuHealth(index=0, uuid="GPU-0", clocks_event_reasons=0x1 | 0x2 | 0x4 | 0x10)
    verdict = gpu_health.judge([gpu_health.Sample(gpus=(gpu,))], gpu_health.Settings())
    assert (verdict.status, verdict.message) == (CheckStatus.OK, "1 GPU healthy: none lost, no slow clocks")


def test_a_driver_that_blocks_says_at_which_gpu() -> None:
    fault = Fault(subject="gpu 2", reason="NoAnswer", detail="silent about this GPU", remedy="reboot")
    verdict = gpu_health.judge([gpu_health.Sample(driver_fault=fault)], gpu_health.Settings())
    assert verdict.reason == "DriverStalled"
    assert verdict.message == "the driver does not respond: GPU 2: silent about this GPU"


def test_persistence_mode_can_be_left_to_the_site() -> None:
    sample = gpu_health.Sample(gpus=(GpuHealth(index=0, uuid="GPU-0", persistence_mode=False),))
    assert gpu_health.judge([sample], gpu_health.Settings()).reason == "PersistenceModeOff"
    relaxed = gpu_health.Settings(require_persistence_mode=False)
    assert gpu_health.judge([sample], relaxed).status is CheckStatus.OK


def test_a_lost_gpu_outranks_all_else() -> None:
    fault = Fault(subject="gpu 1", reason="GpuIsLost", detail="GPU is lost")
    gpu = GpuHealth(index=0, uuid="GPU-0", row_remap_pending=True)
    verdict = gpu_health.judge([gpu_health.Sample(gpus=(gpu,), faults=(fault,))], gpu_health.Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.CRITICAL, "GpuIsLost")
    assert "will replace a bad memory row" in verdict.message


def test_a_fabric_state_newer_than_this_program_is_unknown() -> None:
    sample = fabric.Sample(gpus=(GpuFabric(index=0, uuid="GPU-0", state="State9"),))
    verdict = fabric.judge([sample], Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.UNKNOWN, "FabricStateUnknown")
    assert "nvidia-smi" in verdict.remedy


def linked(index: int, up: int, of: int = 4, peer: str = "gpu") -> GpuLinks:
    links = tuple(NvLink(link=number, up=number < up, peer=peer if number < up else None) for number in range(of))
    return GpuLinks(index=index, uuid=f"GPU-{index}", name="A100", links=links)


def links_verdict(*gpus: GpuLinks, expected: int = 0) -> str:
    sample = nvlink_status.Sample(gpus=gpus)
    return nvlink_status.judge([sample], nvlink_status.Settings(expected_links=expected)).reason


def test_cards_without_a_bridge_are_no_finding_unless_links_are_expected() -> None:
    assert links_verdict(linked(0, 4), linked(1, 4), linked(2, 0), linked(3, 0)) == "LinksUp"
    assert links_verdict(linked(0, 4), linked(1, 4), linked(2, 0), linked(3, 0), expected=4) == "LinkDown"
    assert links_verdict(linked(0, 4), linked(1, 3)) == "LinkDown"
    assert links_verdict(linked(0, 4, peer="switch"), linked(1, 0)) == "LinkDown"
    assert links_verdict(linked(0, 0), linked(1, 0)) == "NoNvlink"


def test_two_samples_of_one_time_have_no_rate() -> None:
    gpu = GpuLinks(index=0, uuid="GPU-0", links=(NvLink(link=0, up=True, recoveries=5),))
    sample = nvlink_status.Sample(taken_monotonic_seconds=10.0, gpus=(gpu,))
    assert nvlink_status.judge([sample, sample], nvlink_status.Settings()).reason == "LinksUp"


def test_a_matrix_that_differs_both_ways() -> None:
    gpus = (
        GpuPlace(index=0, uuid="GPU-0", paths={1: "PIX"}),
        GpuPlace(index=1, uuid="GPU-1", paths={0: "SYS"}),
    )
    verdict = nvlink_topology.judge([nvlink_topology.Sample(gpus=gpus)], Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.WARNING, "Asymmetric")
    assert verdict.message == "GPU 0 reaches GPU 1 over PIX, but in the other direction over SYS"


def test_a_single_gpu_has_a_topology_too() -> None:
    sample = nvlink_topology.Sample(gpus=(GpuPlace(index=0, uuid="GPU-0"),))
    verdict = nvlink_topology.judge([sample], Settings())
    assert verdict.message == "1 GPU and 0 network cards: no connection between GPUs is known"
    assert list(nvlink_topology.table(sample))[1] == ("GPU0", "X", "", "N/A", "N/A")


def slot(**fields: int | float | None) -> pcie.Slot:
    return pcie.Slot(gpu=GpuBus(index=0, uuid="GPU-0", **fields))  # type: ignore[arg-type]


def test_a_link_of_unknown_speed_is_not_judged() -> None:
    sample = pcie.Sample(
        slots=(slot(utilization_ratio=1.0, generation=None, generation_max=5, width=16, width_max=None),)
    )
    verdict = pcie.judge([sample], Settings())
    assert (verdict.status, verdict.message) == (CheckStatus.OK, "1 GPU on links of unknown speed")


def test_replays_count_from_zero_after_the_driver_was_loaded_again() -> None:
    before = pcie.Sample(taken_monotonic_seconds=0.0, slots=(slot(replays=900),))
    after = pcie.Sample(taken_monotonic_seconds=60.0, slots=(slot(replays=3),))
    assert pcie.judge([before, after], Settings()).status is CheckStatus.OK
