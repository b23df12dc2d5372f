"""Sampling of GPUs through the real pynvml and the fake driver library."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hangwatch.model import CheckStatus, Fault, GpuSweep, SamplerStatus
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.gpu.details import Details, GpuFabric, XidDetails, XidEvent
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node.machine import Clock
from tests.commands import finished, first_line, spawn
from tests.conftest import stopping, wait_for
from tests.fake_driver import FakeDriver, h100, uuid_of
from tests.memory_cgroup import cgroup_below
from tests.node_tree import Checked, NodeTree, values

Start = Callable[..., NvmlSampler]


@pytest.fixture
def start(fake_driver: FakeDriver) -> Iterator[Start]:
    """Yield a function that starts a sampler. On a busy machine a driver that answers may take a second, too."""
    started: list[NvmlSampler] = []

    def begin(**options: float) -> NvmlSampler:
        settings = {"sample_seconds": 0.2, "deadline_seconds": 20.0, **options}
        sampler = NvmlSampler(environ=fake_driver.environ, **settings)  # type: ignore[arg-type]
        started.append(sampler)
        sampler.start()
        return sampler

    yield begin
    for sampler in started:
        sampler.stop()


def first_sweep(sampler: NvmlSampler) -> GpuSweep:
    return wait_for(sampler.latest, "a first sweep")


def sweep_where(sampler: NvmlSampler, holds: Callable[[GpuSweep], bool], what: str) -> GpuSweep:
    def probe() -> GpuSweep | None:
        sweep = sampler.latest()
        return sweep if sweep is not None and holds(sweep) else None

    return wait_for(probe, what)


def next_sweep(sampler: NvmlSampler, last: GpuSweep) -> GpuSweep:
    return sweep_where(
        sampler, lambda sweep: sweep.taken_monotonic_seconds > last.taken_monotonic_seconds, "the next sweep"
    )


def status_where(sampler: NvmlSampler, holds: Callable[[SamplerStatus], bool], what: str) -> SamplerStatus:
    def probe() -> SamplerStatus | None:
        status = sampler.status()
        return status if holds(status) else None

    return wait_for(probe, what)


def children() -> list[int]:
    """Return the pids of the sampling processes of this test."""
    pids = procfs.read_children(os.getpid())
    program = "hangwatch.probes.gpu.driver_process"
    return [pid for pid in pids if program in pseudo_files.read_or_empty(f"/proc/{pid}/cmdline")]


def child_pid() -> int:
    """Return the pid of the sampling process, never 0: kill(2) would hit the test itself."""
    pids = children()
    assert pids, "no sampling process runs"
    return pids[0]


def test_eight_healthy_gpus_in_base_units(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("gpu 2 pids 4711 4712")
    sweep = first_sweep(start())
    assert [gpu.index for gpu in sweep.gpus] == list(range(8))
    assert sweep.faults == ()
    assert sweep.driver_version == "570.86.15"
    gpu = sweep.gpus[2]
    assert (gpu.uuid, gpu.name) == (uuid_of(2), "NVIDIA H100 80GB HBM3")
    assert (gpu.power_watts, gpu.power_limit_watts) == (600.0, 700.0)
    assert gpu.utilization_ratio == 0.98
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (70 * 2**30, 80 * 2**30)
    assert gpu.sm_clock_hertz == 1.98e9
    assert gpu.temperature_celsius == 55.0
    assert gpu.energy_joules == 1e6
    assert gpu.pids == (4711, 4712)
    assert gpu.faults == ()


def test_sweeps_keep_a_beat_of_a_fifth_of_a_second(start: Start) -> None:
    """Some sweeps may be late: on a busy machine the process gets its core later."""
    sampler = start(sample_seconds=0.2)
    sweep = first_sweep(sampler)
    taken = [sweep.taken_monotonic_seconds]
    while len(taken) < 30:
        sweep = next_sweep(sampler, sweep)
        taken.append(sweep.taken_monotonic_seconds)

    def in_time(beat: float) -> int:
        periods = [(at - beat) / 0.2 for at in taken]
        return sum(abs(count - round(count)) < 0.05 for count in periods)

    assert max(map(in_time, taken)) >= 10, taken
    assert sampler.status().alive


def test_power_follows_the_scenario(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start()
    assert first_sweep(sampler).gpus[3].power_watts == 600.0
    fake_driver.add("gpu 3 power_watts 95.5")
    sweep = sweep_where(sampler, lambda sweep: sweep.gpus[3].power_watts == 95.5, "GPU 3 at 95.5 W")
    assert sweep.gpus[4].power_watts == 600.0


def test_power_follows_a_schedule(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start()
    first_sweep(sampler)
    falls_at = time.time() + 1.0
    fake_driver.add(f"gpu all power_watts 640 110@{falls_at}")
    fallen = sweep_where(sampler, lambda sweep: all(gpu.power_watts == 110.0 for gpu in sweep.gpus), "power to fall")
    assert fallen.taken_unix_seconds > falls_at - 0.2


def test_one_lost_gpu_is_seven_samples_and_one_fault(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start()
    first_sweep(sampler)
    fake_driver.add("gpu 5 fault all 15")
    sweep = sweep_where(sampler, lambda sweep: bool(sweep.faults), "the loss of GPU 5")
    assert [gpu.index for gpu in sweep.gpus] == [0, 1, 2, 3, 4, 6, 7]
    (fault,) = sweep.faults
    assert (fault.subject, fault.reason) == ("gpu 5", "GpuIsLost")
    assert "GPU is lost" in fault.detail
    assert "power-cycle" in fault.remedy
    assert (sampler.status().alive, sampler.status().restarts) == (True, 0)


def test_what_a_gpu_does_not_have_is_none_and_no_fault(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.write([line for line in h100(1) if "energy" not in line and "utilization" not in line])
    fake_driver.add("gpu 0 fault nvmlDeviceGetTemperature 13")  # the driver is too old for this call
    (gpu,) = first_sweep(start()).gpus
    assert (gpu.energy_joules, gpu.utilization_ratio, gpu.temperature_celsius) == (None, None, None)
    assert gpu.faults == ()
    assert gpu.power_watts == 600.0


def test_a_reading_that_should_be_there_is_none_and_a_fault(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("gpu 1 fault nvmlDeviceGetPowerUsage 999")
    sweep = first_sweep(start())
    gpu = sweep.gpus[1]
    assert gpu.power_watts is None
    assert gpu.utilization_ratio == 0.98
    assert [(fault.subject, fault.reason) for fault in gpu.faults] == [("gpu 1", "Unknown")]
    assert "nvmlDeviceGetPowerUsage" in gpu.faults[0].detail


def test_an_error_code_newer_than_pynvml_is_named_by_its_number(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("gpu 1 fault nvmlDeviceGetPowerUsage 77")
    assert first_sweep(start()).gpus[1].faults[0].reason == "Error77"


def test_a_driver_without_gpus_is_an_empty_sweep(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.write(h100(0))
    sweep = first_sweep(start())
    assert (sweep.gpus, sweep.faults) == ((), ())


def test_driver_that_blocks_is_given_up_within_its_deadline_and_replaced(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start(deadline_seconds=1.0)
    first_sweep(sampler)
    blocked = child_pid()
    block = "fault nvmlEventSetWait_v2 sleep"  # a call without a GPU argument
    began = time.monotonic()
    fake_driver.add(block)
    status = status_where(sampler, lambda status: status.stalled, "the stall")
    assert time.monotonic() - began < 30.0
    assert not status.alive
    assert status.fault.reason == "Stalled"
    assert str(blocked) in status.fault.detail
    assert status.abandoned == 0
    assert not Path(f"/proc/{blocked}").exists()
    fake_driver.remove(block)
    status = status_where(sampler, lambda status: status.alive and status.fault is None, "a new child")
    assert status.restarts >= 1
    assert not status.stalled
    sweep_where(sampler, lambda sweep: sweep.taken_monotonic_seconds > began + 1, "sweeps to go on")


def test_wedged_gpu_is_one_fault_and_other_gpus_are_read(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start(deadline_seconds=2.0, start_deadline_seconds=2.0, gpu_retry_seconds=0.3)
    first_sweep(sampler)
    wedge = "gpu 3 fault all sleep"  # all calls about this GPU, opening included, as with a wedged driver
    fake_driver.add(wedge)
    sweep = sweep_where(sampler, lambda sweep: bool(sweep.faults), "a sweep without GPU 3")
    assert [gpu.index for gpu in sweep.gpus] == [0, 1, 2, 4, 5, 6, 7]
    (fault,) = sweep.faults
    assert (fault.subject, fault.reason, fault.about) == ("gpu 3", "NoAnswer", "target")
    assert "sample" in fault.detail
    restarts = sampler.status().restarts
    taken, most = [sweep.taken_monotonic_seconds], 0
    while len(taken) < 40:  # 8 s, with several attempts to reach GPU 3 that take 2 s each
        sweep = next_sweep(sampler, sweep)
        taken.append(sweep.taken_monotonic_seconds)
        most = max(most, len(children()))
        assert ([gpu.index for gpu in sweep.gpus], len(sweep.faults)) == ([0, 1, 2, 4, 5, 6, 7], 1)
    pauses = [after - before for before, after in itertools.pairwise(taken)]
    assert sum(pause >= 2.0 for pause in pauses) < 2, pauses
    status = sampler.status()
    assert (status.alive, status.stalled, status.fault, status.restarts) == (True, False, None, restarts)
    assert most <= 2, "the one that samples, and the one that tries GPU 3"
    fake_driver.remove(wedge)
    sweep = sweep_where(sampler, lambda sweep: len(sweep.gpus) == 8, "GPU 3 to be read again")
    assert ([gpu.index for gpu in sweep.gpus], sweep.faults) == (list(range(8)), ())
    assert sampler.status().restarts == restarts, "the sampling process was told, not replaced"


def test_gpu_wedged_at_start_differs_from_dead_driver(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("gpu 0 fault all sleep")
    sampler = start(deadline_seconds=2.0, start_deadline_seconds=2.0)
    sweep = first_sweep(sampler)
    assert [gpu.index for gpu in sweep.gpus] == list(range(1, 8))
    assert [(fault.subject, fault.reason) for fault in sweep.faults] == [("gpu 0", "NoAnswer")]
    fake_driver.add("gpu all fault all sleep")
    silent = start(deadline_seconds=1.0, start_deadline_seconds=1.0)
    status = status_where(silent, lambda status: status.restarts >= 2, "the driver to be given up twice")
    assert (silent.latest(), status.fault.subject, status.fault.reason) == (None, "driver", "Stalled")


def test_two_wedged_gpus_are_six_readings_and_two_faults(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start(deadline_seconds=2.0, start_deadline_seconds=8.0)
    first_sweep(sampler)
    fake_driver.add("gpu 3 fault all sleep", "gpu 6 fault all sleep")
    sweep = sweep_where(sampler, lambda sweep: len(sweep.faults) == 2, "a sweep without GPUs 3 and 6")
    assert [gpu.index for gpu in sweep.gpus] == [0, 1, 2, 4, 5, 7]
    assert [fault.subject for fault in sweep.faults] == ["gpu 3", "gpu 6"]


def test_a_driver_that_crashes_is_started_again(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start()
    first_sweep(sampler)
    fake_driver.add("gpu 2 fault nvmlDeviceGetName crash", "gpu 2 fault nvmlDeviceGetPowerUsage crash")
    status = status_where(sampler, lambda status: status.fault is not None, "the crash")
    assert status.fault.reason == "Crashed"
    assert "SIGSEGV" in status.fault.detail
    assert not status.stalled
    fake_driver.write(h100())
    status_where(sampler, lambda status: status.alive and status.fault is None, "a new child")


def test_no_driver_is_one_fault_and_is_looked_for_again(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.vanish()
    sampler = start(driver_retry_seconds=0.3)
    status = status_where(sampler, lambda status: status.fault is not None, "the missing driver")
    assert (status.fault.subject, status.fault.reason) == ("driver", "DriverNotLoaded")
    assert "modprobe nvidia" in status.fault.remedy
    assert sampler.latest() is None
    assert status.restarts == 0
    fake_driver.write(h100())
    first_sweep(sampler)


def test_no_driver_library_is_driver_not_found(tmp_path: Path) -> None:
    sampler = NvmlSampler(sample_seconds=0.2, deadline_seconds=1, environ={"LD_LIBRARY_PATH": str(tmp_path)})
    sampler.start()
    with stopping(sampler):
        status = status_where(sampler, lambda status: status.fault is not None, "the missing library")
    assert (status.fault.subject, status.fault.reason) == ("driver", "DriverNotFound")
    assert "NVIDIA driver" in status.fault.remedy
    assert not status.alive


def test_a_driver_replaced_under_us_is_opened_anew(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("fault nvmlInitWithFlags 18")
    sampler = start()
    status = status_where(sampler, lambda status: status.fault is not None, "the mismatch")
    assert status.fault.reason == "LibRmVersionMismatch"
    assert "reboot" in status.fault.remedy
    fake_driver.write(h100())
    first_sweep(sampler)


def test_a_driver_that_blocks_while_it_opens_is_given_up(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("fault nvmlInitWithFlags sleep")
    began = time.monotonic()
    sampler = start(deadline_seconds=1.0, start_deadline_seconds=1.0)
    status = status_where(sampler, lambda status: status.stalled, "the stall")
    assert time.monotonic() - began < 30.0
    assert "persistence mode" in status.fault.remedy
    assert sampler.latest() is None


def test_gpus_that_take_long_to_open_are_waited_for(fake_driver: FakeDriver, start: Start) -> None:
    """Without persistence mode each takes a second or more, so eight of them exceed the deadline of a sample."""
    fake_driver.add("gpu all fault nvmlDeviceGetHandleByIndex_v2 slow")
    sampler = start(deadline_seconds=2.0)
    early = sampler.query(Details[GpuFabric], 0.1)
    assert isinstance(early, Fault) and "still being opened" in early.detail and "nvidia-smi -pm 1" in early.remedy
    assert len(first_sweep(sampler).gpus) == 8
    status = sampler.status()
    assert (status.restarts, status.stalled, status.fault) == (0, False, None)


def test_the_child_dies_with_its_parent_even_while_the_driver_blocks(fake_driver: FakeDriver) -> None:
    fake_driver.add("gpu 0 fault nvmlDeviceGetPowerUsage sleep")
    program = (
        "import sys, time\n"
        "from hangwatch.probes.gpu.sampler import NvmlSampler\n"
        "sampler = NvmlSampler(sample_seconds=1, deadline_seconds=60)\n"
        "sampler.start()\n"
        "while sampler._child is None or not sampler.status().alive: time.sleep(0.02)\n"
        "print(sampler._child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with spawn(sys.executable, "-c", program, env=fake_driver.environ) as parent:
        child = int(first_line(parent))
        assert Path(f"/proc/{child}").exists()
    wait_for(lambda: procfs.read_thread_states(child) in ("", "Z"), "the child to die with its parent", 20)


def test_stop_leaves_no_process(start: Start) -> None:
    sampler = start()
    first_sweep(sampler)
    pid = child_pid()
    assert pid
    sampler.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert sampler.status().fault is None


def test_the_child_is_lean_and_inherits_nothing(start: Start) -> None:
    sampler = start()
    first_sweep(sampler)
    pid = child_pid()
    status = Path(f"/proc/{pid}/status").read_text()
    resident_kibibytes = int(status.split("VmRSS:")[1].split()[0])
    files = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    print(f"child: {resident_kibibytes} KiB resident")
    assert resident_kibibytes < 24 * 1024
    assert not [name for name in files if name.startswith("socket:")]
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")


def test_sampling_goes_on_while_slow_details_are_collected(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("gpu all fault nvmlDeviceGetGpuFabricInfoV slow")
    sampler = start()
    before = first_sweep(sampler).taken_monotonic_seconds
    replies: list[Details[GpuFabric] | Fault] = []
    asking = threading.Thread(target=lambda: replies.append(sampler.query(Details[GpuFabric], 20.0)))
    asking.start()
    times: set[float] = set()
    while asking.is_alive():
        times.add(first_sweep(sampler).taken_monotonic_seconds)
        asking.join(0.05)
    assert isinstance(replies[0], Details)
    assert len(replies[0].gpus) == 8
    assert len(times - {before}) >= 5  # eight slow calls took 2.4 s


DRIVER = """
import sys
from pathlib import Path
import pynvml
from hangwatch.probes.gpu.driver_process.driver import STATIC_EVERY_SECONDS, Driver
from hangwatch.probes.gpu.messages import Begin

