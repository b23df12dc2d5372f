"""Logs of ranks in `hangwatch explain`, with any text: last lines and first failure. They name no culprit."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hangwatch.formats import log_times
from hangwatch.logs import failures, kernel_text, line_prefixes, log_evidence, rank_log
from hangwatch.model import Confidence, Evidence, RankId, Verdict
from hangwatch.tools.commands.explain import explain
from hangwatch.tools.explain import streams, traces
from hangwatch.verdict.judge import complete
from tests.conftest import load_table
from tests.unit.test_explain_stacks import EXAMPLES, STUCK, WAITS, collect, explained, process, read

LINES = load_table("log_lines.toml")
TRACE = ("Traceback (most recent call last):", '  File "/srv/job/train.py", line 32, in step', "    raise x")
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:32921"
WATCHDOG = (
    "[E1122 02:38:20.123456789 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=812, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out."
)


def judged(*lines: str, name: str = "-") -> Verdict:
    found = collect(*lines, name=name)
    assert not found.ranks
    return complete(None, log_evidence.supplement(found.logs))


def messages_of(verdict: Verdict, kind: str) -> list[str]:
    return [evidence.message for evidence in verdict.evidence if evidence.kind == kind]


# --- last lines of logs ----------------------------------------------------------------------------------------------


def backward(rank: int, step: int) -> str:
    return f"2026-11-22 12:00:{step % 60:02},{rank:03} INFO backward {step} loss 3.{rank}"


@pytest.mark.parametrize(
    ("prefix", "of"),
    [
        ("[rank{}]: ", RankId(rank=7)),
        ("[rank{}] ", RankId(rank=7)),
        ("[RANK:{}] ", RankId(rank=7)),
        ("{}: ", RankId(rank=7)),
        (" {}: ", RankId(rank=7)),
        ("[{}] ", RankId(rank=7)),
        ("[{}]:", RankId(rank=7)),
        ("[1,{}]<stdout>:", RankId(rank=7)),
        ("[default{}]:", RankId(local_rank=7)),
        ("[gpu-a12:{}]", RankId(node="gpu-a12", rank=7)),
        ("[default0/rank{}]:", RankId(rank=7)),
        ("[gpu-a12 rank:{}|step] ", RankId(rank=7)),
        ("gpu-a12/rank{}> ", RankId(rank=7)),
        ("<{}> ", RankId(rank=7)),
        ("gpu-{}\t", RankId(node="gpu-7")),
        ("trainer/{} ", RankId(node="trainer/7")),
        ("worker_0{} stderr | ", RankId(node="worker_07")),
    ],
)
def test_the_last_lines_are_folded_and_the_rank_behind_is_looked_at_first(prefix: str, of: RankId) -> None:
    lines = [
        prefix.format(rank) + backward(rank, step)
        for step in range(805, 813)
        for rank in range(64)
        if not (rank == 7 and step == 812)
    ]
    verdict = judged(*lines)
    (end,) = messages_of(verdict, "log_end")
    known = "rank 7" if of.rank is not None else "local rank 7" if of.is_numbered else "a rank"
    name = f"{known} ({of.node})" if of.node else known
    assert end.startswith("63 ranks end at 'INFO backward 812 loss 3.0' (2026-11-22 12:00:32,063)")
    assert end.endswith(f"{name} at 'INFO backward 811 loss 3.7' (2026-11-22 12:00:31,007)")
    assert verdict.message.startswith(f"The log of {name} ends before the other logs")
    (look,) = verdict.check_first
    assert RankId(node=look.node, rank=look.rank, local_rank=look.local_rank) == of
    assert "PYTHONUNBUFFERED" in look.settle
    assert (verdict.kind, verdict.named, verdict.confidence) == ("LogsOnly", (), Confidence.NONE)


@pytest.mark.parametrize("pod", ["[pod/a/b] ", "[pod/a/b] 2026-11-22T12:00:00Z "])
def test_a_line_of_thousands_of_pods_is_of_the_first_one(pod: str) -> None:
    rank, _, rest = line_prefixes.split(f"[pod/first/c] {pod * 2000}x", RankId())
    assert (rank.node, rest[-1]) == ("first", "x")


def test_one_file_for_each_rank_without_times() -> None:
    files = [(f"logs/rank_{rank}.log", [f"step {10 if rank == 2 else 11}"]) for rank in range(8)]
    verdict = complete(None, log_evidence.supplement(traces.collect(files).logs))
    assert messages_of(verdict, "log_end") == ["7 ranks end at 'step 11', rank 2 at 'step 10'"]
    assert [look.rank for look in verdict.check_first] == [2]


def test_names_that_differ_in_one_or_two_numbers_tell_the_ranks() -> None:
    files = [(f"job-4711/slurm-4711_{rank}.out", [f"step {10 if rank == 2 else 11}"]) for rank in range(8)]
    assert [log.id.rank for log in traces.collect(files).logs] == list(range(8))
    files = [(f"node-{node}-gpu-{gpu}.log", ["step 1"]) for node in (1, 2) for gpu in range(4)]
    assert [log.id.rank for log in traces.collect(files).logs] == list(range(8))
    pids = [(f"log.{pid}", ["step 1"]) for pid in (4711, 4712)]
    assert traces.collect(pids).logs == ()
    assert len(traces.collect(pids).notes) == 4


def test_a_number_of_thousands_of_digits_is_no_step() -> None:
    verdict = judged(*(f"[rank{rank}]: step {rank % 2}{'9' * 5000}" for rank in range(4)))
    assert messages_of(verdict, "log_end")[0].startswith("4 ranks end at 'step 0999")


CUT = "the log of rank 7 may lack lines that were still in a buffer (its last line is cut)"
EARLY = "the log of rank 7 may lack lines that were still in a buffer (it ends 4 min 00 s before the other logs)"


@pytest.mark.parametrize(
    ("minute", "behind", "caveat"),
    [(4, "step 811 loss 3.1", EARLY), (8, "step 811 loss 3.1", ""), (8, "step 812 lo", CUT)],
)
def test_a_log_that_may_lie_in_a_buffer_points_with_a_caveat(minute: int, behind: str, caveat: str) -> None:
    ends = [f"[rank{rank}]: 2026-11-22 12:08:00 step 812 loss 3.{rank}" for rank in range(7)]
    verdict = judged(*ends, f"[rank7]: 2026-11-22 12:0{minute}:00 {behind}")
    assert caveat in verdict.message
    assert ("buffer" in verdict.message) == bool(caveat)
    assert [look.rank for look in verdict.check_first] == ([] if caveat == CUT else [7])
    assert all(caveat in look.why for look in verdict.check_first)
    fails = judged(*ends, f"[rank7]: 2026-11-22 12:0{minute}:00 {behind}", *failing(3, "ValueError: x"))
    assert [look.rank for look in fails.check_first] == [3]
    assert caveat in fails.check_first[0].why
    assert caveat in fails.message


@pytest.mark.parametrize(
    ("text", "clock", "same"),
    [
        ("2026-11-22 02:38:20,123 x", "local", "2026-11-22 02:38:20.123 y"),
        ("[2026-11-22T02:38:20] x", "local", "2026/11/22 02:38:20"),
        ("2026-11-22T02:38:20Z x", "unix", "2026-11-22T03:38:20+01:00"),
        ("[E1122 02:38:20.5 f.cpp:1] x", "yearless", "I1122 02:38:20.500 7 a.py:3]"),
        ("Nov 22 02:38:20 node7 x", "yearless", "W1122 02:38:20"),
        ("2028-02-29 23:59:59.999999999 x", "local", "2028-02-29_23:59:59.999999999"),
    ],
)
def test_times(text: str, clock: str, same: str) -> None:
    first, second = log_times.read_moment(text), log_times.read_moment(same)
    assert (first.clock, first.seconds) == (clock, second.seconds) == (second.clock, second.seconds)


@pytest.mark.parametrize(
    "text", ["2026-13-22 02:38:20", "2026-02-30 02:38:20", "E1322 02:38:20", "step 2026", "", "9" * 99]
)
def test_what_is_no_time(text: str) -> None:
    assert log_times.read_moment(text) is None


# --- the first failure -----------------------------------------------------------------------------------------------


def failing(rank: int, exception: str, stamp: str = "") -> list[str]:
    said = [f"{stamp} ERROR step failed"] if stamp else []
    return [f"[rank{rank}]: {line}" for line in (*said, *TRACE, exception)]


@pytest.mark.parametrize("case", LINES["blames"], ids=[case["text"] for case in LINES["blames"]])
def test_log_that_blames_another_rank_is_no_own_failure(case: dict[str, Any]) -> None:
    rank, text = case["rank"], case["text"]
    verdict = judged(*failing(rank, text), *(f"[rank{other}]: step 1" for other in range(8) if other != rank))
    assert ("irst to fail" in verdict.message) == case["is_own"]
    assert [look.rank for look in verdict.check_first] == ([rank] if case["is_own"] else [])


def test_the_first_exception_of_a_chain_counts_and_their_number_is_bounded() -> None:
    chain = [*TRACE, "KeyError: 'x'", "", "During handling of the above exception, another exception occurred:", ""]
    (log,) = collect(*(f"[rank0]: {line}" for line in [*chain, *TRACE, "ValueError: y"] * 50)).logs
    assert [failure.text for failure in log.failures] == ["KeyError: 'x'", "ValueError: y"] * (
        rank_log.MOST_FAILURES // 2
    )


@pytest.mark.parametrize("times", [1, rank_log.MOST_FAILURES + 1])
def test_an_exception_after_which_the_steps_went_on_was_not_the_first_failure(times: int) -> None:
    caught = [line for _ in range(times) for line in ("[rank2]: step 1", *failing(2, "KeyError: 'shard'"))]
    ends = ["[rank2]: step 2", *failing(2, LOST), "[rank5]: step 2", *failing(5, "ValueError: no shard")]
    assert judged(*caught, *ends).message.startswith("First to fail: rank 5: ValueError: no shard")
    last = ["[rank2]: step 2", *failing(2, "MemoryError: 2 GiB"), "[rank5]: step 2", *failing(5, LOST)]
    assert judged(*caught, *last).message.startswith("First to fail: rank 2: MemoryError: 2 GiB")


def test_what_torchrun_prints_in_the_end_tells_its_ranks() -> None:
    summary = (EXAMPLES / "torchrun-tee.txt").read_text().split("ChildFailedError: \n")[1].splitlines()
    starts = [f"[default{rank}]:[W1122 02:51:40.{rank}3 socket.cpp:207] slow" for rank in range(3)]
    for lines in (summary, [*starts, *summary]):  # torchrun --tee adds only the local rank to a line
        found = collect(*lines, name="slurm-1.out")
        assert [log.id for log in found.logs] == [RankId(rank=rank, local_rank=rank) for rank in range(3)]
        verdict = complete(None, log_evidence.supplement(found.logs))
        assert verdict.message.startswith("First to fail: rank 1 (local rank 1) at 2026-11-22_02:51:43: ValueError")


@pytest.mark.parametrize("case", LINES["headlines"])
def test_headline_is_what_a_launcher_or_an_unknown_rank_says(case: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("\n".join(case["lines"]))
    answer = json.loads(CliRunner().invoke(explain, ["--json", str(tmp_path)]).stdout)
    assert answer["verdict"]["message"].startswith(case["starts"])


def test_lines_that_are_kept_as_json_are_read_as_the_text_in_them() -> None:
    """Docker's json-file log, and `journalctl -o json`: other keys may be longer than the part of a line that is read."""
    text = [*failing(3, "ValueError: bad shard"), "[rank3]: step 7"]
    docker = [json.dumps({"attrs": {"x": "y" * 5000}, "log": f"{line}\n", "stream": "stderr"}) for line in text]
    journal = [json.dumps({"__CURSOR": "y" * 5000, "MESSAGE": line}) for line in text]
    together = [json.dumps({"log": "\n".join(text)})]
    for lines in (docker, journal, together):
        verdict = judged(*lines)
        assert [rank.rank for rank in verdict.check_first] == [3], verdict
        assert "ValueError: bad shard" in verdict.message
    assert "none reports a failure" in judged('{"log": 3}', '[rank3]: {"log": "x', "[rank3]: {}").message


