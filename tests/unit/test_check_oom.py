"""oom: processes that were killed for lack of memory, and the exceeded limit, from the kernel's log and counter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.node import kmsg, oom_kills
from hangwatch.probes.node.machine import Node
from tests.node_tree import Checked, NodeTree, expect, refuse_open, run, values

SLURM = "/system.slice/slurmstepd.scope/job_4711"
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6f1c2d3e_0a1b_4c5d_8e9f_001122334455.slice"
VMSTAT = "nr_free_pages 100\noom_kill {kills}\nnuma_hit 1\n"


def summary(
    pid: int, *, limit: str | None = SLURM, cgroup: str = f"{SLURM}/step_0", comm: str = "python", uid: int = 1004
) -> str:
    """Return the kernel's summary line of a kill, recorded on Linux 6.18, with other paths."""
    constraint = "CONSTRAINT_NONE" if limit is None else "CONSTRAINT_MEMCG"
    where = "global_oom" if limit is None else f"oom_memcg={limit}"
    return (
        f"oom-kill:constraint={constraint},nodemask=(null),cpuset=/,mems_allowed=0,{where},"
        f"task_memcg={cgroup},task={comm},pid={pid},uid={uid}"
    )


def killed(pid: int, *, comm: str = "python", uid: int = 1004, by: str = "Memory cgroup out of memory") -> str:
    return (
        f"{by}: Killed process {pid} ({comm}) total-vm:267216kB, anon-rss:28064kB, file-rss:12408kB, shmem-rss:0kB, "
        f"UID:{uid} pgtables:144kB oom_score_adj:0"
    )


def test_log_without_an_oom_kill_is_ok(tree: NodeTree) -> None:
    tree.log("eth0: link up")
    result = expect(("OK", "NoOomKill"), "oom", tree.node())
    assert result.verdict.message == "no process was killed for lack of memory in the last 1 h"


def test_kill_at_the_limit_of_a_job_names_the_job(tree: NodeTree) -> None:
    tree.log(summary(4713), killed(4713))
    result = expect(("WARNING", "OutOfMemory"), "oom", tree.node())
    assert result.verdict.message == (
        "Slurm job 4711: python (pid 4713, uid 1004) was killed for lack of memory 10 s ago, "
        f"at the limit of the control group {SLURM}"
    )
    assert values(result, "oom_kills_total") == {("python", "cgroup"): 1}
    expect(("OK", "KernelLogQuiet"), "xid", tree.node())


def test_all_processes_of_a_pod_are_one_finding(tree: NodeTree) -> None:
    """With memory.oom.group, which the kubelet sets, the kernel writes one summary and a line for each killed process."""
    container = f"{POD}/cri-containerd-12.scope"
    group = f"Tasks in {container} are going to be killed due to memory.oom.group set"
    tree.log(summary(10, limit=container, cgroup=container), killed(10), group, *map(killed, range(11, 14)))
    result = expect(("WARNING", "OutOfMemory"), "oom", tree.node())
    assert "pod 6f1c2d3e-0a1b-4c5d-8e9f-001122334455: 4 processes were killed" in result.verdict.message
    assert "last python (pid 13, uid 1004)" in result.verdict.message


@pytest.mark.parametrize(("age_seconds", "status"), [(10.0, "CRITICAL"), (599.0, "CRITICAL"), (601.0, "WARNING")])
def test_a_node_without_memory_is_worse(tree: NodeTree, age_seconds: float, status: str) -> None:
    lines = summary(4712, limit=None, cgroup="/user.slice"), killed(4712, by="Out of memory")
    tree.log(*lines, boot_seconds=1000.0 - age_seconds)
    result = expect((status, "NodeOutOfMemory"), "oom", tree.node())
    assert "the node ran out of memory; uid 1004: python (pid 4712" in result.verdict.message


def test_the_numa_nodes_of_a_process_are_a_limit_of_its_own(tree: NodeTree) -> None:
    line = summary(5, limit=None).replace("CONSTRAINT_NONE", "CONSTRAINT_MEMORY_POLICY")
    tree.log(line, killed(5, by="Out of memory"))
    expect(("WARNING", "OutOfMemory"), "oom", tree.node())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Out of memory: Kill process 4714 (python) score 901 or sacrifice child", ("CRITICAL", "NodeOutOfMemory")),
        ("Memory cgroup out of memory: Killed process 4713 (a b) total-vm:1kB", ("WARNING", "OutOfMemory")),
        ("Out of memory (oom_kill_allocating_task): Killed process 1 (python)", ("CRITICAL", "NodeOutOfMemory")),
    ],
)
def test_lines_of_older_kernels(tree: NodeTree, line: str, expected: tuple[str, str]) -> None:
    tree.log(line)
    result = expect(expected, "oom", tree.node())
    assert "an unknown user" in result.verdict.message


def test_what_is_long_past_counts_no_more(tree: NodeTree) -> None:
    tree.log(summary(4713), killed(4713))
    tree.time.now_monotonic = 990.0 + 3601
    result = expect(("OK", "NoOomKill"), "oom", tree.node())
    assert values(result, "oom_kills_total") == {("python", "cgroup"): 1}


