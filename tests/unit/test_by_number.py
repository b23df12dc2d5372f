"""Verdicts by sequence numbers and stacks together: the named rank and the text. Ranks frozen for good."""

from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch.collectives.rank_records import merge_rounds
from hangwatch.model import (
    CallTarget,
    Confidence,
    Died,
    FileLock,
    Frame,
    GpuReadings,
    GpuUse,
    Group,
    Grouping,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    PortTraffic,
    RankId,
    RecorderFacts,
    Rests,
    Signature,
    Stack,
    StackFacts,
    Usage,
    Verdict,
    Waits,
)
from hangwatch.stacks import activity_table
from hangwatch.tools.fleet.merge import merge_all
from hangwatch.verdict import judge
from hangwatch.verdict.diagnosis import with_frozen_ranks
from hangwatch.verdict.permanence import find_permanent, find_waiting
from tests import samples
from tests.samples import change_parts
from tests.unit.test_waitfor import WORLD, done, member, record, recorder, standing, waits

WAIT = Frame(function="all_reduce", file="torch/distributed/distributed_c10d.py", line=9)
OWN = Frame(function="write_metrics", file="metrics.py", line=31)


def waiting(*members: Member) -> Group:
    return Group(
        key="w",
        activity="collective_wait",
        operation="all_reduce",
        waits_for="ranks",
        frames=(WAIT, Frame(function="main", file="train.py", line=3)),
        members=members,
    )


def outside(*members: Member, activity: str = "checkpoint", waits_for: str = "nothing") -> Group:
    own = tuple(change_parts(member, user_frames=(OWN,)) for member in members)
    return Group(key="o", activity=activity, waits_for=waits_for, frames=(OWN,), members=own)


def judged(*groups: Group, world_size: int = 4) -> Verdict:
    return judge.judge(Grouping(groups=groups, world_size=world_size))


def named(verdict: Verdict) -> list[int | None]:
    return [one.rank for one in verdict.named]


def without_numbers(member: Member) -> Member:
    return change_parts(member, libraries=())


THREE = tuple(standing(rank, waits(6)) for rank in range(3))


def test_numbers_name_and_stacks_say_what_it_does() -> None:
    verdict = judged(waiting(*THREE), outside(standing(3, done(5))))
    assert (verdict.kind, [one.rank for one in verdict.named]) == ("NotJoined", [3])
    assert verdict.confidence is Confidence.HIGH
    assert "It has not joined all_reduce #6 of the default group, where ranks 0-2 have waited for" in verdict.message
    assert "metrics.py:31" in verdict.message


def on_gpu(rank: int, first: int, last: int) -> Member:
    """Return a rank that enqueues ten collectives, and has completed `first` of them in the first round."""
    rounds = [
        recorder(
            *(
                record(number, operation="nccl:all_reduce", state="completed" if number <= completed else "open")
                for number in range(1, 11)
            ),
            library="nccl",
        )
        for completed in (first, last)
    ]
    return member(rank, rounds[0], last=[rounds[1]])


def test_rank_with_a_gpu_that_is_behind_is_named() -> None:
    verdict = judged(waiting(*(on_gpu(rank, 7, 7) for rank in range(3)), on_gpu(3, 4, 4)))
    assert (verdict.kind, [one.rank for one in verdict.named]) == ("GpuBehind", [3])
    assert (verdict.confidence, verdict.action.kind) == (Confidence.HIGH, "restart_elsewhere")
    assert verdict.message.startswith(
        "Rank 3's GPU has not completed all_reduce #5 of the default group, which ranks 0-2 have; it is 3 operations "
        "behind."
    )
    assert verdict.stuck_on == "all_reduce #5 of the default group"
    assert verdict.next_step.startswith("`hangwatch check xid")


def test_gpu_that_may_have_been_read_before_the_others_completed_is_not_named() -> None:
    """The others completed the operation between the two rounds. Rank 3 may complete it a moment later."""
    verdict = judged(waiting(*(on_gpu(rank, 4, 7) for rank in range(3)), on_gpu(3, 4, 4)))
    assert verdict.named == ()


def test_gpu_of_a_stopped_rank_is_not_behind() -> None:
    """The process of a stopped rank does not record what its GPU completes."""
    stopped = replace(on_gpu(3, 4, 4), kernel=KernelFacts(state="T"))
    verdict = judged(waiting(*(on_gpu(rank, 7, 7) for rank in range(3)), stopped))
    assert verdict.kind != "GpuBehind"


