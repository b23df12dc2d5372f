"""The recommended action: the first row of actions.toml with a condition that holds."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.model import (
    CRASHED,
    Awaited,
    CallTarget,
    Confidence,
    Died,
    Frame,
    Group,
    Grouping,
    KernelCall,
    KernelFacts,
    KernelLine,
    Member,
    Motion,
    PastHang,
    RankId,
    Sleep,
    StackFacts,
    Verdict,
    Waits,
)
from hangwatch.verdict import recommendation
from hangwatch.verdict.recommendation import History, with_action
from hangwatch.verdict.wording.action_text import describe_action

NOW = 1_800_000_000.0
IDS = [RankId(node="gpu-07", rank=rank, local_rank=rank, pid=100 + rank) for rank in range(4)]
ON_NFS = CallTarget(kind="file", what="/mnt/nfs/shard-3", mount="/mnt/nfs (nfs4)", is_remote=True)
ON_DISK = CallTarget(kind="file", what="/scratch/a", mount="/scratch (ext4)", is_local_device=True)
ON_PROC = CallTarget(kind="file", what="/proc/7/maps", mount="/proc (proc)")
GPU_FILE = CallTarget(kind="file", what="/dev/nvidia3")
ON_FUSE = CallTarget(kind="file", what="/home/user/mnt/a", mount="/home/user/mnt (fuse)", is_remote=True)
PEER = CallTarget(kind="connection", what="10.0.0.9 port 443")
GONE_HERE = CallTarget(kind="connection", what="127.0.0.2 port 443", is_lost=True)
LOCAL_PEER = CallTarget(kind="connection", what="127.0.0.1 port 8080", other_pid=77, other_comm="server")


def line(text: str, name: str = "xid", subject: str = "0000:3b:00") -> KernelLine:
    return KernelLine(name=name, text=text, unix_seconds=NOW, subject=subject, is_recent=True)


def xid(code: int) -> KernelLine:
    return line(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1234, text")


def reads(target: CallTarget) -> KernelCall:
    return KernelCall(name="read", says="read() from", rounds=3, descriptors=1, behind=(target,))


def died(text: str) -> Died:
    return Died(text="an exception", detail=text, unix_seconds=NOW)


IN_LOCK = KernelFacts(state="S", rests="thread")


def judge(
    kind: str = "OutsideCollective",
    *,
    named: bool = True,
    waits_for: str = "unknown",
    kernel: KernelFacts | None = None,
    rest: KernelFacts | None = None,
    history: History | None = None,
    is_known_pause: bool = False,
    **odd: Any,
) -> Verdict:
    """Recommend an action after a hang in which ranks 1 to 3 wait for rank 0. Without `named`, no rank is a suspect."""
    odd = {"motion": Motion.FROZEN, "kernel": kernel or IN_LOCK, "rounds": 3, **odd}
    suspect = Member(id=IDS[0], **odd)
    others = tuple(Member(id=one, motion=Motion.FROZEN, kernel=rest or IN_LOCK, rounds=3) for one in IDS[1:])
    groups = (
        Group("b", "collective_wait", others, waits_for="ranks", frames=(Frame("all_reduce", "c10d.py", 1),)),
        Group("a", "unknown", (suspect,), waits_for=waits_for, frames=(Frame("step", "train.py", 7),)),
    )
    verdict = Verdict(
        kind=kind,
        message="m",
        named=(IDS[0],) if named else (),
        confidence=Confidence.HIGH if named else Confidence.NONE,
    )
    return with_action(verdict, Grouping(groups=groups), history, is_known_pause=is_known_pause)


def kernel(
    state: str = "S", *lines: KernelLine, call: KernelCall | None = None, mount: str | None = None
) -> KernelFacts:
    return KernelFacts(state=state, lines=lines, call=call, silent_mount=mount)


@pytest.mark.parametrize(
    ("expected", "facts"),
    [
        ("wait", {"kind": "Moving", "named": False}),
        ("wait", {"motion": Motion.MOVING}),
        ("wait", {"kind": "Serving", "named": False}),
        ("wait", {"is_known_pause": True, "kernel": kernel(call=reads(ON_NFS))}),
        ("wait", {"stack": StackFacts(sleep=Sleep(until_unix_seconds=NOW, seconds=60.0, place="p"))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 60.0, "p", is_polling=True))}),
        ("investigate", {"stack": StackFacts(sleep=Sleep(NOW, 1.0, "p"))}),
        ("investigate", {"kind": "Suspended", "named": False, "rest": kernel("T", xid(79))}),
        ("restart_elsewhere", {"kernel": kernel("S", xid(79))}),
        ("restart_elsewhere", {"kernel": kernel("S", xid(79), call=reads(ON_NFS))}),
        ("restart_elsewhere", {"kind": "AllJoined", "named": False, "rest": kernel("S", xid(48))}),
        ("restart_elsewhere", {"kind": "GpuBehind"}),
        ("investigate", {"rest": kernel("S", xid(79))}),
        ("investigate", {"kernel": kernel("S", replace(xid(79), is_recent=False))}),
        *(("investigate", {"kernel": kernel("S", xid(code))}) for code in (13, 31, 43, 45, 63)),
        ("restart_elsewhere", {"kernel": kernel("D", call=reads(ON_DISK))}),
        ("restart_elsewhere", {"kernel": kernel("D", call=reads(GPU_FILE))}),
        ("investigate", {"kernel": kernel("D", call=reads(ON_PROC))}),
        ("investigate", {"kernel": kernel("D", call=replace(reads(ON_DISK), descriptors=4))}),
        ("fix_storage", {"kernel": kernel("D", call=reads(ON_DISK), mount="/mnt/nfs")}),
        ("investigate", {"kernel": kernel("S", call=reads(ON_DISK))}),
        ("fix_storage", {"kernel": kernel("D", call=reads(ON_FUSE))}),
        ("fix_storage", {"kernel": kernel("S", call=reads(ON_NFS))}),
        ("fix_storage", {"kind": "MountSilent", "named": False, "rest": kernel("D", mount="/mnt/nfs")}),
        ("fix_storage", {"kernel": kernel("D", line("nfs: server a not responding", "nfs_server_silent", "a"))}),
        ("investigate", {"kernel": kernel("S", line("nfs: server a not responding", "nfs_server_silent", "a"))}),
        ("fix_network", {"kind": "WrongInterface", "named": False}),
        ("fix_network", {"kernel": kernel(call=reads(PEER)), "waits": Waits(awaited=Awaited(name="10.0.0.9"))}),
        ("investigate", {"kernel": kernel(call=reads(GONE_HERE)), "waits": Waits(awaited=Awaited(name="a server"))}),
        ("investigate", {"kernel": kernel(call=reads(LOCAL_PEER)), "waits": Waits(awaited=Awaited(name="a server"))}),
        ("restart", {"kind": CRASHED, "died": died("torch.distributed.DistNetworkError: Broken pipe")}),
        ("investigate", {"kind": CRASHED, "died": died("ValueError: Connection reset")}),
        ("restart", {"kind": "RankGone", "kernel": kernel("S", line("Out of memory: Killed process 1", "oom_kill"))}),
        (
            "investigate",
            {
                "kind": "RankGone",
                "kernel": kernel("S", line("Memory cgroup out of memory: Killed process", "oom_kill")),
            },
        ),
        ("fix_program", {"waits_for": "lock"}),
        ("investigate", {"waits_for": "lock", "named": False}),
        ("investigate", {"waits_for": "lock", "waits": Waits(object="file")}),
        ("investigate", {"waits_for": "lock", "kernel": KernelFacts()}),
        ("investigate", {"waits_for": "lock", "kernel": kernel("S")}),
        ("investigate", {"waits_for": "lock", "motion": Motion.UNKNOWN}),
        ("investigate", {"motion": Motion.UNKNOWN, "kernel": kernel("S", xid(79))}),
        ("investigate", {}),
    ],
)
def test_first_row_that_holds_decides(expected: str, facts: dict[str, Any]) -> None:
    assert judge(**facts).action.kind == expected, facts


def test_adapter_error_counts_only_if_all_ranks_wait() -> None:
    failed = kernel("S", line("mlx5_core 0000:5e:00.0: device's health compromised", "mlx5_fatal", "0000:5e:00.0"))
    assert judge("AllJoined", named=False, rest=failed).action.kind == "restart_elsewhere"
    cable = kernel("S", line("mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged", "mlx5_cable"))
    assert judge("AllJoined", named=False, rest=cable).action.kind == "investigate"
    assert judge(rest=failed, kernel=failed).action.kind == "investigate"


def test_restart_elsewhere_excludes_only_the_node_of_the_fault() -> None:
    action = judge(kernel=kernel("S", xid(79))).action
    assert action.exclude_nodes == ("gpu-07",) and action.confidence is Confidence.HIGH
    assert describe_action(action).startswith(
        "restart the job without gpu-07: the kernel reports XID 79 of GPU 0000:3b"
    )
    assert judge(kernel=kernel(call=reads(ON_NFS))).action.exclude_nodes == ()


def hang(hours: float = 2.0, node: str = "gpu-07", uid: int | None = 1000, **more: Any) -> PastHang:
    fields = {"incident_id": "i", "fingerprint": judge().fingerprint, "action": "investigate", **more}
    return PastHang(node=node, opened_unix_seconds=NOW - hours * 3600, uid=uid, **fields)


def after(*hangs: PastHang) -> History:
    return History(hangs, "gpu-07", 1000, unix_seconds=NOW)


STORE_LOST = {"kind": CRASHED, "died": died("DistStoreError: timed out")}


def test_restart_is_recommended_once_a_day_for_a_fingerprint() -> None:
    mark = judge(**STORE_LOST).fingerprint
    for hours, action, expected in [
        (-1, "restart", "investigate"),
        (2, "restart", "investigate"),
        (30, "restart", "restart"),
        (2, "wait", "restart"),
    ]:
        history = after(hang(hours, fingerprint=mark, action=action))
        assert judge(**STORE_LOST, history=history).action.kind == expected
    other = after(hang(fingerprint="other", action="restart"))
    assert judge(**STORE_LOST, history=other).action.kind == "restart"


def test_hang_of_another_owner_on_the_node_is_to_be_investigated() -> None:
    action = judge(waits_for="lock", history=after(hang(uid=1001, fingerprint=""))).action
    assert (action.kind, action.target, action.exclude_nodes) == ("investigate", "gpu-07", ())
    assert judge(waits_for="lock", history=after(hang(uid=1001, node="gpu-08"))).action.kind == "fix_program"
    assert judge(waits_for="lock", history=after(hang(30, uid=1001))).action.kind == "fix_program"
    assert judge(waits_for="lock", history=after(hang(uid=None), hang(uid=1000))).action.kind == "fix_program"
    assert judge(kernel=kernel("S", xid(79)), history=after(hang(uid=1001))).action.kind == "restart_elsewhere"


def test_same_place_on_other_nodes_points_at_the_program() -> None:
    assert judge(history=after(hang(node="gpu-11"))).action.kind == "fix_program"
    assert judge(history=after(hang())).action.kind == "investigate"
    assert judge(kernel=kernel(call=reads(ON_DISK)), history=after(hang(node="gpu-11"))).action.kind == "investigate"


def test_evidence_lists_the_hangs_at_the_same_place() -> None:
    hangs = (hang(), hang(50), hang(3, node="gpu-11"), hang(8 * 24), hang(fingerprint="other"))
    said = [one.message for one in judge(history=after(*hangs)).evidence]
    assert said == ["blocked at the same place 3 times in the last 7 days: gpu-07 (2 times), gpu-11 (1 time)"]
    assert judge().evidence == ()


def test_fingerprint_ignores_lines_and_nodes_and_follows_the_stack() -> None:
    first = judge()
    assert len(first.fingerprint) == 12 and first.fingerprint == judge(waits_for="lock").fingerprint
    assert judge(named=False).fingerprint != first.fingerprint


def test_table_and_conditions_are_the_same() -> None:
    assert list(recommendation.load()) == list(recommendation.CONDITIONS)
    order = list(dict.fromkeys(row.action for row in recommendation.load().values() if row.action != "investigate"))
    assert order == ["wait", "restart_elsewhere", "fix_storage", "fix_network", "restart", "fix_program"]
