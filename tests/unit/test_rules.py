"""The limits of the naming rules on groups made by hand: one rank more or less changes the verdict."""

import sys
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.model import (
    Awaited,
    CallTarget,
    Confidence,
    EnqueuedOperation,
    Fault,
    FileLock,
    Frame,
    GpuReadings,
    Group,
    Grouping,
    GroupRecords,
    JobState,
    KernelCall,
    KernelFacts,
    Member,
    Motion,
    PortUse,
    RankId,
    RecorderFacts,
    RecorderState,
    Signature,
    Stack,
    StackFacts,
    Store,
    Usage,
    Verdict,
    Waits,
)
from hangwatch.stacks import activity_table
from hangwatch.stacks.idle_reasons import find_refused, find_resting_state, has_no_task, is_serving
from hangwatch.state.on_diagnosis import count_motion
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.judge import judge
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.wording import clauses, evidence, group_text, job_headlines, rank_headlines
from tests.samples import change_parts
from tests.unit.test_waitfor import member, record, recorder

HIGH, MEDIUM, LOW, NONE = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW, Confidence.NONE
ORDER = (NONE, LOW, MEDIUM, HIGH)
ACTIVITIES = {
    "ranks": "collective_wait",
    "gpu": "gpu_sync",
    "lock": "lock",
    "thread": "thread_wait",
    "nothing": "data_loading",
    "unknown": "unknown",
    "leaving": "leaving",
    "tracker": "tracking",
}
WAITS_FOR = {"leaving": "ranks", "tracker": "gpu"}
HELD_UP: dict[str, Any] = {
    "signature": Signature.BLOCKED,
    "awaited": Awaited(name="its worker 7 (python), which is stopped", end="held"),
}
SERVER = Awaited(name="10.0.0.9 port 443")


class Ranks(NamedTuple):
    """Equal ranks. `what` is the target of their wait, "gone", a process state, or the reason of a fault."""

    count: int
    what: str
    rounds: int = 3
    motion: Motion = Motion.FROZEN
    owns_gil: bool = False
    about: str = "target"
    mount: str | None = None
    waits_for_mount: bool = False
    node: str = "n1"
    signature: Signature = Signature.UNKNOWN
    utilization_ratio: float | None = None
    awaited: Awaited | None = None


def verdict(*parts: Ranks, world_size: int | None = None, ranks_here: int | None = None) -> Verdict:
    groups, first = [], 0
    for number, part in enumerate(parts):
        is_state = part.what in ("D", "T")
        is_fault = part.what[:1].isupper() and not is_state
        members = tuple(
            Member(
                id=RankId(node=part.node, rank=rank, local_rank=rank, pid=1000 + rank),
                motion=part.motion,
                rounds=part.rounds,
                stack=StackFacts(owns_gil=part.owns_gil),
                kernel=KernelFacts(
                    state=part.what if is_state else "S", silent_mount=part.mount, waits_for_mount=part.waits_for_mount
                ),
                signature=part.signature,
                gpu=GpuReadings(utilization_ratio=part.utilization_ratio),
                waits=Waits(awaited=part.awaited),
            )
            for rank in range(first, first + part.count)
        )
        first += part.count
        fault = Fault(subject="pid 1", reason=part.what, detail="no answer", about=part.about)  # type: ignore[arg-type]
        what = "unknown" if is_state or is_fault or part.what == "gone" else part.what
        groups.append(
            Group(
                key=f"key{number}",
                activity=ACTIVITIES[what],
                waits_for=WAITS_FOR.get(what, what),
                members=members,
                fault=fault if is_fault else None,
                gone=part.what == "gone",
            )
        )
    return judge(Grouping(groups=tuple(groups), world_size=world_size), ranks_here)