@pytest.mark.parametrize("world_size", [4, None])
def test_process_without_a_rank_number_is_named_alike(world_size: int | None) -> None:
    def unnumbered(numbered: Member) -> Member:
        return replace(numbered, id=RankId(node="a", pid=100 + (numbered.id.rank or 0)))

    groups = waiting(*map(unnumbered, THREE)), outside(unnumbered(standing(3, done(5))))
    verdict = judge.judge(Grouping(groups=groups, world_size=world_size))
    numbered = judged(waiting(*THREE), outside(standing(3, done(5))))
    assert (verdict.kind, [one.pid for one in verdict.named]) == ("NotJoined", [103])
    assert (verdict.confidence, numbered.confidence) == (Confidence.HIGH, Confidence.HIGH)
    assert "It has not joined all_reduce #6 of the default group, where 3 ranks (pids 100-102) have" in verdict.message


def test_advice_omits_numbers_that_the_evidence_has() -> None:
    """By its stack, rank 3 is the rank to check first: no other rank is in its barrier."""
    pair = {"eval": (0, 1)}
    others = [standing(rank, waits(6)) for rank in range(3)]
    barrier = Frame(function="barrier", file="torch/distributed/distributed_c10d.py", line=7)
    lone = replace(waiting(standing(3, {WORLD: (5, 5), **pair})), operation="barrier", frames=(barrier,), key="b")
    verdict = judged(waiting(*others), lone)
    assert [one.rank for one in verdict.check_first] == [3]
    assert "in the evidence" in verdict.check_first[0].settle
    assert any(vote.kind == "sequence" for vote in verdict.evidence)


@pytest.mark.parametrize("waits_for", ["lock", "unknown"])
def test_rank_waiting_for_a_shared_lock_is_checked_first_and_not_named(waits_for: str) -> None:
    held = replace(standing(3, done(5)), signature=Signature.BLOCKED)
    assert named(judged(waiting(*THREE), outside(held, activity="lock", waits_for=waits_for))) == [3]
    verdict = judged(waiting(*THREE), outside(change_parts(held, shares_lock=True), activity="lock", waits_for="lock"))
    assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("NotJoined", (), [3])


@pytest.mark.parametrize(
    ("activity", "waits_for", "rests"), [("lock", "lock", None), ("unknown", "unknown", "sleep")], ids=["lock", "sleep"]
)
@pytest.mark.parametrize(
    ("other_waits_for", "named", "first"), [("gpu", [], [2, 3]), ("ranks", [3], [])], ids=["gpu", "collective"]
)
def test_waiter_in_own_code_is_not_named_while_another_rank_is_outside(
    activity: str, waits_for: str, rests: Rests | None, other_waits_for: str, named: list[int], first: list[int]
) -> None:
    # Rank 2 waits for its GPU, which may be hung. Rank 3 waits in its own code, possibly for rank 2: check both.
    suspect = replace(standing(3, done(5)), signature=Signature.BLOCKED, kernel=KernelFacts(rests=rests))
    other = replace(outside(standing(2, done(5)), activity="gpu_sync", waits_for=other_waits_for), key="g")
    verdict = judged(waiting(*THREE[:2]), other, outside(suspect, activity=activity, waits_for=waits_for))
    assert [rank.rank for rank in verdict.named] == named
    assert sorted(rank.rank or 0 for rank in verdict.check_first) == first
    assert not any(rank.why.endswith(".") for rank in verdict.check_first), "a report ends the sentence"


def test_polling_rank_is_checked_first_and_not_named() -> None:
    asks = replace(standing(3, done(5)), signature=Signature.POLLS)
    verdict = judged(waiting(*THREE), outside(asks, activity="unknown", waits_for="unknown"))
    assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("NotJoined", (), [3])


@pytest.mark.parametrize(
    ("switches_per_second", "main_cpu_ratio", "named"),
    [(80.0, 0.02, []), (80.0, 0.9, [3]), (0.0, 0.1, [3])],
    ids=["a loop that sleeps", "it computes", "it computes on a busy machine"],
)
def test_sleeping_loop_is_no_work(switches_per_second: float, main_cpu_ratio: float, named: list[int]) -> None:
    usage = Usage(switches_per_second=switches_per_second, main_cpu_ratio=main_cpu_ratio)
    goes_on = replace(standing(3, done(5)), signature=Signature.COMPUTES, motion=Motion.MOVING, usage=usage)
    verdict = judged(waiting(*THREE), outside(goes_on, activity="unknown", waits_for="unknown"))
    assert [one.rank for one in verdict.named] == named
    assert [one.rank for one in (*verdict.named, *verdict.check_first)] == [3]
    assert (verdict.stuck_on, "It is working" in verdict.message) == ("", True)