def print_sweep():
    found = driver.sweep()
    print(len(found.gpus), len(found.faults))

scenario = Path(sys.argv[1])
healthy = scenario.read_text()
scenario.write_text(healthy + sys.argv[2])
pynvml.nvmlInit()
driver = Driver(Begin(sample_seconds=1.0, parent_pid=0), lambda gpu, purpose: None)
print_sweep()
"""
REOPEN = """
driver.static_at = float("-inf")
driver.sweep()
print("answers, so it is not opened anew")
scenario.write_text(healthy + "gpu all fault all 999\\n")
print_sweep()
scenario.write_text(scenario.read_text() + "fault nvmlInitWithFlags 18\\n")
driver.static_at = float("-inf")
try:
    driver.sweep()
except pynvml.NVMLError_LibRmVersionMismatch:
    print("opened anew")
"""
FIND = """
scenario.write_text(healthy)
print_sweep()
driver.static_at -= STATIC_EVERY_SECONDS
print_sweep()
scenario.write_text(healthy + "gpus 7\\n")
driver.static_at -= STATIC_EVERY_SECONDS
print_sweep()
"""


@pytest.mark.parametrize(
    ("program", "at_first", "printed"),
    [
        (REOPEN, "", ["8 0", "answers, so it is not opened anew", "0 8", "opened anew"]),
        (FIND, "gpu 5 fault all 15\n", ["7 1", "7 1", "8 0", "7 0"]),
    ],
    ids=["no GPU answers", "a GPU was lost at the start"],
)
def test_driver_without_gpus_is_opened_anew_and_lost_gpus_are_found(
    fake_driver: FakeDriver, program: str, at_first: str, printed: list[str]
) -> None:
    command = [sys.executable, "-c", DRIVER + program, str(fake_driver.scenario), at_first]
    done = finished(*command, env=fake_driver.environ)
    assert done.stdout.splitlines() == printed, done.stderr


def test_wait_for_first_sweep_ends_with_sweep_or_reason(fake_driver: FakeDriver, start: Start) -> None:
    sweep = start().wait_for_sweep(60.0)
    assert len(sweep.gpus) == 8
    fake_driver.vanish()
    began = time.monotonic()
    without = start()
    assert without.wait_for_sweep(120.0) is None
    assert time.monotonic() - began < 60.0
    assert without.status().fault is not None


@pytest.fixture
def freezer() -> Iterator[Path]:
    """Make a control group that freezes processes. Even SIGKILL does not end them, as in a driver that hangs."""
    with cgroup_below("/sys/fs/cgroup/freezer") as folder:
        yield folder
        (folder / "freezer.state").write_text("THAWED")


def test_a_child_that_cannot_be_killed_is_left_behind_and_counted(start: Start, freezer: Path) -> None:
    sampler = start(deadline_seconds=1.0)
    first_sweep(sampler)
    stuck = child_pid()
    (freezer / "tasks").write_text(str(stuck))
    (freezer / "freezer.state").write_text("FROZEN")
    status = status_where(sampler, lambda status: status.abandoned == 1, "the child to be abandoned")
    assert Path(f"/proc/{stuck}").exists()
    assert status.stalled
    status = status_where(sampler, lambda status: status.alive and not status.stalled, "another child to take over")
    assert status.abandoned == 1
    assert sampler.latest() is not None
    (freezer / "freezer.state").write_text("THAWED")  # only now SIGKILL ends the process
    status_where(sampler, lambda status: status.abandoned == 0, "the child to be gone")


def test_gpu_with_unkillable_call_is_not_tried_again(fake_driver: FakeDriver, start: Start, freezer: Path) -> None:
    sampler = start(deadline_seconds=1.0, gpu_retry_seconds=0.2)
    first_sweep(sampler)
    stuck = child_pid()
    fake_driver.add("gpu 3 fault all sleep")
    seen: list[int | None] = []

    def blocked() -> bool:
        seen.append(sampler._child.announced.gpu)
        return seen[-5:] == [3] * 5

    wait_for(blocked, "the call about GPU 3 to block")
    (freezer / "tasks").write_text(str(stuck))
    (freezer / "freezer.state").write_text("FROZEN")
    sweep = sweep_where(sampler, lambda sweep: bool(sweep.faults), "a sweep without GPU 3")
    end, most = sweep.taken_monotonic_seconds + 3, 0  # long enough for ten attempts
    while sweep.taken_monotonic_seconds < end:
        sweep = next_sweep(sampler, sweep)
        most = max(most, sampler.status().abandoned)
    assert most == 1
    (freezer / "freezer.state").write_text("THAWED")
    fake_driver.write(h100())
    sweep_where(sampler, lambda sweep: len(sweep.gpus) == 8, "GPU 3 to be read again")


def xids_of(sampler: NvmlSampler) -> tuple[XidEvent, ...]:
    reply = sampler.query(XidDetails, 60.0)
    assert isinstance(reply, XidDetails)
    return reply.events


def test_xids_from_the_driver_are_kept_for_later_queries(fake_driver: FakeDriver, start: Start) -> None:
    sampler = start()
    assert xids_of(sampler) == ()
    fake_driver.add("xid 1 3 79", "xid 2 6 48")
    first, second = wait_for(lambda: xids_of(sampler), "the XIDs")
    assert (first.code, first.index, first.pci_address) == (79, 3, "0000:61:00.0")
    assert (second.code, second.index) == (48, 6)
    assert len(xids_of(sampler)) == 2


def test_xids_of_the_driver_join_those_of_the_log(fake_driver: FakeDriver, start: Start, tmp_path: Path) -> None:
    """Count an XID of both NVML and the log once, and one of NVML alone, too."""
    tree = NodeTree(tmp_path / "node")
    node = tree.node(gpus=start(), clock=Clock())
    now = int(time.monotonic() * 1e6)
    (tree.dev / "kmsg").write_text(f"4,1,{now},-;NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.\n")
    fake_driver.add("xid 1 3 79", "xid 2 6 48")
    check = Checked("xid")
    wait_for(lambda: values(check.run(node), "xid_nvml_only_events"), "the XID that NVML alone tells")
    result = check.run(node)
    assert values(result, "xid_errors_total") == {("0000:61:00", "79"): 1}
    assert list(values(result, "xid_nvml_only_events").values()) == [1]
    assert result.verdict.status is CheckStatus.CRITICAL
    assert result.verdict.message.count("XID 79") == 1
    assert "(reported by the kernel log and by NVML)" in result.verdict.message
    assert "XID 48" in result.verdict.message and "reported by NVML only" in result.verdict.message


def test_xids_of_the_driver_count_where_there_is_no_log(fake_driver: FakeDriver, start: Start, tmp_path: Path) -> None:
    node = NodeTree(tmp_path / "node").node(gpus=start(), clock=Clock())
    check = Checked("xid")
    assert check.run(node).verdict.reason == "NotPresent"
    fake_driver.add("xid 1 3 79", "xid 2 4 154")
    result = wait_for(lambda: (found := check.run(node)).points and found, "the XID")
    assert result.verdict.status is CheckStatus.CRITICAL and "XID 79" in result.verdict.message


def test_a_driver_that_tells_no_xids_is_sampled_all_the_same(fake_driver: FakeDriver, start: Start) -> None:
    fake_driver.add("fault nvmlEventSetCreate 3", "xid 1 3 79")
    sampler = start()
    assert len(first_sweep(sampler).gpus) == 8
    assert xids_of(sampler) == ()


def test_unknown_query_returns_a_fault(start: Start) -> None:
    reply = start().query(Fault, 60.0)
    assert isinstance(reply, Fault)
    assert reply.reason == "UnknownQuestion"


def test_instances_of_a_divided_gpu_are_listed(start: Start, fake_driver: FakeDriver) -> None:
    lines = ["gpu 2 mig_mode 1", "gpu 2 mig_instances 7", "gpu 1020 uuid MIG-a", "gpu 1022 uuid MIG-c"]
    fake_driver.add(*lines)
    gpus = first_sweep(start()).gpus
    assert [gpu.mig_uuids for gpu in gpus[1:4]] == [(), ("MIG-a", "MIG-c"), ()]
    assert not [fault for gpu in gpus for fault in gpu.faults]
