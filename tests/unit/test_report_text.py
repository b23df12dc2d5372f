"""The text report: the verdict first, raw stacks last. grep(1) works on it, and it has no control characters."""

import json
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import config, words
from hangwatch.model import (
    PAGED,
    EnqueuedOperation,
    Evidence,
    Fault,
    Frame,
    Group,
    Grouping,
    GroupRecords,
    Incident,
    JobState,
    KernelFacts,
    Member,
    ProcessDump,
    RankDump,
    RankId,
    RecorderState,
    Thread,
    TimelineEntry,
    Verdict,
)
from hangwatch.model.flight_records import RankRecords
from hangwatch.report import as_json, html, text
from hangwatch.report.dump_text import GONE, dump_files, prefix, process_lines, rank_lines
from hangwatch.report.stack_tree import Node, merge_tree
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from tests import hangs, samples
from tests.unit.test_waitfor import record, recorder

FRAME = re.compile(r"^    \S.* \(.*\)$")


def raw_part(report: str) -> list[str]:
    lines = report.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("Stacks of the capture")]
    return lines[start + 2 :]


def test_recovered_job_is_told_in_the_past_tense() -> None:
    closed = {"state": JobState.RECOVERED, "closed_unix_seconds": samples.OPENED + 132}
    incident = samples.change_parts(samples.loader_hang(), stuck_on="read() of a pipe", **closed)
    for shown in (text.render(incident), html.render(incident)):
        assert "It works again after 2 min 12 s." in shown and "Before: Rank 7 " in shown
        assert "Was stuck on" in shown and "Do first" not in shown


@pytest.mark.golden
@pytest.mark.parametrize("name", samples.SAMPLES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"report-{name}.txt", text.render(samples.SAMPLES[name]()))


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_the_first_line_is_the_verdict(name: str) -> None:
    incident = samples.SAMPLES[name]()
    first = text.render(incident, width=1000).splitlines()[0]
    assert first == incident.verdict.message


def test_every_raw_line_has_its_prefix_and_every_rank_is_there() -> None:
    incident = samples.loader_hang()
    raw = raw_part(text.render(incident))
    assert all(re.match(r"\[gpu-a12:[0-7]\]", line) for line in raw)
    assert {line.split("]")[0] for line in raw} == {f"[gpu-a12:{rank}" for rank in range(8)}
    assert "[gpu-a12:7]    read_shard (ourdata/shards.py:58)" in raw


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_nothing_before_the_raw_stacks_reads_as_a_dump(name: str) -> None:
    summary = text.render(samples.SAMPLES[name]()).split("Stacks of the capture")[0]
    assert not [line for line in summary.splitlines() if FRAME.match(line) or line.startswith(("Process ", "Thread "))]


def test_long_stack_is_folded_in_each_group() -> None:
    frames = tuple(Frame(function=f"f{number}", file="train.py", line=number) for number in range(1, 25))
    groups = tuple(replace(group, frames=frames) for group in samples.loader_hang().grouping.groups)
    report = text.render_verdict(Grouping(groups=groups), Verdict(kind="NoHangSeen", message="none"))
    assert "f12 (" not in report
    assert "| f5 (train.py:5)\n      | ... 15 more frames\n      | f21 (train.py:21)\n" in report
    assert report.count("... 15 more frames") == len(groups)


def test_start_and_page_stand_in_one_row() -> None:
    hang = samples.loader_hang()
    paged = TimelineEntry(unix_seconds=hang.opened_unix_seconds + 120, state=JobState.HUNG, message=PAGED)
    report = text.render(replace(hang, timeline=(*hang.timeline, paged)))
    (row,) = re.findall("(?m)^State .*$", report)
    assert row.endswith(f", paged at {words.utc(paged.unix_seconds, '%H:%M:%S')}")


def test_only_the_named_rank_is_marked() -> None:
    lines = text.render(samples.loader_hang()).splitlines()
    marked = [line for line in lines if line.startswith("> ")]
    assert [line for line in marked if line.endswith("<- named")] == ["> 1 rank: 7  is loading data; frozen  <- named"]
    assert not [line for line in text.render(samples.all_waiting()).splitlines() if line.startswith(">")]


