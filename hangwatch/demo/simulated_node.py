"""A simulated node from outside: starts its processes, sends orders, reads events, ends everything."""

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
from hangwatch.demo.phases import Phases
from hangwatch.demo.process_setup import PROCESSES
from hangwatch.errors import UserError

START_DEADLINE_SECONDS = 30.0
END_DEADLINE_SECONDS = 10.0
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")  # no variable of a batch job in which the demo may run


class NodeError(UserError):
    """A failure of the simulated node; the message says which, with the end of its log."""


class SimulatedNode:
    """`ranks` worker processes of a job over `nodes` nodes, of which this is the first.

    A context manager: on leaving it, every process that it started is gone. `pids` are those of the ranks, by local
    rank; `proc_root` is a view of /proc with only the node's processes. `program` is the module that starts them,
    `worker` the module that a rank runs, `first_order` (TARGET ORDER) the order before its first step. The processes
    also die with this process, however it dies.
    """

    def __init__(
        self,
        ranks: int = 8,
        nodes: int = 1,
        program: str = "hangwatch.demo.launcher",
        worker: str = "hangwatch.demo.worker",
        first_order: str = "",
    ) -> None:
        self.ranks = ranks
        self.run_id = f"demo-{secrets.token_hex(3)}"
        self.pids: tuple[int, ...] = ()
        self.folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
        self.phases = Phases.create(self.folder / "phases", ranks)
        self.proc_root = self.folder / PROCESSES
        _link_kernel_files(self.proc_root)
        os.mkfifo(self.folder / "stuck-shard")
        self._arguments = [program, str(self.folder), self.run_id, str(ranks), str(nodes), worker, first_order]
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
                start_new_session=True,  # Ctrl-C reaches the demo, which ends them in order
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
        """Send an order to a rank, `all` ranks or the `peers` on other nodes; wait until they have it."""
        self._write(f"{target} {order}\n")
        self.wait_for_event("given", START_DEADLINE_SECONDS)

    def restart(self) -> None:
        """Let the launcher replace all ranks; wait until the new ranks have joined."""
        self._write("launcher restart\n")
        self.wait_for_event("ready", START_DEADLINE_SECONDS)

    def wait_for_event(self, event: str, deadline_seconds: float) -> list[str]:
        """Return the words after the next event of that name. Raises NodeError if it does not arrive in time."""
        end = time.monotonic() + deadline_seconds
        while True:
            words = self._next_event(end - time.monotonic())
            if words is None:
                raise NodeError(f"the simulated node did not say {event!r} within {deadline_seconds:g} s{self._log()}")
            if words[0] == event:
                return words[1:]

    def has_said(self, event: str) -> bool:
        """True if an event has arrived in the meantime; does not wait."""
        while (words := self._next_event(0.0)) is not None:
            if words[0] == event:
                return True
        return False

    def is_alive(self, local_rank: int) -> bool:
        """True if the process of a rank exists."""
        return Path(f"/proc/{self.pids[local_rank]}").exists()

    def close(self) -> None:
        """End all processes and remove the folder; the launcher reaps its ranks before it exits."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an order that a dead launcher did not read
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


def _link_kernel_files(proc_root: Path) -> None:
    """Link all of /proc except its processes: those of the node link themselves when they start."""
    proc_root.mkdir()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            (proc_root / entry.name).symlink_to(entry)


def wait_until(condition: Callable[[], bool], deadline_seconds: float, every_seconds: float = 0.05) -> bool:
    """Return True as soon as the condition is true, False at the deadline."""
    end = time.monotonic() + deadline_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every_seconds)
    return True