def says(*parts: Ranks, world_size: int | None = None, ranks_here: int | None = None) -> tuple[str, int, Confidence]:
    found = verdict(*parts, world_size=world_size, ranks_here=ranks_here)
    return found.kind, len(found.named), found.confidence


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # With kernel facts, the waiting ranks must be at least as many as the suspects.
        ((Ranks(2, "gone"), Ranks(2, "ranks")), ("RankGone", 2, HIGH)),
        ((Ranks(3, "gone"), Ranks(2, "ranks")), ("AllWaiting", 0, NONE)),
        ((Ranks(2, "D"), Ranks(2, "ranks")), ("RankBlocked", 2, HIGH)),
        ((Ranks(2, "T"), Ranks(2, "gpu")), ("RankStopped", 2, HIGH)),
        ((Ranks(1, "nothing", **HELD_UP), Ranks(3, "nothing")), ("HelperStopped", 1, MEDIUM)),
        ((Ranks(2, "ranks", **HELD_UP), Ranks(2, "ranks")), ("HelperStopped", 2, MEDIUM)),
        ((Ranks(3, "ranks", **HELD_UP), Ranks(1, "ranks")), ("Mismatch", 0, NONE)),
        # Half of the others must wait.
        ((Ranks(1, "gone"), Ranks(2, "ranks"), Ranks(2, "unknown")), ("RankGone", 1, MEDIUM)),
        ((Ranks(1, "gone"), Ranks(2, "ranks"), Ranks(3, "unknown")), ("CannotTell", 0, NONE)),
        ((Ranks(1, "D"), Ranks(2, "ranks"), Ranks(2, "StackUnreadable")), ("RankBlocked", 1, HIGH)),
        ((Ranks(1, "D"), Ranks(2, "ranks"), Ranks(3, "StackUnreadable")), ("CannotTell", 0, NONE)),
        # Most of the others wait explicitly, else the confidence is lower.
        ((Ranks(1, "gone"), Ranks(2, "ranks"), Ranks(2, "gpu")), ("RankGone", 1, HIGH)),
        ((Ranks(1, "gone"), Ranks(2, "ranks"), Ranks(3, "gpu")), ("RankGone", 1, MEDIUM)),
        ((Ranks(1, "gone"), Ranks(7, "gpu")), ("RankGone", 1, MEDIUM)),
        ((Ranks(1, "ProcessGone"), Ranks(3, "ranks")), ("RankGone", 1, HIGH)),
        # A disk wait may end.
        ((Ranks(1, "D", rounds=1), Ranks(7, "ranks")), ("RankBlocked", 1, MEDIUM)),
        ((Ranks(1, "D", rounds=2), Ranks(7, "ranks")), ("RankBlocked", 1, HIGH)),
        # A stack may name one rank of two, but not two of four.
        ((Ranks(1, "nothing"), Ranks(1, "ranks")), ("OutsideCollective", 1, HIGH)),
        ((Ranks(2, "nothing"), Ranks(2, "ranks")), ("CannotTell", 0, NONE)),
        ((Ranks(2, "nothing"), Ranks(3, "ranks")), ("OutsideCollective", 2, MEDIUM)),
        ((Ranks(2, "nothing"), Ranks(6, "ranks")), ("OutsideCollective", 2, HIGH)),
        ((Ranks(3, "nothing"), Ranks(8, "ranks")), ("OutsideCollective", 3, MEDIUM)),
        # Three quarters of the others wait explicitly, else the confidence is lower.
        ((Ranks(1, "nothing"), Ranks(6, "ranks"), Ranks(2, "gpu")), ("OutsideCollective", 1, HIGH)),
        ((Ranks(1, "nothing"), Ranks(5, "ranks"), Ranks(3, "gpu")), ("OutsideCollective", 1, MEDIUM)),
        # Weak evidence needs a clear majority, and explicitly waiting ranks.
        ((Ranks(1, "lock"), Ranks(4, "ranks"), Ranks(4, "gpu")), ("OutsideCollective", 1, MEDIUM)),
        ((Ranks(1, "thread"), Ranks(4, "ranks"), Ranks(4, "gpu")), ("OutsideCollective", 1, MEDIUM)),
        ((Ranks(1, "lock"), Ranks(3, "ranks"), Ranks(4, "gpu")), ("OutsideCollective", 1, LOW)),
        # Another rank is outside, too; the rank at the lock may wait for it. Two or more such ranks are usually victims.
        ((Ranks(1, "lock"), Ranks(6, "ranks"), Ranks(1, "gpu")), ("CannotTell", 0, NONE)),
        ((Ranks(1, "lock"), Ranks(6, "ranks"), Ranks(2, "gpu")), ("OutsideCollective", 1, MEDIUM)),
        ((Ranks(1, "unknown"), Ranks(3, "ranks")), ("OutsideCollective", 1, LOW)),
        ((Ranks(1, "unknown"), Ranks(2, "ranks")), ("CannotTell", 0, NONE)),
        ((Ranks(1, "gpu"), Ranks(3, "ranks")), ("Mismatch", 0, NONE)),  # the collective's number is unknown
        ((Ranks(1, "gpu", owns_gil=True), Ranks(3, "ranks")), ("OutsideCollective", 1, MEDIUM)),
        ((Ranks(1, "gpu", motion=Motion.MOVING), Ranks(3, "ranks")), ("OutsideCollective", 1, MEDIUM)),
        ((Ranks(1, "leaving"), Ranks(3, "ranks")), ("OutsideCollective", 1, MEDIUM)),
        # A rank that cannot be dumped: the fault must be about the rank, and another rank was dumped. Three others
        # give HIGH.
        ((Ranks(1, "StackUnreadable"), Ranks(3, "ranks")), ("RankUndumpable", 1, HIGH)),
        ((Ranks(1, "StackUnreadable"), Ranks(2, "ranks")), ("RankUndumpable", 1, MEDIUM)),
        ((Ranks(1, "StackUnreadable", about="tool"), Ranks(7, "ranks")), ("AllWaiting", 0, NONE)),
        ((Ranks(1, "PermissionDenied"), Ranks(1, "ranks")), ("RankUndumpable", 1, MEDIUM)),
        ((Ranks(1, "PermissionDenied", node="n2"), Ranks(7, "ranks")), ("AllWaiting", 0, NONE)),
        ((Ranks(1, "StackUnreadable", node="n2"), Ranks(7, "ranks")), ("RankUndumpable", 1, MEDIUM)),
        # Most ranks move: no rank is named.
        ((Ranks(5, "unknown", motion=Motion.MOVING), Ranks(4, "ranks")), ("Moving", 0, NONE)),
        ((Ranks(1, "nothing"), Ranks(4, "ranks"), Ranks(5, "ranks", motion=Motion.MOVING)),
         ("OutsideCollective", 1, HIGH)),
    ],
)  # fmt: skip
def test_rule_names_ranks_up_to_its_limit(parts: tuple[Ranks, ...], expected: tuple[str, int, Confidence]) -> None:
    assert says(*parts) == expected


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        # A spinning rank without the GIL may be a victim. It is not named if another rank is blocked, other than
        # waiting
        # for ranks.
        ((Ranks(1, "nothing", signature=Signature.SPINS), Ranks(7, "ranks", signature=Signature.BLOCKED)), [0]),
        ((Ranks(1, "nothing", signature=Signature.SPINS), Ranks(1, "lock", signature=Signature.BLOCKED), Ranks(6, "ranks")), [1]),
        ((Ranks(1, "nothing", signature=Signature.SPINS, owns_gil=True), Ranks(1, "lock", signature=Signature.BLOCKED), Ranks(6, "ranks")), [0]),
        ((Ranks(1, "nothing", signature=Signature.BEHIND_GPU), Ranks(7, "ranks")), []),
        # The rank is blocked in an unknown function with an idle GPU, while the others wait for their GPUs.
        ((Ranks(1, "unknown", signature=Signature.BLOCKED, utilization_ratio=0.0), Ranks(7, "gpu")), [0]),
        ((Ranks(1, "unknown", signature=Signature.AWAITS_OUTSIDE, utilization_ratio=0.0), Ranks(7, "gpu")), [0]),
        ((Ranks(1, "unknown", signature=Signature.BLOCKED, utilization_ratio=1.0), Ranks(7, "gpu")), []),
        ((Ranks(1, "unknown", signature=Signature.POLLS, utilization_ratio=0.0), Ranks(7, "gpu")), []),
        # In a tracker, a rank may read a tensor and wait for its GPU. It is named only if it receives from a server.
        ((Ranks(1, "tracker", signature=Signature.BLOCKED, utilization_ratio=0.0), Ranks(7, "gpu")), []),
        ((Ranks(1, "tracker", signature=Signature.AWAITS_OUTSIDE, utilization_ratio=0.0, awaited=SERVER), Ranks(7, "gpu")), [0]),
        ((Ranks(1, "tracker", signature=Signature.BEHIND_GPU, utilization_ratio=1.0), Ranks(7, "gpu")), []),
        ((Ranks(1, "ProcessGone"), Ranks(3, "ranks")), [0]),
    ],
)  # fmt: skip
def test_measured_activity_decides_the_suspect(parts: tuple[Ranks, ...], named: list[int]) -> None:
    assert [one.rank for one in verdict(*parts).named] == named