def test_line_of_a_log_is_cut_at_4096_characters_behind_its_prefix() -> None:
    prefix, trouble = f"[{'n' * 200}:3]: ", "CUDA error: an illegal memory access was encountered"
    near, far = (judged(f"{prefix}{' ' * before}{trouble}", f"{prefix}step") for before in (3900, 4096))
    assert (len(messages_of(near, "log_failure")), len(messages_of(far, "log_failure"))) == (1, 0)


# --- error.json and log folders --------------------------------------------------------------------------------------


def error_file(message: str, timestamp: object = "1795315891") -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": timestamp}}})


def test_rank_of_an_error_file_is_read_from_its_folder() -> None:
    verdict, _ = explained(read("failed"))
    assert [(look.rank, look.local_rank) for look in verdict.check_first] == [(1, 1)]
    alone = [(f"run/attempt_0/{rank}/error.json", [error_file("ValueError: x", 100 - rank)]) for rank in range(3)]
    found = traces.collect(alone)
    assert [log.id for log in found.logs] == [RankId(local_rank=rank) for rank in range(3)]
    assert found.notes == ()
    assert "local rank 2, 3 ranks alike" in complete(None, log_evidence.supplement(found.logs)).message


def test_error_files_that_differ_in_one_number_are_of_ranks() -> None:
    """`srun sh -c 'TORCHELASTIC_ERROR_FILE=error-$SLURM_PROCID.json ...'`."""
    files = [(f"error-{rank}.json", [error_file("ValueError: x", 100 - rank)]) for rank in range(3)]
    found = traces.collect(files)
    assert ([log.id.rank for log in found.logs], found.notes) == ([0, 1, 2], ())
    assert "rank 2, 3 ranks alike" in complete(None, log_evidence.supplement(found.logs)).message
    late = traces.collect([("error-1.json", [error_file("ValueError: x", 9)]), *files[2:]])
    assert [look.rank for look in log_evidence.supplement(late.logs).check_first] == [1]
    alone = traces.collect(files[2:])
    assert alone.logs == ()
    assert alone.notes == ("error-2.json: holds an error of an unknown rank: name the file error-rankN.json",)


