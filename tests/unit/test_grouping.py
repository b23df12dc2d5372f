"""Groups, merging and verdicts: properties that hold for any ranks."""

import random
import tracemalloc
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import json as msgspec_json
from msgspec import structs

from hangwatch import config
from hangwatch.fleet import merge
from hangwatch.model import Capture, Fault, Frame, Grouping, ProcessDump, RankDump, RankId, Thread, WorkerDump
from hangwatch.report import as_json, html
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge
from hangwatch.verdict.wording import clauses
from tests.samples import change_dump, main_dump

TABLE = activity.load()
SETTINGS = config.Capture()
STACKS = (
    ("all_reduce (torch/distributed/distributed_c10d.py)", "train (train.py)"),
    ("all_reduce (torch/distributed/distributed_c10d.py)", "evaluate (train.py)"),
    ("broadcast (torch/distributed/distributed_c10d.py)", "helper (comm.py)", "send (a.py)"),
    ("broadcast (torch/distributed/distributed_c10d.py)", "helper (comm.py)", "receive (b.py)"),
    ("wait (threading.py)", "get (queue.py)", "__next__ (torch/utils/data/dataloader.py)", "train (train.py)"),
    ("_engine_run_backward (torch/autograd/graph.py)", "train (train.py)"),
    ("synchronize (torch/cuda/__init__.py)", "train (train.py)"),
    ("sort (mine.py)", "train (train.py)"),
    ("wait (torch/utils/file_baton.py)",),
    ("0x7f00 (libcuda.so)", "train (train.py)"),
    ("result (concurrent/futures/_base.py)", "train (train.py)"),
    (),
)
FAULTS = (
    None,
    Fault(subject="x", reason="Timeout", detail="no stacks within 5 s", about="target"),
    Fault(subject="x", reason="PermissionDenied", detail="Permission Denied", about="target"),
    Fault(subject="x", reason="ProcessGone", detail="the process has ended", about="target"),
)


def stack(lines: tuple[str, ...], line: int) -> tuple[Frame, ...]:
    return tuple(
        Frame(function=text.split(" (")[0], file=text.split(" (")[1].rstrip(")"), line=line + place)
        for place, text in enumerate(lines)
    )


@st.composite
def rank_dumps(draw: st.DrawFn, rank: int) -> RankDump:
    rounds = []
    for number in range(draw(st.integers(0, 3))):
        chosen = draw(st.sampled_from(STACKS))
        threads = [
            Thread(
                name="MainThread",
                thread_id="1",
                frames=stack(chosen, draw(st.integers(1, 3))),
                is_main=draw(st.booleans()),
                owns_gil=draw(st.booleans()),
            )
        ]
        if draw(st.booleans()):
            threads.append(Thread(name="Executor", thread_id="2", frames=stack(draw(st.sampled_from(STACKS)), 1)))
        rounds.append(
            ProcessDump(
                taken_monotonic_seconds=float(number),
                threads=tuple(threads) if chosen else (),
                fault=draw(st.sampled_from(FAULTS)),
                state=draw(st.sampled_from([None, "R", "S", "D", "T", "Z"])),
                cpu_seconds=draw(st.sampled_from([None, 0.0, float(number)])),
            )
        )
    worker = WorkerDump(pid=7, comm="pt_data_worker", rounds=tuple(rounds[-1:]))
    return change_dump(
        RankDump(id=RankId(node=f"n{rank // 4}", rank=rank, local_rank=rank % 4, pid=100 + rank)),
        rounds=tuple(rounds),
        workers=(worker,) if draw(st.booleans()) else (),
        gone=draw(st.sampled_from([False] * 9 + [True])),
        power_watts=draw(st.sampled_from([None, 70.0, 90.0])),
        utilization_ratio=draw(st.sampled_from([None, 0.0, 1.0])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> list[RankDump]:
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=14))
    return [draw(rank_dumps(rank)) for rank in numbers]


WORLDS = st.one_of(st.none(), st.integers(1, 40))
LAWS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def group(dumps: list[RankDump], world_size: int | None = None) -> Grouping:
    return group_ranks(dumps, TABLE, SETTINGS, world_size)