def meeting(
    *stands: tuple[str, PortUse | None], endpoint: str = "10.0.0.1:29500", signature: Signature = Signature.UNKNOWN
) -> Verdict:
    """Return the verdict on ranks, given as (activity or "" if not captured, use of a socket to the store)."""
    groups = []
    for name in dict(stands):
        members = tuple(
            Member(
                id=RankId(node=f"n{rank // 4}", rank=rank, local_rank=rank % 4, pid=1000 + rank),
                motion=Motion.FROZEN,
                signature=signature if rank == 0 else Signature.UNKNOWN,
                rounds=3,
                waits=Waits(store=None if use is None else Store(endpoint, use)),
            )
            for rank, (stands_in, use) in enumerate(stands)
            if stands_in == name
        )
        if name:
            frames = AT_MASTER if name == "rendezvous" else ()
            waits_for = activity_table.find_activity(name).waits_for
            groups.append(Group(key=name, activity=name, waits_for=waits_for, members=members, frames=frames))
    return judge(Grouping(groups=tuple(groups), world_size=len(stands)))


AT_MASTER = (
    Frame(function="_create_c10d_store", file="torch/distributed/rendezvous.py", line=199),
    Frame(function="_env_rendezvous_handler", file="torch/distributed/rendezvous.py", line=280),
)
REFUSED: tuple[str, PortUse] = ("rendezvous", "retries")
CONNECTED: tuple[str, PortUse] = ("rendezvous", "connected")


def test_rank_0_that_does_not_listen_is_named_with_what_it_does_instead() -> None:
    found = meeting(("data_loading", "none"), *[REFUSED] * 7)
    assert (found.kind, [one.rank for one in found.named], found.confidence) == ("MasterRefused", [0], HIGH)
    assert "does not listen at MASTER_ADDR:MASTER_PORT (10.0.0.1:29500)" in found.message
    assert "it is loading data. All 7 other ranks wait for it in rendezvous, and that address refuses" in found.message
    works = meeting(("data_loading", "none"), *[REFUSED] * 7, signature=Signature.SPINS)
    assert (works.confidence, "either work that ends by itself, or an endless loop" in works.message) == (MEDIUM, True)
    # A connection, or another rank, does not prove that the store refuses.
    assert meeting(("data_loading", "connected"), *[REFUSED] * 7).kind == "OutsideCollective"
    assert meeting(("data_loading", "none"), *[CONNECTED] * 7).kind == "OutsideCollective"
    assert meeting(REFUSED, ("data_loading", "none"), *[REFUSED] * 6).kind == "OutsideCollective"


@pytest.mark.parametrize(
    ("stands", "kind", "phrase"),
    [
        ([("", None), *[REFUSED] * 7], "MasterRefused", "Rank 0 should serve that address, but was not captured"),
        ([REFUSED] * 8, "MasterRefused", "Rank 0 is among them: the launcher"),
        ([("rendezvous", "serving"), *[REFUSED] * 7], "MasterRefused", "the address belongs to another host: correct MASTER_ADDR"),
        ([("rendezvous", "serving"), CONNECTED, *[REFUSED] * 6], "AllWaiting", "Check the store"),
        ([("collective_wait", "retries")] * 8, "AllWaiting", "Check for XIDs"),
        ([("rendezvous", "none")] * 8, "AllWaiting", "Check the store"),
    ],
)  # fmt: skip
def test_ranks_that_are_all_refused_at_store(stands: list[tuple[str, PortUse | None]], kind: str, phrase: str) -> None:
    found = meeting(*stands)
    assert (found.kind, found.named) == (kind, ())
    assert phrase in found.message


@pytest.mark.parametrize(
    ("places", "activity_name", "kind"),
    [
        (["127.0.1.1 port 40961"] * 4, "rendezvous", "WrongInterface"),
        (["127.0.1.1 port 40961"] * 4, "collective_wait", "WrongInterface"),
        (["127.0.1.1 port 40961"] * 3 + [None], "rendezvous", "WrongInterface"),
        (["127.0.1.1 port 40961"] * 2 + [None] * 2, "rendezvous", "AllWaiting"),
        (["127.0.1.1 port 40961"] * 4, "data_loading", "AllAlike"),
        ([None] * 4, "rendezvous", "AllWaiting"),
    ],
)
def test_ranks_that_no_other_node_can_reach(places: list[str | None], activity_name: str, kind: str) -> None:
    members = tuple(
        Member(id=RankId(node="n1", rank=rank), rounds=3, waits=Waits(enclosed_at=place))
        for rank, place in enumerate(places)
    )
    known = activity_table.find_activity(activity_name)
    group = Group(key="k", activity=activity_name, waits_for=known.waits_for, members=members)
    found = judge(Grouping(groups=(group,), world_size=8), 4)
    assert (found.kind, found.named) == (kind, ())
    said = [one.message for one in found.evidence if one.kind == "wrong_interface"]
    if kind == "WrongInterface":
        assert "at 127.0.1.1 port 40961, which no other node can reach" in found.message and not said
    else:
        assert len(said) == (1 if places[0] else 0), "evidence with another verdict"