def test_the_last_attempt_counts_and_each_run_is_a_node() -> None:
    files = [
        (f"logs/{run}/attempt_{attempt}/0/stdout.log", [f"attempt {attempt}"])
        for run in ("none_a", "none_b")
        for attempt in (0, 1, 10)
    ]
    found = traces.collect(files)
    assert [(log.id.node, log.last.text) for log in found.logs if log.last] == [
        ("none_a", "attempt 10"),
        ("none_b", "attempt 10"),
    ]
    assert found.notes == ("4 files of earlier attempts ignored",)


def test_words_of_a_log_are_no_complaint_of_py_spy() -> None:
    lines = ["Process 12: loading", "Error: no shard 3", "Failed to open a file", "", "step 1"]
    for name in ("run/attempt_0/3/stderr.log", "rank3.log"):
        found = collect(*lines, name=name)
        assert (found.ranks, found.notes) == ((), ())
        (log,) = found.logs
        assert log.last is not None and log.last.text == "step 1"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"message": 3}', "error.json:1: is not an error.json"),
        ('{"message": {"message": ', "error.json:1: is not an error.json"),
        ('{"message": "' + "x" * (failures.LARGEST_ERROR_FILE + 9) + '"}', "error.json:1: is larger than 1 MiB"),
        ('{"message": {"message": "x", "extraInfo": {"timestamp": "' + "9" * 400 + '"}}}', ""),
        ('{"message": {"message": "x", "extraInfo": {"timestamp": "nan"}}}', ""),
        ('{"message": {"message": "x", "extraInfo": {"py_callstack": "' + "  \\n" * 260_000 + 'x"}}}', ""),
        ('{"message": {"message": "x\\u0000\\u001b[2J\\ny", "extraInfo": {}}}', ""),
        ('{"message": ' + "[" * 100000, "error.json:1: is not an error.json"),
    ],
)
def test_an_error_file_that_cannot_be_meant(content: str, says: str) -> None:
    found = collect(*content.split("\n"), name="attempt_0/0/error.json")
    assert says in "".join(found.notes)
    assert bool(found.logs) == (not says)
    verdict = complete(None, log_evidence.supplement(found.logs))
    assert "\x1b" not in verdict.message and "\0" not in verdict.message


