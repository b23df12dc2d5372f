"""A hang in a ThreadPoolExecutor.

A worker thread of one rank is blocked in the program's code. The stacks of all main threads are equal.
"""

import contextlib
import socket
from pathlib import Path

from hangwatch import config
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.model import Job, Rank
from hangwatch.stacks import activity
from tests.conftest import identity
from tests.integration import targets

PROGRAM = """
import concurrent.futures, os, socket, sys, threading
kept = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
pool = concurrent.futures.ThreadPoolExecutor(1)
def write_shard(folder):
    if os.environ["ODD"]:
        ready()
        os.open(folder + "/fifo", os.O_RDONLY)
def meet():
    if not os.environ["ODD"]:
        ready()
    threading.Event().wait()
def step():
    written = pool.submit(write_shard, folder)
    meet()
step()
"""
MEETS = (config.ActivityRule(activity="collective_wait", function="meet"),)


def test_rank_with_executor_thread_stuck_in_user_code_is_checked_first(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        train = tmp_path / "train.py"
        train.write_text(PROGRAM)
        run = f"exec(compile(open({str(train)!r}).read(), {str(train)!r}, 'exec'))"
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ranks = []
        for number in range(4):
            folder = tmp_path / str(number)
            folder.mkdir()
            told = {"STORE": str(store.getsockname()[1]), "ODD": "1" if number == 2 else ""}
            pid = stack.enter_context(targets.python(run, folder, **told))
            ranks.append(Rank(id=identity(pid), rank=number, local_rank=number))
        job = Job(job_id="x", launcher="plain", launcher_id=None, ranks=tuple(ranks), world_size=8, share="test")
        limits = config.Capture(rounds=2, pause_seconds=0.3, dump_deadline_seconds=60.0)
        look = diagnose_job(job, CaptureRequest(settings=limits, node="n"), activity.load(MEETS))
    verdict = look.verdict
    assert verdict.named == ()
    assert [look.rank for look in verdict.check_first] == [2]
    assert "write_shard" in verdict.check_first[0].why
    assert "all 4 ranks" in verdict.message and "Check rank 2" in verdict.message
