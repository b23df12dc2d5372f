"""Verdict sentences that a reader could misunderstand."""

import pytest
from msgspec.structs import replace

from hangwatch.model import (
    CallTarget,
    EnqueuedOperation,
    FileLock,
    Frame,
    Group,
    Grouping,
    GroupRecords,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    RankId,
    RecorderState,
    Signature,
    Stack,
)
from hangwatch.stacks import activity
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.judge import judge
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.wording import clauses, group_text, job_headlines, rank_headlines


def group(name: str, ranks: range, *functions: str, node: str = "n1") -> Group:
    return Group(
        key=f"{name}{ranks.start}",
        activity=name,
        waits_for=activity.find_activity(name).waits_for,
        operation="barrier" if name == "collective_wait" else None,
        frames=tuple(Frame(function=one, file="train.py", line=1) for one in functions),
        members=tuple(Member(id=RankId(node=node, rank=rank), motion=Motion.FROZEN, rounds=3) for rank in ranks),
    )


def test_two_are_both() -> None:
    assert group_text.others_wait([group("collective_wait", range(2))]) == "both other ranks wait in barrier"
    assert group_text.others_wait([group("collective_wait", range(3))]) == "all 3 other ranks wait in barrier"
    assert judge(Grouping(groups=(group("collective_wait", range(2)),))).message.startswith(
        "No rank can be named: both ranks wait in barrier."
    )


def test_others_waiting_for_locks_are_described_as_such() -> None:
    assert group_text.others_wait([group("lock", range(3))]).startswith("all 3 other ranks wait for a lock")
    two = group_text.others_wait([group("lock", range(3)), group("thread_wait", range(3, 4))])
    assert two.startswith("all 4 other ranks wait for locks or threads: lock (3 ranks) and thread wait (1 rank)")


@pytest.mark.parametrize(("inner", "frame"), [("save", "save (train.py:1)"), ("load", "load (train.py:1)")])
def test_of_two_groups_with_the_same_words_the_first_frame_that_differs_is_told(inner: str, frame: str) -> None:
    one, two = group("unknown", range(2), "read", inner, "main"), group("unknown", range(2, 4), "read", "other", "main")
    first, second = group_text.describe_each([one, two])
    assert first.endswith(f" in {frame}") and second.endswith(" in other (train.py:1)")
    assert not group_text.describe_each([one])[0].endswith(frame)


@pytest.mark.parametrize(
    ("has_numbers", "phrase"),
    [(False, "compare sequence numbers (flight recorder)."), (True, "see the sequence numbers in the evidence.")],
)
def test_sequence_numbers_that_are_there_are_not_asked_for(has_numbers: bool, phrase: str) -> None:
    two = [group("collective_wait", range(2)), group("gpu_wait", range(2, 4))]
    open_in = EnqueuedOperation(
        number=1, operation="barrier", order=1, created_unix_seconds=0.0, stays_open=has_numbers
    )
    records = GroupRecords(library="gloo", name="0", description="", number=1, operations=(open_in,))
    first = replace(
        two[0].members[0],
        recorder=replace(two[0].members[0].recorder, libraries=(RecorderState(library="gloo", groups=(records,)),)),
    )
    scene = build_scene(Grouping(groups=(replace(two[0], members=(first, two[0].members[1])), two[1])), None)
    assert job_headlines.mismatch(Finding("Mismatch", scene, job_headlines.mismatch, others=scene.stacked)).endswith(
        phrase
    )


def test_sentence_says_that_no_rank_is_known_to_wait() -> None:
    message = judge(Grouping(groups=(group("unknown", range(2), "a"), group("unknown", range(2, 4), "b")))).message
    assert message.startswith("No rank can be named: no rank is known to wait for others.")


@pytest.mark.parametrize(
    ("odd", "phrase"),
    [(range(4, 8), " These are all ranks of n2: check the node."), (range(4, 7), ""), (range(4, 5), "")],
    ids=["a whole node", "all but one", "one of a node"],
)
def test_a_node_that_is_odd_as_a_whole_is_told(odd: range, phrase: str) -> None:
    here = group("collective_wait", range(4))
    waiting = group("collective_wait", range(odd.stop, 9 if odd.stop < 8 else 8), node="n2")
    there = group("storage", odd, node="n2")
    members = (*here.members, *waiting.members)
    found = Grouping(groups=(replace(here, members=members), there))
    named = list(there.members)
    assert rank_headlines.whole_nodes(named, found) == phrase
    assert rank_headlines.whole_nodes(named, Grouping(groups=(there,))) == "", "nothing else is in view"


SHARD = CallTarget(kind="file", what="/mnt/data/shard-3", mount="/mnt/data (fuse.s3fs)", is_remote=True)
PEER = CallTarget(kind="connection", what="10.0.0.7 port 29500")


