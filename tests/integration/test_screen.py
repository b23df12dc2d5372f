"""The output on a terminal: its width, its colors, and a pager if the output is longer than the screen."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from hangwatch import store
from hangwatch.cli import progress_line
from hangwatch.cli.screen import WIDEST
from hangwatch.config import Http
from hangwatch.state.status import CheckLine, Status
from hangwatch.web.http_server import Server
from tests import samples
from tests.commands import HANGWATCH, finished
from tests.other_users import needs_mounts, needs_root


def in_terminal(
    *arguments: str, rows: int = 500, columns: int = 200, before: tuple[str, ...] = (), **environ: str | None
) -> str:
    """Run a command on a terminal of this size. Return its output.

    A variable with the value None is removed from its environment.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    chosen = {**inherited, "TERM": "xterm-256color", "PAGER": None, "LESS": None, **environ}
    command = [*before, *HANGWATCH, *arguments]
    env = {name: value for name, value in chosen.items() if value is not None}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=env):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: no process has it open any longer
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(store.open_writable(tmp_path_factory.mktemp("store")).save(samples.loader_hang(), {}))


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield commands by name, one for each kind of output: a report, tables, a verdict on files, checks."""
    kept = tmp_path_factory.mktemp("kept")
    folder = store.open_writable(kept).save(samples.loader_hang(), {})
    (kept / "hangwatch.toml").write_text(f'[store]\ndirectory = "{kept}"\n')
    many = tmp_path_factory.mktemp("many")
    for number in range(200):
        stack = f'Thread {number + 9} (idle): "MainThread"\n    wait (train.py:3)\n'
        (many / f"{number}.txt").write_text(f"Process {number + 9}: python train.py\n\n{stack}")
    checks = (CheckLine("xid", "CRITICAL", "Xid", "GPU 3: XID 79 " + "of its " * 30),)
    seen = Status(node="gpu-07", sampler="ok", gpus=(), jobs=(), checks=checks)
    server = Server(
        Http(listen="127.0.0.1", port=0, health_port=0),
        CollectorRegistry(),
        status=lambda: seen,
        unhealthy=lambda: None,
    )
    try:
        yield {
            "report": ("report", str(folder)),
            "incidents": ("incidents", "--config", str(kept / "hangwatch.toml")),
            "explain": ("explain", str(many)),
            "status": ("status", "--url", f"http://127.0.0.1:{server.start()}"),
            "check": ("check", "clock_skew", "fd_limit", "memory_pressure"),
        }
    finally:
        server.stop()


COMMANDS = ("report", "incidents", "explain", "status", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_drawn_and_nothing_coloured_where_that_is_not_wanted(
    typed: dict[str, tuple[str, ...]], command: str
) -> None:
    assert "\x1b" not in in_terminal(*typed[command], TERM="dumb")
    assert "\x1b" in in_terminal(*typed[command]), "it would be seen"
    without = in_terminal(*typed[command], NO_COLOR="1")
    is_slow = command == "explain" and not re.search(r"\x1b\[[\d;]+m", without)
    assert "\x1b" not in without or is_slow, "but what it reads"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_frame_is_no_wider_than_the_screen(typed: dict[str, tuple[str, ...]], command: str) -> None:
    shown, *_ = in_terminal(*typed[command], columns=70, TERM="dumb").partition("Stacks of the capture")
    assert [line for line in shown.splitlines() if len(line) > 70 and not re.search(r"\.py:\d+\)$", line)] == []
    assert max(map(len, shown.splitlines())) > 40


@pytest.mark.parametrize(
    ("columns", "environ", "widest"), [(60, {}, 60), (200, {}, WIDEST), (200, {"COLUMNS": "70"}, 70)]
)
def test_sentences_wrap_at_the_edge_of_the_screen(
    incident: str, columns: int, environ: dict[str, str], widest: int
) -> None:
    head, *_ = in_terminal("report", incident, columns=columns, NO_COLOR="1", **environ).partition("Groups, largest")
    lengths = [len(line) for line in head.splitlines()]
    assert widest - 25 < max(lengths) <= widest


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_where_they_are_wanted(incident: str, environ: dict[str, str], colored: bool) -> None:
    assert ("\x1b[" in in_terminal("report", incident, **environ)) == colored


@pytest.mark.parametrize("value", ["", " ", "cat", "less 'a quote without an end"])
def test_a_pager_that_pages_nothing_prints_in_colours(
    incident: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = tmp_path / "less"
    less.write_text("#!/bin/sh\necho paged; cat\n")
    less.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = in_terminal("report", incident, rows=20, PAGER=value)
    assert not shown.startswith("paged") and shown.startswith("\x1b[1")
    assert in_terminal("report", incident, rows=20).startswith("paged"), "without PAGER it is less"


def test_what_is_longer_than_the_screen_goes_to_the_readers_pager(incident: str, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho paged; cat\n")
    pager.chmod(0o755)
    long = in_terminal("report", incident, rows=20, PAGER=str(pager))
    assert long.startswith("paged\n")
    assert long.rstrip().endswith("(threading.py:1045)"), "all of it"
    assert not in_terminal("report", incident, PAGER=str(pager)).startswith("paged")
    assert not in_terminal("report", incident, rows=20, PAGER=str(pager), TERM="dumb").startswith("paged")
    assert not in_terminal("report", "--no-pager", incident, rows=20, PAGER=str(pager)).startswith("paged")
    assert not in_terminal("--no-pager", "report", incident, rows=20, PAGER=str(pager)).startswith("paged")
    piped = finished(*HANGWATCH, "report", incident, check=True, env={**os.environ, "PAGER": str(pager), "LINES": "5"})
    assert not piped.stdout.startswith("paged")


def listing(tmp_path: Path, *arguments: str, columns: int) -> list[str]:
    """Return the output of `hangwatch incidents` on a terminal of this width. There are two incidents."""
    kept = store.open_writable(tmp_path)
    first = samples.loader_hang()
    for number in range(2):
        kept.save(replace(first, opened_unix_seconds=first.opened_unix_seconds + 100 * number), {})
    config = tmp_path / "hangwatch.toml"
    config.write_text(f'[store]\ndirectory = "{tmp_path}"\n')
    return in_terminal("incidents", *arguments, "--config", str(config), columns=columns, NO_COLOR="1").splitlines()


@pytest.mark.parametrize("columns", [80, 40, 1])
def test_an_incident_takes_two_lines_of_a_list(tmp_path: Path, columns: int) -> None:
    shown = listing(tmp_path, columns=columns)
    assert len(shown) == 4
    assert max(map(len, shown)) <= max(columns, 24)
    assert shown[1].lstrip().startswith("OutsideCollective"[: columns - 5] if columns > 24 else "Outside")


def test_its_whole_verdict_is_there_for_the_asking(tmp_path: Path) -> None:
    shown = listing(tmp_path, "--full", columns=80)
    assert max(map(len, shown)) <= 80
    whole = f"OutsideCollective: {samples.loader_hang().verdict.message}"
    assert whole in " ".join(line.strip() for line in shown)
    assert whole.partition(": ")[2].startswith("Rank 7")


@needs_root
@needs_mounts
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this node has GPUs")
def test_status_of_empty_node_fits_one_screen_and_explains_unknown() -> None:
    shown = in_terminal("check", columns=120, TERM="dumb", before=("unshare", "--pid", "--fork", "--mount-proc"))
    assert "this node has no NVIDIA GPU" in shown and "no training job runs" in shown
    assert len(shown.splitlines()) <= 24
    assert "CRITICAL" not in shown
    for row in re.findall(r"^UNKNOWN .*(?:\n .*)*", shown, re.MULTILINE):
        assert "-> " in row or ": as " in row, row


# --- progress of long commands ---------------------------------------------------------------------------------------


def test_explain_says_what_it_reads_while_it_reads_and_leaves_no_trace_of_it(tmp_path: Path) -> None:
    """Keep the input open until the progress line is visible."""
    stack = 'Process 9: python train.py\n\nThread 9 (idle): "MainThread"\n    wait (train.py:3)\n'
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 60, 0, 0))
    command = [*HANGWATCH, "explain", "-"]
    env = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        process.stdin.write(stack.encode())
        process.stdin.flush()
        shown = b""
        while b"reading 1 of 1: standard input" not in shown:
            shown += os.read(ours, 1 << 16)
        answer, _ = process.communicate()
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    assert shown.endswith(b"\r\x1b[K"), "the line is gone"
    assert process.returncode == 0
    assert b"reading" not in answer
    assert b"wait (train.py:3)" in answer


def test_progress_line_is_absent_for_quick_steps_and_without_a_terminal(typed: dict[str, tuple[str, ...]]) -> None:
    command = [*HANGWATCH, *typed["explain"]]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    with progress_line.shown(quiet_seconds=0.0) as now:
        now.say("reading")
        assert [thread for thread in threading.enumerate() if thread.name == "waiting"] == []


def test_what_is_said_fits_the_line_and_holds_nothing_that_a_terminal_acts_on() -> None:
    now = progress_line.Step()
    assert list(now.each(["a", "b\x1b[31m" + "x" * 500], 2000, "reading")) == ["a", "b\x1b[31m" + "x" * 500]
    now.bytes_read = 3 << 30
    assert len(now.line()) < 200
    assert now.line().startswith("reading 2 of 2,000: b") and now.line().endswith("… (3,072 MiB)")
    assert "\x1b" not in now.line()
