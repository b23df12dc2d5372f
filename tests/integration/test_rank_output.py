"""The last lines of files to which real processes write. Pipes, terminals and other users' files are not read."""

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.model import JobState, OutputEnd, ProcessId
from hangwatch.probes.base import procfs
from hangwatch.probes.process import rank_output
from hangwatch.report import html, text
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from tests.commands import spawn
from tests.conftest import identity, wait_for
from tests.integration import targets
from tests.other_users import needs_root

SLEEPS = "import sys, time; sys.stdout.write(sys.argv[1]); sys.stdout.flush(); time.sleep(600)"
EQUAL = """
import os, socket, sys, threading
kept = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
def step(own):
    print("step 812 loss 2.1")
    if own:
        print(own)
    sys.stdout.flush()
    threading.Lock().acquire() and meet()
def meet():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
step(sys.argv[1])
"""
MEETS = (config.ActivityRule(activity="collective_wait", function="meet"),)
NCCL = "gpu-07:5776:5898 [1] NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129"
NCCL_WORDS = NCCL.partition("WARN ")[2]  # without the place


@contextlib.contextmanager
def writing(code: str, *arguments: str, to: list[int], **environ: str) -> Iterator[list[ProcessId]]:
    """Start a process for each argument, with its output in one of these descriptors. Yield them asleep."""
    options = {"stdin": subprocess.DEVNULL, "env": {**os.environ, **environ}}
    with contextlib.ExitStack() as kept:
        children = [
            kept.enter_context(spawn(sys.executable, "-c", code, text, stdout=out, stderr=out, **options))
            for text, out in zip(arguments, to, strict=True)
        ]
        for child in children:
            wait_for(lambda pid=child.pid: (found := procfs.read_state(pid)) and found[1] == "S", "a rank to sleep")  # type: ignore[misc]
        yield [identity(child.pid) for child in children]


def read(*processes: ProcessId, user_id: int | None = None) -> dict[ProcessId, tuple[OutputEnd, ...]]:
    user_id = os.getuid() if user_id is None else user_id
    found, faults = rank_output.read(dict.fromkeys(processes, user_id), share="test", deadline_seconds=60.0)
    assert faults == ()
    return found


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def test_a_file_to_which_both_streams_go_is_read_once(tmp_path: Path) -> None:
    with writing(SLEEPS, "hello\n", to=[opened(tmp_path / "log")]) as (rank,):
        wait_for(lambda: (tmp_path / "log").read_text() == "hello\n", "its word")
        (end,) = read(rank)[rank]
    assert (end.text, end.path, end.size_bytes, end.is_deleted) == (b"hello\n", str(tmp_path / "log"), 6, False)


