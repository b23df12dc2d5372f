"""Groups, merging and verdicts: properties that hold for any ranks. Limits on the stacks that are kept."""

import random
import tracemalloc
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import json as msgspec_json
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture import stack_limits
from hangwatch.model import (
    Fault,
    Frame,
    Grouping,
    ProcessDump,
    RankDump,
    RankId,
    SystemCall,
    Thread,
    WorkerDump,
)
from hangwatch.report import as_json, html
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.grouping import group_ranks
from hangwatch.state.incident_timeline import CAPTURES_KEPT
from hangwatch.tools.fleet import merge
from hangwatch.verdict import judge, sequence_rules
from hangwatch.verdict.scene import is_collective
from hangwatch.verdict.wording import clauses
from tests import samples
from tests.samples import change_parts, main_dump

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
    return change_parts(
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
    capture = replace(samples.mismatch().captures[0], ranks=(dump,), world_size=3, notes=("late",))
    grouping = group_ranks(capture, TABLE, SETTINGS)
    assert (grouping.world_size, grouping.absent, grouping.notes) == (3, (range(1, 3),), ("late",))


def dump_at(line: int, lines: tuple[str, ...] = STACKS[0], **place: Any) -> RankDump:
    return RankDump(id=RankId(**place), rounds=(main_dump(stack(lines, line)),))


def test_a_group_is_shown_by_its_lowest_rank() -> None:
    (found,) = group([dump_at(10 * rank, node="n", rank=rank) for rank in (3, 1, 2)]).groups
    assert [member.id.rank for member in found.members] == [1, 2, 3]
    assert found.frames[0].line == 10


def test_ranks_of_two_nodes_with_the_same_numbers_are_not_lost() -> None:
    dumps = [dump_at(1, node=node, local_rank=0) for node in ("a", "b")]
    assert len(group(dumps).groups[0].members) == 2


def test_a_rank_that_appears_twice_has_one_place() -> None:
    first, second = (group([dump_at(1, lines, node="a", rank=0)]) for lines in (STACKS[0], STACKS[7]))
    merged = merge.merge_all([first, second])
    assert merged == merge.merge_all([second, first])
    assert sum(len(found.members) for found in merged.groups) == 1


@pytest.mark.parametrize(("world_size", "per_node"), [(4_000_000, 1), (10**30, 8)])
def test_a_world_size_costs_nothing(world_size: int, per_node: int) -> None:
    # The world size comes from an environment or a file and may be any number, so nothing may count up to it.
    dumps = [dump_at(1, node=f"n{rank // per_node}", rank=rank) for rank in (0, 1, 2, 9)]
    tracemalloc.start()
    grouping = group(dumps, world_size)
    verdict = judge.judge(grouping)
    shown = as_json.render(as_json.answer(grouping, verdict)) + html.render_grouping(grouping, verdict)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grouping.absent == (range(3, 9), range(10, world_size))
    assert f"10-{world_size - 1}" in shown
    assert peak_bytes < 20 << 20


def asleep_in(function: str, file: str, at: float = 0.0, **facts: object) -> ProcessDump:
    """Return a dump of a process that sleeps in this function."""
    return main_dump(stack((f"{function} ({file})", "train (train.py)"), 1), at, state="S", **facts)


def test_rank_that_left_a_collective_is_not_named() -> None:
    # In a healthy step all ranks wait in the first round. In the last round one rank computes and the others wait
    # for it.
    wait, work = ("all_reduce", "torch/distributed/distributed_c10d.py"), ("__getitem__", "torch/utils/data/dataset.py")
    others = [RankDump(id=RankId(rank=i), rounds=(asleep_in(*wait), asleep_in(*wait, 5))) for i in range(3)]
    came = RankDump(id=RankId(rank=3), rounds=(asleep_in(*wait), asleep_in(*work, 5)))
    stuck = RankDump(id=RankId(rank=3), rounds=(asleep_in(*work), asleep_in(*work, 5)))
    assert judge.judge(group_ranks([*others, came], TABLE, SETTINGS)).named == ()
    assert [who.rank for who in judge.judge(group_ranks([*others, stuck], TABLE, SETTINGS)).named] == [3]


@pytest.mark.parametrize(
    ("server", "expected"), [(103, ([], [3])), (99, ([3], [])), (None, ([3], []))], ids=["itself", "its parent", "none"]
)
def test_rank_waiting_for_clients_has_not_joined(server: int | None, expected: tuple[list[int], list[int]]) -> None:
    # A rank that waits for clients, in any function, is idle and was never in a collective.
    waits = asleep_in("broadcast", "torch/distributed/distributed_c10d.py")
    ranks = [RankDump(id=RankId(rank=rank, pid=100 + rank), rounds=(waits, waits)) for rank in range(3)]
    loop = asleep_in("turn", "loop.py", server=server)
    ranks.append(RankDump(id=RankId(rank=3, pid=103), rounds=(loop, loop)))
    verdict = judge.judge(group_ranks(ranks, TABLE, SETTINGS))
    assert ([one.rank for one in verdict.named], [one.rank for one in verdict.check_first]) == expected


@pytest.mark.parametrize(
    ("came", "want_lock", "expected"),
    [(3, 4, ("CannotTell", [])), (4, 3, ("OutsideCollective", [5, 6, 7]))],
)
def test_ranks_in_other_places_await_no_suspect(came: int, want_lock: int, expected: tuple[str, list[int]]) -> None:
    # Three kinds of ranks do not wait for the suspect. They leave, have left a collective, or want a lock. No rank
    # waits for a leaving rank. If most ranks leave, the others are the next suspects.
    leaving = ("destroy_process_group", "torch/distributed/distributed_c10d.py")
    reducing = ("all_reduce", "torch/distributed/distributed_c10d.py")
    locked = ("acquire", "filelock/_api.py")
    places = [(leaving, leaving), *[(reducing, leaving)] * came, *[(locked, locked)] * want_lock]
    ranks = [
        RankDump(id=RankId(rank=rank), rounds=(asleep_in(*first), asleep_in(*then, 5)))
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
    place = "in Shards.__getitem__ (data.py:67)"
    assert clauses.describe_activity(found) == f"waits for its loader worker ({which}, {place})"
    assert clauses.describe_activity(found, several=True) == f"wait for their loader workers ({place})"
    (found,) = group([replace(rank, workers=tuple(idle))]).groups
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


SLEEPS = SystemCall(number=230, name="clock_nanosleep", kind="sleeps", left_seconds=900.0, until_unix_seconds=1e9)
RECEIVES = SystemCall(number=45, name="recvfrom", kind="receives", object="socket", descriptors=(5,))


@pytest.mark.parametrize(
    ("call", "in_torch", "has_device", "waits_for", "stance"),
    [
        (SLEEPS, False, None, "gpu", "elsewhere"),  # a sleep that the program called
        (SLEEPS, None, None, "gpu", "waits"),
        (SLEEPS, True, None, "gpu", "waits"),  # a sleep in torch's code may be the wait for a GPU
        (SLEEPS, True, False, "ranks", "waits"),
        (RECEIVES, False, True, "gpu", "waits"),
        (RECEIVES, False, False, "unknown", "unclear"),
    ],
)
def test_rank_in_its_training_step_waits_for_a_gpu_only_if_it_may(
    call: SystemCall, in_torch: bool | None, has_device: bool | None, waits_for: str, stance: str
) -> None:
    """Sequence numbers name a rank only if it waits elsewhere."""
    frames = stack(("read (mine.py)", "_call_impl (torch/nn/modules/module.py)"), 7)
    facts = {"call": call, "waits_in_torch": in_torch, "has_device": has_device}
    rounds = tuple(main_dump(frames, 5.0 * at, state="S", **facts) for at in range(3))
    grouping = group([RankDump(id=RankId(rank=3, pid=103), rounds=rounds)])
    assert (grouping.groups[0].waits_for, is_collective(grouping.groups[0])) == (waits_for, waits_for == "ranks")
    assert sequence_rules.stance_of(grouping)(grouping.members[0], "") == stance


MEBIBYTE = 1 << 20


def thread(name: str, frames: int, length: int = 20) -> Thread:
    made = tuple(Frame(function=f"f{number}", file="x" * length, line=number) for number in range(frames))
    return Thread(name=name, thread_id=name, frames=made, is_main=name == "MainThread", installed_frames=frames)


THREADS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300)), max_size=12).map(
    lambda sizes: [
        thread("MainThread" if number == len(sizes) // 2 else f"Thread-{number}", *size)
        for number, size in enumerate(sizes)
    ]
)


def named(threads: Sequence[Thread]) -> list[str | None]:
    return [one.name for one in threads if not (one.name or "").startswith("<")]


@given(THREADS, st.integers(0, 200_000))
def test_what_is_kept_fits_and_the_main_thread_is_always_there(threads: list[Thread], most_bytes: int) -> None:
    kept = stack_limits.fit_threads(threads, most_bytes)
    if stack_limits.size_bytes(threads) <= most_bytes:
        assert kept == tuple(threads)
        return
    main = [one for one in kept if one.is_main]
    assert len(main) == 1
    rest = stack_limits.size_bytes(one for one in kept if one.frames or one.is_main)
    assert rest <= max(most_bytes, stack_limits.size_bytes(main))
    assert len(main[0].frames) <= 49 or stack_limits.size_bytes(main) <= most_bytes
    assert named(kept) == [name for name in named(threads) if name in named(kept)], "in their order"
    left = len(threads) - len(named(kept))
    assert left == 0 or kept[-1].name == f"<{left} threads not shown: the stack exceeds its size limit>"


def test_of_a_long_main_stack_both_ends_are_kept() -> None:
    (main,) = stack_limits.fit_threads([thread("MainThread", 200)], 0)
    assert [frame.function for frame in main.frames[:2]] == ["f0", "f1"]
    assert [frame.function for frame in main.frames[31:34]] == ["f31", "<frames left out>", "f184"]
    assert main.frames[-1].function == "f199"
    assert main.installed_frames == 32


def test_jobs_as_people_have_them_fit() -> None:
    """Keep all stacks of 16 ranks with 13 threads and 16 workers each, in three rounds, for one job and for two."""
    rank = [thread("MainThread", 60, 60), *(thread(f"Thread-{number}", 12, 60) for number in range(12))]
    worker = [thread("MainThread", 20, 60), thread("QueueFeederThread", 6, 60)]
    for jobs, ranks in ((1, 16), (2, 8)):
        capture_bytes = stack_limits.OF_OWNER_BYTES // (CAPTURES_KEPT * jobs)
        room = stack_limits.divide_budget(capture_bytes, ranks, 16 * ranks, rounds=3)
        assert stack_limits.fit_threads(rank, room.rank_bytes) == tuple(rank)
        assert stack_limits.fit_threads(worker, room.worker_bytes) == tuple(worker)


@given(st.integers(1, 64 * MEBIBYTE), st.integers(0, 1024), st.integers(0, 4096), st.integers(0, 10))
def test_all_processes_together_fit_into_a_capture(capture_bytes: int, ranks: int, workers: int, rounds: int) -> None:
    room = stack_limits.divide_budget(capture_bytes, ranks, workers, rounds)
    assert (room.rank_bytes * ranks + room.worker_bytes * workers) * rounds <= capture_bytes


def names(*lines: str) -> list[str]:
    parts = [line.rstrip(")").rpartition(" (") for line in lines]
    stack = tuple(Frame(function=function, file=file, line=7) for function, _, file in parts)
    return [f"{function} ({file})" for function, file in stack_frames.key_places(stack)]


@pytest.mark.parametrize(
    "outer",
    [
        ("<module> (train.py)",),
        ("wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py)", "<module> (train.py)"),
        ("_run_code (<frozen runpy>)", "_run_module_as_main (<frozen runpy>)"),
        ("run_path (runpy.py)", "main (python3.11)", "__libc_start_main (libc.so.6)"),
        ("run (multiprocessing/process.py)", "_bootstrap (multiprocessing/process.py)", "spawn_main (multiprocessing/spawn.py)"),
        ("run (threading.py)", "_bootstrap_inner (threading.py)", "_bootstrap (threading.py)"),
        ("invoke (click/core.py)", "main (click/core.py)", "__call__ (click/core.py)", "<module> (cli)"),
        ("_call_with_frames_removed (<frozen importlib._bootstrap>)", "import_module (importlib/__init__.py)", "<module> (cli.py)"),
    ],
)  # fmt: skip
def test_how_a_rank_was_launched_does_not_count(outer: tuple[str, ...]) -> None:
    assert names("barrier (x.py)", "train (train.py)", *outer)[:2] == ["barrier (x.py)", "train (train.py)"]
    assert len(names("barrier (x.py)", "train (train.py)", *outer)) <= 3


def test_a_stack_of_launcher_frames_alone_is_kept() -> None:
    assert names("<module> (train.py)") == ["<module> (train.py)"]


def test_native_frames_and_addresses_do_not_count() -> None:
    lines = [
        "0x7f12 (libcuda.so.550)",
        "poll (libc.so.6)",
        "ncclAllReduce (nccl/src/collectives.cc)",
        "all_reduce (a.py)",
    ]
    assert names(*lines) == ["all_reduce (a.py)"]


def test_a_stack_of_native_frames_alone_keeps_what_is_the_same() -> None:
    spinning = names("0x7f12 (libcuda.so.550)", "ncclGroupEnd (libnccl.so.2)", "0x55 (?)")
    waiting = names("clock_gettime (linux-vdso.so.1)", "0x7f99 (libcuda.so.550)", "ncclGroupEnd (libnccl.so.2)")
    assert spinning == waiting == ["ncclGroupEnd (libnccl.so.2)"]


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        ("/opt/conda/lib/python3.10/site-packages/torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        ("/usr/lib/python3/dist-packages/x.py", "x.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/tmp/torchinductor_ann/3x/c3xabc.py", "<inductor>"),
        (f"c{'3x' * 25}a.py", "<inductor>"),
        ("collate.py", "collate.py"),
        ("<eval_with_key>.12", "<eval_with_key>"),
        ("/home/ann/train.py", "/home/ann/train.py"),
    ],
)
def test_short_paths(file: str, short: str) -> None:
    assert stack_frames.short_path(file) == short


