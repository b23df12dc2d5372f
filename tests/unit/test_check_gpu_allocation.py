"""gpu_allocation: GPU memory that no process holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model import CheckVerdict
from hangwatch.probes.gpu.sampler import NvmlSampler
from tests.fake_driver import FakeDriver, h100, sampling, uuid_of
from tests.node_tree import Checked, NodeTree, expect, status_and_reason, values

UUIDS = [uuid_of(index) for index in range(4)]
TAKEN, RESERVED = 3 << 30, 600 << 20


class Gpus:
    """A node of four GPUs, read through the real pynvml."""

    def __init__(self, driver: FakeDriver, sampler: NvmlSampler) -> None:
        self.driver, self.sampler = driver, sampler

    def set(self, *used: bool | None, memory_bytes: int = 0) -> Gpus:
        """Write the driver's data of each GPU: True is used by a process, False is not, None is split by MIG.

        A split GPU lists no processes. A GPU without a value is used by a process.
        """
        lines = [f"gpu all memory_used_bytes {memory_bytes + RESERVED}", f"gpu all memory_reserved_bytes {RESERVED}"]
        for index in range(len(UUIDS)):
            told = used[index] if index < len(used) else True
            lines.append(f"gpu {index} mig_mode {int(told is None)}")
            lines += [f"gpu {index} pids {4000 + index}"] if told else []
        self.driver.write([*h100(len(UUIDS)), *lines])
        return self


@pytest.fixture(scope="module")
def gpus(fake_nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    scenario = tmp_path_factory.mktemp("gpus") / "gpus.scenario"
    driver = FakeDriver(fake_nvml_library, scenario, h100(len(UUIDS)))
    with sampling(driver) as sampler:
        yield Gpus(driver, sampler)


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    tree.put_in_namespace("self", "pid", 4026531836)
    tree.time.now_monotonic = 20_000.0
    return tree


def looks(tree: NodeTree, gpus: Gpus, check: Checked, minutes: int) -> tuple[tuple[str, str], CheckVerdict]:
    """Run the check once a minute for `minutes` minutes. Return its last status and reason, and its last verdict."""
    result = check.run(tree.node(gpus=gpus.sampler))
    for _ in range(minutes):
        tree.time.pass_seconds(60)
        result = check.run(tree.node(gpus=gpus.sampler))
    return status_and_reason(result), result.verdict


def test_gpus_that_are_used(tree: NodeTree, gpus: Gpus) -> None:
    node = tree.node(gpus=gpus.set(True, True, memory_bytes=TAKEN).sampler)
    result = expect(("OK", "GpusAccountedFor"), "gpu_allocation", node)
    assert result.verdict.message == "4 of 4 GPUs have a process"
    assert set(values(result, "gpu_memory_without_process_bytes").values()) == {0}


def test_gpu_memory_without_a_process_is_a_warning_after_ten_minutes(tree: NodeTree, gpus: Gpus) -> None:
    gpus.set(False, memory_bytes=TAKEN)
    check = Checked("gpu_allocation")
    assert looks(tree, gpus, check, 9)[0] == ("OK", "GpusAccountedFor")
    status, verdict = looks(tree, gpus, check, 1)
    assert status == ("WARNING", "GpuMemoryLeft")
    assert verdict.message == "GPU 0: 3.0 GiB in use without a process for 10 min 00 s"
    assert "fuser" in verdict.remedy


def test_one_look_with_a_process_begins_the_time_anew(tree: NodeTree, gpus: Gpus) -> None:
    check = Checked("gpu_allocation")
    looks(tree, gpus.set(False, memory_bytes=TAKEN), check, 9)
    looks(tree, gpus.set(True, memory_bytes=TAKEN), check, 0)
    assert looks(tree, gpus.set(False, memory_bytes=TAKEN), check, 9)[0] == ("OK", "GpusAccountedFor")
    assert looks(tree, gpus.set(False, memory_bytes=TAKEN), check, 1)[0] == ("WARNING", "GpuMemoryLeft")


def test_little_memory_is_nothing(tree: NodeTree, gpus: Gpus) -> None:
    assert looks(tree, gpus.set(False, memory_bytes=5 << 20), Checked("gpu_allocation"), 60)[0][0] == "OK"


def test_gpu_without_a_process_list_is_not_judged(tree: NodeTree, gpus: Gpus) -> None:
    status, verdict = looks(tree, gpus.set(None, memory_bytes=TAKEN), Checked("gpu_allocation"), 60)
    assert status == ("OK", "GpusAccountedFor")
    assert verdict.message == "3 of 3 GPUs have a process; processes of 1 GPU unknown (MIG or vGPU)"


def test_in_a_pid_namespace_of_its_own_it_does_not_guess(tree: NodeTree, gpus: Gpus) -> None:
    tree.put_in_namespace("self", "pid", 4026532301)
    node = tree.node(gpus=gpus.set(False, memory_bytes=TAKEN).sampler)
    result = expect(("UNKNOWN", "OtherPidNamespace"), "gpu_allocation", node)
    assert "hostPID" in result.verdict.remedy
