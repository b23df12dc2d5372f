"""fd_limit: open files of the node, of ranks, of loader workers and of job launchers, and their limits."""

import math
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid
from tests.commands import finished, first_line, spawn
from tests.node_tree import NodeTree, expect, job, rank, real_rank, run, values


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    tree.write("proc/sys/fs/file-nr", "1184\t0\t9223372036854775807\n")
    return tree


def test_well_without_a_job(tree: NodeTree) -> None:
    result = expect(("OK", "FilesLeft"), "fd_limit", tree.node())
    assert values(result, "fd_open_files") == {(): 1184}


def test_well_with_ranks_and_workers(tree: NodeTree) -> None:
    for pid in (10, 11, 12):
        tree.process(pid, open_files=pid)
    result = expect(("OK", "FilesLeft"), "fd_limit", tree.node(job(rank(10, 3, workers=[11, 12]))))
    assert values(result, "fd_process_open_files") == {("77", "rank"): 10, ("77", "worker"): 12}
    assert values(result, "fd_process_soft_limit") == {("77", "rank"): 1048576, ("77", "worker"): 1048576}


@pytest.mark.parametrize(
    ("open_files", "soft", "expected"),
    [
        (79, "100", ("WARNING", "HardLimitLow")),
        (80, "100", ("WARNING", "FilesHigh")),
        (95, "100", ("CRITICAL", "FilesExhausted")),
    ],
)
def test_a_rank_near_its_limit(tree: NodeTree, open_files: int, soft: str, expected: tuple[str, str]) -> None:
    tree.process(10, open_files=open_files, soft=soft, hard=soft)
    result = expect(expected, "fd_limit", tree.node(job(rank(10))))
    assert "pid 10" in result.verdict.message


def test_a_worker_near_its_limit_is_named_as_a_worker(tree: NodeTree) -> None:
    tree.process(10)
    tree.process(11, open_files=99, soft="100", hard="1048576")
    result = expect(("CRITICAL", "FilesExhausted"), "fd_limit", tree.node(job(rank(10, workers=[11]))))
    assert "a worker of local rank 0" in result.verdict.message


def test_a_low_hard_limit_is_a_warning_that_says_how_many(tree: NodeTree) -> None:
    for pid in (10, 11):
        tree.process(pid, soft="1024", hard="4096")
    result = expect(("WARNING", "HardLimitLow"), "fd_limit", tree.node(job(rank(10), rank(11, 1))))
    assert "4096" in result.verdict.message and "1 more" in result.verdict.message
    expect(("OK", "FilesLeft"), "fd_limit", tree.node(job(rank(10))), minimum_hard_limit=4096)


def test_what_starts_jobs_is_asked_before_there_is_one(tree: NodeTree) -> None:
    tree.process(500, comm="slurmd", soft="1024", hard="4096")
    tree.process(501, comm="bash", soft="1024", hard="1024")
    result = expect(("WARNING", "HardLimitLow"), "fd_limit", tree.node())
    assert "slurmd" in result.verdict.message
    own = replace(tree.node(), shell_pid=501)
    expect(("WARNING", "HardLimitLow"), "fd_limit", own, launchers=())
    shown = expect(("OK", "FilesLeft"), "fd_limit", own, launchers=(), minimum_hard_limit=1024).verdict.message
    assert shown.endswith("no training job is running; `ulimit -n` of this shell: 1024, at most 1024")
    tree.process(10)
    expect(("OK", "FilesLeft"), "fd_limit", replace(tree.node(job(rank(10))), shell_pid=501), launchers=())


def test_a_full_node(tree: NodeTree) -> None:
    tree.write("proc/sys/fs/file-nr", "970\t0\t1000\n")
    expect(("CRITICAL", "NodeFilesExhausted"), "fd_limit", tree.node())
    tree.write("proc/sys/fs/file-nr", "810\t0\t1000\n")
    expect(("WARNING", "NodeFilesHigh"), "fd_limit", tree.node())


def test_unlimited_is_a_limit_too(tree: NodeTree) -> None:
    tree.process(10, soft="unlimited", hard="unlimited")
    result = expect(("OK", "FilesLeft"), "fd_limit", tree.node(job(rank(10))))
    assert values(result, "fd_process_hard_limit") == {("77", "rank"): math.inf}


@pytest.mark.parametrize("text", ["many\n", "1 2\n", "1 0 x\n", "1 2 3 4\n", ""])
def test_a_file_that_cannot_be_understood(tree: NodeTree, text: str) -> None:
    tree.write("proc/sys/fs/file-nr", text)
    expect(("UNKNOWN", "UnreadableFileNr"), "fd_limit", tree.node())


def test_limits_that_cannot_be_understood_are_a_fault_not_a_crash(tree: NodeTree) -> None:
    tree.process(10)
    tree.write("proc/10/limits", "\x1b[1mLimit\x1b[0m  garbage\n")
    result = expect(("UNKNOWN", "UnreadableLimits"), "fd_limit", tree.node(job(rank(10))))
    assert result.faults[0].subject == "pid 10"


def test_a_pid_that_vanishes_between_two_reads_is_no_fault(tree: NodeTree) -> None:
    tree.process(10)
    tree.process(11)
    (tree.proc / "11" / "fd" / "0").parent.rename(tree.proc / "11" / "gone")
    result = expect(("OK", "FilesLeft"), "fd_limit", tree.node(job(rank(10), rank(11, 1), rank(12, 2))))
    assert not result.faults
    assert set(values(result, "fd_process_open_files")) == {("77", "rank")}


def test_of_many_ranks_the_worst_is_exported_and_named(tree: NodeTree) -> None:
    for number in range(8):
        tree.process(10 + number, open_files=90 if number == 5 else 3, soft="100", hard="100")
    result = run("fd_limit", tree.node(job(*(rank(10 + number, number) for number in range(8)))))
    assert values(result, "fd_process_open_files") == {("77", "rank"): 90}
    assert result.verdict is not None and "local rank 5 of job 77 (pid 15)" in result.verdict.message


def test_a_real_process_near_its_limit() -> None:
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "files = [open('/dev/null') for _ in range(16)]\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with spawn(sys.executable, "-c", program) as child:
        assert first_line(child) == "ready"
        result = expect(("CRITICAL", "FilesExhausted"), "fd_limit", Node(jobs=(job(real_rank(child.pid)),)))
        assert values(result, "fd_process_open_files")["77", "rank"] == 19


def test_this_process_as_the_kernel_counts_it() -> None:
    count = proc_pid.open_files(Path("/proc"), os.getpid())
    assert count == len(list(Path("/proc/self/fd").iterdir())) - 1, "listing the folder opens one more"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert proc_pid.file_limit(Path("/proc"), os.getpid()) == proc_pid.FileLimit(soft=soft, hard=hard)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts a reader without rights")
def test_a_process_that_may_not_be_asked_is_a_fault_with_a_remedy() -> None:
    reader = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hangwatch.probes.process import proc_pid as pidfiles\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(pidfiles.variables(Path('/proc'), int(sys.argv[1]), ['PATH']))\n"
    )
    answer = finished(sys.executable, "-c", reader, os.getpid(), check=True).stdout
    assert "PermissionDenied" in answer and "CAP_SYS_PTRACE" in answer