@LAWS
@given(jobs(), WORLDS, st.randoms(use_true_random=False))
def test_the_order_of_ranks_changes_nothing(dumps: list[RankDump], world: int | None, chance: random.Random) -> None:
    shuffled = list(dumps)
    chance.shuffle(shuffled)
    first, second = group(dumps, world), group(shuffled, world)
    assert first == second
    assert judge.judge(first) == judge.judge(second)


@LAWS
@given(jobs(), WORLDS)
def test_each_rank_is_in_one_group_or_absent(dumps: list[RankDump], world: int | None) -> None:
    grouping = group(dumps, world)
    placed = [member.id.rank for one in grouping.groups for member in one.members]
    assert sorted(rank for rank in placed if rank is not None) == sorted(dump.id.rank or 0 for dump in dumps)
    assert not set(placed) & set(chain.from_iterable(grouping.absent))
    if dumps:
        highest = max(dump.id.rank or 0 for dump in dumps)
        assert sorted([*(rank or 0 for rank in placed), *chain.from_iterable(grouping.absent)]) == list(
            range(max(highest + 1, world or 0))
        )
    sizes = [len(one.members) for one in grouping.groups]
    assert sizes == sorted(sizes, reverse=True)


@LAWS
@given(jobs(), WORLDS, st.data())
def test_merging_groups_is_grouping_all(dumps: list[RankDump], world: int | None, data: st.DataObject) -> None:
    sides = [data.draw(st.integers(0, 2)) for _ in dumps]
    a, b, c = ([dump for dump, side in zip(dumps, sides, strict=True) if side == number] for number in range(3))
    ga, gb, gc = (group(part, world) for part in (a, b, c))
    whole = group(dumps, world)
    assert merge.merge_all([ga, gb]) == merge.merge_all([gb, ga]) == group(a + b, world)
    assert merge.merge_all([merge.merge_all([ga, gb]), gc]) == merge.merge_all([ga, merge.merge_all([gb, gc])]) == whole
    assert merge.merge_all([gc, ga, gb]) == whole
    assert merge.merge_all([whole, whole]) == whole


@LAWS
@given(jobs(), WORLDS)
def test_verdict_names_only_existing_ranks_and_gives_evidence(dumps: list[RankDump], world: int | None) -> None:
    grouping = group(dumps, world)
    verdict = judge.judge(grouping)
    members = {member.id for one in grouping.groups for member in one.members}
    assert set(verdict.named) <= members
    assert len(verdict.named) * 2 <= len(members)
    assert bool(verdict.named) == (verdict.confidence.value != "none")
    assert verdict.message.endswith((".", "?")) and not verdict.message[0].islower()
    if verdict.named:
        assert any(vote.supports for vote in verdict.evidence) or verdict.kind == "RankGone"
    assert "None" not in verdict.message


@LAWS
@given(jobs())
def test_groups_survive_the_way_between_nodes(dumps: list[RankDump]) -> None:
    grouping = group(dumps)
    assert msgspec_json.decode(msgspec_json.encode(grouping), type=Grouping) == grouping


def test_a_capture_brings_its_world_size_and_notes() -> None:
    dump = RankDump(id=RankId(node="n", rank=0))
    capture = Capture(
        job_id="j",
        node="n",
        started_unix_seconds=0.0,
        duration_seconds=1.0,
        rounds=1,
        ranks=(dump,),
        world_size=3,
        notes=("late",),
    )
    grouping = group_ranks(capture, TABLE, SETTINGS)
    assert (grouping.world_size, grouping.absent, grouping.notes) == (3, (range(1, 3),), ("late",))


def test_a_group_is_shown_by_its_lowest_rank() -> None:
    def dump_of_rank(rank: int, line: int) -> RankDump:
        return RankDump(id=RankId(node="n", rank=rank), rounds=(main_dump(stack(STACKS[0], line)),))

    (found,) = group([dump_of_rank(3, 30), dump_of_rank(1, 10), dump_of_rank(2, 20)]).groups
    assert [member.id.rank for member in found.members] == [1, 2, 3]
    assert found.frames[0].line == 10


def test_ranks_of_two_nodes_with_the_same_numbers_are_not_lost() -> None:
    dump = RankDump(id=RankId(node="a", local_rank=0), rounds=(main_dump(stack(STACKS[0], 1)),))
    other = structs.replace(dump, id=RankId(node="b", local_rank=0))
    assert len(group([dump, other]).groups[0].members) == 2


