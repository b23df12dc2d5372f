"""The traffic on the links of GPUs. The real pynvml reads it from the fake driver library."""

import time
from collections.abc import Callable, Iterator

import pytest

from hangwatch.model import Fault, GpuTraffic, GpuUse, TrafficSweep
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.sampler import NvmlSampler
from tests.conftest import stopping, wait_for
from tests.fake_driver import FakeDriver

ALL_LINKS = 4294967295  # UINT_MAX, the scope of nvml.h for the sum of all links
KIB_SENT, KIB_RECEIVED = f"gpu all link {ALL_LINKS} field 138", f"gpu all link {ALL_LINKS} field 139"
BYTES_SENT, BYTES_RECEIVED = f"gpu all link {ALL_LINKS} field 202", f"gpu all link {ALL_LINKS} field 204"
PCIE_SENT, PCIE_RECEIVED = "gpu all field 197", "gpu all field 198"
COUNTERS = (f"{KIB_SENT} 3", f"{KIB_RECEIVED} 5", f"{PCIE_SENT} 700", f"{PCIE_RECEIVED} 900")

Ask = Callable[[], TrafficSweep]


@pytest.fixture
def ask(fake_driver: FakeDriver) -> Iterator[Ask]:
    sampler = NvmlSampler(sample_seconds=0.2, deadline_seconds=20.0, environ=fake_driver.environ)

    def sweep() -> TrafficSweep:
        sampler.start()
        reply = sampler.query(TrafficSweep, 60.0)
        assert not isinstance(reply, Fault)
        return reply

    yield sweep
    sampler.stop()


def numbers(gpu: GpuTraffic) -> tuple[object, object, object]:
    return gpu.nvlink_bytes, gpu.pcie_bytes, gpu.pcie_bytes_per_second


def test_both_links_are_counted_in_bytes(fake_driver: FakeDriver, ask: Ask) -> None:
    fake_driver.add(*COUNTERS, f"gpu 3 link {ALL_LINKS} field 138 4")
    details = ask()
    assert [gpu.index for gpu in details.gpus] == list(range(8))
    assert numbers(details.gpus[0]) == ((3 * 1024, 5 * 1024), (700, 900), None)
    assert details.gpus[3].nvlink_bytes == (4 * 1024, 5 * 1024)
    assert details.faults == ()
    assert details.gpus[0].taken_monotonic_seconds <= details.gpus[7].taken_monotonic_seconds


COUNTED = {
    "neither": ((), (None, None, None)),
    "no NVLink": (COUNTERS[2:], (None, (700, 900), None)),
    "NVLink 5": ((f"{BYTES_SENT} 11", f"{BYTES_RECEIVED} 13"), ((11, 13), None, None)),
    "one direction of NVLink": ((f"{KIB_SENT} 3", *COUNTERS[2:]), (None, (700, 900), None)),
    "NVLink in 32 bits": ((*COUNTERS, "gpu all field_type 138 1"), (None, (700, 900), None)),
    "PCIe in 32 bits, and as a rate": (
        (
            *COUNTERS,
            "gpu all field_type 198 1",
            "gpu all pcie_bytes_per_second 0 4000",
            "gpu all pcie_bytes_per_second 1 9000",
        ),
        ((3 * 1024, 5 * 1024), None, (4000.0, 9000.0)),
    ),
    "one direction of the rate": (
        (*COUNTERS[:2], "gpu all pcie_bytes_per_second 0 4000"),
        ((3 * 1024, 5 * 1024), None, None),
    ),
    "MIG is off": ((*COUNTERS, "gpu all mig_mode 0"), ((3 * 1024, 5 * 1024), (700, 900), None)),
    "MIG is on": ((*COUNTERS, "gpu all mig_mode 1"), (None, None, None)),
}


@pytest.mark.parametrize(("lines", "expected"), COUNTED.values(), ids=COUNTED)
def test_what_a_gpu_does_not_count_is_not_zero(
    lines: tuple[str, ...], expected: tuple[object, ...], fake_driver: FakeDriver, ask: Ask
) -> None:
    fake_driver.add(*lines)
    details = ask()
    assert numbers(details.gpus[5]) == expected
    assert details.faults == ()