@pytest.mark.parametrize(
    ("function", "plain"),
    [("wait", "wait"), ("Condition.wait", "wait"), ("f.<locals>.g", "g"), ("<module>", "<module>")],
)
def test_plain_names(function: str, plain: str) -> None:
    assert stack_frames.plain_name(function) == plain


@pytest.mark.parametrize(
    ("place", "called"),
    [
        (("Loop.<locals>.<lambda>", "train.py"), None),
        (("<listcomp>", "train.py"), None),
        (("Loop.step", "train.py"), "step"),
        (("<module>", "train.py"), "<module>"),
        (("0x7f12ab", "libcuda.so.550"), None),
        (("ncclAllReduce", "libnccl.so.2"), "ncclAllReduce"),
        (("c10d::Reducer::finalize_backward()", "libtorch_cpu.so"), "c10d::Reducer::finalize_backward"),
        (("c10d::WorkNCCL::isCompleted() const", "libtorch_cuda.so"), "c10d::WorkNCCL::isCompleted"),
        (("acme::Ring<int>::wait(long const&) const &", "libacme.so"), "acme::Ring::wait"),
        (("void c10d::send<at::Tensor, std::vector<int> >(int)", "libtorch_cpu.so"), "c10d::send"),
        (("std::_Function_handler<void (), c10d::Reducer::delay_all_reduce()>::_M_invoke", "libtorch_cpu.so"), None),
        (("c10d::Reducer::autograd_hook(unsigned long)::{lambda()#1}::operator()", "libtorch_cpu.so"), None),
    ],
)
def test_the_name_by_which_a_function_is_known(place: tuple[str, str], called: str | None) -> None:
    assert stack_frames.display_name(place) == called


