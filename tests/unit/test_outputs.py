"""The last lines of the output of ranks. They name no rank; at most a rank is checked first."""

import pytest

from hangwatch.logs import live_output, log_evidence
from hangwatch.logs.merged_logs import RankLog
from hangwatch.model import OutputEnd, RankId, Verdict
from hangwatch.verdict.judge import complete
from tests import secret_texts

RANKS = [RankId(node="n", rank=number, local_rank=number, pid=100 + number) for number in range(8)]
FAILS = 'Traceback (most recent call last):\n  File "/job/train.py", line 38, in step\nValueError: bad shard 7\n'
WAITS = Verdict(kind="AllWaiting", message="All wait.")
PEER = "NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129"


def end(text: str, file: str = "1:1", size_bytes: int | None = None) -> OutputEnd:
    raw = text.encode()
    return OutputEnd(file=file, path="/job/log", size_bytes=len(raw) if size_bytes is None else size_bytes, text=raw)


def logs(*texts: str) -> tuple[RankLog, ...]:
    """Return one log for each rank."""
    ends = {rank: (end(text, f"1:{rank.rank}"),) for rank, text in zip(RANKS, texts, strict=False)}
    return live_output.read_logs(ends, {})


def complete_with_logs(verdict: Verdict, rank_logs: tuple[RankLog, ...], ranks_here: int) -> Verdict:
    return complete(verdict, log_evidence.supplement_of_live_job(rank_logs, ranks_here))


def shared(text: str) -> dict[int | None, RankLog]:
    found = live_output.read_logs(
        {rank: (end(text),) for rank in RANKS}, {rank: 7 + index for index, rank in enumerate(RANKS)}
    )
    return {log.id.rank: log for log in found}


def test_rank_with_the_only_failure_in_its_log_is_checked_first() -> None:
    verdict = complete_with_logs(WAITS, logs("step 3\n", FAILS, "step 3\n", "step 3\n"), 4)
    assert [look.rank for look in verdict.check_first] == [1]
    assert "ValueError: bad shard 7" in verdict.check_first[0].why
    assert "shard" not in verdict.message and verdict.message.startswith("All wait. By the logs rank 1")
    assert not verdict.named and all(vote.supports is None for vote in verdict.evidence)


def test_log_failure_does_not_change_a_named_rank() -> None:
    named = Verdict(kind="RankGone", message="Gone.", named=(RANKS[3],))
    verdict = complete_with_logs(named, logs("step\n", FAILS, "step\n", "step\n"), 4)
    assert (verdict.named, verdict.check_first, verdict.message) == ((RANKS[3],), (), "Gone.")
    assert any("ValueError" in vote.message for vote in verdict.evidence)


def test_moving_ranks_or_missing_logs_point_at_no_rank() -> None:
    four = logs("step\n", FAILS, "step\n", "step\n")
    assert complete_with_logs(Verdict(kind="Moving", message="x"), four, 4).check_first == ()
    assert complete_with_logs(WAITS, four, 9).check_first == ()
    assert [look.rank for look in complete_with_logs(WAITS, four, 8).check_first] == [1]


def test_failure_in_two_of_eight_logs_points_at_no_rank() -> None:
    assert complete_with_logs(WAITS, logs(PEER, PEER, *["step\n"] * 6), 8).check_first == ()
    assert [look.rank for look in complete_with_logs(WAITS, logs(PEER, *["step\n"] * 7), 8).check_first] == [0]


def test_what_nccl_merely_chose_is_no_trouble() -> None:
    chose = "NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>"
    assert complete_with_logs(WAITS, logs(chose, *["step\n"] * 7), 8).check_first == ()


@pytest.mark.parametrize(("pid", "ranks"), [(99, []), (10, [3])])
def test_lines_before_a_restart_of_a_rank_do_not_count(pid: int, ranks: list[int]) -> None:
    report = (
        f"E1201 10:00:00.000000 9 torch/api.py:1] failed (exitcode: 1) local_rank: 3 (pid: {pid}) of binary: python"
    )
    assert list(shared(f"[rank3]: {FAILS}\n{report}\n")) == ranks


def test_line_in_a_shared_log_belongs_to_the_rank_in_its_prefix() -> None:
    found = shared(
        f"[rank3]: ValueError\nnode-1:9:31 [2] {PEER}\na line without a rank\n[rank99]: ValueError\nnode-1:99:1 [0] {PEER}\n"
        "2026-11-28 10:00:00 [Rank 5] RuntimeError: bad shard\n"
    )
    assert set(found) == {2, 3, 5}
    assert list(found[2].messages) == ["ib_pair_unreachable"]


def test_the_first_line_of_an_end_is_cut_and_left_out() -> None:
    assert live_output.last_lines([end("alueError: x\nstep 2\n", size_bytes=99)])[0].lines == ("step 2",)


def test_escapes_holes_progress_bars_and_bytes_that_are_no_text_are_shown_safely() -> None:
    raw = b"\0\0\0\x1b[2J\x1b]0;title\x07step 1\r 10%\r 20%\n\xff\xfe\xe2\x80\xaex\n"
    (shown,) = live_output.last_lines([OutputEnd(file="1:1", path="/l", size_bytes=len(raw), text=raw)])
    assert all(line.isprintable() and "\x1b" not in line for line in shown.lines)
    assert shown.lines[0] == "20%"


def test_lines_are_few_and_short() -> None:
    (shown,) = live_output.last_lines([end("\n".join("x" * 60_000 for _ in range(50)))])
    assert len(shown.lines) == 10 and {len(line) for line in shown.lines} == {200}


@pytest.mark.parametrize("name", secret_texts.FORMS | secret_texts.MORE)
def test_lines_and_evidence_of_a_log_have_no_secret_of_a_known_form(name: str) -> None:
    """Mask secrets in a last line, in a failure, and in a message of NCCL."""
    case = (secret_texts.FORMS | secret_texts.MORE)[name]
    failure = f'Traceback (most recent call last):\n  File "/job/train.py", line 3, in main\nShardError: {case.text}\n'
    written = f"{failure}{PEER} {case.text}\n{case.text}\n"
    verdict = complete_with_logs(WAITS, logs(written, *["step\n"] * 7), 8)
    shown = repr((live_output.last_lines([end(written)]), verdict))
    assert "ShardError" in shown and "Got completion" in shown
    assert not any(secret in shown for secret in case.secrets), shown


def test_log_line_of_a_live_rank_is_looked_at_in_its_first_1024_characters() -> None:
    """Ignore text after the first 1,024 characters: matching time grows with the square of the length of a line."""
    near, far = (f"{' ' * before}{PEER}\n" for before in (900, 1024))
    found = [list(log.messages) for log in logs(f"{near}step\n", f"{far}step\n")]
    assert found == [["ib_pair_unreachable"], []]
