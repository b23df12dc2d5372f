"""A command of hangwatch in the process of the test, for tests about its output: a start takes 0.2 CPU seconds."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch import cli

PROGRAM = str(Path(cli.__file__).parents[1] / "__main__.py")
Finished = subprocess.CompletedProcess[str]
HANGWATCH = (sys.executable, "-m", "hangwatch")
LEAVES = ("check", "run")
"""Commands that end their process at once, whatever blocks."""


def finished(*command: object, **options: Any) -> Finished:
    """Run a program to its end. Return what it printed, as text. The options are those of `subprocess.run`."""
    usual = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(list(map(str, command)), **{**usual, **options})


@contextlib.contextmanager
def spawn(*command: object, group: bool = False, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of `with`, which kills it, with `group` also the processes that it started.

    Its standard input and output are pipes of text.
    """
    usual = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": group}
    with subprocess.Popen(list(map(str, command)), **{**usual, **options}) as process:
        try:
            yield process
        finally:
            process.kill()
            if group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def first_line(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that the process prints. Return it without its end."""
    return process.stdout.readline().rstrip("\n")


def rank_environ(run_id: str, rank: int = 0, size: int = 1, **more: str) -> dict[str, str]:
    """Return the variables of a rank, one of `size` on this node and of no other node, as torchrun sets them."""
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": run_id, **more}


@contextlib.contextmanager
def sleeping(*before: object, **environ: str) -> Iterator[int]:
    """Run a Python that sleeps, started by the command `before`. Yield its pid."""
    program = "import time; print('up', flush=True); time.sleep(600)"
    with spawn(*before, sys.executable, "-c", program, env={**os.environ, **environ}) as process:
        assert first_line(process) == "up"
        yield process.pid


def write_program(path: Path, body: str) -> Path:
    """Write a shell script that may be run. Return its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def write_config(folder: Path, store: Path) -> Path:
    """Write `folder`/hangwatch.toml with the directory of a store. Return its path."""
    path = folder / "hangwatch.toml"
    path.write_text(f'[store]\ndirectory = "{store}"\n')
    return path


def start(*arguments: object, **environ: str) -> Finished:
    """Start a command as a program. Fail if it reports a bug."""
    return _without_bug(finished(*HANGWATCH, *arguments, env={**os.environ, **environ}))


def hangwatch(*arguments: object, stdin: str = "", **environ: str) -> Finished:
    """Run a command with files as its standard streams. Fail if it reports a bug."""
    if arguments[0] in LEAVES:
        return start(*arguments, **environ)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "stdin").write_text(stdin)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
            patch.setattr(sys, name, stack.enter_context((folder / name).open(mode)))
        patch.setattr(sys, "argv", [PROGRAM, *map(str, arguments)])
        for name, value in environ.items():
            patch.setenv(name, value)
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        with pytest.raises(SystemExit) as end:
            cli.main(sys.argv[1:])
        printed, complaints = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return _without_bug(subprocess.CompletedProcess(arguments, end.value.code or 0, printed, complaints))


def _without_bug(done: Finished) -> Finished:
    assert "Traceback" not in done.stdout + done.stderr
    assert "this is a bug" not in done.stderr, done.stderr
    return done


def refused(*arguments: object, says: str) -> None:
    """Assert that the command prints one message that contains `says`, and exits with 2."""
    assert_refused(hangwatch(*arguments), says)


def assert_refused(done: Finished, says: str) -> None:
    assert (done.returncode, done.stdout or "") == (2, ""), done.stderr
    assert says in done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("hangwatch: ")]
    assert len(messages) == 1, done.stderr
