"""dump_rights: the kernel's permission to take stacks, on fixture trees and for real processes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hangwatch.checks.dump_rights import RankRight, Sample, judge
from hangwatch.checks.framework.contract import RankName, Settings
from hangwatch.probes.base import procfs
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import dump_permissions, pyspy
from tests.commands import finished, spawn
from tests.node_tree import NodeTree, expect, job, rank, real_rank, run, values

ROOT = dump_permissions.Rights(
    user_id=0,
    capabilities=tuple(dump_permissions.CAPABILITIES),
    ptrace_scope=1,
    seccomp_filter=False,
    pyspy_version=(0, 4, 3),
    pyspy_path="/usr/bin/py-spy",
)


def write_rank(**changes: Any) -> dump_permissions.Rights:
    return dump_permissions.Rights(**{name: getattr(ROOT, name) for name in ROOT.__struct_fields__} | changes)


def refused(**changes: Any) -> RankRight:
    name = RankName.of_rank(job(), rank(10, 3))
    return RankRight(**{"rank": name, "pid": 10, "permitted": False, "user_id": 1000} | changes)


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    tree.process("self")
    return tree


def test_all_ranks_may_be_dumped(tree: NodeTree) -> None:
    tree.process(10)
    tree.process(11)
    result = expect(("OK", "DumpsPermitted"), "dump_rights", tree.node(job(rank(10), rank(11, 1))))
    assert values(result, "dump_permitted") == {("77", "0"): 1, ("77", "1"): 1}


def test_without_a_job_the_capabilities_count(tree: NodeTree) -> None:
    expect(("OK", "DumpsPermitted"), "dump_rights", tree.node())
    tree.process("self", capabilities="0000000000000000", uid=1000)
    result = expect(("WARNING", "CapabilityMissing"), "dump_rights", tree.node())
    assert "CAP_SYS_PTRACE" in result.verdict.remedy


def test_yama_forbids_everything(tree: NodeTree) -> None:
    tree.write("proc/sys/kernel/yama/ptrace_scope", "3\n")
    expect(("WARNING", "DumpForbidden"), "dump_rights", tree.node())
    tree.write("proc/sys/kernel/yama/ptrace_scope", "2\n")
    expect(("OK", "DumpsPermitted"), "dump_rights", tree.node())


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (write_rank(ptrace_scope=3), ["ptrace_scope is 3", "reboot"]),
        (write_rank(capabilities=(), user_id=500), ["user 1000", "lacks CAP_SYS_PTRACE"]),
        (write_rank(seccomp_filter=True), ["seccomp", "@debug"]),
        (ROOT, ["user namespace", "PrivateUsers"]),
    ],
)
def test_a_refusal_names_the_likeliest_reason(ours: dump_permissions.Rights, words: list[str]) -> None:
    verdict = judge((Sample(rights=ours, ranks=(refused(),)),), Settings())
    assert (verdict.status.name, verdict.reason) == ("WARNING", "DumpRefused")
    for word in words:
        assert word in verdict.message + verdict.remedy


def test_the_table_and_the_owner_of_a_rank(tree: NodeTree) -> None:
    tree.process("self", capabilities="0000000000080000", uid=500)
    tree.write("proc/sys/kernel/yama/ptrace_scope", "1\n")
    tree.process(10, uid=1000)
    result = run("dump_rights", tree.node(job(rank(10))))
    rows = dict(result.table)
    assert rows["capabilities"] == "CAP_SYS_PTRACE"
    assert rows["yama ptrace_scope"] == "1"
    assert rows["local rank 0 of job 77 (pid 10)"] == "may be dumped"
    assert procfs.read_user_id(10, tree.proc) == 1000
    assert procfs.read_user_id(11, tree.proc) is None
    own = dump_permissions.read_rights(tree.proc)
    assert isinstance(own, dump_permissions.Rights) and own.user_id == 500


def test_many_refusals_are_one_sentence() -> None:
    ranks = tuple(refused(rank=RankName.of_rank(job(), rank(10, number))) for number in range(8))
    message = judge((Sample(rights=write_rank(capabilities=()), ranks=ranks),), Settings()).message
    assert "stack of local rank 0-7 of job 77: " in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pyspy_version": None}, "PySpyMissing"),
        ({"pyspy_path": None}, "PySpyMissing"),
        ({"pyspy_version": (0, 3, 14)}, "PySpyOld"),
        ({"pyspy_version": (0, 4, 0)}, "DumpsPermitted"),
        ({"pyspy_version": (1, 0, 0)}, "DumpsPermitted"),
        ({"pyspy_version": pyspy.SILENT}, "DumpsPermitted"),
    ],
)
def test_py_spy_itself(changes: dict[str, Any], reason: str) -> None:
    assert judge((Sample(rights=write_rank(**changes)),), Settings()).reason == reason


def test_a_rank_that_vanished_is_left_out(tree: NodeTree) -> None:
    tree.process(10)
    result = expect(("OK", "DumpsPermitted"), "dump_rights", tree.node(job(rank(10), rank(11, 1))))
    assert values(result, "dump_permitted") == {("77", "0"): 1}


def test_a_status_that_may_not_be_read(tree: NodeTree) -> None:
    tree.make_unreadable("proc/self/status")
    expect(("UNKNOWN", "CannotRead"), "dump_rights", tree.node())


def test_this_process_may_look_at_itself_and_is_not_touched() -> None:
    before = Path("/proc/self/status").read_text()
    assert "TracerPid:\t0" in before
    assert dump_permissions.may_attach(Path("/proc"), os.getpid()) is True
    answer = dump_permissions.read_rights(Path("/proc"))
    assert isinstance(answer, dump_permissions.Rights)
    assert answer.user_id == os.geteuid() and answer.pyspy_version
    assert answer.pyspy_path and os.access(answer.pyspy_path, os.X_OK)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts a reader without rights")
def test_dump_rights_check_stops_no_process() -> None:
    reader = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hangwatch.probes.process import dump_permissions as rights\n"
        "rights.read_rights(Path('/proc'))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(rights.may_attach(Path('/proc'), int(sys.argv[1])), rights.read_rights(Path('/proc')).capabilities)\n"
    )
    with spawn(sys.executable, "-c", "import sys; sys.stdin.read()") as target:
        answer = finished(sys.executable, "-c", reader, target.pid, check=True).stdout
        assert answer.split() == ["False", "()"]
        expect(("OK", "DumpsPermitted"), "dump_rights", Node(jobs=(job(real_rank(target.pid)),)))
        assert Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR"