@pytest.mark.parametrize(("number", "kind"), [(1, "WrongInterface"), (465, "AllWaiting")])
def test_ranks_that_have_met_before_have_a_way_to_each_other(number: int, kind: str) -> None:
    # Four of eight ranks wait in a collective of all ranks. They listen on loopback, which suggests a single node.
    # A sequence number above the first proves that all ranks have been connected.
    mine = recorder(record(number, created_unix_ns=10**9, state="open"))
    members = tuple(change_parts(member(rank, mine), enclosed_at="127.0.0.1 port 40961", rounds=3) for rank in range(4))
    group = Group(key="k", activity="collective_wait", waits_for="ranks", members=members)
    verdict = judge(Grouping(groups=(group,), world_size=8), 4)
    assert (verdict.kind, verdict.named) == (kind, ())
    assert not [one for one in verdict.evidence if one.kind == "wrong_interface"]


def test_a_master_that_is_each_node_s_own_address() -> None:
    for endpoint in ("127.0.0.1:29500", "localhost:29500", "[::1]:29500"):
        found = meeting(("", None), *[REFUSED] * 7, endpoint=endpoint)
        assert (found.kind, found.named) == ("MasterRefused", ())
        assert "set MASTER_ADDR to the address of the node with rank 0" in found.message


def test_where_a_rule_finds_too_many_the_weaker_ones_behind_it_stay_silent() -> None:
    # If a strong rule finds too many ranks, no weaker rule names another rank. Five ranks that hold the GIL cannot
    # all be guilty. The rank that is blocked elsewhere is not named instead.
    held = Ranks(1, "unknown", signature=Signature.BLOCKED, utilization_ratio=0.0)
    assert [one.rank for one in verdict(held, Ranks(5, "gpu"), Ranks(3, "ranks")).named] == [0]
    assert verdict(held, Ranks(5, "gpu", owns_gil=True), Ranks(3, "ranks")).named == ()


@pytest.mark.parametrize(
    ("world_size", "ranks_here", "named", "confidence"),
    [
        # The whole job was captured: half of the existing ranks must be suspects or wait.
        (None, None, 1, HIGH),
        (8, None, 1, HIGH),
        (16, None, 1, HIGH),
        (17, None, 0, NONE),
        (512, None, 0, NONE),
        # One node was captured: half of its ranks, and confidence at most MEDIUM.
        (8, 8, 1, HIGH),
        (512, 8, 1, MEDIUM),
        (512, 16, 1, MEDIUM),
        (512, 17, 0, NONE),
        (None, 8, 1, HIGH),
    ],
)
def test_half_of_the_ranks_that_exist_where_was_looked_are_suspects_or_wait(
    world_size: int | None, ranks_here: int | None, named: int, confidence: Confidence
) -> None:
    parts = (Ranks(1, "nothing"), Ranks(7, "ranks"))
    assert says(*parts, world_size=world_size, ranks_here=ranks_here)[1:] == (named, confidence)


@pytest.mark.parametrize(("world_size", "ranks_here", "named"), [(None, None, 1), (2, 2, 1), (3, None, 0), (7, 2, 0)])
def test_one_against_one_counts_in_a_job_of_two(world_size: int | None, ranks_here: int | None, named: int) -> None:
    assert says(Ranks(1, "nothing"), Ranks(1, "ranks"), world_size=world_size, ranks_here=ranks_here)[1] == named


@pytest.mark.parametrize(("what", "named"), [("unknown", (1, 1, 0)), ("gpu", (0, 1, 0))])
def test_a_weak_suspicion_speaks_only_where_all_answered(what: str, named: tuple[int, ...]) -> None:
    found = [says(Ranks(1, what), Ranks(7, "ranks"), world_size=size)[1] for size in (None, 8, 9)]
    assert tuple(found) == named


@pytest.mark.parametrize(("others", "pointed"), [(2, []), (3, [0]), (7, [0])])
def test_rank_waiting_for_its_gpu_is_checked_first_with_unknown_world_size(others: int, pointed: list[int]) -> None:
    found = verdict(Ranks(1, "gpu"), Ranks(others, "ranks"))
    assert found.named == ()
    assert [rank.rank for rank in found.check_first] == pointed


@pytest.mark.parametrize(("rounds", "waits_for", "named"), [(1, "ranks", 0), (2, "ranks", 1), (1, "nothing", 1)])
def test_a_disk_wait_seen_once_in_a_collective_is_no_guilt(rounds: int, waits_for: str, named: int) -> None:
    blocked = Member(id=RankId(node="n1", rank=0), kernel=KernelFacts(state="D"), rounds=rounds)
    others = tuple(replace(blocked, id=RankId(node="n1", rank=rank), kernel=KernelFacts()) for rank in range(1, 8))
    groups = (
        Group(key="a", activity=ACTIVITIES["ranks"], waits_for="ranks", members=others),
        Group(key="b", activity=ACTIVITIES[waits_for], waits_for=waits_for, members=(blocked,)),
    )
    assert len(judge(Grouping(groups=groups)).named) == named


def test_what_is_said_of_one_node_says_so() -> None:
    message = verdict(Ranks(1, "nothing"), Ranks(7, "ranks"), world_size=512, ranks_here=8).message
    assert message.endswith("This verdict is on the 8 ranks of this node; the job has 512.")