def test_verdict_says_that_a_rank_that_works_may_still_join() -> None:
    def describe(**more: object) -> tuple[str, str]:
        verdict = judged(waiting(*THREE), outside(replace(standing(3, done(5)), **more)))
        return verdict.message.partition("16 min 34 s.")[2], (verdict.stuck_on or "").partition(" in rank")[0]

    uses_cpu = " It uses CPU: either work that ends by itself, or an endless loop."
    child_computes = {"motion": Motion.UNKNOWN, "usage": Usage(cpu_ratio=1.0, main_cpu_ratio=0.0)}
    assert describe(signature=Signature.COMPUTES, motion=Motion.MOVING) == (
        " It is working, and may join when that is done.",
        "",
    )
    assert describe(signature=Signature.SPINS) == (uses_cpu, "perhaps write_metrics (metrics.py:31)")
    assert describe(**child_computes) == (uses_cpu, "perhaps write_metrics (metrics.py:31)")
    assert describe(signature=Signature.BLOCKED) == ("", "write_metrics (metrics.py:31)")


def test_stack_that_contradicts_the_numbers_names_no_rank() -> None:
    """Name no rank: a process group has two more members that were not captured, and these may not have joined."""
    pair = {WORLD: (5, 6), "1": (4, 4)}
    verdict = judged(waiting(*(standing(rank, pair) for rank in range(3))), outside(standing(3, pair)))
    assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("Contradiction", (), [3])
    assert "the stacks point at rank 3" in verdict.message and "have" not in verdict.message.split("joined")[0]
    alone = judged(waiting(*map(without_numbers, THREE)), outside(standing(3, pair)))
    assert (alone.kind, [one.rank for one in alone.named]) == ("OutsideCollective", [3])


def test_stopped_rank_is_named_although_all_have_joined() -> None:
    stopped = replace(standing(3, waits(6)), kernel=KernelFacts(state="T"), signature=Signature.STOPPED)
    verdict = judged(waiting(*THREE, stopped))
    assert (verdict.kind, [one.rank for one in verdict.named]) == ("RankStopped", [3])
    joined = judged(waiting(*THREE, standing(3, waits(6))))
    assert joined.kind == "AllJoined"
    assert "Check the network between these ranks" in joined.message, "gloo uses no GPU"


def test_rank_waiting_for_a_lock_waits_for_the_rank_that_holds_it() -> None:
    lock = FileLock(path="/shared/lock", holder_pid=700)
    held = replace(standing(3, done(5)), waits=Waits(file_lock=lock))
    holder = replace(THREE[0], id=replace(THREE[0].id, pid=700))
    verdict = judged(waiting(holder, *THREE[1:]), outside(held, activity="lock", waits_for="lock"), world_size=4)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("CannotTell", [holder.id.rank])
    assert "holds the lock of /shared/lock, for which rank 3" in verdict.message
    stranger = change_parts(held, file_lock=replace(lock, holder_pid=701))
    assert judged(waiting(holder, *THREE[1:]), outside(stranger, activity="lock", waits_for="lock")).kind == "NotJoined"


def in_call_about(name: str, other_pid: int | None = None, **facts: bool) -> KernelFacts:
    behind = () if other_pid is None else (CallTarget(kind="pipe", what="a pipe", other_pid=other_pid),)
    call = KernelCall(name=name, says=f"{name}()", rounds=3, descriptors=len(behind), behind=behind, **facts)
    return KernelFacts(call=call)


@pytest.mark.parametrize(
    ("facts", "others", "is_named"),
    [
        (in_call_about("futex"), (), True),
        (in_call_about("futex"), ("thread_wait", "lock", "sleep"), True),
        (in_call_about("futex"), ("thread_wait", "unknown"), False),  # which may wait for another rank
        (in_call_about("futex"), ("collective_wait",), False),
        (KernelFacts(rests="thread"), (), True),  # its call was not read, as there are many such ranks
        (in_call_about("read", other_pid=703), (), True),
        (in_call_about("read", other_pid=704), (), False),  # the other end of a pipe may be another rank
        (in_call_about("read"), (), False),
        (KernelFacts(), (), False),
    ],
)
def test_rank_at_its_own_memory_or_pipe_waits_for_no_rank(
    facts: KernelFacts, others: tuple[str, ...], is_named: bool
) -> None:
    late = replace(standing(3, done(5)), kernel=facts, id=RankId(node="a", rank=3, pid=703))
    group = outside(late, activity="thread_wait", waits_for="thread")
    threads = tuple(Stack(name="T", activity=one, frames=(OWN,)) for one in others)
    verdict = judged(waiting(*THREE), replace(group, threads=threads))
    assert verdict.kind == "NotJoined" and named(verdict) == ([3] if is_named else [])