# --- logs next to stacks ---------------------------------------------------------------------------------------------


def test_log_does_not_change_the_named_rank() -> None:
    stacks = [f"[n:{rank}]{line}" for rank in range(4) for line in process(9 + rank, *(STUCK if rank == 2 else WAITS))]
    alone, _ = explained(collect(*stacks))
    assert [rank.rank for rank in alone.named] == [2]
    files = [("trace.out", stacks), ("rank1.log", [*TRACE, "ValueError: x"]), ("rank2.log", ["step 3"])]
    beside, _ = explained(traces.collect(files))
    assert (beside.named, beside.confidence, beside.message) == (alone.named, alone.confidence, alone.message)
    assert all(evidence.supports is None for evidence in beside.evidence if evidence.kind.startswith("log_"))
    assert messages_of(beside, "log_failure") == ["rank 1: ValueError: x, in step (train.py:32)"]


def test_headline_adds_the_first_failure_if_no_rank_is_named() -> None:
    stacks = [f"[n:{rank}]{line}" for rank in range(4) for line in process(9 + rank, *WAITS)]
    alone, _ = explained(collect(*stacks))
    assert alone.named == ()
    beside, _ = explained(traces.collect([("trace.out", stacks), ("rank3.log", [*TRACE, "ValueError: x"])]))
    assert beside.message.startswith(f"{alone.message} By the logs, ")
    assert beside.message.endswith("By the logs, first to fail: rank 3: ValueError: x, in step (train.py:32).")
    assert [look.rank for look in beside.check_first] == [3]
    assert beside.named == ()