@pytest.mark.parametrize(
    "name",
    [
        "a,mems_allowed=0,oom_memcg=/system.slice/slurmstepd.scope/job_1,task_memcg=/x,task=python,pid=4713,uid=0",
        "a,task_memcg=/system.slice/slurmstepd.scope/job_1",
        "a,global_oom",
    ],
)
def test_hostile_cgroup_name_blames_no_other_job(tree: NodeTree, name: str) -> None:
    mine = f"/user.slice/user-1004.slice/{name}"
    tree.log(summary(4713, limit=mine, cgroup=mine), killed(4713))
    message = run("oom", tree.node()).verdict.message
    assert message.startswith("uid 1004: python (pid 4713, uid 1004) was killed") and "job" not in message


def test_hostile_process_name_blames_no_other_job(tree: NodeTree) -> None:
    tree.log(summary(4713, comm="x,pid=1,uid=0"), killed(4713, comm="x) UID:0 y"))
    result = run("oom", tree.node())
    assert result.verdict.message.startswith("Slurm job 4711: x) UID:0 y (pid 4713, uid 1004) was killed")


def test_a_line_of_another_kill_is_not_joined(tree: NodeTree) -> None:
    """Do not add a kill without a summary to the kill before. The kernel omits summaries if it kills many processes."""
    tree.log(summary(4713), killed(4713), killed(9, uid=1005))
    assert "uid 1005: python (pid 9, uid 1005) was killed" in run("oom", tree.node()).verdict.message


def test_a_process_cannot_write_itself_into_the_log(tree: NodeTree) -> None:
    tree.log(f"audit: comm={killed(1)}", f"x {summary(1)}")
    expect(("OK", "NoOomKill"), "oom", tree.node())


def test_a_flood_of_one_owner_hides_no_other(tree: NodeTree) -> None:
    tree.log(summary(7), killed(7), *(killed(pid, uid=1005) for pid in range(1000, 2000)))
    result = run("oom", tree.node())
    assert "Slurm job 4711: python (pid 7, uid 1004)" in result.verdict.message
    assert "uid 1005: 16 or more processes were killed" in result.verdict.message
    assert values(result, "oom_kills_total") == {("python", "cgroup"): 1001}


def test_owners_and_names_are_bounded(tree: NodeTree) -> None:
    tree.log(*(killed(pid, uid=pid, comm=f"n{pid}") for pid in range(1000)))
    events = tree.read_log()
    assert len(events.oom.kills) == oom_kills.OWNERS_KEPT
    assert len(events.oom.counts) == oom_kills.KEYS_KEPT


def test_looks_at_a_quiet_log_share_what_they_hold(tree: NodeTree) -> None:
    # Two results without a new kill share one list of kills. The daemon keeps ten minutes of results with up to
    # 2,000 kills each.
    follower = kmsg.KernelLog()
    tree.log(killed(1))
    first, second = (follower.read(tree.dev / "kmsg") for _ in range(2))
    tree.log(killed(2))
    third = follower.read(tree.dev / "kmsg")
    assert isinstance(first, kmsg.KernelEvents) and isinstance(second, kmsg.KernelEvents)
    assert first.oom is second.oom
    assert isinstance(third, kmsg.KernelEvents) and [kill.pid for kill in third.oom.kills] == [1, 2]


def test_kills_are_counted_by_the_kernel_without_a_log(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write("proc/vmstat", VMSTAT.format(kills=3))
    check, node = Checked("oom"), tree.node()
    with monkeypatch.context() as patch:
        refuse_open(patch, "kmsg")
        first = check.expect(("OK", "NoOomKill"), node)
    assert first.verdict.message == (
        "no new OOM kill, 3 OOM kills since the node booted; "
        f"the kernel log cannot be read, so the killed processes are unknown ({tree.dev}/kmsg: Operation not permitted)"
    )
    tree.write("proc/vmstat", VMSTAT.format(kills=5))
    tree.time.pass_seconds(15)
    second = check.expect(("WARNING", "OutOfMemory"), node)
    assert second.verdict.message == (
        "2 OOM kills in the last 1 min; the kernel log cannot be read, so the killed processes are unknown (there is "
        "no /dev/kmsg)"
    )
    assert values(second, "oom_kills_counted_total") == {(): 5}


def test_lines_as_a_kernel_wrote_them(tree: NodeTree) -> None:
    """A real kill would leave lines in the kernel's log that other checks report."""
    group = "/process_api/7c1c5d5f3435a0820cbd2a16758518ea/hangwatch-test-y9kkxntx"
    tree.log(
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={group},"
        f"task_memcg={group},task=python,pid=8650,uid=0",
        "Memory cgroup out of memory: Killed process 8650 (python) total-vm:267216kB, anon-rss:28064kB, "
        "file-rss:12408kB, shmem-rss:0kB, UID:0 pgtables:144kB oom_score_adj:0",
    )
    result = run("oom", tree.node())
    assert result.verdict.message.startswith("uid 0: python (pid 8650, uid 0) was killed")
    assert result.table[1] == ("10 s ago", "uid 0", "8650", "0", "python", "cgroup", group)


def test_this_machine() -> None:
    assert values(run("oom", Node()), "oom_kills_counted_total")[()] >= 0


@given(st.text(max_size=300))
def test_any_text_is_heard(text: str) -> None:
    listener = oom_kills.OomLog()
    for line in (text, f"oom-kill:{text}", f"Tasks in {text}", f"Out of memory: {text}"):
        listener.read_line(line, 1.0)
    assert len(listener.kills().kills) <= 4
