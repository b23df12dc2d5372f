"""AMD GPUs, read from a made-up /sys: readings, processes, faults, the power trigger and the check of the power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import detector
from hangwatch.checks import gpu_health, gpu_power
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.jobs import rank_gpus
from hangwatch.model import CheckStatus, GpuSweep, Job, JobState, ProcessId, Rank, TrafficSweep
from hangwatch.probes.gpu import amd_sysfs, query
from hangwatch.probes.gpu.amd_sysfs import AmdSampler
from hangwatch.probes.gpu.node_sampler import make_sampler
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node.machine import Node
from tests.conftest import wait_for

LIMIT_WATTS, WORK_WATTS, HANG_WATTS = 750, 690, 170


class FakeSys:
    """A /sys of a node with `count` AMD GPUs, one for each bus from 1 on. KFD's topology has a CPU first."""

    def __init__(self, root: Path, count: int = 2) -> None:
        self.root = root
        self.write("class/kfd/kfd/topology/nodes/0/gpu_id", 0)
        self.write("class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nlocation_id 0")
        for number in range(count):
            bus = number + 1
            device = root / f"devices/pci0000:00/0000:{bus:02x}:00.0"
            device.mkdir(parents=True)
            card = root / f"class/drm/card{number}"
            card.mkdir(parents=True)
            (card / "device").symlink_to(device)
            (root / f"class/drm/card{number}-DP-1").mkdir()
            node = f"class/kfd/kfd/topology/nodes/{bus}"
            self.write(f"{node}/gpu_id", 5000 + number)
            self.write(f"{node}/properties", f"simd_count 304\nlocation_id {bus << 8}\ndomain 0")
            self.set(number, "vendor", "0x1002")
            self.set(number, "device", "0x74a1")
            self.set(number, "product_name", "AMD Instinct MI300X OAM")
            self.set(number, "unique_id", f"{0xAB00 + number:x}")
            self.set(number, "gpu_busy_percent", 97)
            self.set(number, "mem_info_vram_used", 3 << 30)
            self.set(number, "mem_info_vram_total", 192 << 30)
            self.sensor(number, "power1_average", WORK_WATTS * 10**6)
            self.sensor(number, "power1_cap", LIMIT_WATTS * 10**6)
            self.sensor(number, "temp1_input", 61000)

    def write(self, path: str, value: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def set(self, number: int, name: str, value: object) -> None:
        self.write(f"class/drm/card{number}/device/{name}", value)

    def sensor(self, number: int, name: str, value: object) -> None:
        self.set(number, f"hwmon/hwmon{number + 4}/{name}", value)

    def sensor_file(self, number: int, name: str) -> Path:
        return self.root / f"class/drm/card{number}/device/hwmon/hwmon{number + 4}/{name}"

    def hold(self, pid: int, *numbers: int, count: int = 2) -> None:
        """Let a process hold memory of these GPUs. KFD lists it for the others with 0 bytes."""
        for number in range(count):
            self.write(f"class/kfd/kfd/proc/{pid}/vram_{5000 + number}", 1 << 30 if number in numbers else 0)


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


@pytest.fixture
def sampler(fake: FakeSys) -> Iterator[AmdSampler]:
    started = AmdSampler(sample_seconds=0.01, deadline_seconds=5.0, sys_root=fake.root)
    started.start()
    yield started
    started.stop()


def test_readings_have_the_units_of_the_kernel(fake: FakeSys) -> None:
    fake.hold(700, 0)
    fake.hold(701, 1)
    fake.hold(702, 0, 1)
    first, second = amd_sysfs.read_sweep(fake.root).gpus
    assert (first.index, first.uuid, first.name) == (0, "AMD-ab00", "AMD Instinct MI300X OAM")
    assert (first.power_watts, first.power_limit_watts) == (pytest.approx(690), pytest.approx(750))
    assert (first.utilization_ratio, first.temperature_celsius) == (pytest.approx(0.97), pytest.approx(61))
    assert (first.memory_used_bytes, first.memory_total_bytes) == (3 << 30, 192 << 30)
    assert (first.pids, second.pids, first.faults) == ((700, 702), (701, 702), ())
    assert rank_gpus.find_gpus([701], {}, 0, (first, second)) == ("AMD-ab01",)


def test_instantaneous_power_replaces_a_missing_average(fake: FakeSys) -> None:
    fake.sensor_file(0, "power1_average").unlink()
    fake.sensor(0, "power1_input", 123_000_000)
    fake.sensor_file(1, "power1_cap").unlink()
    fake.set(1, "unique_id", "")
    first, second = amd_sysfs.read_sweep(fake.root).gpus
    assert first.power_watts == pytest.approx(123)
    assert (second.power_limit_watts, second.uuid, second.faults) == (None, "AMD-0000:02:00.0", ())


def test_file_that_cannot_be_read_is_a_fault_of_its_gpu_only(fake: FakeSys) -> None:
    broken = fake.sensor_file(0, "power1_average")
    broken.unlink()
    broken.mkdir()  # reading it is EISDIR
    first, second = amd_sysfs.read_sweep(fake.root).gpus
    assert first.power_watts is None and [fault.subject for fault in first.faults] == ["gpu 0"]
    assert second.power_watts == pytest.approx(690) and second.faults == ()


@pytest.mark.parametrize("properties", ["", "location_id", "location_id -1", "location_id 1 2\ngarbage"])
def test_topology_without_an_address_gives_no_processes(fake: FakeSys, properties: str) -> None:
    fake.write("class/kfd/kfd/topology/nodes/1/properties", properties)
    fake.hold(700, 0, 1)
    first, second = amd_sysfs.read_sweep(fake.root).gpus
    assert (first.pids, second.pids) == ((), (700,))


def test_node_gets_the_sampler_of_its_vendor(fake: FakeSys, tmp_path: Path) -> None:
    def kind(root: Path) -> type:
        return type(make_sampler(sample_seconds=1.0, deadline_seconds=1.0, sys_root=root))

    assert kind(fake.root) is AmdSampler
    assert kind(tmp_path / "empty") is NvmlSampler
    fake.write("bus/pci/devices/0000:09:00.0/vendor", "0x10de")
    fake.write("bus/pci/devices/0000:09:00.0/class", "0x030200")
    assert kind(fake.root) is NvmlSampler
    other = FakeSys(tmp_path / "other", 1)
    other.set(0, "vendor", "0x8086")
    assert kind(other.root) is NvmlSampler


def test_sampler_reads_again_and_has_no_further_details(fake: FakeSys, sampler: AmdSampler) -> None:
    assert sampler.wait_for_sweep(10.0) is not None
    fake.sensor(0, "power1_average", HANG_WATTS * 10**6)
    wait_for(lambda: sampler.latest().gpus[0].power_watts == pytest.approx(HANG_WATTS), "the new power")
    assert sampler.status().alive
    assert isinstance(sampler.query(GpuSweep, 5.0), GpuSweep)
    assert query.traffic(sampler) is None
    node = Node(gpus=sampler, sys_root=fake.root)
    assert query.details(node, TrafficSweep) is None
    assert gpu_health.CHECK.observe(node, gpu_health.CHECK.settings()) is None


def test_driver_that_blocks_is_reported_and_does_not_block_the_daemon(fake: FakeSys) -> None:
    blocked = fake.sensor_file(1, "power1_average")
    blocked.unlink()
    os.mkfifo(blocked)  # open(2) blocks until there is a writer
    sampler = AmdSampler(sample_seconds=0.01, deadline_seconds=0.05, sys_root=fake.root)
    sampler.start()
    status = wait_for(lambda: sampler.status() if sampler.status().stalled else None, "the driver to be late")
    assert not status.alive and "the amdgpu driver has not responded for" in status.fault.detail
    assert sampler.query(GpuSweep, 0.05).reason == "Stalled"
    with blocked.open("w") as file:
        file.write("170000000\n")
    sweep = sampler.wait_for_sweep(10.0)
    assert sweep is not None and sweep.gpus[1].power_watts == pytest.approx(170)
    writer = os.open(blocked, os.O_RDWR | os.O_NONBLOCK)  # ends the wait of an open(2) that has begun
    blocked.unlink()
    os.close(writer)
    sampler.stop()


def test_power_that_falls_makes_the_job_suspected(fake: FakeSys) -> None:
    ranks = tuple(
        Rank(id=ProcessId(pid=700 + i, start_ticks=1), rank=i, local_rank=i, gpu_uuids=(f"AMD-{0xAB00 + i:x}",))
        for i in range(2)
    )
    job = Job(job_id="j", job_key="j", launcher="torchrun", launcher_id=None, ranks=ranks)
    settings, now = Detector(), 0.0
    watch, states = job_watch.begin_watch(job, 0.0), []
    for watts in [WORK_WATTS] * 300 + [HANG_WATTS] * 140:
        now += 1.0
        for number in range(2):
            fake.sensor(number, "power1_average", watts * 10**6)
        samples = {gpu.uuid: gpu for gpu in amd_sysfs.read_sweep(fake.root).gpus}
        watch, _ = detector.apply_sample(watch, samples, now, settings)
        if states[-1:] != [watch.state]:
            states.append(watch.state)
    assert states == [JobState.TRAINING, JobState.QUIET, JobState.SUSPECTED]


def test_check_of_the_power_reads_amd_gpus(fake: FakeSys, sampler: AmdSampler) -> None:
    assert sampler.wait_for_sweep(10.0) is not None
    node = Node(gpus=sampler, sys_root=fake.root)
    sample = gpu_power.observe(node, gpu_power.Settings())
    verdict = gpu_power.judge([sample], gpu_power.Settings())
    assert (verdict.status, verdict.reason) == (CheckStatus.OK, "PowerRead")
    assert verdict.message == "2 GPUs draw 1380 W of 1500 W allowed; the lowest is GPU 0 at 690 W"
    lowered = replace(sample, gpus=(*sample.gpus, replace(sample.gpus[0], index=2, power_limit_watts=500.0)))
    verdict = gpu_power.judge([lowered], gpu_power.Settings())
    assert (verdict.reason, verdict.remedy) == ("PowerLimitLowered", "amd-smi set -g 2 -o 750")