# --- hostile input ---------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *(EXAMPLES / "torchrun-tee.txt").read_text().splitlines(),
        *TRACE,
        LOST,
        WATCHDOG.format(rank=1),
        backward(1, 812),
        "\r",
        "\0",
        "\x1b[31m",
        "[rank99999999]: x",
        "  rank      : 99999999999 (local_rank: 1)",
        '{"message": "x"}',
        "=" * 60,
        "9" * 400,
        "0x" + "f" * 400,
        "1e999",
        "0001-01-01 00:00:00+23:59",
        "9999-12-31 23:59:59-23:59",
    ]
)
PREFIXES = st.sampled_from(["", "[rank1]: ", "[rank2]:", "[default3]:[rank3]: ", "3: ", "[1,4]<stdout>:", "[n:5]"])
NAMES = st.sampled_from(
    ["x", "rank1.log", "a-0.out", "a-1.out", "r/attempt_0/1/stderr.log", "r/attempt_1/2/error.json"]
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        NAMES, st.lists(st.tuples(PREFIXES, st.one_of(PIECES, st.text(max_size=40))), max_size=40), max_size=4
    )
)
def test_any_log_lines_name_no_rank(files: dict[str, list[tuple[str, str]]]) -> None:
    found = traces.collect([(name, [a + b for a, b in lines]) for name, lines in files.items()])
    ids = [log.id for log in found.logs]
    assert len(ids) == len(set(ids))
    verdict = complete(None, log_evidence.supplement(found.logs))
    assert verdict.named == ()
    assert verdict.confidence is Confidence.NONE
    assert all(character.isprintable() for character in verdict.message)
    assert all(isinstance(evidence, Evidence) and evidence.supports is None for evidence in verdict.evidence)
    assert len(verdict.message) < 2000


