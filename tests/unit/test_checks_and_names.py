"""All checks on a node that has nothing to check, and on jobs and containers with the same names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.checks.framework import registry
from hangwatch.checks.framework.contract import RANK
from hangwatch.model import CheckResult, Job, ProcessId, Rank
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.torch_recorder import layouts
from tests.checks_page import list_metrics
from tests.dead_mount import tmpfs
from tests.fake_driver import FakeDriver, h100, sampling, uuid_of
from tests.node_tree import NodeTree, expect, job, rank, run
from tests.recorder_memory import Memory, Operation, as_process, recorder

ABOUT_JOBS = sorted(
    name for name, check in registry.checks().items() if any("job_id" in labels for _, labels in list_metrics(check))
)
ABOUT_RANKS = ["dump_rights", "ranks"]
ABOUT_PARTS_OF_A_NODE = ["gpu_allocation", "memory_pressure", "oom", "storage", "xid"]
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:D431 0100007F:733C 01 00000000:00000000 00:00000000 00000000 0 0 1
"""
NCCL = "00007f00-00007f01 r-xp 00000000 08:01 1    /usr/lib/libnccl.so.2.14.3\n"


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    tree.process("self")
    tree.write("proc/sys/fs/file-nr", "1184\t0\t9223372036854775807\n")
    tree.write("proc/self/net/dev", "Inter-|\n face |\n")
    _mounts(tree, "self", "node")
    (tree.dev / "shm").mkdir()
    return tree


def namesake(tree: NodeTree, key: str, *pids: int) -> Job:
    """Return a job named "100". Its processes have a separate mount namespace."""
    memory = Memory(0x200000)
    address = recorder(memory, layouts.candidates("")[-1], [Operation()])
    for pid in pids:
        tree.process(pid, environ={"CUDA_LAUNCH_BLOCKING": "1", **MASTER})
        as_process(tree.proc / str(pid), memory, address)
        maps = tree.proc / str(pid) / "maps"
        maps.write_text(NCCL + maps.read_text())
        tree.write(f"proc/{pid}/net/dev", "Inter-|\n face |\n")
        tree.write(f"proc/{pid}/net/tcp", TCP)
        _mounts(tree, str(pid), key)
    ranks = [rank(pid, place, gpu_uuids=(uuid_of(place),)) for place, pid in enumerate(pids)]
    return job(*ranks, job_id="100", job_key=key, local_world_size=len(pids))


def _mounts(tree: NodeTree, view: str, inode: str) -> None:
    link = tree.proc / view / "ns" / "mnt"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"mnt:[{inode}]")


def series(result: CheckResult) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(point.name, point.labels) for point in result.points]


@pytest.fixture
def gpus(fake_driver: FakeDriver) -> Iterator[NvmlSampler]:
    fake_driver.write(h100(2))
    with sampling(fake_driver) as sampler:
        yield sampler


@pytest.mark.parametrize("name", ABOUT_JOBS)
def test_two_jobs_of_one_name_have_a_series_each(name: str, tree: NodeTree, gpus: NvmlSampler) -> None:
    jobs = (namesake(tree, "a1", 10, 11), namesake(tree, "b2", 20, 21))
    with contextlib.ExitStack() as mounted:
        for pid in (10, 20) if name == "shared_memory" else ():
            mounted.enter_context(tmpfs(tree.proc / str(pid) / "root" / "dev" / "shm", "1m"))
        found = series(run(name, tree.node(*jobs, dump_after_seconds=135.0, gpus=gpus)))
    assert len(set(found)) == len(found)
    assert {"a1", "b2"} <= {dict(labels).get("job_key") for _, labels in found}


def test_every_check_about_jobs_was_tried() -> None:
    assert {
        *ABOUT_RANKS,
        "collective_timeout",
        "environment",
        "fd_limit",
        "flight_recorder",
        "gpu_speed",
        "network",
        "shared_memory",
    } == set(ABOUT_JOBS)


@pytest.mark.parametrize("name", ABOUT_RANKS)
def test_ranks_of_two_containers_of_one_job_may_both_be_local_rank_0(name: str, tree: NodeTree) -> None:
    tree.process(10)
    tree.process(20)
    ranks = [
        Rank(id=ProcessId(pid=pid, start_ticks=100), rank=number, local_rank=0) for number, pid in enumerate((10, 20))
    ]
    found = series(run(name, tree.node(job(*ranks, job_key="a1"))))
    assert len(set(found)) == len(found)
    about = [dict(labels) for _, labels in found if set(RANK) <= set(dict(labels))]
    assert {(labels["rank"], labels["local_rank"]) for labels in about} == {("0", "0"), ("1", "0")}


@pytest.mark.parametrize("name", sorted({*ABOUT_JOBS, *ABOUT_PARTS_OF_A_NODE}))
def test_check_of_what_a_node_does_not_have_is_not_present(name: str, tmp_path: Path) -> None:
    expect(("OK", "NotPresent"), name, NodeTree(tmp_path).node())
