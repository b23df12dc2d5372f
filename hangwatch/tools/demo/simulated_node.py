"""Control of a simulated node: start its processes, send orders, read events, end its processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import hangwatch
from hangwatch.errors import UserError
from hangwatch.tools.demo.phases import Phases
from hangwatch.tools.demo.process_setup import PROCESSES

START_DEADLINE_SECONDS = 30.0
END_DEADLINE_SECONDS = 10.0
# without variables of a batch job in which the demo may run
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")


class NodeError(UserError):
    """A failure of the simulated node. The message describes it and ends with the last lines of the node's log."""


class SimulatedNode:
    """A simulated node with `ranks` worker processes.

    It is a context manager, which ends every process that it started. The processes also die with this process,
    even if it is killed. `pids` are those of the ranks, by local rank. `proc_root` is a view of /proc with only the
    node's processes. `program` is the module that starts the ranks, with `more` arguments.
    """

    def __init__(
        self,
        ranks: int = 8,
        program: str = "hangwatch.tools.demo.launcher",
        more: tuple[str, ...] = (),
    ) -> None:
        self.ranks = ranks
        self.run_id = f"demo-{secrets.token_hex(3)}"
        self.pids: tuple[int, ...] = ()
        self.folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
        self.phases = Phases.create(self.folder / "phases", ranks)
        self.proc_root = self.folder / PROCESSES
        # Make links in `proc_root` to all of /proc except its processes. The node's processes add links to themselves.
        self.proc_root.mkdir()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                (self.proc_root / entry.name).symlink_to(entry)
        os.mkfifo(self.folder / "stuck-shard")
        self._arguments = [program, str(self.folder), self.run_id, str(ranks), *more]
        self._unread = ""

    def __enter__(self) -> SimulatedNode:
        program, *arguments = self._arguments
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-SE", "-m", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(hangwatch.__file__).parents[1],
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C reaches only the demo, which ends the processes in order
            )
        try:
            self.wait_for_event("ready", START_DEADLINE_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def order(self, target: int | str, order: str) -> None:
        """Send an order to a rank. Wait until it was received."""
        self._write(f"{target} {order}\n")
        self.wait_for_event("given", START_DEADLINE_SECONDS)

    def wait_for_event(self, event: str, deadline_seconds: float) -> list[str]:
        """Wait for the next event of this name. Return the words after the name. Raises NodeError at the deadline."""
        end = time.monotonic() + deadline_seconds
        while True:
            words = self._next_event(end - time.monotonic())
            if words is None:
                raise NodeError(f"no event {event!r} of the simulated node within {deadline_seconds:g} s{self._log()}")
            if words[0] == event:
                return words[1:]

    def is_alive(self, local_rank: int) -> bool:
        """True if the process of a rank exists."""
        return Path(f"/proc/{self.pids[local_rank]}").exists()

    def close(self) -> None:
        """End all processes, and remove the folder of the node."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a dead launcher did not read an order
                    pipe.close()
        try:
            self._process.wait(END_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.phases.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NodeError(f"the launcher of the simulated node has ended{self._log()}") from None

    def _next_event(self, wait_seconds: float) -> list[str] | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        end = time.monotonic() + wait_seconds
        while "\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                return None
            text = os.read(pipe, 4096).decode()
            if not text:
                raise NodeError(f"the launcher of the simulated node has ended{self._log()}")
            self._unread += text
        line, _, self._unread = self._unread.partition("\n")
        words = line.split()
        if words[0] == "ready":
            self.pids = tuple(map(int, words[1:]))
        return words

    def _log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return "".join(f"\n  {line}" for line in lines[-3:])


def wait_until(condition: Callable[[], bool], deadline_seconds: float, every_seconds: float = 0.05) -> bool:
    """Call `condition` again and again. Return True once it returns true; False at the deadline."""
    end = time.monotonic() + deadline_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every_seconds)
    return True