def test_ranks_in_joined_collective_are_not_blocked_by_rank_ahead() -> None:
    # Rank 2 is one collective ahead, which is normal after a broadcast with another root. By stacks alone, rank 2
    # would be the rank to check first.
    ahead = replace(waiting(standing(2, waits(8))), operation="barrier", key="ahead")
    behind = waiting(standing(0, waits(7)), standing(1, waits(6)), standing(3, waits(6)))
    verdict = judged(behind, ahead)
    assert (verdict.kind, verdict.named, verdict.check_first) == ("AllJoined", (), ())
    assert verdict.message.startswith("All ranks have joined all_reduce #6 of the default group, and ranks 1,3 are")
    assert "root" not in verdict.message
    without = (replace(one, members=tuple(map(without_numbers, one.members))) for one in (behind, ahead))
    assert [one.rank for one in judged(*without).check_first] == [2]


def test_open_operation_does_not_clear_a_rank_suspected_by_its_stack() -> None:
    behind = waiting(standing(0, waits(7)), standing(1, waits(6)), standing(3, waits(6)))
    stands = outside(standing(2, waits(8)), activity="training_loop", waits_for="gpu")
    verdict = judged(behind, stands)
    assert verdict.kind in ("OutsideCollective", "Contradiction")


MAY_BE_ASKED = "waits in the kernel for something that another rank"
WAITS = pytest.mark.parametrize(
    ("activity", "waits_for", "facts", "words"),
    [
        ("network", "nothing", {"asks_rank": "main"}, f"It {MAY_BE_ASKED} of the job may provide"),
        ("data_loading", "nothing", {"asks_rank": "thread"}, f"One of its threads {MAY_BE_ASKED}"),
        ("subprocess", "nothing", {"asks_rank": "child"}, f"The process that it waits for {MAY_BE_ASKED}"),
        ("unknown", "unknown", {"waits_in_torch": True}, ""),
    ],
)


@WAITS
def test_rank_that_may_wait_for_another_rank_is_not_named_by_numbers(
    activity: str, waits_for: str, facts: dict[str, object], words: str
) -> None:
    """Do not name a rank that waits for another rank, in any function: the other rank may be the cause.

    A rank that sleeps in torch's code may wait, too: `work.wait()` has no Python frame. A lock or sleep of the
    program has no Python frame either, but does not sleep in torch's code.
    """
    own = replace(standing(3, done(5)), signature=Signature.BLOCKED)
    assert named(judged(waiting(*THREE), outside(own, activity=activity, waits_for=waits_for))) == [3]
    verdict = judged(waiting(*THREE), outside(change_parts(own, **facts), activity=activity, waits_for=waits_for))
    assert verdict.named == () and words in verdict.message
    if words:
        assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("NotJoined", [3])
    else:
        assert "sequence" in {vote.kind for vote in verdict.evidence}, "what the numbers show is reported, too"


def test_socket_to_another_rank_is_reported_as_possible_wait_for_it() -> None:
    def describe(other_pid: int | None) -> str:
        behind = CallTarget(kind="unix", what="a Unix socket", other_pid=other_pid)
        call = KernelCall(name="recvfrom", says="recvfrom() from", rounds=2, descriptors=1, behind=(behind,))
        own = replace(standing(3, done(5)), kernel=KernelFacts(receives=True, call=call), signature=Signature.BLOCKED)
        holder = replace(THREE[0], id=replace(THREE[0].id, pid=700))
        unknown = outside(own, activity="unknown", waits_for="unknown")
        verdict = judged(waiting(holder, *THREE[1:]), unknown)
        assert [one.rank for one in verdict.check_first] == [3]
        return verdict.message

    assert "It waits in the kernel for something that another rank of the job may provide" in describe(700)
    for stranger in (701, None):
        assert "It is unknown if it waits for another rank in that operation" in describe(stranger)


@pytest.mark.parametrize(("has_device", "ranks"), [(False, [3]), (True, []), (None, [])])
def test_rank_without_a_device_that_computes_in_a_library_is_named(has_device: bool | None, ranks: list[int]) -> None:
    busy = change_parts(replace(standing(3, done(5)), signature=Signature.SPINS), has_device=has_device)
    frames = (Frame(function="svd", file="numpy/linalg/_linalg.py", line=7),)
    library = Group(key="o", activity="unknown", frames=frames, members=(busy,))
    assert named(judged(waiting(*THREE), library)) == ranks


@WAITS
def test_rank_that_may_wait_for_another_rank_is_not_named_by_stacks(
    activity: str, waits_for: str, facts: dict[str, object], words: str
) -> None:
    others = waiting(*map(without_numbers, THREE))
    own = without_numbers(replace(standing(3, done(5)), signature=Signature.BLOCKED))
    assert named(judged(others, outside(own, activity=activity, waits_for=waits_for))) == [3]
    assert not judged(others, outside(change_parts(own, **facts), activity=activity, waits_for=waits_for)).named