PARTS = st.builds(
    Ranks,
    st.integers(1, 6),
    st.sampled_from(["ranks", "gpu", "lock", "thread", "nothing", "unknown", "leaving", "gone", "D", "T", "Timeout"]),
    owns_gil=st.booleans(),
    motion=st.sampled_from([Motion.FROZEN, Motion.UNKNOWN]),
    utilization_ratio=st.sampled_from([None, 0.0, 1.0]),
    signature=st.sampled_from([Signature.UNKNOWN, Signature.BLOCKED, Signature.SPINS, Signature.BEHIND_GPU]),
    rounds=st.just(3),
    about=st.just("target"),
    mount=st.none(),
    waits_for_mount=st.just(value=False),
    node=st.just("n1"),
)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(PARTS, min_size=1, max_size=5),
    absent=st.integers(0, 30),
    more=st.integers(1, 30),
    on_one_node=st.booleans(),
)
def test_ranks_that_did_not_answer_add_no_name_and_no_confidence(
    *, parts: list[Ranks], absent: int, more: int, on_one_node: bool
) -> None:
    """Add ranks that are absent, and ranks with a failed dump that proves nothing about them."""
    seen = sum(part.count for part in parts)
    here = seen if on_one_node else None
    before = verdict(*parts, world_size=seen + absent, ranks_here=here)
    silent = Ranks(more, "DumperStuck", about="tool")
    for after in (
        verdict(*parts, world_size=seen + absent + more, ranks_here=here),
        verdict(*parts, silent, world_size=seen + absent + more, ranks_here=here and here + more),
    ):
        assert set(after.named) <= set(before.named)
        assert ORDER.index(after.confidence) <= ORDER.index(before.confidence)


@pytest.mark.parametrize(
    ("parts", "named", "confidence"),
    [
        ((Ranks(1, "DumperStuck", about="tool", mount="/data", waits_for_mount=True), Ranks(3, "DumperStuck", about="tool", mount="/data")), 1, MEDIUM),
        ((Ranks(2, "DumperStuck", about="tool", mount="/data", waits_for_mount=True), Ranks(2, "DumperStuck", about="tool", mount="/data")), 2, MEDIUM),
        ((Ranks(3, "DumperStuck", about="tool", mount="/data", waits_for_mount=True), Ranks(1, "DumperStuck", about="tool", mount="/data")), 0, NONE),
    ],
)  # fmt: skip
def test_only_rank_at_a_dead_mount_is_named(parts: tuple[Ranks, ...], named: int, confidence: Confidence) -> None:
    assert says(*parts) == ("MountSilent", named, confidence)
    assert {vote.kind for vote in verdict(*parts).evidence} == {"group"}


def test_evidence_on_a_named_rank_has_its_measurements() -> None:
    accused = Member(
        id=RankId(rank=3),
        signature=Signature.BEHIND_GPU,
        usage=Usage(main_cpu_ratio=0.99, switches_per_second=0.0),
        gpu=GpuReadings(
            utilization_ratio=1.0,
            power_watts=118.0,
            busy_power_ratio=0.09,
            nvlink_bytes_per_second=0.0,
            pcie_bytes_per_second=2.34e6,
        ),
    )
    group = Group(key="a", activity="unknown", members=(accused,))
    told = [one.message for one in evidence.on_named([group], []) if one.kind == "signature"]
    assert told == [
        "rank 3 waits for its GPU: main thread at 99% of a core, 0.0 voluntary context switches per second, "
        "GPU at 100%, 118 W, 9% of the way from idle to busy, NVLink 0.0 MB/s, PCIe 2.3 MB/s"
    ]


def test_suspect_next_to_another_possible_suspect_has_lower_confidence() -> None:
    alone = verdict(Ranks(6, "ranks"), Ranks(1, "nothing"))
    assert (len(alone.named), alone.confidence) == (1, HIGH)
    beside = verdict(Ranks(6, "ranks"), Ranks(1, "nothing"), Ranks(1, "unknown"))
    assert (beside.named, beside.confidence) == (alone.named, MEDIUM)
    assert "Check these, too: rank 7" in beside.message
    moving = verdict(Ranks(6, "ranks"), Ranks(1, "nothing"), Ranks(1, "unknown", motion=Motion.MOVING))
    assert (moving.confidence, "too" in moving.message) == (HIGH, False)
    many = verdict(Ranks(6, "ranks"), Ranks(1, "nothing"), Ranks(2, "unknown"))
    assert "Check these, too" not in many.message, "the larger group is rather the victims"