def test_a_rank_that_appears_twice_has_one_place() -> None:
    def dump_with_stack(lines: tuple[str, ...]) -> RankDump:
        return RankDump(id=RankId(node="a", rank=0), rounds=(main_dump(stack(lines, 1)),))

    first, second = group([dump_with_stack(STACKS[0])]), group([dump_with_stack(STACKS[7])])
    merged = merge.merge_all([first, second])
    assert merged == merge.merge_all([second, first])
    assert sum(len(found.members) for found in merged.groups) == 1


@pytest.mark.parametrize(("world_size", "per_node"), [(4_000_000, 1), (10**30, 8)])
def test_a_world_size_costs_nothing(world_size: int, per_node: int) -> None:
    # The world size comes from an environment or a file and may be any number, so nothing may count up to it.
    rounds = (main_dump(stack(STACKS[0], 1)),)
    dumps = [RankDump(id=RankId(node=f"n{rank // per_node}", rank=rank), rounds=rounds) for rank in (0, 1, 2, 9)]
    tracemalloc.start()
    grouping = group(dumps, world_size)
    verdict = judge.judge(grouping)
    shown = as_json.render(as_json.answer(grouping, verdict)) + html.render_grouping(grouping, verdict)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grouping.absent == (range(3, 9), range(10, world_size))
    assert f"10-{world_size - 1}" in shown
    assert peak_bytes < 20 << 20


def test_rank_that_left_a_collective_is_not_named() -> None:
    # In a healthy step all ranks wait in the first round. In the last round one rank computes and the others wait
    # for it.
    def dump(at: float, function: str, file: str) -> ProcessDump:
        frames = (Frame(function=function, file=file), Frame(function="train", file="train.py"))
        return main_dump(frames, at, state="S")

    wait, work = ("all_reduce", "torch/distributed/distributed_c10d.py"), ("__getitem__", "torch/utils/data/dataset.py")
    others = [RankDump(id=RankId(rank=i), rounds=(dump(0, *wait), dump(5, *wait))) for i in range(3)]
    came = RankDump(id=RankId(rank=3), rounds=(dump(0, *wait), dump(5, *work)))
    stuck = RankDump(id=RankId(rank=3), rounds=(dump(0, *work), dump(5, *work)))
    assert judge.judge(group_ranks([*others, came], TABLE, SETTINGS)).named == ()
    assert [who.rank for who in judge.judge(group_ranks([*others, stuck], TABLE, SETTINGS)).named] == [3]


@pytest.mark.parametrize(
    ("server", "expected"), [(103, ([], [3])), (99, ([3], [])), (None, ([3], []))], ids=["itself", "its parent", "none"]
)
def test_rank_waiting_for_clients_has_not_joined(server: int | None, expected: tuple[list[int], list[int]]) -> None:
    # A rank that waits for clients, in any function, is idle and was never in a collective.
    def dump(function: str, file: str, server: int | None = None) -> ProcessDump:
        frames = (Frame(function=function, file=file), Frame(function="train", file="train.py"))
        return main_dump(frames, state="S", server=server)

    waits = dump("broadcast", "torch/distributed/distributed_c10d.py")
    ranks = [RankDump(id=RankId(rank=rank, pid=100 + rank), rounds=(waits, waits)) for rank in range(3)]
    loop = dump("turn", "loop.py", server)
    ranks.append(RankDump(id=RankId(rank=3, pid=103), rounds=(loop, loop)))
    verdict = judge.judge(group_ranks(ranks, TABLE, SETTINGS))
    assert ([one.rank for one in verdict.named], [one.rank for one in verdict.check_first]) == expected