def test_rank_receiving_in_its_main_thread_waits_like_the_others() -> None:
    # A rank that receives in its main thread, as with MPI, waits like the ranks in the collective.
    asks = replace(standing(3, done(5)), waits=Waits(asks_rank="main"))
    assert judged(waiting(*THREE), outside(asks, activity="point_to_point", waits_for="ranks")).check_first == ()


def test_nodes_are_judged_together_as_one() -> None:
    def node(name: str, *members: Member) -> tuple[Member, ...]:
        return tuple(replace(one, id=replace(one.id, node=name)) for one in members)

    here = Grouping(groups=(waiting(*node("a", *THREE)),), world_size=4)
    there = Grouping(groups=(outside(*node("b", standing(3, done(5)))),), world_size=4)
    assert judge.judge(here, 3).named == ()
    for both in (merge_all([here, there]), merge_all([there, here])):
        assert [one.rank for one in judge.judge(both).named] == [3]


def with_gpus(*gpus: GpuReadings) -> Verdict:
    """Return the verdict on ranks with these GPUs that have all joined."""
    members = (replace(standing(rank, waits(6)), gpu=gpu) for rank, gpu in enumerate(gpus))
    verdict = judged(waiting(*members), world_size=len(gpus))
    assert (verdict.kind, verdict.named) == ("AllJoined", ())
    return verdict


SPINS, IDLE, LOWER = (118.0, 1.0), (117.0, 0.0), (90.0, 1.0)


def test_rank_with_different_gpu_is_checked_first_without_numbers() -> None:
    """Check none first if a rank is missing: the culprit may be on its node."""
    ratios = enumerate((1.0, 1.0, 0.0, 1.0))
    members = [change_parts(standing(rank, {}), libraries=(), utilization_ratio=ratio) for rank, ratio in ratios]
    alike = replace(waiting(*members), activity="gpu_sync", waits_for="gpu")
    verdict = judged(alike, world_size=4)
    assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("AllWaiting", (), [2])
    assert "its GPU is at 0%, the others are at 100%" in verdict.message
    assert "No rank can be named:" in verdict.message
    assert judged(alike, world_size=8).check_first == ()
    assert judged(waiting(*members[:2], *members[3:]), world_size=3).check_first == ()


def with_kernels(*sm_ratios: float | None, tensor_ratio: float = 0.0, dram_ratio: float = 0.0) -> Verdict:
    """Return the verdict on ranks that have all joined. `sm_ratios` are the busy SMs of their GPUs."""
    uses = (
        None if ratio is None else GpuUse(sm_ratio=ratio, tensor_ratio=tensor_ratio, dram_ratio=dram_ratio)
        for ratio in sm_ratios
    )
    return with_gpus(*(GpuReadings(use=use) for use in uses))


def only_waits(verdict: Verdict) -> list[str]:
    return [one.message for one in verdict.evidence if one.kind == "gpu_use"]


def test_a_gpu_without_a_kernel_is_looked_at_first_where_all_others_have_one() -> None:
    odd = with_kernels(0.12, 0.12, 0.0, 0.13)
    assert [one.rank for one in odd.check_first] == [2]
    assert "its GPU runs no kernel, the others run kernels on 12.0% to 13.0% of their SMs" in odd.message
    for all_alike in (with_kernels(0.12, 0.12, 0.0, 0.0), with_kernels(*[0.12] * 4), with_kernels(0.1, None, 0.0, 0.1)):
        assert all_alike.check_first == ()


def test_kernels_that_run_and_neither_compute_nor_move_data_only_wait() -> None:
    (said,) = only_waits(with_kernels(0.12, 0.12, 0.13, 0.12, dram_ratio=0.004))
    assert said.startswith("kernels run on the GPUs of 4 ranks and only wait: they run on 12.0% to 13.0% of the SMs")
    for works in ({"tensor_ratio": 0.2}, {"dram_ratio": 0.3}):
        assert only_waits(with_kernels(*[0.12] * 4, **works)) == []
    assert only_waits(with_kernels(0.12, 0.12, None, 0.12)) == []
    assert only_waits(with_kernels(0.12, 0.12, 0.0, 0.12)) == []


def test_ports_that_got_worse_are_said_of_their_node() -> None:
    worse = PortTraffic(bytes_per_second=0.0, worse=("mlx5_3/1 link_downed +1",))
    calm = PortTraffic(bytes_per_second=0.0)
    members = [replace(standing(rank, waits(6)), gpu=GpuReadings(ports=calm if rank else worse)) for rank in range(4)]
    (said,) = (one for one in judged(waiting(*members)).evidence if one.kind == "ports")
    assert "during the capture: mlx5_3/1 link_downed +1" in said.message
    assert judged(waiting(*(change_parts(one, ports=calm) for one in members))).evidence != ()