def steps_of(groups: int, what: str) -> int:
    """Return the number of opcodes that a verdict on this number of groups of one rank executes."""
    grouping = Grouping(groups=tuple(alone(number, what) for number in range(groups)))
    steps = 0

    def count(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        judge(grouping)
    finally:
        sys.settrace(before)
    return steps


def alone(number: int, what: str) -> Group:
    one = Member(id=RankId(node="n1", rank=number, pid=1000 + number))
    return Group(key=f"key{number}", activity=ACTIVITIES[what], waits_for=what, members=(one,))


@pytest.mark.parametrize("what", ["ranks", "gpu", "lock", "thread", "nothing", "unknown"])
def test_cost_of_a_verdict_grows_linearly_with_its_groups(what: str) -> None:
    steps_of(2, what)  # fills the caches
    assert 0 < steps_of(800, what) < 12 * steps_of(100, what)


LINGERS = Member(
    id=RankId(node="n1"),
    signature=Signature.BLOCKED,
    motion=Signature.BLOCKED.motion,
    kernel=KernelFacts(state="S", rests="sleep"),
    waits=Waits(peers=0, active_peers=0),
    most_peers=3,
)
STOPPED = change_parts(LINGERS, signature=Signature.STOPPED, state="T")
GONE = change_parts(LINGERS, signature=Signature.GONE, peers=None)
NEVER_MET = replace(LINGERS, most_peers=0)
IDLE_PAIR = change_parts(LINGERS, peers=2)
AT_A_CALL = change_parts(LINGERS, rests=None)
AT_A_THREAD = change_parts(LINGERS, rests="thread")
RECORDED = RecorderFacts(libraries=(RecorderState(library="gloo", groups=(GroupRecords("gloo", "0", "", 7),)),))
OPEN = EnqueuedOperation(7, "all_reduce", 7, 0.0, stays_open=True)


def with_operation(facts: RecorderFacts) -> RecorderFacts:
    (library,) = facts.libraries
    (group,) = library.groups
    return replace(facts, libraries=(replace(library, groups=(replace(group, operations=(OPEN,)),)),))


def group_ranks(*members: Member, world_size: int | None = 2) -> Grouping:
    group = tuple(
        replace(one, id=RankId(node="n1", rank=rank, pid=100 + rank), motion=one.signature.motion)
        for rank, one in enumerate(members)
    )
    return Grouping(groups=(Group(key="k", activity="unknown", members=group),), world_size=world_size)


def resting(*members: Member, world_size: int | None = 2) -> JobState | None:
    return find_resting_state(group_ranks(*members, world_size=world_size))


@pytest.mark.parametrize(
    ("name", "members", "expected"),
    [
        ("all stopped", (STOPPED, STOPPED), JobState.SUSPENDED),
        ("one stopped", (STOPPED, LINGERS), None),
        ("all linger", (LINGERS, LINGERS), JobState.OVER),
        ("rank 0 alone is left", (LINGERS, GONE), JobState.OVER),
        ("all ranks are gone", (GONE, GONE), None),
        ("one is connected to another", (LINGERS, change_parts(LINGERS, peers=1, active_peers=1)), None),
        ("one is unknown", (LINGERS, replace(LINGERS, waits=Waits())), None),
        ("one spins", (LINGERS, replace(LINGERS, signature=Signature.SPINS)), None),
        ("one waits for its GPU", (LINGERS, replace(LINGERS, signature=Signature.BEHIND_GPU)), None),
        ("one is blocked in the kernel", (LINGERS, change_parts(LINGERS, state="D")), None),
        ("one GPU is in use", (LINGERS, change_parts(LINGERS, utilization_ratio=0.05)), None),
        (
            "one waits for the lock of a file",
            (LINGERS, change_parts(LINGERS, file_lock=FileLock(path="/data/l"))),
            None,
        ),
        ("one waits for a lock that another has, too", (LINGERS, change_parts(LINGERS, shares_lock=True)), None),
        ("they never met", (NEVER_MET, NEVER_MET), None),
        ("they never met, and one has left", (NEVER_MET, GONE), JobState.OVER),
        ("the last one is in a call on a file", (AT_A_CALL, GONE), None),
        ("DDP left an idle pair", (IDLE_PAIR, IDLE_PAIR), JobState.OVER),
        ("one receives on its pair", (change_parts(IDLE_PAIR, active_peers=1), GONE), None),
        ("one polls, and no recorder tells for what", (replace(IDLE_PAIR, signature=Signature.POLLS), GONE), None),
        (
            "one polls, and its recorder shows no open operation",
            (replace(IDLE_PAIR, signature=Signature.POLLS, recorder=RECORDED), GONE),
            JobState.OVER,
        ),
        ("one has an operation open", (replace(IDLE_PAIR, recorder=with_operation(RECORDED)), GONE), None),
        ("they communicated by their recorders", (replace(NEVER_MET, recorder=RECORDED),) * 2, JobState.OVER),
        ("one asks a server", (replace(LINGERS, signature=Signature.AWAITS_OUTSIDE), GONE), None),
        ("one waits for a thread", (AT_A_THREAD, GONE), None),
        ("one uploads", (LINGERS, replace(LINGERS, signature=Signature.TRANSFERS)), JobState.OVER),
        ("two of three compute", (LINGERS, *[replace(LINGERS, signature=Signature.COMPUTES)] * 2), None),
    ],
)
def test_resting_members_are_recognized(name: str, members: tuple[Member, ...], expected: JobState | None) -> None:
    assert resting(*members) is expected, name


@pytest.mark.parametrize(
    ("name", "doing", "function", "expected"),
    [
        ("it joins a thread", "thread_wait", "join", JobState.OVER),
        ("it waits in the interpreter's shutdown", "exiting", "_shutdown", JobState.OVER),
        ("it waits for a lock", "lock", "acquire", None),
    ],
)
def test_joined_thread_rests_unlike_a_lock(name: str, doing: str, function: str, expected: JobState | None) -> None:
    (group,) = group_ranks(AT_A_THREAD, GONE).groups
    frame = Frame(function=function, file="/usr/lib/python3.12/threading.py", line=1)
    group = replace(group, activity=doing, frames=(frame,))
    assert find_resting_state(Grouping(groups=(group,), world_size=2)) is expected, name


@pytest.mark.parametrize("world_size", [None, 1])
def test_job_of_one_or_unknown_size_is_never_over(world_size: int | None) -> None:
    assert resting(LINGERS, world_size=world_size) is None


def test_ranks_waiting_for_a_stale_lock_file_are_not_over() -> None:
    """Recognize the wait for a lock file by the stack: torch's FileBaton polls for the file and uses no kernel lock."""
    asking = replace(LINGERS, signature=Signature.POLLS)
    (group,) = group_ranks(asking, asking).groups
    assert find_resting_state(Grouping(groups=(group,), world_size=2)) is JobState.OVER
    waits = replace(group, activity="lock_file", operation="lock file", waits_for="lock")
    verdict = judge(Grouping(groups=(waits,), world_size=2))
    assert (find_resting_state(Grouping(groups=(waits,), world_size=2)), verdict.kind) == (None, "AllAlike")
    assert "a lock file that no live process holds is stale: remove it" in verdict.message


def test_ranks_polling_a_file_store_are_not_over() -> None:
    # Ranks that poll a store in a file have no connections. They have not ended: one rank has not joined.
    (whole,) = group_ranks(LINGERS, *[replace(LINGERS, signature=Signature.POLLS)] * 3).groups
    late, meets = replace(whole, members=whole.members[:1]), replace(whole, key="m", members=whole.members[1:])
    assert find_resting_state(Grouping(groups=(late, meets), world_size=4)) is JobState.OVER
    joining = replace(meets, activity="rendezvous", operation="init_process_group", waits_for="ranks")
    assert find_resting_state(Grouping(groups=(late, joining), world_size=4)) is None


def test_rank_without_a_stack_prevents_the_state_over() -> None:
    fault = Fault(subject="pid 1", reason="DumperStuck", detail="py-spy hangs")
    (both,) = group_ranks(LINGERS, LINGERS).groups
    for why, state in ((None, JobState.OVER), (fault, None)):
        second = replace(both, key="2", members=both.members[1:], fault=why)
        groups = (replace(both, members=both.members[:1]), second)
        assert find_resting_state(Grouping(groups=groups, world_size=2)) is state


PARENT, RANK_0, RANK_1 = 99, 100, 101
AT_PARENT = change_parts(LINGERS, server=PARENT)
ACCEPTS = change_parts(LINGERS, server=RANK_0, peers=3)
AT_RANK_0 = change_parts(LINGERS, server=RANK_0)
BEHIND_GPU = change_parts(LINGERS, signature=Signature.BEHIND_GPU, utilization_ratio=1.0, peers=2)


@pytest.mark.parametrize(
    ("name", "members", "serves"),
    [
        ("all at a parent that accepts", (AT_PARENT, AT_PARENT), True),
        ("one at a lock", (AT_PARENT, LINGERS), False),
        ("one gone", (AT_PARENT, GONE), False),
        ("one connected to another", (AT_PARENT, change_parts(AT_PARENT, peers=1)), False),
        ("one is unknown", (AT_PARENT, change_parts(AT_PARENT, peers=None)), False),
        ("one GPU in use", (AT_PARENT, change_parts(AT_PARENT, utilization_ratio=0.05)), False),
        ("one spins", (AT_PARENT, replace(AT_PARENT, signature=Signature.SPINS)), False),
        ("all stopped meanwhile", (replace(AT_PARENT, signature=Signature.STOPPED),) * 2, False),
        ("each accepts", (ACCEPTS, change_parts(ACCEPTS, server=RANK_1)), True),
        ("rank 0 polls for clients", (replace(ACCEPTS, signature=Signature.POLLS), AT_RANK_0), True),
        ("rank 0 accepts, the others wait for their GPUs", (ACCEPTS, BEHIND_GPU, BEHIND_GPU), True),
        ("one of these waits for something else", (ACCEPTS, BEHIND_GPU, LINGERS), False),
        ("all wait for their GPUs", (BEHIND_GPU, BEHIND_GPU), False),
        ("one waits for its GPU, one for its parent", (AT_PARENT, BEHIND_GPU), False),
        ("nobody", (), False),
    ],
)
def test_ranks_waiting_for_clients_are_serving(name: str, members: tuple[Member, ...], serves: bool) -> None:
    assert is_serving(group_ranks(*members)) is serves, name


def test_serving_job_names_no_rank() -> None:
    verdict = judge(group_ranks(*[ACCEPTS, *[BEHIND_GPU] * 7], world_size=8))
    assert (verdict.kind, verdict.named) == ("Serving", ())
    assert verdict.message.startswith("All ranks are idle and wait for requests")


MAIN_LOOP = Frame(function="main_loop", file="ray/_private/worker.py", line=1069)
METHOD = Frame(function="actor_method_executor", file="ray/_private/function_manager.py", line=700)
AT_LOOP = replace(LINGERS, signature=Signature.POLLS, kernel=KernelFacts(state="S", receives=True))


def of_ray(*members: Member, frame: Frame = MAIN_LOOP, thread: Frame | None = None) -> Grouping:
    slots = group_ranks(*members)
    threads = () if thread is None else (Stack(name="pool", frames=(thread,)),)
    groups = tuple(replace(one, activity="rpc_wait", frames=(frame,), threads=threads) for one in slots.groups)
    return replace(slots, groups=groups)


@pytest.mark.parametrize(
    ("name", "grouping", "is_idle"),
    [
        ("all in the loop that takes tasks", of_ray(AT_LOOP, AT_LOOP), True),
        ("a thread rests", of_ray(AT_LOOP, thread=Frame(function="_bootstrap", file="threading.py", line=1)), True),
        ("one gone", of_ray(AT_LOOP, GONE), False),
        ("one computes", of_ray(AT_LOOP, replace(AT_LOOP, signature=Signature.COMPUTES)), False),
        ("one GPU in use", of_ray(AT_LOOP, replace(AT_LOOP, gpu=GpuReadings(utilization_ratio=1.0))), False),
        ("one uses a CPU", of_ray(AT_LOOP, replace(AT_LOOP, usage=Usage(cpu_ratio=0.5))), False),
        ("one uses a connection", of_ray(AT_LOOP, replace(AT_LOOP, waits=Waits(active_peers=1))), False),
        ("a thread is in a method", of_ray(AT_LOOP, thread=METHOD), False),
        ("the main thread waits for an object", of_ray(AT_LOOP, frame=replace(MAIN_LOOP, function="get")), False),
    ],
)
def test_ranks_that_take_tasks_of_ray_have_no_task(name: str, grouping: Grouping, is_idle: bool) -> None:
    assert has_no_task(grouping) is is_idle, name
    assert (judge(grouping).kind == "NoTask") is is_idle, name
    assert count_motion(grouping).serves is is_idle, name


def test_suspended_job_names_no_rank() -> None:
    verdict = judge(group_ranks(*[STOPPED] * 8, world_size=8))
    assert (verdict.kind, verdict.named) == ("Suspended", ())
    assert verdict.message.startswith("All 8 ranks are stopped: scontrol suspend")


def test_ranks_that_are_refused_at_the_store_are_not_over() -> None:
    # Ranks have not ended if the store refuses their connections: they still try to connect.
    store = Store(endpoint="10.0.0.1:29500", socket="retries")
    meet = group_ranks(*[change_parts(LINGERS, store=store)] * 2)
    assert find_resting_state(meet) is JobState.OVER, "they sleep anywhere"
    for function, refused in (("_env_rendezvous_handler", True), ("_tcp_rendezvous_handler", False)):
        frame = Frame(function=function, file="/opt/torch/distributed/rendezvous.py", line=280)
        group = replace(meet.groups[0], activity="rendezvous", frames=(frame,))
        assert find_resting_state(replace(meet, groups=(group,))) is None
        assert bool(find_refused(group)) is refused, "at another address than MASTER_ADDR"


def group(name: str, ranks: range, *functions: str, node: str = "n1") -> Group:
    return Group(
        key=f"{name}{ranks.start}",
        activity=name,
        waits_for=activity_table.find_activity(name).waits_for,
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
    open_in = EnqueuedOperation(1, "barrier", 1, 0.0, stays_open=has_numbers)
    records = GroupRecords(library="gloo", name="0", description="", number=1, operations=(open_in,))
    first = change_parts(two[0].members[0], libraries=(RecorderState(library="gloo", groups=(records,)),))
    scene = build_scene(Grouping(groups=(replace(two[0], members=(first, two[0].members[1])), two[1])), None)
    assert job_headlines.mismatch(Finding("Mismatch", scene, others=scene.stacked)).endswith(phrase)


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
        (KernelCall(name="poll", says="poll() on", rounds=1, descriptors=3, behind=(PEER, PEER)), Signature.BLOCKED,
         "poll() on 10.0.0.7 port 29500 and 1 other descriptor"),
        (KernelCall(name="openat", says="openat() on", rounds=2, path="/mnt/x"), Signature.BLOCKED, "openat() on /mnt/x, in each of 2 rounds"),
        (KernelCall(name="wait4", says="wait4() for", rounds=1, child_pid=9, child_comm="ssh"), Signature.BLOCKED, "wait4() for its child 9 (ssh)"),
        (KernelCall(name="flock", says="flock() on", rounds=1, descriptors=1, file_lock=FileLock(path="/x.lock", holder_pid=9, holder_comm="rsync")), Signature.BLOCKED,
         "flock() on /x.lock (held by pid 9, rsync)"),
        (KernelCall(name="futex", says="futex", rounds=1), Signature.BLOCKED, "futex()"),
    ],
)  # fmt: skip
def test_what_is_behind_a_call_is_said(call: KernelCall, signature: Signature, phrase: str) -> None:
    """Say that a file system does not respond only if no bytes flow."""
    member = Member(id=RankId(node="n1", rank=3, pid=13), signature=signature, kernel=KernelFacts(state="D", call=call))
    assert clauses.describe_call(call, member, {13: member.id, 14: RankId(node="n1", rank=4, pid=14)}) == phrase


