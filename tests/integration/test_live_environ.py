"""The present environment of real processes, in any kind of program, and the details of processes."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.model import JobState, ProcessId
from hangwatch.probes.process import process_details, process_memory
from hangwatch.probes.process.environment import Environment
from hangwatch.probes.process.live_environ import MOST_SECONDS, LiveEnvironments, Place, read_environ
from hangwatch.probes.process.memory_image import UnreadableError
from hangwatch.report import html, text
from hangwatch.stacks import activity
from tests.commands import spawn
from tests.conftest import identity, wait_for
from tests.dead_mount import dying_mount
from tests.environ_memory import within_cpu_seconds
from tests.integration import targets

WANTED = frozenset({"RANK", "MASTER_ADDR", "TURN"})
CHANGES = """
import os, time
for number in range(200):
    os.environ[f"V{number}"] = "x" * 50
os.environ["RANK"] = "3"
del os.environ["V7"]
open(folder + "/ready", "w").close()
time.sleep(600)
"""
# Two environments in turn. The memory of the other one is used again: there, RANK is wrong and changes.
ALTERNATING = """
import ctypes, itertools, time
class Block:
    def __init__(self):
        self.texts = [ctypes.create_string_buffer(32) for _ in range(2)]
        self.array = (ctypes.c_void_p * 3)(*map(ctypes.addressof, self.texts), None)
    def write(self, rank, turn):
        self.texts[0].value, self.texts[1].value = f"RANK={rank}".encode(), f"TURN={turn}".encode()
environ, blocks = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ"), [Block(), Block()]
for turn in itertools.count():
    new, old = blocks
    new.write(3, turn)
    environ.value = ctypes.addressof(new.array)
    old.write(f"9{turn}", turn)
    if turn == 0:
        ready()
    time.sleep(0.0005)
    blocks.reverse()
"""
HOSTILE = """
import ctypes, mmap, re, time
block = mmap.mmap(-1, 1 << 23)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
(vvar,) = re.findall(r"^([0-9a-f]+)-.*\\[vvar\\]$", open("/proc/self/maps").read(), re.MULTILINE)
arrays = {
    "endless": address,
    "unmapped": 4096,
    "beyond": (1 << 63) + 8,
    "device": int(vvar, 16),
}
ctypes.memmove(address, (address.to_bytes(8, "little")) * (1 << 20), 1 << 23)
ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value = arrays[kind]
ready()
time.sleep(600)
"""


def find_symbol(live: LiveEnvironments, process: ProcessId) -> Place | None:
    modules = live.find_modules(process)
    assert modules is not None
    return live.find_place(process, modules, "uid 0")


def read(live: LiveEnvironments, process: ProcessId) -> tuple[Place, Environment] | None:
    place = find_symbol(live, process)
    assert place is not None
    return live.read(process, place, WANTED)


@pytest.mark.parametrize("python", [sys.executable, "/usr/bin/python3"])
def test_rank_set_after_the_start_is_read_in_dyn_and_exec_programs(python: str, tmp_path: Path) -> None:
    if not Path(python).exists():
        pytest.skip(f"no {python}")
    with spawn(python, "-c", f"folder = {str(tmp_path)!r}{CHANGES}") as child:
        wait_for((tmp_path / "ready").exists, "the changes")
        assert b"RANK=3" not in Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        answer = read(LiveEnvironments(), identity(child.pid))
        assert answer is not None and answer[1].variables["RANK"] == "3"


def test_environment_that_changes_all_the_time_is_never_read_wrong(tmp_path: Path) -> None:
    """The free cores decide how many readings are refused, and whether one takes too long."""
    live, turns = LiveEnvironments(), [-1]
    with targets.python(ALTERNATING, tmp_path) as pid:
        while len(turns) <= 100:
            answer = read(live, identity(pid))
            if answer is not None:
                assert answer[1].variables["RANK"] == "3"
                turns.append(int(answer[1].variables["TURN"]))
    assert turns == sorted(turns)


def test_one_question_shows_which_of_many_environments_have_changed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("same", "changed", "ended")]
    for folder in folders:
        folder.mkdir()
    code = "import os, time\nready()\nopen(folder + '/fifo').read()\nos.environ['RANK'] = '3'\n"
    code += "open(folder + '/done', 'w').close()\ntime.sleep(600)"
    live = LiveEnvironments()
    with targets.python(code, folders[0]) as same, targets.python(code, folders[1]) as changed:
        with targets.python(code, folders[2]) as ended:
            answers = {process: read(live, process) for process in map(identity, (same, changed, ended))}
            places = {process: answer[0] for process, answer in answers.items() if answer is not None}
            assert live.find_unchanged(places) == answers.keys()
        (folders[1] / "fifo").write_text("go")
        wait_for((folders[1] / "done").exists, "the change")
        assert {process.pid for process in live.find_unchanged(places)} == {same}


@pytest.mark.parametrize("kind", ["endless", "unmapped", "beyond", "device"])
def test_hostile_environment_is_not_read_and_costs_little(kind: str, tmp_path: Path) -> None:
    with targets.python(f"kind = {kind!r}{HOSTILE}", tmp_path) as pid:
        place = find_symbol(LiveEnvironments(), identity(pid))  # starts the reading child
        assert place is not None
        with within_cpu_seconds(0.05), pytest.raises(UnreadableError, match=r"^(TooLarge|UnknownLayout): "):
            read_environ(process_memory.reader(Path(f"/proc/{pid}/mem"), MOST_SECONDS), place, WANTED)


def test_static_program_has_no_place(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler")
    (tmp_path / "main.c").write_text("#include <unistd.h>\nint main(void) { return pause(); }\n")
    command = [compiler, "-static", "-o", str(tmp_path / "static"), str(tmp_path / "main.c")]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no static C library")
    with spawn(tmp_path / "static") as child:
        targets.wait_for_state(child.pid, "S")
        assert find_symbol(LiveEnvironments(), identity(child.pid)) is None


def test_process_that_has_ended_has_no_modules() -> None:
    child = subprocess.Popen(["true"])
    process = ProcessId(pid=child.pid, start_ticks=0)
    child.wait()
    assert LiveEnvironments().find_modules(process) is None


BUSY = """
import os, socket, subprocess, threading, time
kept = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
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


