"""Real ranks that wait for another rank in the main thread, in another thread or in a child.

Such a rank is not the late rank.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import FileLock, Group, Member
from hangwatch.probes.process import blocked_call, main_thread, procfs
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict.wording import clauses
from tests.commands import first_line, spawn
from tests.conftest import wait_for
from tests.integration import targets

SETTINGS = config.Capture(rounds=2, pause_seconds=0.1, dump_deadline_seconds=60.0)
FLOCK = "import fcntl, sys\nlock = open(sys.argv[1] + '/the.lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)"
FIFO = "import os, sys\nos.read(os.open(sys.argv[1] + '/the.fifo', os.O_RDONLY), 1)"
CONNECTION = "import socket, sys\nport = int(open(sys.argv[1] + '/port').read())\nsocket.create_connection(('127.0.0.1', port)).recv(1)"
WAITS = "import subprocess, sys\nready()\nsubprocess.run([sys.executable, '-c', {code!r}, folder])"
IN_A_SHELL = "import subprocess, sys\nready()\nsubprocess.run(['sh', '-c', '\"$0\" -c \"$1\" \"$2\"; :', sys.executable, {code!r}, folder])"
ITSELF = "import sys\nsys.argv[1:] = [folder]\nready()\n{code}"
IN_A_THREAD = """
import sys, threading
sys.argv[1:] = [folder]
ready()
thread = threading.Thread(target=exec, args=({code!r}, {{}}))
thread.start()
thread.join()
"""
AT_A_WORKER = """
import os, sys
sys.argv[1:] = [folder]
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(reads)
    exec({code!r}, {{}})
    os._exit(0)
os.close(writes)
ready()
os.read(reads, 1)
"""
# The other rank holds the lock, may write into the FIFO and has the other end of the connection.
OTHER = """
import fcntl, os, socket, sys
folder = sys.argv[1]
lock = open(folder + "/the.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
os.mkfifo(folder + "/the.fifo")
fifo = os.open(folder + "/the.fifo", os.O_RDWR)
listening = socket.create_server(("127.0.0.1", 0))
open(folder + "/port", "w").write(str(listening.getsockname()[1]))
print("ready", flush=True)
if sys.argv[2] == "accepts":
    connection, _ = listening.accept()
    print("accepted", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_rank(folder: Path, *, accepts: bool = False) -> Iterator[subprocess.Popen[str]]:
    with spawn(sys.executable, "-c", OTHER, folder, "accepts" if accepts else "listens") as other:
        assert first_line(other) == "ready"
        yield other


def seen(kind: str, pid: int, *ranks: int) -> tuple[Group, Member]:
    """Wait until a child of process `pid`, or itself or one of its threads, is blocked in a call of `kind`.

    A program that starts reads regular files: such a call does not count. Capture the ranks. Return the group and the
    member of `pid`.
    """

    def is_in_call(process: int, thread: int | None = None) -> bool:
        call = main_thread.read_call(process, procfs.PROC, thread)
        if call is None or call.kind != kind:
            return False
        link = blocked_call.link_of(process, call.descriptors[0], procfs.PROC)
        is_childs = link.startswith("pipe:") and process != pid  # the rank itself reads the pipe of its worker
        return kind != "receives" or is_childs or link.startswith("socket:") or link.endswith(".fifo")

    def waits() -> bool:
        threads = main_thread.list_other_threads(pid, procfs.PROC, 4)
        below = procfs.read_children(pid, procfs.PROC)
        return any(map(is_in_call, (pid, *below))) or any(is_in_call(pid, thread) for thread in threads)

    wait_for(waits, "the call")
    groups = group_ranks(
        capture(job_of_pids([*ranks, pid]), CaptureRequest(settings=SETTINGS, node="here")), Table(()), SETTINGS
    ).groups
    group = next(one for one in groups if any(member.id.pid == pid for member in one.members))
    return group, next(member for member in group.members if member.id.pid == pid)


@pytest.mark.parametrize("how", [WAITS, IN_A_SHELL, AT_A_WORKER], ids=["child", "below a shell", "worker"])
def test_rank_with_child_waiting_for_a_lock_of_another_rank_waits_for_it(how: str, tmp_path: Path) -> None:
    with other_rank(tmp_path) as other, targets.python(how.format(code=FLOCK), tmp_path) as pid:
        group, member = seen("locks", pid, other.pid)
        _, alone = seen("locks", pid)
    path = str(tmp_path / "the.lock")
    comm = member.waits.file_lock.holder_comm
    assert member.waits.file_lock == FileLock(path, holder_pid=other.pid, holder_comm=comm, by_child=True)
    assert group.waits_for == "lock" and member.waits.awaited is None
    by_child = "waits for its child process, which waits for"
    assert clauses.describe_activity(group) == f"{by_child} the lock of {path}, held by pid {other.pid} ({comm})"
    assert alone.waits.file_lock is None, "the holder is not in its job"
    assert (alone.waits.awaited is None) is (how == AT_A_WORKER)


@pytest.mark.parametrize(
    ("how", "waiting_part"), [(ITSELF, "main"), (IN_A_THREAD, "thread"), (WAITS, "child"), (AT_A_WORKER, "child")]
)
@pytest.mark.parametrize(
    ("code", "accepts"),
    [(FIFO, False), (CONNECTION, True), (CONNECTION, False)],
    ids=["fifo", "connection", "connection that is not accepted"],
)
def test_rank_receiving_from_another_rank_waits_for_that_rank(
    how: str, waiting_part: str, code: str, accepts: bool, tmp_path: Path
) -> None:
    with other_rank(tmp_path, accepts=accepts) as other, targets.python(how.format(code=code), tmp_path) as pid:
        _, member = seen("receives", pid, other.pid)
        _, alone = seen("receives", pid)
    assert (member.waits.asks_rank, member.kernel.is_held_outside, member.waits.awaited) == (waiting_part, False, None)
    assert alone.waits.asks_rank is None, "it asks no process of its job"


@pytest.mark.parametrize("code", [FIFO, CONNECTION], ids=["fifo", "connection"])
def test_rank_with_child_receiving_from_outside_waits_outside_the_job(code: str, tmp_path: Path) -> None:
    with other_rank(tmp_path), targets.python(WAITS.format(code=code), tmp_path) as pid:
        _, member = seen("receives", pid)
    assert member.waits.asks_rank is None and member.kernel.is_held_outside and member.waits.awaited is not None


def test_a_pipe_that_all_ranks_only_read_leads_to_none_of_them(tmp_path: Path) -> None:
    """Read a pipe to which no rank writes, such as the standard input that a launcher gives all ranks."""
    reads = "import os\nos.read(0, 1)"
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE) as other, contextlib.ExitStack() as ends:
        ends.callback(other.kill)
        code = f"import os\nos.dup2(os.open('/proc/{other.pid}/fd/0', os.O_RDONLY), 0)\n" + WAITS.format(code=reads)
        with targets.python(code, tmp_path) as pid:
            _, member = seen("receives", pid, other.pid)
    assert member.waits.asks_rank is None