def test_sixteen_thousand_ranks_stay_readable() -> None:
    report = text.render(samples.fleet())
    assert len(report.splitlines()) < 150
    assert "15,228 ranks: 0-615,624-9730,9732-15236" in report
    assert "No response  8 ranks: 616-623" in report


def test_color_changes_nothing_but_escapes() -> None:
    incident = samples.loader_hang()
    colored = text.render(incident, color=True)
    assert "\x1b[1m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == text.render(incident)
    assert "\x1b" not in text.render(incident)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_sentences_wrap_at_the_width(width: int) -> None:
    incident = samples.loader_hang()
    head = text.render(incident, width=width).split("====")[0]
    assert max(map(len, head.splitlines())) <= width
    assert re.sub(r"\s+", " ", head).strip() == incident.verdict.message


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_fall_of_power_is_seen_in_every_width(width: int) -> None:
    incident = samples.loader_hang()
    power = text.render(incident, width=width).partition("\nPower\n")[2].partition("\nTimeline\n")[0]
    rows = power.splitlines()
    assert max(map(len, rows)) <= width
    bars = [re.findall("[▁▂▃▄▅▆▇█]+", row)[0] for row in rows if row.startswith("gpu ")]
    assert len(bars) == len(incident.power)
    assert all(bar[0] == "█" and bar[-1] == "▂" and len(bar) >= 20 for bar in bars), "full at first, little at the end"
    assert " ".join(power.split()).count("quiet below 262 W, limit 700 W") == len(bars)


@pytest.mark.parametrize("width", [60, 110])
def test_end_of_progress_is_seen_beside_the_power(width: int) -> None:
    incident = replace(samples.loader_hang(), collectives=samples.collectives())
    section = text.render(incident, width=width).partition("\nProgress\n")[2].partition("\nPower\n")[0]
    assert max(map(len, section.splitlines())) <= width
    assert re.fullmatch(
        r"-+ collectives █+[▁-▇]?▁+ 9,024 collectives of a rank, none in the last 2 min 27 s", " ".join(section.split())
    )


def test_late_rank_before_the_hang_is_shown() -> None:
    incident = replace(samples.loader_hang(), arrival=samples.arrival())
    section = text.render(incident, width=110).partition("\nProgress\n")[2].partition("\nPower\n")[0]
    assert "before Rank 7 (pid 41207) is late by 4 ms (10.0% of a step of 40 ms)." in " ".join(section.split())


def test_a_verdict_without_an_incident() -> None:
    incident = samples.loader_hang()
    said = text.render_verdict(incident.grouping, incident.verdict)
    assert said.startswith("Rank 7 (gpu-a12, local rank 7, pid 41207) ")
    assert "Named     rank 7 (gpu-a12, local rank 7, pid 41207)" in said
    assert "Power" not in said


def test_an_empty_answer_is_an_answer() -> None:
    said = text.render_verdict(Grouping(groups=()), Verdict(kind="CannotTell", message="No dump was found."))
    assert said.startswith("No dump was found.\n") and "Ranks" not in said


def test_a_rank_without_a_stack_shows_what_the_kernel_says() -> None:
    raw = raw_part(text.render(samples.blocked_in_kernel()))
    said = [line.removeprefix("[gpu-a12:3]") for line in raw if line.startswith("[gpu-a12:3]")]
    assert said[1].startswith("Error: the process is blocked in the kernel")
    assert "Wchan: nfs_wait_bit_killable" in said
    assert "Kernel: nfs_file_read+0x6f/0xb0 [nfs]" in said


def test_many_groups_are_counted_and_the_odd_ones_kept() -> None:
    incident = samples.parallel_groups()
    (odd,) = [group for group in incident.grouping.groups if group.key == "77e2b0d9"]
    crowd = tuple(_singleton(number) for number in range(300))
    said = text.render_verdict(Grouping(groups=(*crowd, odd)), incident.verdict)
    assert "<- named" in said
    assert "smaller groups with" in said
    assert len(said.splitlines()) < 700