def test_a_gigantic_line_and_a_million_lines_are_bounded() -> None:
    lines = [
        f"[rank0]: {'x' * (1 << 20)}",
        *(f"[rank0]: Traceback (most recent call last):\nE: {n}" for n in range(2000)),
    ]
    (log,) = collect(*lines).logs
    assert len(log.failures) <= rank_log.MOST_FAILURES
    assert log.last is not None and len(log.last.text) <= 8192


def test_prefixes_without_end_make_no_readers_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_STREAMS", 100)
    found = traces.collect([("x", (f"[n:{number}]step {number}" for number in range(300)))])
    assert len(found.logs) == 100
    assert found.notes == (
        "x: more than 100 prefixes; a further prefix is read as part of its line",
        "x: 200 lines are of no known rank, for example '[n:100]step 100'",
    )


# --- the kernel's log ------------------------------------------------------------------------------------------------

FAULT = "python3[4711]: segfault at 0 ip 00007fc2 sp 00007ffd error 6 in libnccl.so.2[164a15,7fc2+156000]"


@pytest.mark.parametrize(("prefix", "when"), LINES["dmesg"].items())
def test_lines_of_dmesg_are_evidence(prefix: str, when: str) -> None:
    found = collect("[1.0] eth0: link up", prefix + FAULT, name="dmesg.txt")
    (heard,) = found.kernel
    assert (heard.matched.name, heard.matched.subject, heard.when) == ("segfault", "4711", when)
    verdict = complete(None, kernel_text.supplement(found.kernel, []))
    assert verdict.kind == "LogsOnly" and not verdict.named and not verdict.check_first
    assert "segfault at 0" in verdict.message and "accessed memory that is not its own" in verdict.message


@pytest.mark.parametrize("prefix", ["3,1234,72852469973,-;", "kern  :err   : [72852.469973] ", ""])
def test_xid_is_the_headline_if_no_rank_has_a_log(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "kernel.txt").write_text(f"{prefix}eth0: link up\n{prefix}NVRM: Xid (PCI:0000:41:00): 79, pid=7\n")
    answer = json.loads(CliRunner().invoke(explain, ["--json", str(tmp_path / "kernel.txt")]).stdout)
    message = answer["verdict"]["message"]
    assert message.startswith("The kernel log reports 1 problem" if prefix else "Logs report 1 problem")
    assert "NVRM: Xid" in message and "the GPU has fallen off the bus" in message


@pytest.mark.parametrize("line", [FAULT, "[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid=4711, name=python3, GPU is lost."])
def test_kernel_line_about_a_dumped_rank_is_evidence(line: str) -> None:
    verdict = complete(
        Verdict(kind="AllWaiting", message="all wait"),
        kernel_text.supplement(collect(line).kernel, [RankId(rank=3, pid=4711)]),
    )
    assert (verdict.kind, verdict.named, verdict.message) == ("AllWaiting", (), "all wait")
    (vote,) = verdict.evidence
    assert vote.ranks == (RankId(rank=3, pid=4711),) and "about rank 3" in vote.message and vote.supports is None