def test_files_connections_children_memory_and_cpus_of_a_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with targets.python(BUSY, tmp_path, STORE=str(port)) as pid:
            (found,) = process_details.read([identity(pid)]).values()
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
        (found,) = process_details.read([identity(pid)]).values()
    assert found.files == (f"{tmp_path}/shard (r, 40 times, at 0 to 2,000)", f"{tmp_path}/index (r, at 0)")


def test_of_nine_processes_eight_are_asked(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        target = identity(pid)
        made_up = [ProcessId(pid=4_000_000 + number, start_ticks=1) for number in range(8)]
        assert target not in process_details.read([*made_up, target])


def test_another_process_of_that_pid_has_no_details(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        assert process_details.read([ProcessId(pid=pid, start_ticks=1)]) == {}
    assert process_details.read([identity(os.getpid())]), "it closes a descriptor meanwhile"


def test_a_file_system_that_does_not_respond_hides_no_details(tmp_path: Path) -> None:
    (tmp_path / "content").write_text("x")
    code = "import time\nfile = open(folder + '/mnt/data')\nready()\ntime.sleep(600)"
    with contextlib.ExitStack() as mounted:
        die = mounted.enter_context(dying_mount(tmp_path / "mnt", {"data": tmp_path / "content"}))
        with targets.python(code, tmp_path) as pid:
            die()
            (found,) = process_details.read([identity(pid)]).values()
            mounted.close()  # closed first: the end of the process waits for the file system
    assert found.files == (f"{tmp_path}/mnt/data (r, at 0)",)


@pytest.mark.parametrize("reads_details", [True, False])
def test_incident_has_process_details_of_suspects_only(tmp_path: Path, reads_details: bool) -> None:
    rules = (config.ActivityRule(activity="collective_wait", function="asleep"),)
    with targets.started(tmp_path, BUSY, *[targets.SLEEPING] * 3) as pids:
        job = targets.job_of(pids)
        limits = replace(targets.QUICK, details=reads_details)
        look = targets.diagnosed(job, limits, activity.load(rules))
    told = {rank.id.rank: rank.details is not None for rank in look.capture.ranks}
    pointed = {rank.rank for rank in (*look.verdict.named, *look.verdict.check_first)}
    assert pointed == {0}
    assert told == {0: reads_details, 1: False, 2: False, 3: False}
    incident = look.incident(job, JobState.HUNG)
    for report in (text.render(incident, width=1000), html.render(incident)):
        assert ("shard\\x1b[2J-7" in report) is reads_details