def _singleton(number: int) -> samples.Group:
    group = samples.waiting([1000 + number])
    frames = (Frame(function=f"f{number}", file="x.py"),)
    return samples.Group(key=f"s{number}", activity="unknown", members=group.members * 2, frames=frames)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (RankId(node="n1", rank=7, local_rank=3), "[n1:7]"),
        (RankId(node="n1", local_rank=3), "[n1:3]:"),
        (RankId(rank=7), "[unknown:7]"),
        (RankId(node="n]1 x:", rank=9), "[n_1_x_:9]"),
        (RankId(node="n1", pid=9), "n1: "),
        (RankId(pid=9), "unknown: "),
    ],
)
def test_prefixes(rank: RankId, expected: str) -> None:
    assert prefix(rank) == expected


def test_a_dump_file_for_each_rank_and_round() -> None:
    files = dump_files(samples.loader_hang())
    assert len(files) == 3 * 8
    assert (
        files["dumps/20260314T031501Z-round2/rank7.txt"].count("Process ") == 5
    )  # the rank, two workers, their parents
    assert dump_files(samples.parallel_groups()) == {}


def seen(sources: list[tuple[str, list[str]]]) -> dict[RankId, tuple[object, ...]]:
    """Return the stacks of each rank and of its workers, as `hangwatch explain` reads them from `sources`."""
    return {
        rank.id: (_stacks(rank.rounds[-1]), {worker.pid: _stacks(worker.rounds[-1]) for worker in rank.workers})
        for rank in traces.collect(sources).ranks
    }


def _stacks(dump: ProcessDump) -> list[tuple[Frame, ...]] | str:
    return [thread.frames for thread in dump.threads] or str(dump.fault and dump.fault.detail)


def written(dumps: tuple[RankDump, ...], local: bool = False) -> dict[RankId, tuple[object, ...]]:
    return {
        replace(dump.id, local_rank=dump.id.local_rank if local else None): (
            _stacks(dump.rounds[-1]) if dump.rounds else GONE,
            {worker.pid: _stacks(worker.rounds[-1]) for worker in dump.workers},
        )
        for dump in dumps
    }


@pytest.mark.parametrize("name", [name for name in samples.SAMPLES if name != "parallel"])
def test_explain_reads_the_report_back(name: str) -> None:
    incident = samples.SAMPLES[name]()
    expected = written(incident.captures[-1].ranks)
    assert seen([("report.txt", text.render(incident).splitlines())]) == expected
    files = [(path, content.splitlines()) for path, content in dump_files(incident).items() if "round3" in path]
    assert seen(files) == expected


@pytest.mark.parametrize("with_local_rank", [True, False])
def test_explain_reads_ranks_without_a_global_number_back(with_local_rank: bool) -> None:
    dumps = tuple(
        replace(
            samples.rank_dump(number, samples.LOADER),
            id=RankId(node="gpu-a12", local_rank=number if with_local_rank else None, pid=41200 + number),
        )
        for number in range(3)
    )
    capture = replace(samples.mismatch().captures[0], ranks=dumps)
    incident = replace(samples.mismatch(), captures=(capture,))
    assert seen([("report.txt", text.render(incident).splitlines())]) == written(dumps, local=True)


def test_threads_are_written_as_py_spy_does() -> None:
    threads = (
        Thread("MainThread", "7", (Frame(function="f", file="a.py", line=3),), active=True, owns_gil=True),
        Thread(name=None, thread_id="8", frames=(), active=False),
        Thread(name=None, thread_id="9", frames=()),
    )
    lines = list(process_lines(ProcessDump(taken_monotonic_seconds=0.0, threads=threads)))
    assert lines == ['Thread 7 (active+gil): "MainThread"', "    f (a.py:3)", "Thread 8 (idle)", "Thread 9 (?)"]


def test_the_last_round_with_a_stack_is_shown() -> None:
    stack = samples.process_dump(1, samples.LOADER, 0)
    gone = ProcessDump(taken_monotonic_seconds=5.0, fault=samples.D_STATE)
    dump = RankDump(id=samples.rank_id(1), rounds=(stack, gone))
    assert "    __next__ (torch/utils/data/dataloader.py:701)" in "\n".join(rank_lines(dump, "python"))


hostile = st.text(max_size=40) | st.text(
    st.sampled_from("\x1b[31m\n\r\t\u202e\u2028\x00\x9b'\"<&>\udcff]: ()|=>"), max_size=40
)


