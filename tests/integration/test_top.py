"""`hangwatch top` and `status` on a real terminal, and a terminal that works again after any way to end `top`."""

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from hangwatch import store
from hangwatch.cli import progress_line
from hangwatch.cli.screen import WIDEST
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import JobName, JobState
from hangwatch.state.status import CheckLine, GpuStatus, JobStatus, Status
from hangwatch.tools.commands.status_tables import status_text
from hangwatch.tools.commands.top import watch
from tests import samples
from tests.commands import HANGWATCH, write_config
from tests.conftest import wait_for
from tests.other_users import needs_mounts, needs_root
from tests.servers import served

SHOWN, HIDDEN, NEW_SCREEN, OLD_SCREEN = b"\x1b[?25h", b"\x1b[?25l", b"\x1b[?1049h", b"\x1b[?1049l"


def job(name: str, state: JobState, **more: object) -> JobStatus:
    fields = {
        "job_id": name, "job_key": name, "owner": "uid 1004", "launcher": "torchrun", "user": None, "state": state,
        "message": "quiet for 2 min", "seconds_in_state": 125.0, "ranks": 8, "world_size": 8,
        "absent_local_ranks": (), "page": state is JobState.HUNG, **more,
    }  # fmt: skip
    return JobStatus(**fields)  # type: ignore[arg-type]


SEEN = Status(
    node="gpu-07",
    sampler="ok",
    gpus=(GpuStatus(0, "H100", 115.0, 700.0, 1.0, (JobName("stuck", "k"),)),),
    jobs=(
        job("well", JobState.TRAINING, power_watts=5200.0, line_watts=2100.0),
        job("stuck", JobState.HUNG, power_watts=920.0, line_watts=2100.0, verdict="rank 3 waits for its loader"),
    ),
    checks=(
        CheckLine("xid", "CRITICAL", "Xid", "GPU 3: XID 79", 0.0),
        CheckLine("clock_skew", "OK", "InSync", "fine", 0.0),
    ),
)


def open_terminal(columns: int, lines: int) -> tuple[int, int]:
    """Open a terminal of this size. Return the descriptors of the test and of the command."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    return ours, theirs


def rest_of(terminal: int) -> bytes:
    """Close a terminal after the output of the last command."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO: no process has it open any longer
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    return shown


class Terminal:
    """A terminal of 100 x 30 characters that shows `hangwatch top`. `output` is all output so far."""

    def __init__(self, port: int, *, kind: str = "xterm-256color", command: tuple[str, ...] = ("top",)) -> None:
        self.ours, theirs = open_terminal(100, 30)
        self.before = termios.tcgetattr(self.ours)
        url = f"http://127.0.0.1:{port}"
        # Loading readline sets COLUMNS and LINES in the environment. They would override the terminal's size.
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hangwatch", *command, "--url", url],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**environ, "TERM": kind}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.output = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def read(self) -> bytes:
        """Read the new output of the terminal. Return all output so far."""
        while select.select([self.ours], [], [], 0)[0]:
            try:
                part = os.read(self.ours, 1 << 16)
            except OSError:  # EIO: the command has ended
                break
            self.output += part
        return self.output

    def wait_for(self, text: str) -> None:
        seen = len(self.output)
        wait_for(lambda: text.encode() in self.read()[seen:], f"{text!r} on the terminal")

    def end(self) -> int:
        """Read the output to its end, without which the command does not end. Return the exit status."""
        wait_for(lambda: self.read() and self.process.poll() is not None, "the end of top")
        self.read()
        return self.process.returncode