INIT = "{host}:{pid}:9 [0] NCCL INFO comm 0x5 rank {rank} nranks 3 cudaDev 0 nvmlDev 0 busId {bus} commId 0x8 - Init COMPLETE"
XID = "[1.0] NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=7, name=python"


@pytest.mark.parametrize(
    ("buses", "xids", "expected"),
    [
        (("1b000", "9b000", "c3000"), [("9b", 79)], [1]),
        (("1b000", "9b000", "c3000"), [("9b", 45)], []),  # a notice
        (("1b000", "9b000", "c3000"), [("9b", 79), ("c3", 74)], []),
        (("1b000", "9b000", "9b000"), [("9b", 79)], []),  # two nodes have a GPU there
        (("1b000", "9b000"), [("9b", 79)], []),  # the node without a log may have one there
    ],
)
def test_rank_with_the_gpu_of_an_xid_is_checked_first(
    buses: tuple[str, ...], xids: list[tuple[str, int]], expected: list[int], tmp_path: Path
) -> None:
    inits = [INIT.format(host=f"gpu-{rank}", pid=80 + rank, rank=rank, bus=bus) for rank, bus in enumerate(buses)]
    (tmp_path / "train.log").write_text("\n".join(inits))
    (tmp_path / "dmesg.txt").write_text("\n".join(XID.format(bus=bus, code=code) for bus, code in xids))
    answer = json.loads(CliRunner().invoke(explain, ["--json", str(tmp_path)]).stdout)
    assert [rank["rank"] for rank in answer["verdict"]["check_first"]] == expected


@pytest.mark.parametrize(
    ("name", "lines", "writer"),
    [
        ("rank3.log", ["step 1", f"[72852.469973] {FAULT}"], "rank 3"),
        ("rank3.log", [f"[72852.469973] {FAULT}"], "rank 3"),
        ("slurm-77.out", ["3: step 1", f"3: {FAULT}"], "rank 3"),
        ("train.log", ["step 1", f"gpu-a12 kernel: {FAULT}"], "train.log"),
        ("syslog", ["Nov 22 16:12:00 gpu-a12 sshd[1]: hello", f"Nov 22 16:12:00 gpu-a12 kernel: {FAULT}"], "syslog"),
    ],
)
def test_kernel_line_in_another_log_is_attributed_to_its_writer(name: str, lines: list[str], writer: str) -> None:
    (heard,) = collect(*lines, name=name).kernel
    assert heard.writer == writer
    verdict = complete(
        Verdict(kind="AllWaiting", message="all wait"), kernel_text.supplement([heard], [RankId(rank=5, pid=4711)])
    )
    (vote,) = verdict.evidence
    assert vote.kind == "log" and vote.ranks == () and "of rank 5" not in vote.message
    assert vote.message.startswith(f"log of {writer} (not a kernel log)")


def test_a_trouble_that_is_over_is_none_and_many_are_bounded() -> None:
    silent, back = "nfs: server filer-03 not responding, still trying", "[9.0] nfs: server filer-03 OK"
    assert collect(silent, back, FAULT).kernel == collect(FAULT).kernel
    lines = [FAULT.replace("4711", str(pid)) for pid in range(1, 1000)]
    of_one = "more than 64 different kernel log lines: only the first 64 are used"
    assert of_one in collect(*lines).notes
    assert of_one not in collect(*lines[: kernel_text.MOST_KEPT]).notes
    halves = [(f"{half}.log", [f"{line}\n" for line in lines[half * 40 : half * 40 + 40]]) for half in (0, 1)]
    assert of_one in traces.collect(halves).notes
    kernel = collect(*lines).kernel
    assert len(kernel) == kernel_text.MOST_KEPT
    assert len(complete(None, kernel_text.supplement(kernel, [])).evidence) == 9


def test_a_program_that_prints_such_words_writes_no_line_of_the_kernel() -> None:
    assert (
        collect("INFO loaded python3[1]: segfault at the barrier", "step 3: nfs: server x not responding").kernel == ()
    )
