"""An exported incident is judged as before, has the expected verdict of its feedback, and no name of its site."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.model import Capture, Fault, Feedback, Frame, Incident, ProcessDump, RankDump, RankId, Thread, Verdict
from hangwatch.report import dump_text
from hangwatch.report.anonymous_case import UnknownAnswerError, render_case
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.verdict import judge
from tests import robustness, samples
from tests.hangs import SETTINGS, TABLE

RIGHT = Feedback(is_right=True, verdict="OutsideCollective", named=(), given_unix_seconds=0.0, by_uid=0)
HANGS = [case for case in robustness.known_cases() if case.numbers == "rank"]


def incident_of(ranks: Sequence[RankDump], world_size: int | None = None) -> Incident:
    capture = Capture(
        job_id="4711",
        node="gpu-a12",
        started_unix_seconds=samples.OPENED,
        duration_seconds=1.0,
        rounds=max([1, *(len(dump.rounds) for dump in ranks)]),
        ranks=tuple(ranks),
        world_size=world_size,
    )
    made = samples.incident(groups=(), verdict=Verdict(kind="OutsideCollective", message="made up"))
    return replace(made, captures=(capture,), grouping=group_ranks(ranks, TABLE, SETTINGS, world_size))


def judge_texts(texts: Iterable[tuple[str, str]]) -> tuple[str, list[tuple[int | None, int | None]]]:
    collected = traces.collect((name, text.splitlines()) for name, text in texts)
    verdict = judge.judge(group_ranks(collected.ranks, TABLE, SETTINGS, None))
    return verdict.kind, sorted((rank.rank, rank.local_rank) for rank in verdict.named)


def judge_stacks(incident: Incident) -> tuple[str, list[tuple[int | None, int | None]]]:
    (capture,) = incident.captures
    rounds = range(capture.rounds)
    lines = (line for at in rounds for dump in capture.ranks for line in dump_text.rank_lines(dump, "python x.py", at))
    return judge_texts([("trace.out", "\n".join(lines))])


@pytest.mark.parametrize("case", HANGS, ids=[case.name for case in HANGS])
def test_anonymous_stacks_get_the_verdict_of_the_original(case: robustness.Case) -> None:
    incident = incident_of(case.ranks, case.world_size)
    files = render_case(incident, RIGHT, "case")
    assert judge_texts(one for one in files.items() if one[0].startswith("trace-")) == judge_stacks(incident)


def read_back(incident: Incident, named: tuple[RankId, ...], folder: Path) -> robustness.Case:
    """Write the case of an incident, and read it as the other cases are read."""
    (folder / "case").mkdir()
    for name, content in render_case(incident, replace(RIGHT, named=named), "case").items():
        (folder / "case" / name).write_text(content)
    (case,) = robustness.cases_of(folder)
    return case


def test_case_is_read_as_the_other_cases_are(tmp_path: Path) -> None:
    incident = samples.loader_hang()
    case = read_back(incident, incident.verdict.named, tmp_path)
    assert (len(case.ranks), case.guilty) == (8, {(None, 7)})
    assert [len(dump.workers) for dump in case.ranks] == [0] * 7 + [2]
    judged = list(robustness.vary(case))
    assert judged[0].after.kind == incident.verdict.kind
    assert case.named_places(judged[0].after) == case.guilty
    assert not any(form.innocents for form in judged)


def test_local_ranks_stay_local(tmp_path: Path) -> None:
    ranks = [replace(dump, id=replace(dump.id, rank=None)) for dump in samples.loader_hang().captures[0].ranks]
    incident = incident_of(ranks)
    case = read_back(incident, (ranks[7].id,), tmp_path)
    assert case.guilty == {("node-0", 7)} == case.named_places(next(robustness.vary(case)).after)


@pytest.mark.parametrize(
    ("is_right", "named", "culprit", "expected"),
    [
        (True, [7], None, ("name", [7], [])),
        (True, [], None, ("abstain", [], [])),
        (False, [7], 2, ("name", [2], [7])),
        (False, [6, 7], 6, ("name", [6], [7])),
        (False, [], 2, ("name", [2], [])),
        (False, [7], None, ("abstain", [], [7])),
    ],
)
def test_expected_verdict_follows_the_feedback(
    is_right: bool, named: list[int], culprit: int | None, expected: tuple[str, list[int], list[int]]
) -> None:
    feedback = replace(
        RIGHT,
        is_right=is_right,
        named=tuple(map(samples.rank_id, named)),
        culprit=None if culprit is None else samples.rank_id(culprit),
    )
    expectation = json.loads(render_case(samples.loader_hang(), feedback, "case-7")["expect.json"])
    assert (expectation["expect"], expectation["odd_ranks"], expectation["must_not_name"]) == expected
    assert (expectation["id"], expectation["world_size"], expectation["ranks_in_files"]) == ("case-7", 8, 8)
    assert sorted(expectation["groups"].values()) == [[0, 1, 2, 3, 4, 5, 6], [7]]


def test_unknown_right_verdict_is_not_exported() -> None:
    incident = samples.mismatch()
    with pytest.raises(UnknownAnswerError, match="names no rank and is wrong"):
        render_case(incident, replace(RIGHT, is_right=False), "case")
    with pytest.raises(UnknownAnswerError, match="no rank number"):
        render_case(incident, replace(RIGHT, named=(RankId(pid=7),)), "case")


def test_a_name_gets_one_word_and_other_names_get_others() -> None:
    dumps = [
        stack_of(rank, [Frame(function=function, file=file, line=3)])
        for rank, (function, file) in enumerate([("zip", "a.py"), ("zap", "a.py"), ("zip", "b.py")])
    ]
    text = render_case(incident_of(dumps), RIGHT, "case")["trace-node-0.out"]
    frames = [line.partition("]")[2].strip() for line in text.splitlines() if "file-" in line]
    assert frames == ["function_0 (file-0.py:3)", "function_1 (file-0.py:3)", "function_0 (file-1.py:3)"]


MARK = "zqx"  # in every name that must not survive, and in no word of hangwatch
FUNCTIONS = ("{}", "load_{}", "{}_all_reduce", "Trainer{}.fit", "fit.<locals>.{}", "<{}>", "at::{}::run", "0x{}")
FILES = (
    "{}.py",
    "{}/utils.py",
    "utils/{}.py",
    "communicator_{}.py",
    "/home/{}/train.py",
    "/home/{}/megatron/core/{}.py",
    "/opt/{}/lib/python3.11/site-packages/{}/loader.py",
    "/opt/{}/lib/python3.11/site-packages/{}.py",
    "torch/{} {}.py",
    "torch/../{}.py",
    "<{}>",
    "<frozen {}>",
    "lib{}.so",
    "/opt/lib{}/libnccl_{}.so",
    "libtorch_{}.so",
    "{}",
)
LIBRARY = Frame(
    function="get", file=f"/home/{MARK}/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line=3
)


def stack_of(rank: int, frames: Sequence[Frame], **changes: object) -> RankDump:
    thread = Thread(name="MainThread", thread_id="1", frames=tuple(frames), is_main=True)
    dump = ProcessDump(taken_monotonic_seconds=0.0, threads=(replace(thread, **changes),))
    return RankDump(id=samples.rank_id(rank), rounds=(dump,))


names = st.from_regex(rf"{MARK}[a-z]{{0,4}}", fullmatch=True)
frames = st.builds(
    lambda name, function, file: Frame(
        function=function.replace("{}", name),
        file=file.replace("{}", name),
        line=3,
        module=name,
        locals=((name, name),),
    ),
    names,
    st.sampled_from(FUNCTIONS),
    st.sampled_from(FILES),
)
threads = st.builds(
    Thread,
    name=names,
    thread_id=st.just("7"),
    frames=st.lists(frames | st.just(LIBRARY), min_size=1, max_size=5).map(tuple),
    is_main=st.booleans(),
    installed_frames=st.sampled_from([None, 0, 1, 9]),
)
faults = st.builds(
    lambda name, words: Fault(subject=name, reason="DumpFailed", detail=f"{words} /home/{name}: {name}", remedy=name),
    names,
    st.sampled_from(["Timed out", "No such process", "py-spy: no such file", "odd"]),
)
dumps = st.builds(
    samples.change_parts,
    st.just(ProcessDump(taken_monotonic_seconds=0.0)),
    threads=st.lists(threads, max_size=3).map(tuple),
    fault=st.none() | faults,
    state=st.just("D"),
    wchan=names,
    kernel_stack=st.tuples(names),
)


@given(st.lists(st.lists(dumps, min_size=1, max_size=2), min_size=1, max_size=3), names)
def test_no_name_of_site_user_or_program_survives(ranks: list[list[ProcessDump]], name: str) -> None:
    rank_dumps = [
        replace(
            samples.rank_dump(number, (), ((),)),
            id=replace(samples.rank_id(number), node=name, title=name),
            rounds=tuple(rounds),
        )
        for number, rounds in enumerate(ranks)
    ]
    workers = tuple(replace(worker, comm=name, rounds=tuple(ranks[0])) for worker in rank_dumps[0].workers)
    incident = incident_of([replace(rank_dumps[0], workers=workers), *rank_dumps[1:]])
    job = replace(incident.job, job_id=name, job_name=name, command=f"python {name}.py", user=name, program=name)
    incident = replace(incident, job=job, node=name, incident_id=name)
    feedback = replace(RIGHT, named=(rank_dumps[0].id,), cause=name)
    for file, content in render_case(incident, feedback, "case").items():
        assert MARK not in file and MARK not in content