@contextmanager
def terminal(port: int, **options: object) -> Iterator[Terminal]:
    found = Terminal(port, **options)  # type: ignore[arg-type]
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        os.close(found.ours)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port. Nothing listens on it, and only this test can start a server there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.type(b"\x03"), 0),
        (lambda shown: shown.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_however_it_ends_the_terminal_is_as_it_was(end: Callable[[Terminal], None], code: int) -> None:
    with served(SEEN, health_port=0) as (port, _), terminal(port) as shown:
        shown.wait_for("rank 3 waits for its loader")
        assert NEW_SCREEN in shown.output and HIDDEN in shown.output
        end(shown)
        assert shown.end() == code
        assert termios.tcgetattr(shown.ours) == shown.before
        assert shown.output.rindex(OLD_SCREEN) > shown.output.rindex(NEW_SCREEN)
        assert shown.output.rindex(SHOWN) > shown.output.rindex(HIDDEN)
        assert b"Traceback" not in shown.output


def test_a_daemon_that_is_not_there_is_asked_again() -> None:
    with reserved_port() as port, reserved_port() as health_port, terminal(port) as shown:
        shown.wait_for("retrying every second")
        with served(SEEN, port=port, health_port=health_port):
            shown.wait_for("gpu-07")
            shown.resize(50, 12)
            shown.wait_for("job: stuck")
        shown.wait_for("as of")
        shown.type(b"\x03")
        assert shown.end() == 0


def test_where_there_is_nothing_to_draw_on_it_says_what_to_type() -> None:
    with terminal(1, kind="dumb") as shown:
        assert shown.end() == 2
        assert b"a terminal is needed" in shown.output and b"`hangwatch status`" in shown.output
        assert b"\x1b" not in shown.output


@pytest.mark.parametrize("kind", ["xterm", ""])
def test_without_a_terminal_it_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", kind)
    with pytest.raises(InputError, match="a terminal is needed, and output is a pipe"):
        watch(lambda: SEEN)


def test_jobs_and_checks_that_need_attention_come_first() -> None:
    text = status_text(SEEN)
    assert text.index("stuck") < text.index("well") < text.index("H100") < text.index("GPU 3: XID 79")
    assert text.index("xid") < text.index("clock_skew")


VERDICT = (
    "Rank 3 (gpu-07, pid 2799) is blocked in next_batch() at loader.py:48. The 7 other ranks are waiting for it in "
    'all_reduce. It is reading from a pipe; its data-loader worker (pid 2805) is blocked in open("/mnt/nfs/shard-3").'
)
HUNG = Status(
    node="gpu-07",
    sampler="ok",
    gpus=(GpuStatus(0, "H100", 115.0, 700.0, 1.0, (JobName("4711", "k"),), None, 61 << 30, 80 << 30, 54.0),),
    jobs=(
        job("4712", JobState.TRAINING, job_name="vit", owner="bob", power_watts=5200.0, line_watts=2100.0),
        job(
            "4711", JobState.HUNG, job_name="llama-70b", owner="alice", power_watts=920.0, line_watts=2100.0,
            verdict=VERDICT, seconds_in_state=755.0, ends_itself_unix_seconds=1.7e9 + 460,
        ),
    ),
    checks=(CheckLine("environment", "WARNING", "Differs", "NCCL_DEBUG differs between ranks: " * 6, 1.7e9 - 240),),
)  # fmt: skip


class Screen(io.StringIO):
    """A terminal that keeps its text."""

    def isatty(self) -> bool:
        return True


@pytest.mark.golden
@pytest.mark.parametrize("width", [40, 80, 200])
def test_status_at_each_width_wraps_between_words(
    width: int, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Screen()
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    print(status_text(HUNG))
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue())
    assert max(map(cell_len, text.splitlines())) <= max(width, cell_len(text.splitlines()[0]))
    assert "alice" in text and "utilisation" in text, "no word is cut"
    golden(f"status-{width}.txt", "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def in_terminal(
    *arguments: str, rows: int = 500, columns: int = 200, before: tuple[str, ...] = (), **environ: str | None
) -> str:
    """Return the output of a command on a terminal of this size, without the variables that are None."""
    ours, theirs = open_terminal(columns, rows)
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    chosen = {**inherited, "TERM": "xterm-256color", **environ}
    command = [*before, *HANGWATCH, *arguments]
    env = {name: value for name, value in chosen.items() if value is not None}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=env):
        os.close(theirs)
        return rest_of(ours).decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(store.open_writable(tmp_path_factory.mktemp("store")).save(samples.loader_hang(), {}))