@pytest.mark.parametrize(
    ("numbers", "first", "phrase"),
    [
        ((SPINS, SPINS, IDLE, SPINS), [2], "its GPU is at 0%, the others are at 100%"),
        ((SPINS, LOWER, SPINS, SPINS), [1], "its GPU draws 90 W, the others draw 118 to 118 W"),
        ((SPINS, (60.0, 0.0), SPINS, SPINS), [1], "its GPU is at 0%"),
        ((SPINS, LOWER, IDLE, SPINS), [], ""),  # two ranks differ, each in another value
        ((SPINS, IDLE, IDLE, SPINS), [], ""),
        ((IDLE, SPINS, IDLE, IDLE), [], ""),  # the rank with the busy GPU is no more likely to be the culprit
        ((SPINS, (107.0, 1.0), SPINS, SPINS), [], ""),  # 90 % of the others' power is not a clear difference
        ((SPINS, (None, None), SPINS, (60.0, 0.0)), [], ""),  # one GPU was not read
        ((SPINS, (60.0, 0.0)), [], ""),  # with two ranks, either may be the culprit
    ],
)
def test_rank_with_different_gpu_is_checked_first_after_all_have_joined(
    numbers: tuple[tuple[float | None, float | None], ...], first: list[int], phrase: str
) -> None:
    verdict = with_gpus(*(GpuReadings(power_watts=watts, utilization_ratio=ratio) for watts, ratio in numbers))
    assert [one.rank for one in verdict.check_first] == first
    assert phrase in verdict.message
    assert all("XID" in one.settle for one in verdict.check_first)
    assert ("Check rank" in verdict.message) == bool(first)


AWAITS_CHILD = KernelCall(name="wait4", says="wait4() for", rounds=3, child_pid=9, child_state="T", is_held=True)
FULL = Frame(function="read_shard", file="train.py", line=3)
FIFO: dict[str, Any] = {"object": "file", "wchan": "wait_for_partner"}


def at_work(member: Member, **given: Any) -> Member:
    values = {"rounds": 3, "signature": Signature.GPU_WORKS, "motion": Motion.MOVING, **given}
    return change_parts(member, user_frames=(FULL,), **{"switches_per_second": 0.0, **values})


def job(odd: Member, *, others: int = 3, **given: Any) -> Grouping:
    waiting = tuple(at_work(standing(rank, waits(6)), **given) for rank in range(others))
    return Grouping(
        groups=(
            Group(key="w", activity="collective_wait", waits_for="ranks", members=waiting),
            Group(key="o", activity="unknown", frames=(FULL,), members=(odd,)),
        ),
        world_size=4,
    )


def motions(grouping: Grouping) -> set[Motion]:
    return {member.motion for member in with_frozen_ranks(grouping).members}


@pytest.mark.parametrize(
    "held",
    [
        FIFO,
        {"file_lock": FileLock(path="/data/lock", holder_pid=77)},
        {"call": AWAITS_CHILD, "object": "child"},
        {**FIFO, "signature": Signature.BLOCKED, "motion": Motion.FROZEN},
    ],
    ids=["a FIFO", "a lock of another process", "a stopped child", "only the others' GPUs are at work"],
)
def test_rank_held_in_a_call_is_frozen_with_the_ranks_that_wait_for_it(held: dict[str, Any]) -> None:
    assert motions(job(at_work(standing(3, done(5)), **held))) == {Motion.FROZEN}


@pytest.mark.parametrize(
    ("main_cpu_ratio", "motion"), [(0.01, Motion.FROZEN), (0.6, Motion.MOVING), (None, Motion.MOVING)]
)
def test_rank_that_retries_collective_moves_only_if_it_computes(main_cpu_ratio: float | None, motion: Motion) -> None:
    odd = at_work(standing(3, done(5)), **FIFO, signature=Signature.BLOCKED, motion=Motion.FROZEN)
    use = {"switches_per_second": 9.0, "main_cpu_ratio": main_cpu_ratio}
    tried = with_frozen_ranks(job(odd, signature=Signature.COMPUTES, **use))
    assert [member.motion for member in tried.members] == [*[motion] * 3, Motion.FROZEN]


MAY_STILL_JOIN = {
    "it evaluates": at_work(standing(3, done(5))),
    "it returns from its calls": at_work(standing(3, done(5)), **{**FIFO, "switches_per_second": 0.4}),
    "switches were not counted": at_work(standing(3, done(5)), **{**FIFO, "switches_per_second": None}),
    "it reads a slow mount in one call": at_work(standing(3, done(5)), object="file", wchan="folio_wait_bit"),
    "it receives from outside": at_work(standing(3, done(5)), object="socket", awaited=None),
    "it waits for a child that works": at_work(standing(3, done(5)), object="child", wchan="do_wait"),
    "the holder of its lock is unknown": at_work(standing(3, done(5)), file_lock=FileLock(path="/data/lock")),
    "it has joined": at_work(standing(3, {WORLD: (6, 6)}), **FIFO),
}