@pytest.mark.parametrize(("operation", "is_named"), [("all_reduce", True), ("gather", False)])
def test_ended_rank_may_have_left_after_its_part_of_a_gather(operation: str, *, is_named: bool) -> None:
    waiting, apart = replace(group("collective_wait", range(2)), operation=operation), group("lock", range(2, 3))
    ended = replace(group("unknown", range(3, 4)), gone=True)
    verdict = judge(Grouping(groups=(waiting, apart, ended), world_size=4))
    assert (verdict.kind == "RankGone") is is_named, verdict.message


@pytest.mark.parametrize(
    ("state", "wchan", "is_silent"),
    [
        ("S", "request_wait_answer", True),
        ("D", "rpc_wait_bit_killable", True),
        ("S", "pipe_read", False),
        ("S", None, False),
    ],
)
def test_fifo_on_remote_file_system_does_not_make_it_silent(state: str, wchan: str | None, *, is_silent: bool) -> None:
    call = KernelCall(name="read", says="read() on", rounds=2, descriptors=1, behind=(SHARD,))
    kernel = KernelFacts(state=state, wchan=wchan, call=call)
    member = Member(id=RankId(rank=3), signature=Signature.BLOCKED, kernel=kernel)
    assert ("does not respond" in clauses.describe_call(call, member, {})) is is_silent


def test_sentence_has_the_blocked_call_of_the_named_rank() -> None:
    call = KernelCall(name="read", says="read() on", rounds=3, descriptors=1, behind=(SHARD,))
    waiting, odd = group("collective_wait", range(3)), group("data_loading", range(3, 4))
    odd = replace(odd, members=(change_parts(odd.members[0], call=call, wchan="request_wait_answer"),))
    verdict = judge(Grouping(groups=(waiting, odd), world_size=4))
    assert verdict.message.endswith(
        "In the kernel it is in read() on /mnt/data/shard-3, on /mnt/data (fuse.s3fs), in each of 3 rounds."
    )
    assert [vote.kind for vote in verdict.evidence][-1] == "system_call"


@pytest.mark.parametrize(
    ("task", "does"), [(None, "is idle"), (Frame(function="read", file="a.py"), "is loading data")]
)
def test_loader_worker_without_a_task_is_idle(task: Frame | None, does: str) -> None:
    worker = Stack(name="4 x pt_data_worker", frames=(), activity="data_loading", user_frame=task)
    group = Group(key="k", activity="data_loading", members=(), workers=(worker,))
    assert group_text.describe_stack(worker, group) == f"its worker (4 x pt_data_worker) {does}"
