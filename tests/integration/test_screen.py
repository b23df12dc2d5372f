"""What a person sees on a terminal: its width, its colours, and a pager where the answer is longer than the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hangwatch import store
from hangwatch.cli.screen import WIDEST
from tests import samples


def in_terminal(*arguments: str, rows: int = 500, columns: int = 200, **environ: str) -> str:
    """What a command shows on a terminal of this size; "" as a value takes a variable away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    chosen = {**inherited, "TERM": "xterm-256color", "PAGER": "", "LESS": "", **environ}
    command = [sys.executable, "-m", "hangwatch", *arguments]
    env = {name: value for name, value in chosen.items() if value}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=env):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(store.open_writable(tmp_path_factory.mktemp("store")).save(samples.loader_hang(), {}))


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


def test_what_is_longer_than_the_screen_goes_to_the_readers_pager(incident: str, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho paged; cat\n")
    pager.chmod(0o755)
    long = in_terminal("report", incident, rows=20, PAGER=str(pager))
    assert long.startswith("paged\n")
    assert long.rstrip().endswith("(threading.py:1045)"), "all of it"
    assert not in_terminal("report", incident, PAGER=str(pager)).startswith("paged")
    assert not in_terminal("report", incident, rows=20, PAGER=str(pager), TERM="dumb").startswith("paged")
    piped = subprocess.run(
        [sys.executable, "-m", "hangwatch", "report", incident],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PAGER": str(pager), "LINES": "5"},
    )
    assert not piped.stdout.startswith("paged")