@pytest.mark.parametrize("odd", MAY_STILL_JOIN.values(), ids=MAY_STILL_JOIN)
def test_rank_that_may_still_join_keeps_the_motion_that_power_shows(odd: Member) -> None:
    assert motions(job(odd)) == {Motion.MOVING}


def test_rank_is_not_frozen_if_another_rank_of_the_job_is_unknown() -> None:
    assert motions(job(at_work(standing(3, done(5)), **FIFO), others=2)) == {Motion.MOVING}


ALONE = StackFacts(is_alone=True)


def with_odd(
    signature: Signature,
    kernel: KernelFacts | None = None,
    waits_facts: Waits | None = None,
    at: str = "step",
    others: str = "collective_wait",
    waited_in: str = WORLD,
    operation: str = "all_reduce",
    **facts: object,
) -> Grouping:
    """Return a grouping of rank 3, and all other ranks in a collective of a group, or another activity."""
    facts = {"kernel": kernel or KernelFacts(), "waits": waits_facts or Waits(), "stack": ALONE, **facts}
    odd = replace(samples.member(3), signature=signature, **facts)
    frames = (Frame(function=at, file="torch/utils/data/dataloader.py", line=9),)
    group = Group(key="odd", activity="unknown", members=(odd,), gone=signature is Signature.GONE, frames=frames)
    is_open = waited_in and others == "collective_wait"
    own = record(6, waited_in or WORLD, operation=f"gloo:{operation}", state="open" if is_open else "completed")
    recorded = member(0, recorder(own)).recorder
    waiting = samples.waiting(rank for rank in range(8) if rank != 3)
    members = tuple(replace(one, recorder=recorded) for one in waiting.members)
    kind = activity_table.find_activity(others).waits_for
    waiting = replace(waiting, activity=others, waits_for=kind, members=members)
    return Grouping(groups=(waiting, group), world_size=8)


def without_recorders(grouping: Grouping) -> Grouping:
    """Return the same grouping, without flight recorders."""
    groups = (
        replace(group, members=tuple(replace(each, recorder=RecorderFacts()) for each in group.members))
        for group in grouping.groups
    )
    return replace(grouping, groups=tuple(groups))


def permanent(grouping: Grouping) -> list[int | None]:
    named = Verdict(kind="OutsideCollective", message="Rank 3.", named=(grouping.groups[-1].members[0].id,))
    return [rank.rank for rank in find_permanent(grouping, named)]


HELD, LIVING = in_call_about("read", is_held=True), in_call_about("read")
TIMED = in_call_about("read", is_held=True, may_time_out=True)
STOPPED, TRACED = KernelFacts(state="T"), KernelFacts(state="t")


PERMANENT = {
    "gone": (with_odd(Signature.GONE), True),
    "gone, and the others wait in their own group": (with_odd(Signature.GONE, waited_in="7"), False),
    "gone, and the others gather": (with_odd(Signature.GONE, operation="gather"), False),
    "gone, and no record shows the wait": (with_odd(Signature.GONE, waited_in=""), False),
    "gone, and there are no flight recorders": (without_recorders(with_odd(Signature.GONE)), False),
    "died": (with_odd(Signature.GONE, waited_in="", died=Died(text="ValueError", detail="", unix_seconds=1.0)), True),
    "gone, while the others leave": (with_odd(Signature.GONE, others="leaving"), False),
    "stopped": (with_odd(Signature.STOPPED, STOPPED), True),
    "stopped, while the others load": (with_odd(Signature.STOPPED, STOPPED, others="data_loading"), False),
    "by a tracer": (with_odd(Signature.STOPPED, TRACED), False),
    "traced": (with_odd(Signature.STOPPED, STOPPED, Waits(tracer="gdb (pid 8)")), False),
    "frozen": (with_odd(Signature.STOPPED, STOPPED, Waits(frozen_cgroup="/pod")), False),
    "blocked": (with_odd(Signature.BLOCKED), False),
    "stopped helpers": (with_odd(Signature.BLOCKED, HELD), True),
    "stopped helpers, and a thread": (with_odd(Signature.BLOCKED, HELD, stack=StackFacts()), False),
    "living helper": (with_odd(Signature.BLOCKED, LIVING), False),
    "timeout": (with_odd(Signature.BLOCKED, TIMED), False),
    "loader": (with_odd(Signature.BLOCKED, TIMED, at="_try_get_data"), True),
    "computes": (with_odd(Signature.COMPUTES, HELD), False),
}


@pytest.mark.parametrize(("grouping", "is_permanent"), PERMANENT.values(), ids=PERMANENT)
def test_named_rank_is_permanent_by_its_state(grouping: Grouping, is_permanent: bool) -> None:
    assert permanent(grouping) == ([3] if is_permanent else [])