def test_a_name_that_a_process_chose_costs_no_time() -> None:
    assert stack_frames.display_name(("f" + "<" * 200_000 + ">" * 200_000, "mine.so")) is not None


@pytest.mark.parametrize(
    ("files", "installed", "users"),
    [
        (["threading.py", "torch/x.py", "train.py"], None, [False, None, None]),
        (["threading.py", "torch/x.py", "train.py"], 2, [False, False, True]),
        (["threading.py", "torch/x.py"], 2, [False, False]),
        (["json/encoder.py", "logging/__init__.py", "code/train.py"], None, [False, False, None]),
        (["job/distributed/bus.py", "torch/x.py", "job/train.py", "train.py"], 0, [True, None, True, None]),
        (["helpers.py", "lightning/x.py", "train.py", "runpy.py"], 0, [True, None, True, False]),
        (["/opt/lib/python3.13t/queue.py", "/opt/lib/python3.11/site-packages/torch/x.py"], None, [False, False]),
        (["/home/user/torch/train.py", "<string>", "<frozen runpy>"], None, [True, None, False]),
        (["/tmp/torchinductor_me/ab/cab.py", "train.py"], None, [None, None]),
        ([f"c{'3x' * 25}a.py", "train.py"], None, [None, None]),
    ],
)
def test_frames_belong_to_user_or_library(files: list[str], installed: int | None, users: list[bool | None]) -> None:
    assert list(stack_frames.find_owners(files, installed)) == users