@pytest.fixture(scope="module")
def typed(incident: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield commands by name, one for each kind of output: a report, tables, a verdict on files, checks."""
    config = write_config(tmp_path_factory.mktemp("kept"), Path(incident).parents[1])
    many = tmp_path_factory.mktemp("many")
    for number in range(200):
        stack = f'Thread {number + 9} (idle): "MainThread"\n    wait (train.py:3)\n'
        (many / f"{number}.txt").write_text(f"Process {number + 9}: python train.py\n\n{stack}")
    checks = (CheckLine("xid", "CRITICAL", "Xid", "GPU 3: XID 79 " + "of its " * 30, 0.0),)
    seen = Status(node="gpu-07", sampler="ok", gpus=(), jobs=(), checks=checks)
    with served(seen, health_port=0) as (port, _):
        yield {
            "report": ("report", incident),
            "incidents": ("incidents", "--config", str(config)),
            "explain": ("explain", str(many)),
            "status": ("status", "--url", f"http://127.0.0.1:{port}"),
            "check": ("check", "clock_skew", "fd_limit", "memory_pressure"),
        }


COMMANDS = ("report", "incidents", "explain", "status", "check")
EMPTY_NODE = (  # without the processes and the dead mounts of tests that run beside it
    *("unshare", "--pid", "--fork", "--mount-proc", "--propagation", "private"),
    *("sh", "-euc", 'umount --all --lazy --types fuse.deadfs; exec "$@"', "sh"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_drawn_or_coloured_where_not_wanted(typed: dict[str, tuple[str, ...]], command: str) -> None:
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
def test_sentences_wrap_at_edge_of_screen(incident: str, columns: int, environ: dict[str, str], widest: int) -> None:
    head, *_ = in_terminal("report", incident, columns=columns, NO_COLOR="1", **environ).partition("Groups, largest")
    lengths = [len(line) for line in head.splitlines()]
    assert widest - 25 < max(lengths) <= widest


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_where_they_are_wanted(incident: str, environ: dict[str, str], colored: bool) -> None:
    assert ("\x1b[" in in_terminal("report", incident, **environ)) == colored


def listing(tmp_path: Path, columns: int) -> list[str]:
    """Return the output of `hangwatch incidents` on a terminal of this width. There are two incidents."""
    kept = store.open_writable(tmp_path)
    first = samples.loader_hang()
    for number in range(2):
        kept.save(replace(first, opened_unix_seconds=first.opened_unix_seconds + 100 * number), {})
    config = write_config(tmp_path, tmp_path)
    return in_terminal("incidents", "--config", str(config), columns=columns, NO_COLOR="1").splitlines()


@pytest.mark.parametrize("columns", [80, 40, 1])
def test_an_incident_takes_two_lines_of_a_list(tmp_path: Path, columns: int) -> None:
    shown = listing(tmp_path, columns=columns)
    assert len(shown) == 4
    assert max(map(len, shown)) <= max(columns, 24)
    assert all(line.startswith("hung  ") for line in shown[::2])
    assert shown[1].lstrip().startswith("OutsideCollective"[: columns - 5] if columns > 24 else "Outside")


@needs_root
@needs_mounts
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this node has GPUs")
def test_status_of_empty_node_fits_one_screen_and_explains_unknown() -> None:
    shown = in_terminal("check", columns=120, TERM="dumb", before=EMPTY_NODE)
    assert "this node has no NVIDIA GPU" in shown and "no training job runs" in shown
    assert len(shown.splitlines()) <= 24
    assert "CRITICAL" not in shown
    for row in re.findall(r"^UNKNOWN .*(?:\n .*)*", shown, re.MULTILINE):
        assert "-> " in row or ": as " in row, row


def test_explain_says_what_it_reads_while_it_reads_and_leaves_no_trace_of_it(tmp_path: Path) -> None:
    """Keep the input open until the progress line is visible."""
    stack = 'Process 9: python train.py\n\nThread 9 (idle): "MainThread"\n    wait (train.py:3)\n'
    ours, theirs = open_terminal(60, 50)
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
        shown += rest_of(ours)
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