@given(function=hostile, file=hostile, command=hostile, message=hostile, node=hostile)
def test_nothing_from_process_acts_on_terminal(function: str, file: str, command: str, message: str, node: str) -> None:
    report = text.render(_hostile(function, file, command, message, node))
    acting = {c for c in report if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != "\n"}
    assert not acting
    assert all(re.match(r"\[[\w.-]+:0\]", line) for line in raw_part(report))


def _hostile(function: str, file: str, command: str, message: str, node: str) -> Incident:
    frame = Frame(function=function, file=file, line=1)
    who = RankId(node=node, rank=0, pid=1)
    thread = Thread(name=function, thread_id=file, frames=(frame,))
    dump = RankDump(id=who, rounds=(ProcessDump(taken_monotonic_seconds=0.0, threads=(thread,)),))
    member = Member(id=who, kernel=KernelFacts(wchan=function))
    group = Group("k", function, (member,), operation=file, frames=(frame,))
    verdict = Verdict(kind=function, message=message, named=(who,))
    incident = samples.incident(groups=(group,), verdict=verdict, dumps=(dump,), notes=(message,))
    return replace(incident, job=samples.job([0], 1, job_id=message, command=command))


def test_dump_shows_the_failure_in_the_log_of_the_named_rank_only() -> None:
    incident = samples.loader_hang()
    named, other = incident.verdict.named[0], RankId(node="a", rank=99)
    failures = [Evidence(kind="log_failure", message=f"failure {rank.rank}", ranks=(rank,)) for rank in (other, named)]
    verdict = replace(incident.verdict, evidence=(*incident.verdict.evidence, *failures))
    assert re.search(rf"^Its log +failure {named.rank}$", text.render_answer(replace(incident, verdict=verdict)), re.M)


def test_report_has_do_first_with_the_pid_before_the_details() -> None:
    incident = samples.loader_hang()
    report = text.render(incident, width=1000)
    assert "Do first" in report.split("Groups, largest first")[0]
    stopped = samples.change_parts(incident, kind="RankStopped", next_step="")
    assert f"/proc/{incident.verdict.named[0].pid}/status" in text.render(stopped, width=1000)
    unknown = samples.change_parts(incident, kind="OfALaterVersion", next_step="")
    assert "Do first" not in text.render(unknown)


def test_frames_of_the_user_stand_out_from_those_of_libraries() -> None:
    incident = samples.loader_hang()
    lines = text.render(incident, color=True).splitlines()
    assert any("\x1b[1mread_shard (ourdata/shards.py:58)" in line for line in lines)
    assert any("\x1b[2m" in line and "torch/" in line for line in lines)
    assert not [line for line in text.render(incident).splitlines() if "\x1b" in line]


def test_the_answer_of_a_dump_has_no_raw_stacks_unless_they_are_asked_for() -> None:
    incident = samples.loader_hang()
    answer = text.render_answer(incident, full=True)
    assert "[gpu-a12:7]" not in answer
    assert incident.incident_id not in answer, "it is kept nowhere"
    assert all(part in answer for part in (incident.verdict.kind, "Groups, largest first", "Evidence"))
    assert raw_part(text.render_answer(incident, stacks=True)) == raw_part(text.render(incident))


SIX_HANGS = {
    "loader": "loader worker deadlock",
    "state-d": "file system stopped answering: checkpoint in state D",
    "died": "one rank died of an exception, another one followed it",
    "python-loop": "rank in a Python loop",
    "other-call": "collective mismatch",
    "all-waiting": "the server of a file system that all have mounted is silent",
}


def dumped(case: dict[str, Any]) -> Incident:
    grouping, verdict = hangs.judged(case)
    dumps = tuple(hangs.rank_dumps(case))
    world_size = case.get("world_size")
    return samples.incident(groups=grouping.groups, verdict=verdict, dumps=dumps, world_size=world_size, timeline=())


@pytest.mark.golden
@pytest.mark.parametrize("name", SIX_HANGS)
def test_golden_dump(name: str, golden: Callable[[str, str], None]) -> None:
    (case,) = (case for case in hangs.CASES if case["name"] == SIX_HANGS[name])
    golden(f"dump-{name}.txt", text.render_answer(dumped(case)))


