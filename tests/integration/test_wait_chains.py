"""Waits that lead through the driver of a job: measured, and followed to the rank for which the driver waits."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import Motion, Rank, Signature
from hangwatch.probes.network import sockets
from hangwatch.probes.process import procfs
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from tests.conftest import identity, wait_for
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

# The driver is no launcher: it is a sibling of the ranks, which connect to it over TCP.
SIBLING = """
import os, socket, sys
folder, does = sys.argv[1:]
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    ends = dict((end.recv(1), end) for end, _ in (server.accept() for rank in range(3)))
    while does == "computes":
        pass
    ends[b"2"].recv(1)
    os._exit(0)
for rank in range(3):
    if os.fork() == 0:
        end = socket.create_connection(server.getsockname())
        server.close()
        end.sendall(str(rank).encode())
        with open(f"{folder}/new-{rank}", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/new-{rank}", f"{folder}/pid-{rank}")
        if rank == 2 and does == "waits":
            open(f"{folder}/fifo").read()
        end.recv(1)
        os._exit(0)
server.close()
for _ in range(4):
    os.wait()
"""
HELPER = """
import os, signal
questions, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(questions[1])
    os.close(answers[0])
    {task}
    os._exit(0)
os.close(questions[0])
os.close(answers[1])
ready()
os.read(answers[0], 1)
"""
OVER_A_SOCKET = """
import os, signal, socket
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    {task}
    os._exit(0)
theirs.close()
ready()
ours.recv(1)
"""
STOPS, ASKS_BACK = "os.kill(os.getpid(), signal.SIGSTOP)", "os.read(questions[0], 1)"


@contextlib.contextmanager
def started(folder: Path, does: str, program: str) -> Iterator[list[int]]:
    os.mkfifo(folder / "fifo")
    with subprocess.Popen([sys.executable, "-c", program, folder, does], start_new_session=True) as driver:
        try:
            wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(3)), "three ranks to start")
            pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(3)]
            targets.wait_for_call(pids[0], "receives")
            targets.wait_for_call(pids[1], "receives")
            yield pids
        finally:
            os.killpg(driver.pid, signal.SIGKILL)


@pytest.mark.parametrize("program", [DRIVER, SIBLING], ids=["parent", "sibling over TCP"])
@pytest.mark.parametrize(
    ("does", "signature", "asks_rank"), [("computes", Signature.UNKNOWN, None), ("waits", Signature.BLOCKED, "child")]
)
def test_rank_that_waits_for_its_driver_waits_for_the_rank_behind_it(
    tmp_path: Path, does: str, signature: Signature, asks_rank: str | None, program: str
) -> None:
    with started(tmp_path, does, program) as pids:
        if does == "waits":
            targets.wait_until_blocked(pids[2])
        taken = capture(job_of_pids(pids), CaptureRequest(settings=QUICK, node="here"))
        by_pid = {member.id.pid: member for member in group_ranks(taken, activity.load(), QUICK).members}
        assert {(by_pid[pid].signature, by_pid[pid].waits.asks_rank) for pid in pids[:2]} == {(signature, asks_rank)}
        assert by_pid[pids[2]].waits.asks_rank is None or does == "computes"


@pytest.mark.parametrize(
    ("program", "task", "end", "says"),
    [
        (HELPER, STOPS, "held", "which is stopped"),
        (HELPER, ASKS_BACK, "cycle", "which waits for this process"),
        (OVER_A_SOCKET, STOPS, "held", "which is stopped"),
        (OVER_A_SOCKET, "theirs.recv(1)", "cycle", "which waits for this process"),
    ],
)
def test_rank_is_blocked_by_a_helper_that_cannot_answer(
    tmp_path: Path, program: str, task: str, end: str, says: str
) -> None:
    with targets.python(program.format(task=task), tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        (helper,) = procfs.read_children(pid)
        wait_for(lambda: procfs.read_thread_states(helper).startswith("T") or end == "cycle", "the helper to stop")
        taken = capture(job_of_pids([pid]), CaptureRequest(settings=QUICK, node="here"))
    (member,) = group_ranks(taken, activity.load(), QUICK).members
    awaited = member.waits.awaited
    assert member.motion is Motion.FROZEN and awaited is not None
    assert (awaited.end, awaited.name) == (end, f"its worker {helper} (python), {says}")


def test_rank_moves_as_its_worker_behind_a_socket_computes(tmp_path: Path) -> None:
    task = "while True: sum(range(1000)); len('0')"
    with targets.python(OVER_A_SOCKET.format(task=task), tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        taken = capture(job_of_pids([pid]), CaptureRequest(settings=QUICK, node="here"))
    (member,) = group_ranks(taken, activity.load(), QUICK).members
    assert member.signature is Signature.UNKNOWN, "it uses a core, at one line"


def test_awaited_child_is_found_among_many(tmp_path: Path) -> None:
    code = "import os, time\nfor number in range(70):\n    child = os.fork()\n    if child == 0:\n        time.sleep(600)\n"
    with targets.python(code + "ready()\nos.waitpid(child, 0)", tmp_path) as pid:
        targets.wait_for_call(pid, "awaits_child")
        child = procfs.read_children(pid, procfs.PROC, 100)[-1]
        taken = capture(
            replace(job_of_pids([pid]), ranks=(Rank(id=identity(pid), rank=0, local_rank=0),)),
            CaptureRequest(settings=QUICK, node="here"),
        )
        for other in procfs.read_children(pid, procfs.PROC, 100):
            os.kill(other, signal.SIGKILL)
    (member,) = group_ranks(taken, activity.load(), QUICK).members
    assert member.signature is Signature.AWAITS_OUTSIDE
    assert member.waits.awaited is not None and f"its child {child} (" in member.waits.awaited.name


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