@pytest.mark.parametrize(
    ("came", "want_lock", "expected"),
    [(3, 4, ("CannotTell", [])), (4, 3, ("OutsideCollective", [5, 6, 7]))],
)
def test_ranks_in_other_places_do_not_wait_for_a_suspect(
    came: int, want_lock: int, expected: tuple[str, list[int]]
) -> None:
    # Three kinds of ranks do not wait for the suspect. They leave, have left a collective, or want a lock. No rank
    # waits for a leaving rank. If most ranks leave, the others are the next suspects.
    def dump(at: float, function: str, file: str) -> ProcessDump:
        frames = (Frame(function=function, file=file), Frame(function="main", file="train.py"))
        return main_dump(frames, at, state="S")

    leaving = ("destroy_process_group", "torch/distributed/distributed_c10d.py")
    reducing = ("all_reduce", "torch/distributed/distributed_c10d.py")
    locked = ("acquire", "filelock/_api.py")
    places = [(leaving, leaving), *[(reducing, leaving)] * came, *[(locked, locked)] * want_lock]
    ranks = [
        RankDump(id=RankId(rank=rank), rounds=(dump(0, *first), dump(5, *then)))
        for rank, (first, then) in enumerate(places)
    ]
    verdict = judge.judge(group_ranks(ranks, TABLE, SETTINGS))
    assert (verdict.kind, [rank.rank for rank in verdict.named]) == expected


_LOOP = Frame(function="_worker_loop", file="torch/utils/data/_utils/worker.py", line=349)
_OWN = Frame(function="Shards.__getitem__", file="data.py", line=67)
_TASK = (Frame(function="read", file="fsspec/local.py", line=384), _OWN, _LOOP, Frame(function="main", file="train.py"))
_GET = Frame(function="get", file="multiprocessing/queues.py", line=113)
_IDLE = (_GET, _LOOP, Frame(function="main", file="train.py"))


@pytest.mark.parametrize(
    ("state", "which"),
    [("S", "pid 71"), ("T", "pid 71, stopped"), ("D", "pid 71, blocked in the kernel"), (None, "pid 71")],
)
def test_wait_for_loader_shows_the_worker_with_a_task(state: str | None, which: str) -> None:
    def worker(pid: int, frames: tuple[Frame, ...], installed: int, state: str | None) -> WorkerDump:
        thread = Thread(name="MainThread", thread_id="1", frames=frames, is_main=True, installed_frames=installed)
        dump = ProcessDump(taken_monotonic_seconds=0.0, threads=(thread,), state=state)
        return WorkerDump(pid=pid, comm="pt_data_worker", rounds=(dump, dump))

    waits = stack(("__next__ (torch/utils/data/dataloader.py)", "main (train.py)"), 38)
    dump = main_dump(waits, state="S")
    idle = [worker(pid, _IDLE, 3, "S") for pid in (72, 73)]
    rank = RankDump(id=RankId(rank=2), rounds=(dump, dump), workers=(*idle, worker(71, _TASK, 1, state)))
    (found,) = group([rank]).groups
    assert (
        clauses.describe_activity(found) == f"waits for its loader worker ({which}, in Shards.__getitem__ (data.py:67))"
    )
    assert (
        clauses.describe_activity(found, several=True)
        == "wait for their loader workers (in Shards.__getitem__ (data.py:67))"
    )
    (found,) = group([structs.replace(rank, workers=tuple(idle))]).groups
    assert clauses.describe_activity(found).startswith("is loading data")


@pytest.mark.parametrize(
    ("seen", "is_apart"),
    [
        ((True, True, True), False),
        ((True, False, True), False),
        ((None, None, None), False),
        ((True, None, None), False),
        ((False, False, False), True),
    ],
)
def test_rank_with_unreadable_memory_joins_the_group_at_its_line(seen: tuple[bool | None, ...], is_apart: bool) -> None:
    # Four ranks sleep at one line of their program; three of them sleep inside torch's code. `seen` has one item
    # per round: True if the fourth rank sleeps inside torch's code, None if its memory was unreadable.
    def dumped(rank: int, in_torch: tuple[bool | None, ...]) -> RankDump:
        frames = stack(("sort (mine.py)",), 7)
        rounds = tuple(
            main_dump(frames, 5.0 * number, state="S", waits_in_torch=one) for number, one in enumerate(in_torch)
        )
        return RankDump(id=RankId(rank=rank, pid=100 + rank), rounds=rounds)

    found = group([*(dumped(rank, (True, True, True)) for rank in range(3)), dumped(3, seen)], 4)
    assert [[one.id.rank for one in each.members] for each in found.groups] == (
        [[0, 1, 2], [3]] if is_apart else [[0, 1, 2, 3]]
    )
    assert found.groups[0].waits_for == "gpu"