@pytest.mark.parametrize("case", hangs.CASES, ids=[case["name"] for case in hangs.CASES])
def test_dump_of_a_job_with_eight_groups_has_thirty_lines(case: dict[str, Any]) -> None:
    incident = dumped(case)
    answer = text.render_answer(incident)
    assert len(answer.splitlines()) <= 30, answer
    assert max(map(len, answer.splitlines())) <= 200
    first_rows = [line.partition("  ")[0] for line in answer.partition("\n\n")[2].splitlines() if line[:1] != " "][:2]
    assert first_rows == (["Stuck on", "Do first"] if incident.verdict.stuck_on else ["Do first", "Verdict"])


def test_dump_of_one_process_shows_its_program_and_nothing_about_its_job() -> None:
    found = dumped(next(case for case in hangs.CASES if case["name"] == SIX_HANGS["python-loop"]))
    (group, *_) = (one for one in found.grouping.groups if one.size == 1)
    own = group.members[0].stack.user_frames[0]
    native = tuple(Frame(function=f"f{number}", file="libc.so.6") for number in range(6))
    alone = Grouping(groups=(replace(group, frames=(*native, *group.frames)),))
    job = replace(found.job, launcher="pids")
    shown = text.render_answer(replace(found, grouping=alone, job=job), source_lines={own: "while True:"})
    lines = shown.splitlines()
    assert not any(line.startswith(("Verdict ", "Job ", "Ranks ", "Not captured ")) for line in lines)
    at = lines.index("      | ...")
    assert lines[at - 2 : at] == ["      | f0 (libc.so.6)", "      | f1 (libc.so.6)"]
    assert lines[at + 1] == f"      | {own}: while True:"
    assert "      | ..." not in text.render_answer(found)


def test_dump_with_many_groups_counts_the_rest() -> None:
    groups = tuple(_singleton(number) for number in range(30))
    incident = replace(samples.loader_hang(), grouping=Grouping(groups=groups))
    answer = text.render_answer(incident)
    assert "and 22 smaller groups with 44 ranks: --full" in answer
    assert len(answer.splitlines()) <= 30


def timed_out_row(incident: Incident, **changes: object) -> str:
    found = re.search(r"^Timeout +(.*)$", text.render(replace(incident, **changes), width=1000), re.MULTILINE)
    return found[1] if found else ""


def test_time_out_of_a_dump_by_hand_is_counted_from_the_recorded_operation() -> None:
    incident = samples.loader_hang()
    capture = incident.captures[-1]
    looked = capture.started_unix_seconds + capture.duration_seconds
    recorded = EnqueuedOperation(6, "all_reduce", 6, looked - 27, stays_open=True, timeout_seconds=1800.0)
    ended = replace(recorded, number=5, stays_open=False, created_unix_seconds=looked - 99)
    records = GroupRecords(library="gloo", name="0", description="default_pg", number=6)
    (group, *others) = incident.grouping.groups
    rows = []
    for operations in ((ended, recorded), (ended,)):
        libraries = (RecorderState(library="gloo", groups=(replace(records, operations=operations),)),)
        member = samples.change_parts(group.members[0], libraries=libraries)
        grouping = replace(incident.grouping, groups=(replace(group, members=(member, *group.members[1:])), *others))
        rows.append(timed_out_row(incident, timeline=(), grouping=grouping))
    assert rows[0].endswith(" UTC, 29 min 33 s after this capture (as its ranks recorded)")
    assert "30 min" in rows[1] and rows[1].endswith("(as its ranks recorded)"), "a completed operation shows it, too"


