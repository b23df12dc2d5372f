"""gpu_allocation: allocated GPUs without a process, and GPU memory that no process holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.model import CheckVerdict
from hangwatch.probes.gpu import gpu_holders
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node.machine import Node
from tests.fake_driver import FakeDriver, h100, sampling, uuid_of
from tests.node_tree import Checked, NodeTree, expect, run, status_and_reason, values

UUIDS = [uuid_of(index) for index in range(4)]
POD_UID = "6f1c2d3e-0a1b-4c5d-8e9f-001122334455"
POD = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_UID.replace('-', '_')}.slice"
SLURM = "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"
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


def member(tree: NodeTree, pid: int, cgroup: str, *, uid: int = 1004, began: int = 1_000_000, gpus: str = "") -> None:
    """Add a process in this control group. It started `began` ticks after boot."""
    tree.process(pid, uid=uid, start_ticks=began, environ={"SLURM_JOB_GPUS": gpus} if gpus else {})
    tree.write(f"proc/{pid}/cgroup", f"0::{cgroup}\n")


def checkpoint(tree: NodeTree, *entries: dict[str, object]) -> None:
    form = {"Data": {"PodDeviceEntries": list(entries), "RegisteredDevices": {"nvidia.com/gpu": UUIDS}}, "Checksum": 1}
    tree.write(f"proc/1/root/{gpu_holders.CHECKPOINT}", json.dumps(form))


def entry(devices: object, pod: str = POD_UID, resource: str = "nvidia.com/gpu") -> dict[str, object]:
    names = {"PodUID": pod, "ContainerName": "train", "ResourceName": resource}
    return {**names, "DeviceIDs": devices, "AllocResp": "CkA="}


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


def test_gpus_of_an_idle_slurm_job_are_a_warning_after_half_an_hour(tree: NodeTree, gpus: Gpus) -> None:
    member(tree, 500, SLURM, uid=0, began=900_000)
    member(tree, 511, SLURM, gpus="1,2")
    gpus.set(True, False, False, False)
    check = Checked("gpu_allocation")
    first = check.expect(("OK", "GpusAccountedFor"), tree.node(gpus=gpus.sampler))
    assert first.verdict.message.startswith(
        "1 of 4 GPUs have a process; no process on GPU 1, allocated to Slurm job 4711 of uid 1004 for 3 h 03 min"
    )
    assert list(values(first, "gpu_held_without_process").values()) == [0, 1, 1, 0]
    assert looks(tree, gpus, check, 29)[0] == ("OK", "GpusAccountedFor")
    status, verdict = looks(tree, gpus, check, 1)
    assert status == ("WARNING", "GpuHeldIdle")
    assert verdict.message == (
        "GPUs 1-2: no process for 30 min 00 s; allocated to Slurm job 4711 of uid 1004 for 3 h 33 min"
    )
    assert "scancel 4711" in verdict.remedy


def test_the_steps_of_a_job_hold_what_each_was_given(tree: NodeTree, gpus: Gpus) -> None:
    """Set SLURM_STEP_GPUS only for children of srun, as Slurm 22.05 does."""
    member(tree, 500, SLURM, uid=0)
    for pid, number in ((511, "3"), (512, "1")):
        member(tree, pid, SLURM)
        tree.write(f"proc/{pid}/environ", f"SLURM_STEP_GPUS={number}\0")
    result = run("gpu_allocation", tree.node(gpus=gpus.set(False, False, False, False).sampler))
    assert list(values(result, "gpu_held_without_process").values()) == [0, 1, 0, 1]


def test_one_look_with_a_process_begins_the_time_anew(tree: NodeTree, gpus: Gpus) -> None:
    member(tree, 511, SLURM, gpus="0")
    check = Checked("gpu_allocation")
    looks(tree, gpus.set(False), check, 29)
    looks(tree, gpus.set(True), check, 0)
    assert looks(tree, gpus.set(False), check, 29)[0] == ("OK", "GpusAccountedFor")
    assert looks(tree, gpus.set(False), check, 1)[0] == ("WARNING", "GpuHeldIdle")


def test_the_next_job_has_a_time_of_its_own(tree: NodeTree, gpus: Gpus) -> None:
    member(tree, 511, SLURM, gpus="0")
    check = Checked("gpu_allocation")
    looks(tree, gpus.set(False), check, 29)
    member(tree, 511, SLURM.replace("4711", "4712"), gpus="0")
    assert looks(tree, gpus.set(False), check, 5)[0] == ("OK", "GpusAccountedFor")


@pytest.mark.parametrize(
    "devices",
    [{"0": [UUIDS[1]]}, {"-1": [f"{UUIDS[1]}::3"]}, [UUIDS[1]], {"0": ["1"]}, {"0": ["nvidia1"]}],
    ids=["by NUMA node", "shared", "before 1.20", "by index", "of GKE"],
)
def test_a_gpu_that_the_kubelet_gave_to_a_pod(tree: NodeTree, gpus: Gpus, devices: object) -> None:
    member(tree, 600, f"{POD}/cri-containerd-1.scope", uid=65535)
    checkpoint(tree, entry(devices))
    status, verdict = looks(tree, gpus.set(True, False), Checked("gpu_allocation"), 30)
    assert status == ("WARNING", "GpuHeldIdle")
    assert f"GPU 1: no process for 30 min 00 s; allocated to pod {POD_UID} (container train)" in (verdict.message)
    assert POD_UID in verdict.remedy and "kubectl get pods" in verdict.remedy


@pytest.mark.parametrize(
    "given_to",
    [entry({"0": [UUIDS[0]]}, pod="00000000-aaaa-bbbb-cccc-000000000000"), entry({"0": ["a"]}, resource="a.com/nic")],
    ids=["a pod that has ended", "another device"],
)
def test_stale_kubelet_checkpoint_holds_no_gpu(tree: NodeTree, gpus: Gpus, given_to: dict[str, object]) -> None:
    member(tree, 600, f"{POD}/cri-containerd-1.scope")
    checkpoint(tree, given_to)
    assert looks(tree, gpus.set(False), Checked("gpu_allocation"), 60)[0] == ("OK", "GpusAccountedFor")


@pytest.mark.parametrize("text", ["", "{", '{"Data": 1}', '{"Data": {"PodDeviceEntries": [7]}}', "[" * 100_000])
def test_a_checkpoint_of_another_form_is_said(tree: NodeTree, gpus: Gpus, text: str) -> None:
    member(tree, 600, POD)
    tree.write(f"proc/1/root/{gpu_holders.CHECKPOINT}", text)
    result = expect(("UNKNOWN", "UnreadableCheckpoint"), "gpu_allocation", tree.node(gpus=gpus.set(False).sampler))
    assert "kubelet_internal_checkpoint" in result.verdict.message


def test_gpu_memory_without_a_process_is_a_warning_after_ten_minutes(tree: NodeTree, gpus: Gpus) -> None:
    gpus.set(False, memory_bytes=TAKEN)
    check = Checked("gpu_allocation")
    assert looks(tree, gpus, check, 9)[0] == ("OK", "GpusAccountedFor")
    status, verdict = looks(tree, gpus, check, 1)
    assert status == ("WARNING", "GpuMemoryLeft")
    assert verdict.message == "GPU 0: 3.0 GiB in use without a process for 10 min 00 s"
    assert "fuser" in verdict.remedy


def test_little_memory_is_nothing(tree: NodeTree, gpus: Gpus) -> None:
    assert looks(tree, gpus.set(False, memory_bytes=5 << 20), Checked("gpu_allocation"), 60)[0][0] == "OK"


def test_gpu_without_a_process_list_is_not_judged(tree: NodeTree, gpus: Gpus) -> None:
    member(tree, 511, SLURM, gpus="0,1")
    status, verdict = looks(tree, gpus.set(None, memory_bytes=TAKEN), Checked("gpu_allocation"), 60)
    assert status == ("OK", "GpusAccountedFor")
    assert verdict.message == "3 of 3 GPUs have a process; processes of 1 GPU unknown (MIG or vGPU)"


def test_in_a_pid_namespace_of_its_own_it_does_not_guess(tree: NodeTree, gpus: Gpus) -> None:
    tree.put_in_namespace("self", "pid", 4026532301)
    node = tree.node(gpus=gpus.set(False, memory_bytes=TAKEN).sampler)
    result = expect(("UNKNOWN", "OtherPidNamespace"), "gpu_allocation", node)
    assert "hostPID" in result.verdict.remedy


@pytest.mark.parametrize("value", ["9", "0,x", "99999", "-1", "1" * 5000, "0-9999"])
def test_a_user_can_blame_only_himself_and_gpus_that_are_there(tree: NodeTree, value: str) -> None:
    member(tree, 511, SLURM, gpus=value)
    held = [uuid for holder in gpu_holders.read(tree.proc, UUIDS).holders for uuid in holder.gpu_uuids]
    assert set(held) <= set(UUIDS)


def test_the_processes_of_this_machine() -> None:
    assert all(holder.name for holder in gpu_holders.read(Node().proc_root, UUIDS).holders)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


def test_a_checkpoint_that_may_not_be_read_is_said(tree: NodeTree, gpus: Gpus) -> None:
    member(tree, 600, POD)
    tree.make_unreadable(f"proc/1/root/{gpu_holders.CHECKPOINT}")
    expect(("UNKNOWN", "CannotRead"), "gpu_allocation", tree.node(gpus=gpus.set(False).sampler))


@given(JSON)
def test_any_checkpoint_is_holders_or_a_fault(tmp_path_factory: pytest.TempPathFactory, form: object) -> None:
    tree = NodeTree(tmp_path_factory.mktemp("node"))
    member(tree, 600, POD)
    tree.write(f"proc/1/root/{gpu_holders.CHECKPOINT}", json.dumps({"Data": {"PodDeviceEntries": form}}))
    assert gpu_holders.read(tree.proc, UUIDS).holders == ()