def test_a_counter_of_zero_is_a_number(fake_driver: FakeDriver, ask: Ask) -> None:
    fake_driver.add(f"{KIB_SENT} 0", f"{KIB_RECEIVED} 0", f"{PCIE_SENT} 0", f"{PCIE_RECEIVED} 0")
    assert numbers(ask().gpus[0]) == ((0, 0), (0, 0), None)


def test_errors_of_one_gpu_are_its_faults_and_cost_only_its_numbers(fake_driver: FakeDriver, ask: Ask) -> None:
    fake_driver.add(
        *COUNTERS, "gpu 2 fault nvmlDeviceGetFieldValues 999", "gpu 3 field_error 139 999", "gpu 4 fault all 15"
    )
    details = ask()
    read = {gpu.index: numbers(gpu) for gpu in details.gpus}
    assert read[2] == (None, None, None)
    assert read[3] == (None, (700, 900), None)
    assert read[1] == ((3 * 1024, 5 * 1024), (700, 900), None)
    assert 4 not in read
    assert {(fault.subject, fault.reason) for fault in details.faults} == {
        ("gpu 2", "Unknown"),
        ("gpu 3", "Unknown"),
        ("gpu 4", "GpuIsLost"),
    }


def test_what_a_gpu_did_between_two_readings(fake_driver: FakeDriver, ask: Ask) -> None:
    """12.5 % of the SMs, no tensor cores, 0.4 % of the memory bandwidth, from GPM if the GPU has it."""
    fake_driver.add("gpu all gpm 2 12.5", "gpu all gpm 5 0", "gpu all gpm 10 0.4")
    assert [gpu.use for gpu in ask().gpus] == [None] * 8
    for _ in range(3):
        details = ask()
        assert [gpu.use for gpu in details.gpus] == [GpuUse(sm_ratio=0.125, tensor_ratio=0.0, dram_ratio=0.004)] * 8
        assert details.faults == ()


@pytest.mark.parametrize("tensor", ["nan", "-3", "250"])
def test_what_cannot_be_is_no_answer(tensor: str, fake_driver: FakeDriver, ask: Ask) -> None:
    fake_driver.add("gpu all gpm 2 12.5", f"gpu all gpm 5 {tensor}", "gpu all gpm 10 0.4", "gpu 3 gpm 5 1")
    ask()
    assert [gpu.index for gpu in ask().gpus if gpu.use is not None] == [3]


def test_without_one_of_its_numbers_or_with_mig_gpm_tells_nothing(fake_driver: FakeDriver, ask: Ask) -> None:
    fake_driver.add("gpu all gpm 2 12.5", "gpu 1 gpm 5 0", "gpu 1 gpm 10 1", "gpu 2 fault nvmlGpmSampleGet 999")
    fake_driver.add("gpu 0 gpm 5 0", "gpu 0 gpm 10 1", "gpu 0 mig_mode 1")
    ask()
    details = ask()
    assert [gpu.index for gpu in details.gpus if gpu.use is not None] == [1]
    assert {(fault.subject, fault.reason) for fault in details.faults} == {("gpu 2", "Unknown")}


def test_a_driver_that_never_answers_costs_a_look_its_deadline_and_no_sample(fake_driver: FakeDriver) -> None:
    fake_driver.add(*COUNTERS)
    settings = {"sample_seconds": 0.2, "deadline_seconds": 5.0, "gpu_retry_seconds": 0.3}
    sampler = NvmlSampler(environ=fake_driver.environ, **settings)
    sampler.start()
    with stopping(sampler):
        wait_for(lambda: query.traffic(sampler), "a first answer")
        fake_driver.add("gpu 5 fault nvmlDeviceGetFieldValues sleep")
        began = time.monotonic()
        assert query.traffic(sampler) is None
        assert time.monotonic() - began < 5.0, "the process that samples hangs longer"
        wait_for(lambda: sampler.status().restarts, "the process that hangs to be replaced")
        asked = time.monotonic()
        wait_for(lambda: sampler.status().alive, "a new process")
        assert query.traffic(sampler) is None, "not asked again for a while"
        wait_for(
            lambda: (now := sampler.latest()) and now.taken_monotonic_seconds > asked and len(now.gpus) == 8, "all"
        )
