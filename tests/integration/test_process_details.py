"""Process details from psutil, on real processes.

A process that delays psutil uses up a deadline, but its stack is still read.
"""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.model import Job, JobState, ProcessId, Rank
from hangwatch.probes.process import process_details
from hangwatch.report import html, text
from hangwatch.stacks import activity
from tests.conftest import identity, wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets

BUSY = """
import os, socket, subprocess, threading, time
kept = socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))
file = open(folder + "/shard\\x1b[2J-7", "w+")
file.write("x" * 1000), file.flush()
child = subprocess.Popen(["sleep", "600"])
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
os.nice(3)
def own_code():
    ready()
    os.read(os.pipe()[0], 1)
own_code()
"""


def read(*pids: int, deadline_seconds: float = 60.0) -> list[object]:
    targets_ = [identity(pid) for pid in pids]
    found = process_details.read(targets_, share="test", deadline_seconds=deadline_seconds)
    return [found.get(target) for target in targets_]


def test_files_connections_children_memory_and_cpus_of_a_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with targets.python(BUSY, tmp_path, PORT=str(port)) as pid:
            (found,) = process_details.read([identity(pid)], share="test", deadline_seconds=60.0).values()
    assert found.files == (f"{tmp_path}/shard\\x1b[2J-7 (r+, at 1,000)",)
    (connection,) = found.connections
    assert connection.endswith(f"-> 127.0.0.1:{port} ESTABLISHED")
    (child,) = found.children
    assert "(sleep), sleeping" in child
    assert (
        found.resident_bytes and found.resident_bytes > 1 << 20 and found.shared_bytes and found.swap_bytes is not None
    )
    assert (found.threads, found.niceness, bool(found.cpus)) == (2, os.nice(0) + 3, True)


def test_a_file_that_is_open_many_times_is_listed_once(tmp_path: Path) -> None:
    """List a file once, although loader threads have opened it forty times. Forty lines would hide all other files."""
    code = "kept = [open(folder + '/shard', 'rb') for _ in range(40)]\nkept[0].read()\nother = open(folder + '/index')"
    (tmp_path / "shard").write_bytes(b"x" * 2000)
    (tmp_path / "index").touch()
    with targets.python(f"{code}\nready()\nimport time\ntime.sleep(600)", tmp_path) as pid:
        (found,) = process_details.read([identity(pid)], share="test", deadline_seconds=60.0).values()
    assert found.files == (f"{tmp_path}/shard (r, 40 times, at 0 to 2,000)", f"{tmp_path}/index (r, at 0)")


def test_of_nine_processes_eight_are_asked(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        target = identity(pid)
        made_up = [ProcessId(pid=4_000_000 + number, start_ticks=1) for number in range(8)]
        assert target not in process_details.read([*made_up, target], share="test", deadline_seconds=60.0)


def test_another_process_of_that_pid_has_no_details(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        assert process_details.read([ProcessId(pid=pid, start_ticks=1)], share="test", deadline_seconds=60.0) == {}


def test_a_file_system_that_gives_no_answer_costs_the_deadline_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "content").write_text("x")
    code = "import time\nfile = open(folder + '/mnt/data')\nready()\ntime.sleep(600)"
    other = tmp_path / "other"
    other.mkdir()
    with contextlib.ExitStack() as mounted:
        die = mounted.enter_context(dying_mount(tmp_path / "mnt", {"data": tmp_path / "content"}))
        with targets.python(code, tmp_path) as pid, targets.python(targets.SLEEPING, other) as well:
            die()
            held, fine = read(pid, well, deadline_seconds=8.0)
            mounted.close()  # closed first: the end of the process waits for the file system
    assert fine is not None
    assert held is None
    wait_for(lambda: process_details.RUNNER.abandoned.count() == 0, "the reader to be let go")


@pytest.mark.parametrize("reads_details", [True, False])
def test_incident_has_process_details_of_suspects_only(tmp_path: Path, reads_details: bool) -> None:
    rules = (config.ActivityRule(activity="collective_wait", function="asleep"),)
    with socket.create_server(("127.0.0.1", 0)) as server:
        folders = [tmp_path / str(number) for number in range(4)]
        for folder in folders:
            folder.mkdir()
        port = str(server.getsockname()[1])
        with (
            targets.python(BUSY, folders[0], PORT=port) as odd,
            targets.python(targets.SLEEPING, folders[1]) as one,
            targets.python(targets.SLEEPING, folders[2]) as two,
            targets.python(targets.SLEEPING, folders[3]) as three,
        ):
            ranks = tuple(Rank(id=identity(pid), rank=n, local_rank=n) for n, pid in enumerate((odd, one, two, three)))
            job = Job(job_id="x", launcher="plain", launcher_id=None, ranks=ranks, world_size=4, share="test")
            limits = config.Capture(rounds=2, pause_seconds=0.1, dump_deadline_seconds=60.0, details=reads_details)
            look = diagnose_job(job, CaptureRequest(settings=limits, node="n"), activity.load(rules))
    told = {rank.id.rank: rank.details is not None for rank in look.capture.ranks}
    pointed = {rank.rank for rank in (*look.verdict.named, *look.verdict.check_first)}
    assert pointed == {0}
    assert told == {0: reads_details, 1: False, 2: False, 3: False}
    incident = look.incident(job, JobState.HUNG)
    for report in (text.render(incident, width=1000), html.render(incident)):
        assert ("shard\\x1b[2J-7" in report) is reads_details
