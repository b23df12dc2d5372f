"""Waits that lead through the driver of a job: measured, and followed to the rank for which the driver waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import Motion
from hangwatch.probes.network import sockets
from hangwatch.probes.process import procfs
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from tests.conftest import wait_for
from tests.integration import targets

QUICK = config.Capture(rounds=2, pause_seconds=1.0, dump_deadline_seconds=60.0)
DRIVER = """
import os, select, socket, sys
folder, does = sys.argv[1:]
ends = [socket.socketpair() for rank in range(3)]
for rank, (_, end) in enumerate(ends):
    if os.fork():
        continue
    for other in (each for pair in ends for each in pair if each is not end):
        other.close()
    with open(f"{folder}/new-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/new-{rank}", f"{folder}/pid-{rank}")
    if rank == 2 and does == "waits":
        open(f"{folder}/fifo").read()
    end.recv(1)
    os._exit(0)
while does == "computes":
    pass
select.select([ends[2][0]], [], [])
"""


@contextlib.contextmanager
def started(folder: Path, does: str) -> Iterator[list[int]]:
    os.mkfifo(folder / "fifo")
    with subprocess.Popen([sys.executable, "-c", DRIVER, folder, does]) as driver:
        try:
            wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(3)), "three ranks to start")
            pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(3)]
            targets.wait_for_call(pids[0], "receives")
            targets.wait_for_call(pids[1], "receives")
            yield pids
        finally:
            driver.kill()
            for path in folder.glob("pid-*"):
                with contextlib.suppress(ProcessLookupError):  # it ends when the driver is gone
                    os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("does", "motion"), [("computes", Motion.UNKNOWN), ("waits", Motion.FROZEN)])
def test_rank_that_waits_for_its_driver_stands_still_only_if_the_driver_does(
    tmp_path: Path, does: str, motion: Motion
) -> None:
    with started(tmp_path, does) as pids:
        if does == "waits":
            targets.wait_until_blocked(pids[2])
        taken = capture(job_of_pids(pids), CaptureRequest(settings=QUICK, node="here"))
        by_pid = {member.id.pid: member for member in group_ranks(taken, activity.load(), QUICK).members}
        assert {by_pid[pid].motion for pid in pids[:2]} == {motion}


def test_question_without_an_answer_is_known_from_its_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0] as server,
    ):

        def awaits_answer() -> bool:
            own = sockets.read(os.getpid(), procfs.PROC) or {}
            return own[os.fstat(client.fileno()).st_ino].awaits_answer

        assert not awaits_answer()
        client.sendall(b"a question")
        assert awaits_answer()
        server.sendall(b"an answer")
        assert client.recv(16) and not awaits_answer()