def test_of_a_sparse_gigabyte_the_end_is_read(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    os.ftruncate(log, 1 << 30)
    with writing(SLEEPS, "the end\n", to=[log]) as (rank,):
        wait_for(lambda: (tmp_path / "log").stat().st_size > 1 << 30, "its word")
        (end,) = read(rank)[rank]
    assert (len(end.text), end.size_bytes) == (rank_output.MOST_BYTES, (1 << 30) + 8)
    assert end.text.endswith(b"\0the end\n")


def test_a_deleted_file_is_read_by_its_descriptor(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    with writing(SLEEPS, "still there\n", to=[log]) as (rank,):
        wait_for(lambda: os.fstat(log).st_size == 12, "its word")
        (tmp_path / "log").unlink()
        (tmp_path / "log").write_text("another file of that name")
        (end,) = read(rank)[rank]
    assert (end.text, end.is_deleted, end.path) == (b"still there\n", True, str(tmp_path / "log"))


def test_a_fifo_is_not_opened(tmp_path: Path) -> None:
    """A writer that waits for a reader would continue, and SIGPIPE would then kill it."""
    os.mkfifo(tmp_path / "log")
    fifo = os.open(tmp_path / "log", os.O_RDWR)
    with writing(SLEEPS, "", to=[fifo]) as (rank,):
        other = str(tmp_path / "other")
        with spawn(sys.executable, "-c", f"import os; os.mkfifo({other!r}); open({other!r}, 'w')") as waiting:
            wait_for((tmp_path / "other").exists, "the other FIFO")
            assert read(rank) == {}
            assert waiting.poll() is None
    os.close(fifo)


@pytest.mark.parametrize("kind", ["terminal", "pipe", "null"])
def test_what_is_no_regular_file_is_not_read(kind: str) -> None:
    ends = {"terminal": os.openpty, "pipe": os.pipe, "null": lambda: (os.open(os.devnull, 0), os.open(os.devnull, 1))}[
        kind
    ]()
    try:
        with writing(SLEEPS, "", to=[ends[1]]) as (rank,):
            assert read(rank) == {}
            assert kind == "null" or select.select([ends[0]], [], [], 0)[0] == []
    finally:
        for descriptor in ends:
            os.close(descriptor)


@needs_root
def test_the_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("not for you\n")
    os.chown(tmp_path / "log", 12345, 12345)
    with writing(SLEEPS, "", to=[opened(tmp_path / "log")]) as (rank,):
        assert read(rank) == {}
        assert read(rank, user_id=12345)[rank][0].text == b"not for you\n"


def look(ranks: list[ProcessId], **settings: object) -> Diagnosis:
    limits = config.Capture(rounds=2, pause_seconds=0.1, dump_deadline_seconds=60.0, **settings)  # type: ignore[arg-type]
    return targets.diagnosed(targets.job_of(ranks, world_size=8), limits, activity.load(MEETS))


def test_rank_with_only_error_in_log_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all ranks the same stack and a connection to the store. Only the log of rank 2 has an error."""
    logs = [opened(tmp_path / f"rank{number}.log") for number in range(4)]
    store = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("STORE", str(store.getsockname()[1]))
    with store, writing(EQUAL, "", "", f"\x1b[31m{NCCL}\x1b[0m", "", to=logs) as ranks:
        wait_for(lambda: all("step" in path.read_text() for path in tmp_path.glob("*.log")), "their words")
        found = look(ranks)
        without = look(ranks, logs=False)
    (first,) = found.verdict.check_first
    assert (first.rank, found.verdict.named) == (2, ())
    assert NCCL_WORDS in first.why and "an InfiniBand or RoCE peer did not respond" in first.why
    (vote,) = (vote for vote in found.verdict.evidence if vote.kind == "nccl_message")
    assert (vote.supports, NCCL_WORDS in vote.message) == (None, True)
    assert "NCCL" not in found.verdict.message and "By the logs rank 2" in found.verdict.message
    (lines,) = found.capture.ranks[2].last_lines
    assert lines.lines == ("step 812 loss 2.1", NCCL)
    assert all(rank.last_lines == () for rank in found.capture.ranks if rank.id.rank != 2)
    incident = found.incident(targets.job_of(ranks, world_size=8), JobState.STALLED)
    assert f"    | {NCCL}\n" in text.render(incident) and NCCL in html.render(incident)
    assert without.verdict.check_first == () and without.verdict.kind == found.verdict.kind


def test_a_variable_of_one_rank_alone_is_evidence_and_in_the_report(tmp_path: Path) -> None:
    told = [{}, {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_TOKEN": "secret"}, {}]
    with contextlib.ExitStack() as stack:
        ranks = []
        for number, own in enumerate(told):
            log = opened(tmp_path / f"rank{number}.log")
            ranks += stack.enter_context(writing(SLEEPS, "", to=[log], **{"NCCL_SOCKET_IFNAME": "eth0", **own}))
        found = look(ranks)
        without = look(ranks, environment=False)
    (vote,) = (vote for vote in found.verdict.evidence if vote.kind == "environment")
    assert (
        vote.message.startswith("NCCL_SOCKET_IFNAME differs: eth1 on rank 1 (here")
        and "eth0 on 2 others" in vote.message
    )
    assert (vote.supports, without.capture.environment) == (None, None)
    report = text.render(found.incident(targets.job_of(ranks, world_size=8), JobState.STALLED), width=500)
    assert "NCCL_SOCKET_IFNAME differs" in report and "secret" not in report


def test_reader_without_answer_costs_its_deadline_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "child.py"
    silent.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(rank_output, "CHILD", silent)
    with writing(SLEEPS, "hello\n", to=[opened(tmp_path / "log")]) as (rank,):
        found = look([rank])
    assert [note for note in found.capture.notes if "logs" in note] == ["the logs of some ranks were not read: Timeout"]
    assert rank_output.RUNNER.abandoned.count() == 0