def test_rank_that_is_not_named_is_not_permanent() -> None:
    grouping = with_odd(Signature.STOPPED, STOPPED)
    assert find_permanent(grouping, Verdict(kind="CannotTell", message="No rank can be named.")) == frozenset()
    assert not list(find_waiting(with_odd(Signature.STOPPED, STOPPED, others="data_loading")))


@pytest.mark.parametrize(
    ("enqueued_by", "alone", "waits_for", "signature", "timeout_ms", "permanent_ranks"),
    [
        (7, {0, 1}, "ranks", Signature.BLOCKED, 600_000, {0, 1}),
        (7, {0}, "ranks", Signature.BLOCKED, 600_000, set()),
        (7, {1}, "ranks", Signature.BLOCKED, 600_000, set()),
        (8, {0, 1}, "ranks", Signature.BLOCKED, 600_000, set()),
        (7, {0, 1}, "gpu", Signature.BEHIND_GPU, 600_000, set()),
        (7, {0, 1}, "ranks", Signature.TRANSFERS, 600_000, set()),
        (7, {0, 1}, "ranks", Signature.BLOCKED, 75_000, set()),
    ],
    ids=["", "1 has a thread", "0 has a thread", "a thread enqueues", "the GPU may work", "bytes move", "it times out"],
)
def test_cycle_by_sequence_numbers_is_permanent_if_ranks_only_wait(
    enqueued_by: int, alone: set[int], waits_for: str, signature: Signature, timeout_ms: int, permanent_ranks: set[int]
) -> None:
    """Rank 0 waits in its group for rank 1, which waits in the default group for rank 0.

    A rank that saves in a thread, or uses its GPU, may still enqueue the operation for which rank 0 waits.
    """
    group = record(2, "1"), record(3, "1", state="open", thread_id=enqueued_by, timeout_ms=timeout_ms)
    read = recorder(record(2), *group), recorder(group[0], record(2), record(3, state="open"))
    facts = [RecorderFacts(libraries=merge_rounds([[one], [one]], {7: ""})) for one in read]
    first, second = (
        Member(id=RankId(rank=rank), recorder=recorded, signature=signature, stack=StackFacts(is_alone=rank in alone))
        for rank, recorded in enumerate(facts)
    )
    waiting = Group(key="w", activity="collective_wait", waits_for=waits_for, members=(first, second))
    grouping = Grouping(groups=(waiting,), world_size=2)
    verdict = judge.judge(grouping)
    assert verdict.kind == "Cycle", verdict
    assert {rank.rank for rank in find_permanent(grouping, verdict)} == permanent_ranks


@pytest.mark.parametrize(
    ("enqueued_by", "activity", "kind", "named_ranks"),
    [
        (8, "checkpoint", "NotJoined", [2]),
        (8, "thread_wait", "Cycle", []),
        (8, "collective_wait", "Cycle", []),
        (7, "checkpoint", "Cycle", []),
        (9, "checkpoint", "Cycle", []),
        (8, "", "Cycle", []),
    ],
    ids=["", "it waits for threads", "it waits for ranks", "the main thread has", "it has ended", "it is not shown"],
)
def test_thread_of_a_rank_is_named_instead_of_a_cycle(
    enqueued_by: int, activity: str, kind: str, named_ranks: list[int]
) -> None:
    """Ranks save in the background, in a group that only threads use, and rank 0 waits for its thread."""
    saves = [record(number, "1", id=number, thread_id=8) for number in (1, 2)]
    waits_in_save = record(3, "1", id=3, state="open", thread_id=8)
    steps = record(5, id=4, thread_id=7), record(6, id=5, state="open", thread_id=7)
    last = replace(saves[1], thread_id=enqueued_by)
    read = recorder(*saves, waits_in_save, steps[0]), recorder(*saves, waits_in_save, *steps), recorder(last, *steps)
    threads = {7: "", 8: "Saver"}
    members = [
        Member(id=RankId(rank=rank), recorder=RecorderFacts(libraries=merge_rounds([[one], [one]], threads)))
        for rank, one in enumerate(read)
    ]
    saver = Stack(name="Saver" if activity else "another", frames=(OWN,), activity=activity or "checkpoint")
    verdict = judged(waiting(*members[:2]), replace(waiting(members[2]), key="v", threads=(saver,)), world_size=3)
    assert (verdict.kind, named(verdict)) == (kind, named_ranks)
    if named_ranks:
        said = "Thread Saver of rank 2 is writing or reading a checkpoint (write_metrics) at metrics.py:31."
        assert verdict.message.startswith(said)
        assert verdict.stuck_on == "write_metrics (metrics.py:31) in rank 2"