def test_when_the_job_will_be_ended_by_its_time_out() -> None:
    incident = samples.loader_hang()
    capture = incident.captures[-1]
    looked = capture.started_unix_seconds + capture.duration_seconds
    quiet = TimelineEntry(unix_seconds=looked - 140, state=JobState.QUIET, message="quiet")
    said = timed_out_row(incident, timeline=(quiet,))
    assert re.match(r"ends the job at \S+ \S+ UTC, 7 min 40 s after this capture \(", said)
    assert said.endswith("(PyTorch's default for NCCL, unless its code sets another timeout)")
    overdue = replace(quiet, unix_seconds=looked - 900)
    assert "had passed before this capture" in timed_out_row(incident, timeline=(overdue,))
    assert "ends the job after 10 min 00 s of waiting for other ranks" in timed_out_row(incident, timeline=()), (
        "a dump by hand"
    )
    assert timed_out_row(incident, closed_unix_seconds=looked + 9) == ""
    forever = replace(incident.job, environ={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert timed_out_row(incident, job=forever) == ""


FUNCTIONS = st.sampled_from(["main", "train", "step", "all_reduce", "__next__"])
FILES = st.sampled_from(["a.py", "b.py"])
FRAMES = st.builds(Frame, function=FUNCTIONS, file=FILES, line=st.sampled_from([None, 1, 2]))


@st.composite
def grouped(draw: st.DrawFn) -> list[Group]:
    stacks = draw(st.lists(st.lists(FRAMES, max_size=6).map(tuple), max_size=8))
    sizes = draw(st.lists(st.integers(1, 5), min_size=len(stacks), max_size=len(stacks)))
    ranks = iter(range(100))
    return [
        Group(f"k{number}", "unknown", tuple(Member(id=RankId(rank=next(ranks))) for _ in range(size)), frames=stack)
        for number, (stack, size) in enumerate(zip(stacks, sizes, strict=True))
    ]


def nodes(trees: tuple[Node, ...]) -> Iterator[Node]:
    for tree in trees:
        yield tree
        yield from nodes(tree.children)


def paths(
    trees: tuple[Node, ...], above: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield each group's key with the functions and files of the frames on its path."""
    for tree in trees:
        way = above + tuple((frame.function, frame.file) for frame in tree.frames)
        yield from ((group.key, way) for group in tree.ends)
        yield from paths(tree.children, way)


@given(grouped())
def test_every_rank_ends_exactly_once(groups: list[Group]) -> None:
    ends = Counter(member.id for node in nodes(merge_tree(groups)) for group in node.ends for member in group.members)
    assert ends == Counter({member.id: 1 for group in groups for member in group.members})


@given(grouped())
def test_a_node_holds_the_ranks_of_its_ends_and_branches(groups: list[Group]) -> None:
    for node in nodes(merge_tree(groups)):
        below = [rank for child in node.children for rank in child.ids]
        ends = [member.id for group in node.ends for member in group.members]
        assert sorted(node.ids, key=RankId.sort_key) == sorted(below + ends, key=RankId.sort_key)
        assert [group.key for group in node.below()] == [g.key for n in nodes((node,)) for g in n.ends]


@given(grouped())
def test_the_way_to_an_end_is_the_stack(groups: list[Group]) -> None:
    expected = {group.key: tuple((f.function, f.file) for f in reversed(group.frames)) for group in groups}
    assert dict(paths(merge_tree(groups))) == expected


@given(grouped())
def test_branches_differ_and_are_ordered_by_size(groups: list[Group]) -> None:
    trees = merge_tree(groups)
    for children in (trees, *(node.children for node in nodes(trees))):
        first = [
            (child.frames[0].function, child.frames[0].file, child.frames[0].line) for child in children if child.frames
        ]
        assert len(set(first)) == len(first)
        assert [len(child.ids) for child in children] == sorted((len(child.ids) for child in children), reverse=True)


@given(grouped(), st.randoms())
def test_the_order_of_groups_does_not_change_the_tree(groups: list[Group], order: random.Random) -> None:
    shuffled = list(groups)
    order.shuffle(shuffled)
    assert sorted(paths(merge_tree(shuffled))) == sorted(paths(merge_tree(groups)))


def _in_main(key: str, line: int, called: str = "step") -> Group:
    frames = (Frame(function=called, file="t.py", line=9), Frame(function="main", file="t.py", line=line))
    return Group(key=key, activity="unknown", frames=frames, members=(Member(id=RankId(rank=line)),))


def test_a_line_is_shown_where_all_agree() -> None:
    (tree,) = merge_tree([_in_main("a", 1), _in_main("b", 2, "save")])
    assert [str(frame) for frame in tree.frames] == ["main (t.py)"]
    assert [str(frame) for child in tree.children for frame in child.frames] == ["step (t.py:9)", "save (t.py:9)"]


def test_stacks_that_differ_in_lines_only_part_at_the_first_that_differs() -> None:
    trees = merge_tree([_in_main("a", 1), _in_main("b", 2)])
    assert [[str(frame) for frame in tree.frames] for tree in trees] == [
        ["main (t.py:1)", "step (t.py:9)"],
        ["main (t.py:2)", "step (t.py:9)"],
    ]


def test_group_without_a_stack_is_a_separate_tree_node() -> None:
    fault = Fault(subject="pid 1", reason="Uninterruptible", detail="blocked")
    blocked = Group(key="b", activity="unknown", fault=fault, members=(Member(id=RankId(rank=1)),))
    trees = merge_tree([blocked])
    assert [(node.frames, node.ends) for node in trees] == [((), (blocked,))]


def test_a_stack_of_a_thousand_frames() -> None:
    deep = tuple(Frame(function=f"f{number}", file="deep.py") for number in range(5000))
    (tree,) = merge_tree([Group(key="a", activity="unknown", frames=deep, members=(Member(id=RankId(rank=0)),))])
    assert len(tree.frames) == 5000


def test_a_very_deep_stack_is_drawn_in_the_time_of_its_frames() -> None:
    """An earlier version took minutes. The limit allows for slow machines."""
    frames = tuple(Frame(function="call", file="a.py", line=1) for _ in range(20_000))
    deep = [Group(f"k{rank}", "unknown", (Member(id=RankId(rank=rank)),), frames=frames) for rank in range(2)]
    begin = time.process_time()
    (tree,) = merge_tree(deep)
    assert time.process_time() - begin < 60
    assert len(tree.frames) == 20_000
    assert len(tree.ends) == 2


OFF = Fault(
    subject="pid 7 nccl",
    reason="RecorderOff",
    detail="the flight recorder is off: its buffer has no capacity",
    remedy="set TORCH_FR_BUFFER_SIZE=2000 in the job",
)
SILENT = Fault(subject="pid 7 gloo", reason="NoAnswer", detail="it did not respond")
NO_TORCH = Fault(subject="pid 7", reason="NoTorch", detail="it has not loaded torch")
TOLD = "no sequence numbers of ranks 0-2 on a in NCCL: the flight recorder is off: its buffer has no capacity"


def grouped_faults(*faults: tuple[Fault, ...], records: tuple[RankRecords, ...] = ()) -> Grouping:
    ranks = [
        RankDump(
            id=RankId(node="a", rank=rank, pid=rank + 7),
            rounds=(
                ProcessDump(taken_monotonic_seconds=0.0, recorder_faults=(NO_TORCH,)),
                ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=of_rank, recorders=records),
            ),
        )
        for rank, of_rank in enumerate(faults)
    ]
    return group_ranks(ranks, activity.load(), config.Capture())


def grouped_rounds(*rounds: ProcessDump) -> Grouping:
    one = RankDump(id=RankId(node="a", rank=0, pid=7), rounds=rounds)
    return group_ranks([one], activity.load(), config.Capture())


def notes_on(grouping: Grouping) -> list[str]:
    verdict = Verdict(kind="CannotTell", message="Nobody.")
    notes = [note for note in as_json.answer(grouping, verdict).notes if "sequence numbers" in note]
    said = " ".join(text.render_verdict(grouping, verdict).split())
    page = html.render_grouping(grouping, verdict)
    assert all(note in said and note in page for note in notes)
    assert ("no sequence numbers" in said) == ("no sequence numbers" in page) == bool(notes)
    return notes


def test_last_fault_of_all_ranks_is_reported_once_with_its_remedy() -> None:
    grouping = grouped_faults((OFF,), (replace(OFF, subject="pid 8 nccl"),), (OFF,), (NO_TORCH,))
    assert grouping.members[0].recorder.faults == (OFF,)
    assert notes_on(grouping) == [f"{TOLD} (RecorderOff); set TORCH_FR_BUFFER_SIZE=2000 in the job"]


def test_verdict_lists_the_sources_that_it_did_not_have() -> None:
    unread = replace(OFF, reason="RecorderUnread", detail="torch 2.16.0 is unknown: no object in /l has the shape")
    grouping, verdict = grouped_faults((unread,), (unread,)), Verdict(kind="CannotTell", message="Nobody.")
    incident = replace(next(iter(samples.SAMPLES.values()))(), grouping=grouping, verdict=verdict)
    job = replace(incident.job, ranks=(replace(incident.job.ranks[0], gpu_uuids=("GPU-0",)),))
    sources = "stacks of 2 ranks, GPU power"
    for shown in (text.render(replace(incident, job=job)), html.render(replace(incident, job=job))):
        assert f"flight recorder (torch 2.16.0 is unknown), {sources}" in " ".join(shown.split())
    assert "Without   stacks of 1 rank\n" in text.render_verdict(grouped_faults(()), verdict)


def test_ranks_without_torch_have_no_fault() -> None:
    gone = replace(NO_TORCH, reason="ProcessGone")
    assert notes_on(grouped_faults((NO_TORCH,), (gone,), ())) == []


@pytest.mark.parametrize("unread", range(3))
def test_failed_round_keeps_the_numbers_of_other_rounds(unread: int) -> None:
    rounds = [
        ProcessDump(taken_monotonic_seconds=float(number), recorders=(recorder(record(7, state="open")),))
        for number in range(3)
    ]
    rounds[unread] = ProcessDump(taken_monotonic_seconds=float(unread), recorder_faults=(SILENT,))
    (member,) = grouped_rounds(*rounds).members
    assert [
        operation.number for operation in member.recorder.libraries[0].groups[0].operations if operation.stays_open
    ] == [7]
    assert member.recorder.faults == ()


@pytest.mark.parametrize("unread", range(2))
def test_recorder_read_once_reports_only_its_fault(unread: int) -> None:
    rounds = [ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7, state="open")),))] * 2
    rounds[unread] = ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=(SILENT,))
    grouping = grouped_rounds(*rounds)
    assert (grouping.members[0].recorder.libraries, grouping.members[0].recorder.faults) == ((), (SILENT,))
    assert notes_on(grouping) == ["no sequence numbers of rank 0 (a, pid 7) in gloo: it did not respond (NoAnswer)"]


