"""environment: variables and versions that are known to cause hangs. Each names its source."""

import importlib
import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.checks import environment
from hangwatch.checks.environment import JobEnvironment, matching, packages_of, rules, satisfies, version_in
from hangwatch.model import JobName
from hangwatch.probes.node.machine import Node
from tests.node_tree import NodeTree, expect, job, rank, real_rank, run, values


def running(
    nccl: str | None = None, torch: str | None = None, *, multi_node: bool = False, **variables: str
) -> list[str]:
    name = JobName(job_id="77", job_key="k")
    found = JobEnvironment(job=name, variables=variables, nccl=nccl, torch=torch, multi_node=multi_node)
    return [rule.name for rule in matching(found)]


@pytest.mark.parametrize(
    ("nccl", "expected"),
    [("2.12.12", []), ("2.13.4", ["launch_blocking"]), ("2.14.3", ["launch_blocking"]), ("2.17", []), (None, [])],
)
def test_launch_blocking(nccl: str | None, expected: list[str]) -> None:
    assert running(nccl, CUDA_LAUNCH_BLOCKING="1") == expected
    assert running(nccl, CUDA_LAUNCH_BLOCKING="0") == []
    assert running(nccl) == []


def test_every_rule_can_fire_and_has_a_public_source() -> None:
    names = [rule.name for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        found = running(
            version_meeting(rule.nccl),
            version_meeting(rule.torch),
            multi_node=True,
            **{name: value for name, value in rule.variables.items() if value},
        )
        assert rule.name in found
        assert rule.sources and all(source.startswith("https://") for source in rule.sources)
        assert rule.remedy and rule.message


def version_meeting(wanted: str) -> str | None:
    found = re.search(r"[>=]=([\d.]+)", wanted)
    return found.group(1) if found else None


def test_rules_of_many_nodes_are_silent_on_one() -> None:
    assert running("2.26.2", NCCL_CUMEM_ENABLE="0") == []
    assert running("2.26.2", NCCL_CUMEM_ENABLE="0", multi_node=True) == ["cumem_off"]


def test_a_variable_that_must_not_be_set() -> None:
    assert running(torch="2.7.0") == ["nonblocking_by_default"]
    assert running(torch="2.7.0", TORCH_NCCL_USE_COMM_NONBLOCKING="0") == []
    assert running(torch="2.7.1") == []


def process(tree: NodeTree, packages: list[str], environ: dict[str, str], maps: list[str]) -> None:
    tree.process(10, environ=environ)
    site = tree.proc / "10" / "root" / "venv" / "site-packages"
    for package in packages:
        (site / package).mkdir(parents=True)
    lines = [f"7f00{at:08x}-7f01{at:08x} r-xp 00000000 08:01 {at + 1}    {path}" for at, path in enumerate(maps)]
    tree.write("proc/10/maps", "\n".join(["55d0-55d1 rw-p 00000000 00:00 0 [heap]", *lines]) + "\n")


PIP_MAPS = ["/venv/site-packages/nvidia/nccl/lib/libnccl.so.2", "/venv/site-packages/torch/lib/libtorch_cpu.so"]
PIP_PACKAGES = ["nvidia_nccl_cu11-2.14.3.dist-info", "torch-2.0.1+cu118.dist-info", "torchvision-0.15.dist-info"]


def test_a_job_that_is_known_to_hang(tree: NodeTree) -> None:
    process(tree, PIP_PACKAGES, {"CUDA_LAUNCH_BLOCKING": "1", "SECRET": "hunter2"}, PIP_MAPS)
    result = expect(("WARNING", "KnownToHang"), "environment", tree.node(job(rank(10))))
    assert "NCCL 2.14.3 deadlocks" in result.verdict.message
    assert "https://github.com/NVIDIA/nccl/issues/750" in result.verdict.remedy
    assert values(result, "environment_known_hang") == {("77", "launch_blocking"): 1}
    assert "hunter2" not in str(result), "nothing else of the environment is kept"
    expect(("OK", "NothingKnown"), "environment", tree.node(job(rank(10))), ignored_rules=("launch_blocking",))


def test_a_job_that_is_well(tree: NodeTree) -> None:
    process(tree, PIP_PACKAGES, {}, PIP_MAPS)
    result = expect(("OK", "NothingKnown"), "environment", tree.node(job(rank(10))))
    assert "NCCL 2.14.3, PyTorch 2.0.1" in result.verdict.message


def test_nccl_of_the_system_tells_its_version_by_its_file(tree: NodeTree) -> None:
    process(tree, [], {}, ["/usr/lib/x86_64-linux-gnu/libnccl.so.2.16.2 (deleted)"])
    result = run("environment", tree.node(job(rank(10))))
    assert "NCCL 2.16.2, PyTorch unknown" in result.verdict.message
    process(tree, [], {}, [])
    assert "uses PyTorch unknown" in run("environment", tree.node(job(rank(10)))).verdict.message


def test_a_job_of_many_nodes(tree: NodeTree) -> None:
    process(tree, [], {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, [])
    one_node = job(rank(10), world_size=8, local_world_size=8)
    expect(("OK", "NothingKnown"), "environment", tree.node(one_node))
    two_nodes = job(rank(10), world_size=16, local_world_size=8)
    expect(("WARNING", "KnownToHang"), "environment", tree.node(two_nodes))


def test_a_rank_that_vanished(tree: NodeTree) -> None:
    result = run("environment", tree.node(job(rank(10))))
    assert result.verdict.status.name == "OK" and not result.faults


def test_libraries_that_may_not_be_read(tree: NodeTree) -> None:
    tree.process(10)
    tree.make_unreadable("proc/10/maps")
    expect(("UNKNOWN", "CannotRead"), "environment", tree.node(job(rank(10))))


@pytest.mark.torch
def test_the_real_torch_of_this_environment() -> None:
    importlib.import_module("torch")
    result = expect(("OK", "NothingKnown"), "environment", Node(jobs=(job(real_rank(os.getpid())),)))
    torch = sys.modules["torch"]
    assert f"PyTorch {torch.__version__.partition('+')[0]}" in result.verdict.message


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    [
        ("2.14.3", ">=2.13,<2.17", True),
        ("2.17.0", ">=2.13,<2.17", False),
        ("2.7.0", "==2.7.0", True),
        ("2.7", "==2.7.0", True),
        ("2.10", ">2.9", True),
        ("2.9", "<=2.9.0", True),
        (None, ">=2", False),
        (None, "", True),
    ],
)
def test_versions_are_compared_by_numbers(version: str | None, wanted: str, met: bool) -> None:
    assert satisfies(version, wanted) is met


@given(st.tuples(*[st.integers(0, 99)] * 3), st.tuples(*[st.integers(0, 99)] * 3))
def test_comparisons_are_those_of_numbers(first_version: tuple[int, ...], right: tuple[int, ...]) -> None:
    version, bound = (".".join(map(str, numbers)) for numbers in (first_version, right))
    assert satisfies(version, f">={bound}") is (first_version >= right)
    assert satisfies(version, f"<{bound}") is (first_version < right)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch-2.7.0+cu126.dist-info", "2.7.0"),
        ("torch-2.8.0.dist-info", "2.8.0"),
        ("torch-2.9.0a0+git123.dist-info", "2.9.0"),
        ("torchvision-0.22.0.dist-info", None),
        ("torch_tensorrt-2.7.0.dist-info", None),
    ],
)
def test_versions_by_the_names_of_packages(name: str, version: str | None) -> None:
    assert version_in([name], "torch") == version


def test_the_folder_of_packages() -> None:
    assert packages_of("/a/site-packages/torch/lib/libtorch_cpu.so") == "/a/site-packages"
    assert packages_of("/usr/lib/python3/dist-packages/torch/lib/libtorch_cpu.so") == "/usr/lib/python3/dist-packages"
    assert packages_of("/usr/lib/libnccl.so.2") is None


def test_a_bad_comparison_in_the_table_is_noticed() -> None:
    with pytest.raises(ValueError, match="not a version comparison"):
        environment.satisfies("2.0", "~2.0")
