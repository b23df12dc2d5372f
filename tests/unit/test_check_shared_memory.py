"""shared_memory: the node's /dev/shm, and the 64 MiB that a container has by default."""

from pathlib import Path
from typing import Any

import pytest

from hangwatch.checks.shared_memory import Sample, Settings, Shm, judge
from hangwatch.model import Fault, JobName
from hangwatch.probes.base.filesystems import FilesystemReader
from hangwatch.probes.node.machine import Node
from tests.conftest import wait_for
from tests.dead_mount import dead_mount, tmpfs
from tests.node_tree import NodeTree, expect, job, rank, run, status_and_reason, values

GIB = 1 << 30


def verdict(size: int, available: int, **settings: Any) -> tuple[str, str]:
    found = judge((Sample(shms=(Shm(job=None, size_bytes=size, available_bytes=available),)),), Settings(**settings))
    return found.status.name, found.reason


@pytest.mark.parametrize(
    ("size", "available", "expected"),
    [
        (64 * GIB, 60 * GIB, ("OK", "SharedMemoryLeft")),
        (64 * GIB, 6 * GIB, ("WARNING", "SharedMemoryLow")),
        (64 * GIB, GIB // 2, ("CRITICAL", "SharedMemoryFull")),
        (GIB // 16, GIB // 16, ("WARNING", "SharedMemorySmall")),
        (0, 0, ("CRITICAL", "SharedMemoryFull")),
    ],
)
def test_sizes(size: int, available: int, expected: tuple[str, str]) -> None:
    assert verdict(size, available) == expected


def test_many_jobs_are_folded_and_the_fullest_are_shown() -> None:
    jobs = tuple(
        Shm(job=JobName(job_id=str(n), job_key=str(n)), size_bytes=4 * GIB, available_bytes=4 * GIB - n)
        for n in range(9)
    )
    node = Shm(job=None, size_bytes=64 * GIB, available_bytes=60 * GIB)
    message = judge((Sample(shms=(*jobs, node)),), Settings()).message
    assert message.startswith("the node has 61,440 MiB")
    assert [part.split(" has")[0] for part in message.split("; ")[1:3]] == ["job 8", "job 7"]
    assert message.endswith("; and 7 more") and message.count("job ") == 2


def test_a_smaller_minimum() -> None:
    assert verdict(GIB // 16, GIB // 16, minimum_size_bytes=1 << 20) == ("OK", "SharedMemoryLeft")


def test_this_machine() -> None:
    result = run("shared_memory", Node(), minimum_size_bytes=0)
    assert values(result, "shared_memory_size_bytes")["node", ""] > 0


def mounts(root: Path, **namespaces: int) -> NodeTree:
    """Return a node on which these processes are in these mount namespaces."""
    tree = NodeTree(root)
    (tree.dev / "shm").mkdir()
    for view, inode in namespaces.items():
        tree.put_in_namespace(view.removeprefix("pid"), "mnt", inode)
    return tree


def test_a_job_in_a_container_with_64_mib_that_are_full(tmp_path: Path) -> None:
    tree = mounts(tmp_path, self=1, pid10=2)
    with tmpfs(tree.proc / "10" / "root" / "dev" / "shm", "64m") as shm:
        result = expect(
            ("WARNING", "SharedMemorySmall"), "shared_memory", tree.node(job(rank(10))), minimum_size_bytes=65 << 20
        )
        assert "job 77 has 64 MiB of 64 MiB left in /dev/shm" in result.verdict.message
        assert "--shm-size" in result.verdict.remedy
        (shm / "torch_4711").write_bytes(b"\0" * (64 << 20))
        full = expect(("CRITICAL", "SharedMemoryFull"), "shared_memory", tree.node(job(rank(10))), minimum_size_bytes=0)
        assert values(full, "shared_memory_available_bytes")["job", "77"] == 0


def test_in_a_container_that_sees_the_nodes_processes_the_nodes_own_counts(tmp_path: Path) -> None:
    tree = mounts(tmp_path, self=1, pid1=2, pid10=2)
    with tmpfs(tree.proc / "1" / "root" / "dev" / "shm", "32m"):
        result = run("shared_memory", tree.node(job(rank(10))), minimum_size_bytes=0)
        assert values(result, "shared_memory_size_bytes") == {("node", ""): 32 << 20}


def test_a_job_that_shares_the_nodes_or_vanished_adds_nothing(tmp_path: Path) -> None:
    tree = mounts(tmp_path, self=1, pid10=1)
    result = run("shared_memory", tree.node(job(rank(10)), job(rank(11), job_id="78")), minimum_size_bytes=0)
    assert set(values(result, "shared_memory_size_bytes")) == {("node", "")}


def test_one_that_should_answer_and_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangwatch.checks.shared_memory.DEADLINE_SECONDS", 0.3)
    tree, onlookers = NodeTree(tmp_path), FilesystemReader()
    with dead_mount(tree.dev / "shm"):
        result = run("shared_memory", tree.node(filesystems=onlookers))
        assert status_and_reason(result)[0] == "UNKNOWN"
        assert isinstance(result.faults[0], Fault) and result.faults[0].reason == "NoAnswer"
    wait_for(lambda: onlookers.abandoned.count() == 0, "the children to end once the mount is gone")