def test_two_of_one_library_in_one_round_are_not_two_rounds() -> None:
    # Two recorders of one library in the same round do not show that a record stays open. That needs two rounds.
    twice = ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7, state="open")),) * 2)
    (member,) = grouped_rounds(twice, ProcessDump(taken_monotonic_seconds=1.0, recorder_faults=(SILENT,))).members
    assert (member.recorder.libraries, member.recorder.faults) == ((), (SILENT,))


def test_unread_one_of_two_recorders_has_its_fault() -> None:
    both = ProcessDump(taken_monotonic_seconds=0.0, recorders=(recorder(record(7)),), recorder_faults=(OFF,))
    (member,) = grouped_rounds(both, both).members
    assert [one.library for one in member.recorder.libraries] == ["gloo"]
    assert member.recorder.faults == (OFF,)


def test_faults_of_two_libraries_are_separate_and_bounded() -> None:
    gloo = replace(OFF, subject="pid 7 gloo", reason="UnknownLayout", detail="it fits in no known layout", remedy="")
    assert notes_on(grouped_faults((OFF, gloo), (gloo,))) == [
        "no sequence numbers of rank 0 (a, pid 7) in NCCL: the flight recorder is off: its buffer has no capacity"
        " (RecorderOff); set TORCH_FR_BUFFER_SIZE=2000 in the job",
        "no sequence numbers of ranks 0-1 on a in gloo: it fits in no known layout (UnknownLayout)",
    ]
    many = grouped_faults(*((replace(gloo, reason=f"Reason{number}"),) for number in range(9)))
    assert len(notes_on(many)) == 4


def test_incident_keeps_recorder_faults_and_old_ones_load() -> None:
    incident = replace(next(iter(samples.SAMPLES.values()))(), grouping=grouped_faults((OFF,)))
    raw = msgspec.json.encode(incident)
    assert msgspec.json.decode(raw, type=Incident) == incident
    before = json.loads(raw)
    del before["grouping"]["groups"][0]["members"][0]["recorder"]["faults"]
    old = msgspec.json.decode(json.dumps(before).encode(), type=Incident)
    assert [member.recorder.faults for member in old.grouping.members] == [()]