@pytest.mark.parametrize(
    ("call", "signature", "phrase"),
    [
        (KernelCall(name="read", says="read() on", rounds=3, descriptors=1, behind=(SHARD,)), Signature.BLOCKED,
         "read() on /mnt/data/shard-3, on /mnt/data (fuse.s3fs), which does not respond, in each of 3 rounds"),
        (KernelCall(name="read", says="read() on", rounds=3, descriptors=1, behind=(SHARD,)), Signature.TRANSFERS,
         "read() on /mnt/data/shard-3, on /mnt/data (fuse.s3fs), in each of 3 rounds"),
        (KernelCall(name="recvfrom", says="recvfrom() from", rounds=1, descriptors=1, behind=(PEER,)), Signature.BLOCKED,
         "recvfrom() from 10.0.0.7 port 29500"),
        (KernelCall(name="recvfrom", says="recvfrom() from", rounds=1, descriptors=1, behind=(replace(PEER, is_lost=True),)), Signature.BLOCKED,
         "recvfrom() from 10.0.0.7 port 29500, which is gone"),
        (KernelCall(name="recvfrom", says="recvfrom() from", rounds=1, descriptors=1, behind=(replace(PEER, other_pid=14),)), Signature.BLOCKED,
         "recvfrom() from 10.0.0.7 port 29500 of rank 4 (n1, pid 14)"),
        (KernelCall(name="read", says="read() on", rounds=1, descriptors=1, behind=(CallTarget(kind="pipe", what="pipe:[7]", other_pid=4711, other_comm="pt_data_worker"),)), Signature.BLOCKED,
         "read() on a pipe connected to pid 4711 (pt_data_worker)"),
        (KernelCall(name="read", says="read() on", rounds=1, descriptors=1, behind=(CallTarget(kind="pipe", what="pipe:[7]", other_pid=13),)), Signature.BLOCKED,
         "read() on a pipe connected to this process"),
        (KernelCall(name="poll", says="poll() on", rounds=1, descriptors=9, behind=(PEER,)), Signature.BLOCKED,
         "poll() on 10.0.0.7 port 29500 and 8 other descriptors"),
        (KernelCall(name="openat", says="openat() on", rounds=2, path="/mnt/x"), Signature.BLOCKED, "openat() on /mnt/x, in each of 2 rounds"),
        (KernelCall(name="wait4", says="wait4() for", rounds=1, child_pid=9, child_comm="ssh"), Signature.BLOCKED, "wait4() for its child 9 (ssh)"),
        (KernelCall(name="flock", says="flock() on", rounds=1, descriptors=1, file_lock=FileLock(path="/x.lock", holder_pid=9, holder_comm="rsync")), Signature.BLOCKED,
         "flock() on /x.lock, held by pid 9 (rsync)"),
        (KernelCall(name="futex", says="futex", rounds=1), Signature.BLOCKED, "futex()"),
    ],
)  # fmt: skip
def test_what_is_behind_a_call_is_said(call: KernelCall, signature: Signature, phrase: str) -> None:
    """Say that a file system does not respond only if no bytes flow."""
    member = Member(id=RankId(node="n1", rank=3, pid=13), signature=signature, kernel=KernelFacts(state="D", call=call))
    assert clauses.describe_call(call, member, {13: member.id, 14: RankId(node="n1", rank=4, pid=14)}) == phrase


@pytest.mark.parametrize(
    ("state", "wchan", "is_silent"),
    [
        ("S", "request_wait_answer", True),
        ("D", "rpc_wait_bit_killable", True),
        ("S", "pipe_read", False),
        ("S", None, False),
    ],
)
def test_a_fifo_on_a_file_system_of_another_machine_does_not_make_that_silent(
    state: str, wchan: str | None, *, is_silent: bool
) -> None:
    call = KernelCall(name="read", says="read() on", rounds=2, descriptors=1, behind=(SHARD,))
    member = Member(
        id=RankId(rank=3), signature=Signature.BLOCKED, kernel=KernelFacts(state=state, wchan=wchan, call=call)
    )
    assert ("does not respond" in clauses.describe_call(call, member, {})) is is_silent


def test_sentence_has_the_blocked_call_of_the_named_rank() -> None:
    call = KernelCall(name="read", says="read() on", rounds=3, descriptors=1, behind=(SHARD,))
    waiting, odd = group("collective_wait", range(3)), group("data_loading", range(3, 4))
    odd = replace(
        odd,
        members=(
            replace(odd.members[0], kernel=replace(odd.members[0].kernel, call=call, wchan="request_wait_answer")),
        ),
    )
    verdict = judge(Grouping(groups=(waiting, odd), world_size=4))
    assert verdict.message.endswith(
        "In the kernel it is in read() on /mnt/data/shard-3, on /mnt/data (fuse.s3fs), "
        "in each of 3 rounds; wchan request_wait_answer."
    )
    assert [vote.kind for vote in verdict.evidence][-1] == "system_call"


@pytest.mark.parametrize(
    ("task", "does"), [(None, "is idle"), (Frame(function="read", file="a.py"), "is loading data")]
)
def test_loader_worker_without_a_task_is_idle(task: Frame | None, does: str) -> None:
    worker = Stack(name="4 x pt_data_worker", frames=(), activity="data_loading", user_frame=task)
    group = Group(key="k", activity="data_loading", members=(), workers=(worker,))
    assert group_text.describe_stack(worker, group) == f"its worker (4 x pt_data_worker) {does}"
