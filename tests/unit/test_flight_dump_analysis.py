"""Analysis of flight-recorder dumps that were written at one moment, compared with torch's own analyzer."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.explain.flight_dumps import rank_recorders, stopped_launch
from hangwatch.explain.flight_dumps.rank_recorders import DumpFile
from hangwatch.model import Confidence, Fault, Group, Grouping, Member, RankId, Verdict
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge, recorder_dumps
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.sequence_rules import Answer, decide_by_records
from hangwatch.verdict.supplements import complete
from hangwatch.verdict.wording import sequence_numbers
from tests.unit.test_flight_dump import CREATED_NS, entry, parse

TABLE = activity.load()
GROUPS = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1]), "2": ("tp", [2, 3])}
Program = list[tuple[str, str]]
"""Operations of a rank in order, each with the name of its group."""


def recorder(rank: int, program: Program, first_open: int) -> dict[str, Any]:
    """Return the NCCL dump of one rank. Operations from number `first_open` on are open."""
    numbers: dict[str, int] = {}
    entries = []
    for place, (group, operation) in enumerate(program):
        numbers[group] = numbers.get(group, 0) + 1
        is_open = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
        entries.append(
            entry(
                place,
                pg_id=int(group),
                process_group=(group, GROUPS[group][0]),
                collective_seq_id=numbers[group],
                profiling_name=f"nccl:{operation}",
                time_created_ns=CREATED_NS + place * 10**6,
                **(is_open if place >= first_open else {}),
            )
        )
    mine = {name: (desc, ranks) for name, (desc, ranks) in GROUPS.items() if rank in ranks}
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in mine.items()},
        "pg_status": {},
    }


def judged(dumps: Mapping[int, dict[str, Any]]) -> tuple[Answer, Verdict]:
    joined = rank_recorders.join([DumpFile(f"rank{rank}", parse(dump)) for rank, dump in dumps.items()])
    ranks = recorder_dumps.without_stacks(joined.by_rank, [], joined.world_size)
    grouping = group_ranks(ranks, TABLE, config.Capture(), joined.world_size)
    grouping = recorder_dumps.with_records(grouping, joined.by_rank)
    verdict = judge.judge(grouping, dumped_records=joined.by_rank)
    return decide_by_records(grouping), verdict


def referee(dumps: Mapping[int, dict[str, Any]]) -> dict[tuple[str, int], tuple[set[int], set[int]]]:
    """Return the result of torch's own analyzer, for each collective that does not match.

    The key is (group, number). The value has the missing ranks, and the ranks in another operation.
    """
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    configured = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager").JobConfig()
    details = {
        str(rank): {"rank": rank, "host_name": f"host_rank{rank}", **copy.deepcopy(dump)}
        for rank, dump in dumps.items()
    }
    database = builder.build_db(details, configured.parse_args([]), "2.10")
    return {
        (one.group_id, one.collective_seq_id): (set(one.missing_ranks or ()), set(one.mismatch_collectives or ()))
        for one in database.collectives
        if one.missing_ranks or one.mismatch_collectives
    }


WORLD = ("0", "all_reduce")
OWN = {0: ("1", "all_reduce"), 1: ("1", "all_reduce"), 2: ("2", "all_reduce"), 3: ("2", "all_reduce")}


@pytest.mark.torch
def test_torch_finds_the_same_rank_missing() -> None:
    # Rank 2 is in its own code. All other ranks have enqueued one more collective.
    dumps = {rank: recorder(rank, [WORLD] * (4 if rank == 2 else 5), 4) for rank in range(4)}
    answer, verdict = judged(dumps)
    assert referee(dumps) == {("0", 5): ({2}, set())}
    assert [(one.name, one.number, one.missing) for one in answer.graph.pending] == [("0", 5, (2,))]
    assert [one.rank for one in verdict.check_first] == [2]


@pytest.mark.torch
def test_torch_finds_the_same_skipped_collectives() -> None:
    # Rank 2 skips the third all_reduce of the default group and continues in group tp, where rank 3 does not join.
    dumps = {}
    for rank in range(4):
        program = [
            WORLD,
            OWN[rank],
            WORLD,
            OWN[rank],
            *([] if rank == 2 else [WORLD]),
            *([OWN[rank]] if rank == 2 else []),
        ]
        dumps[rank] = recorder(rank, program, 4)
    answer, verdict = judged(dumps)
    ours = {(one.name, one.number): (set(one.missing), set[int]()) for one in answer.graph.pending}
    assert referee(dumps) == ours == {("0", 3): ({2}, set()), ("2", 3): ({3}, set())}
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("Cycle", [2])


@pytest.mark.torch
def test_torch_finds_the_same_mismatch() -> None:
    other = ("0", "broadcast")
    dumps = {rank: recorder(rank, [WORLD, WORLD, other if rank == 1 else WORLD], 2) for rank in range(4)}
    answer, verdict = judged(dumps)
    assert referee(dumps) == {("0", 3): (set(), {1})}
    assert (verdict.kind, answer.check_first) == ("Mismatch", (1,))
    assert answer.graph.mismatches == ((("all_reduce", (0, 2, 3)), ("broadcast", (1,))),)


def test_mismatch_is_shown_with_the_operation_of_its_group() -> None:
    """Ranks 0 and 1 wait in another operation of the default group, too, which comes first in the list."""
    other = ("2", "broadcast")
    dumps = {rank: recorder(rank, [WORLD, WORLD] if rank < 2 else [WORLD, OWN[2]], 1) for rank in range(3)}
    dumps[3] = recorder(3, [WORLD, other], 1)
    _, verdict = judged(dumps)
    assert verdict.kind == "Mismatch"
    assert "(all_reduce #1 of tp of ranks 2-3)" in verdict.message


def test_a_wrong_size_in_each_of_two_groups_is_shown_with_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in (("1", [0, 1, 2]), ("2", [3, 4, 5])):
        monkeypatch.setitem(GROUPS, name, ("tp", members))
    dumps = {rank: recorder(rank, [("1" if rank < 3 else "2", "all_reduce")], 0) for rank in range(6)}
    for rank in (1, 4):
        dumps[rank]["entries"][-1]["input_sizes"] = [[3]]
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("Mismatch", [1, 4])
    assert "all_reduce #1 of tp of ranks 3-5" in verdict.message


def stopped_at(rank: int, counted: int | None, others: int = 8) -> Verdict:
    """Return the verdict on four ranks that are stuck in operation 5.

    Rank `rank` has enqueued nothing after it. The three other ranks have enqueued `others` operations.
    """
    dumps = {one: recorder(one, [WORLD] * (5 if one == rank else others), 4) for one in range(4)}
    if counted is not None:
        status = {"last_enqueued_collective": counted, "last_started_collective": 4, "last_completed_collective": 4}
        dumps[rank]["pg_status"] = {"0": status}
    recorders = {one: parse(dump).recorders for one, dump in dumps.items()}
    return complete(judged(dumps)[1], stopped_launch.supplement(recorders))


def test_rank_that_enqueued_nothing_more_is_shown_and_not_checked_first() -> None:
    """Do not check rank 0 first: a healthy rank 0 that reads a result has the same dump."""
    verdict = stopped_at(0, counted=5)
    assert (verdict.kind, verdict.named, verdict.check_first) == ("AllJoined", (), ())
    assert "no rank's CPU is behind" not in verdict.message
    shown = [one.message for one in verdict.evidence if "stopped right after" in one.message]
    assert shown == [
        "rank 0 enqueued nothing after all_reduce 5, 3 other ranks did: the CPU stopped right after this operation: "
        "it waits for its GPU, or is inside the launch"
    ]


def test_rank_inside_a_launch_is_checked_first() -> None:
    verdict = stopped_at(2, counted=4)
    assert [one.rank for one in verdict.check_first] == [2]
    assert "inside its launch, which torch has not counted yet" in verdict.message


@pytest.mark.parametrize("counted", [None, 5])
def test_count_that_is_not_lower_shows_no_launch(counted: int | None) -> None:
    assert stopped_at(2, counted).check_first == ()


def test_ranks_that_all_enqueued_the_same_are_not_behind() -> None:
    verdict = stopped_at(2, counted=4, others=5)
    assert "no rank's CPU is behind" in verdict.message
    assert verdict.check_first == ()


SAME, LESS, NONE = [[4]], [[3]], []
SIZES: list[tuple[str, list[Any], list[Any], bool, bool]] = [
    # the operation, input and output of rank 1 (those of the others are [4]), a mismatch for us, for torch
    *((name, LESS, LESS, True, True) for name in ("all_reduce", "broadcast", "reduce", "allreduce_coalesced")),
    *((f"all_gather{name}", LESS, [[16]], True, True) for name in ("", "_into_tensor_coalesced")),
    ("_all_gather_base", LESS, [[16]], True, True),
    *((f"reduce_scatter{name}", LESS, SAME, True, True) for name in ("", "_tensor_coalesced")),
    ("_reduce_scatter_base", LESS, SAME, True, True),
    ("gather", LESS, NONE, True, True),
    ("gather", SAME, NONE, False, False),
    ("scatter", NONE, LESS, True, True),
    ("scatter", NONE, SAME, False, False),
    ("all_to_all", LESS, SAME, True, True),
    ("all_to_all", [[5]], [[5]], False, False),
    ("all_to_all", [[2], [2]], SAME, False, True),  # torch counts the first tensor only
    ("barrier", NONE, NONE, False, False),
]


@pytest.mark.torch
@pytest.mark.parametrize(("operation", "inputs", "outputs", "ours", "theirs"), SIZES)
def test_sizes_of_each_operation_are_compared_as_by_torch(
    operation: str, inputs: list[Any], outputs: list[Any], *, ours: bool, theirs: bool
) -> None:
    dumps = {rank: recorder(rank, [WORLD, ("0", operation)], 1) for rank in range(4)}
    whole = [[16]] if operation.startswith(("all_gather", "_all_gather")) else SAME
    larger = [[16]] if "reduce_scatter" in operation else SAME
    for dump in dumps.values():
        dump["entries"][-1]["input_sizes"], dump["entries"][-1]["output_sizes"] = larger, whole
        if operation == "barrier":
            dump["entries"][-1]["input_sizes"] = dump["entries"][-1]["output_sizes"] = NONE
    dumps[1]["entries"][-1]["input_sizes"], dumps[1]["entries"][-1]["output_sizes"] = inputs, outputs
    answer, _ = judged(dumps)
    assert (answer.kind == "Mismatch", bool(referee(dumps))) == (ours, theirs)
    assert not ours or answer.check_first == (1,)


@pytest.mark.parametrize(("completed", "missing"), [(1, (2,)), (2, ())])
def test_group_without_a_record_is_judged_by_the_count_of_torch(completed: int, missing: tuple[int, ...]) -> None:
    """A dump may contain only open operations. Then only torch's own count shows what rank 2 has completed.

    Processes give the same id to different groups, so the ids of one process are compared with its names of groups.
    """
    dumps = {rank: recorder(rank, [WORLD, WORLD], 1) for rank in (0, 1, 3)}
    dumps[2] = recorder(2, [OWN[2]], 0)
    names = ("enqueued", "started", "completed")
    counts = {"0": completed, "2": 1}
    dumps[2]["pg_status"] = {
        group: {f"last_{name}_collective": count for name in names} for group, count in counts.items()
    }
    answer, _ = judged(dumps)
    assert (answer.graph.pending[0].missing, answer.graph.pending[0].unknown) == (missing, ())


def finding(kind: str, group: Group, answer: Answer) -> Finding:
    scene = build_scene(Grouping(groups=(group,)), None)
    return Finding(kind, scene, sequence_numbers.not_joined, (group,), confidence=Confidence.HIGH, answer=answer)


DENIED = Fault(subject="pid 7", reason="PermissionDenied", detail="no right")
UNDUMPED = Group(key="x", activity="unknown", fault=DENIED, members=(Member(id=RankId(rank=0)),))


def test_stacks_that_answer_let_a_rank_be_named_with_medium_confidence() -> None:
    answer, verdict = judged({rank: recorder(rank, [WORLD] * (1 if rank == 2 else 2), 1) for rank in range(4)})
    named = recorder_dumps.qualify(finding("NotJoined", UNDUMPED, answer), {})
    assert (named.confidence, verdict.confidence) == (Confidence.MEDIUM, Confidence.NONE)
    assert "This is the state at the moment when torch wrote its dumps." in verdict.message


def test_what_the_kernel_says_of_a_rank_is_not_hidden_by_dumps() -> None:
    blocked = finding("RankBlocked", UNDUMPED, Answer("Unknown"))
    _, alone = judged({0: recorder(0, [WORLD], 0)})
    records = {0: parse(recorder(0, [WORLD], 0)).recorders}
    qualified = recorder_dumps.qualify(blocked, records)
    assert qualified._replace(open_then=blocked.open_then) == blocked
    assert [one.kind for one in sequence_numbers.evidence(qualified.open_then)] == ["sequence"]
    assert alone.kind == "RecordsOnly"


def test_gpu_that_has_not_completed_what_others_have_is_checked_first() -> None:
    dumps = {rank: recorder(rank, [WORLD] * 8, 4 if rank == 2 else 6) for rank in range(4)}
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("GpuBehind", [2])
    assert verdict.message.startswith(
        "Rank 2's GPU has not completed all_reduce #5 of the default group, which ranks 0-1,3 have; it is 2 operations "
        "behind."
    )


def test_program_that_is_behind_is_checked_first() -> None:
    dumps = {rank: recorder(rank, [WORLD] * (4 if rank == 2 else 8), 4) for rank in range(4)}
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("NotJoined", [2])
    assert "Rank 2 has not joined all_reduce #5 of the default group, where ranks 0-1,3 wait" in verdict.message


def test_rank_without_a_dump_is_checked_first_if_others_wait_for_it() -> None:
    dumps = {rank: recorder(rank, [WORLD] * 8, 4) for rank in (0, 1, 3)}
    _, verdict = judged(dumps)
    assert (verdict.kind, [one.rank for one in verdict.check_first]) == ("NotJoined", [2])
    assert "Rank 2 has no flight recorder dump, and ranks 0-1,3 wait for it in all_reduce #5" in verdict.message


PROGRAMS = st.lists(st.sampled_from([WORLD, ("1", "all_reduce"), ("2", "barrier")]), min_size=1, max_size=8)


def test_dumps_of_different_moments_point_at_no_rank() -> None:
    """Rank 2 was dumped first: the others have completed operations that it had not enqueued then."""
    dumps = {rank: recorder(rank, [WORLD] * (8 if rank == 2 else 12), 4 if rank == 2 else 10) for rank in range(4)}
    _, verdict = judged(dumps)
    assert (verdict.kind, verdict.check_first) == ("RecordsOnly", ())


@settings(max_examples=200)
@given(st.lists(st.tuples(PROGRAMS, st.integers(0, 8)), min_size=4, max_size=4))
def test_ranks_in_a_launch_are_few_and_not_named(drawn: list[tuple[Program, int]]) -> None:
    parsed = {rank: parse(recorder(rank, program, first)) for rank, (program, first) in enumerate(drawn)}
    found = stopped_launch.supplement({rank: dump.recorders for rank, dump in parsed.items()})
    assert len(found.check_first) < 3


@settings(max_examples=200)
@given(st.lists(st.tuples(PROGRAMS, st.integers(0, 8)), min_size=4, max_size=4))
def test_dumps_without_stacks_name_no_rank(drawn: list[tuple[Program, int]]) -> None:
    _, verdict = judged({rank: recorder(rank, program, first) for rank, (program, first) in enumerate(drawn)})
    assert verdict.named == ()
    assert "the moment when torch wrote its dumps" in verdict.message
