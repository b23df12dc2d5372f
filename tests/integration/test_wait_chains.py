"""Waits that lead through the driver of a job: measured, and followed to the rank for which the driver waits."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.model import FileLock, Group, Job, Member, Motion, Signature
from hangwatch.probes.base import procfs
from hangwatch.probes.network import sockets
from hangwatch.probes.process import blocked_call, main_thread
from hangwatch.stacks import activity
from hangwatch.verdict.wording import clauses
from tests.commands import first_line, spawn
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
STARTS = "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, folder + '/fifo', 0, 0)])"
# A thread of compiled code waits for a source and would signal the main thread, as in a message queue.
AT_QUEUE = """
import _thread, collections, os, select, socket
signal, events, source = os.eventfd(0), select.epoll(), {source}
events.register(source)
_thread.start_new_thread(collections.deque, (iter(events.poll, None), 0))
ready()
os.read(signal, 8)
"""
IN_LOOP = AT_QUEUE.replace("os.read(signal, 8)", "own = socket.socketpair(); select.select([signal, own[0]], [], [])")
SERVES = "threading.Thread(target=socket.create_server(('127.0.0.1', 0)).accept).start(); ready(); "
LIBRARY_SERVES = (
    "server = socket.create_server(('127.0.0.1', 0)); "
    "_thread.start_new_thread(collections.deque, (iter(server._accept, None), 0)); ready(); "
)
STOPS, ASKS_BACK = "os.kill(os.getpid(), signal.SIGSTOP)", "os.read(questions[0], 1)"


def measured(job: Job) -> Sequence[Member]:
    return targets.grouped(job, QUICK, activity.load()).members


@contextlib.contextmanager
def started(folder: Path, does: str) -> Iterator[list[int]]:
    os.mkfifo(folder / "fifo")
    with spawn(sys.executable, "-c", DRIVER, folder, does, group=True):
        wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(3)), "three ranks to start")
        pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(3)]
        targets.wait_for_call(pids[0], "receives")
        targets.wait_for_call(pids[1], "receives")
        yield pids


@pytest.mark.parametrize(
    ("does", "signature", "asks_rank"), [("computes", Signature.UNKNOWN, None), ("waits", Signature.BLOCKED, "child")]
)
def test_rank_that_waits_for_its_driver_waits_for_the_rank_behind_it(
    tmp_path: Path, does: str, signature: Signature, asks_rank: str | None
) -> None:
    with started(tmp_path, does) as pids:
        if does == "waits":
            targets.wait_until_blocked(pids[2])
        by_pid = {member.id.pid: member for member in measured(targets.job_of_pids(pids))}
        assert {(by_pid[pid].signature, by_pid[pid].waits.asks_rank) for pid in pids[:2]} == {(signature, asks_rank)}
        assert by_pid[pids[2]].waits.asks_rank is None or does == "computes"


@pytest.mark.parametrize(
    ("program", "task", "end", "says"),
    [
        (HELPER, STOPS, "held", "which is stopped"),
        (HELPER, STARTS, "held", "which is in state D"),
        (HELPER, ASKS_BACK, "cycle", "which waits for this process"),
        (OVER_A_SOCKET, STOPS, "held", "which is stopped"),
        (OVER_A_SOCKET, "theirs.recv(1)", "cycle", "which waits for this process"),
    ],
)
def test_rank_is_blocked_by_helper_without_answer(tmp_path: Path, program: str, task: str, end: str, says: str) -> None:
    with targets.python(program.format(task=task), tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        helper, *_ = procfs.read_children(pid)
        wait_for(
            lambda: procfs.read_thread_states(helper).startswith(("T", "D")) or end == "cycle", "the helper to stop"
        )
        (member,) = measured(targets.job_of_pids([pid]))
    awaited = member.waits.awaited
    assert member.motion is Motion.FROZEN and awaited is not None
    assert (awaited.end, awaited.name) == (end, f"its worker {helper} (python), {says}")


@pytest.mark.parametrize(
    ("waits", "signature"),
    [
        ("threading.Thread(target=server.recv, args=(1,)).start(); ready(); lock.acquire()", Signature.BLOCKED),
        (
            "loop.add_reader(server, print); threading.Thread(target=loop.run_forever).start(); ready(); lock.acquire()",
            Signature.AWAITS_OUTSIDE,
        ),
        (f"{SERVES}lock.acquire()", Signature.BLOCKED),
        (f"{SERVES}queue.Queue().get()", Signature.UNKNOWN),
        (f"{LIBRARY_SERVES}queue.Queue().get()", Signature.BLOCKED),
    ],
)
def test_rank_at_lock_awaits_event_loop_not_polling_thread(tmp_path: Path, waits: str, signature: Signature) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        code = f"""
import _thread, asyncio, collections, queue, socket, threading
server, lock, loop = socket.create_connection({listening.getsockname()}), threading.Lock(), asyncio.new_event_loop()
server.sendall(b"a question")
lock.acquire()
{waits}
"""
        with targets.python(code, tmp_path) as pid:
            targets.wait_for_call(pid, "futex")
            (member,) = measured(targets.job_of_pids([pid]))
    assert member.signature is signature


@pytest.mark.parametrize(
    ("waits", "signature"),
    [
        ("one = socket.socket(type=socket.SOCK_DGRAM); one.bind(('127.0.0.1', 0)); ready(); one.recv(1)", "unknown"),
        ("one = socket.socket(1, socket.SOCK_DGRAM); one.bind(folder + '/one'); ready(); one.recv(1)", "unknown"),
        ("one = libc.inotify_init(); ready(); os.read(one, 64)", "unknown"),
        ("one = libc.msgget(0, 0o600); ready(); libc.msgrcv(one, bytes(64), 8, 0, 0)", "unknown"),
        ("one = libc.semget(0, 1, 0o600); ready(); libc.semop(one, bytes([0, 0, 255, 255, 0, 0]), 1)", "unknown"),
        ("one = os.eventfd(0); ready(); os.read(one, 8)", "blocked"),
        (AT_QUEUE.format(source="socket.create_server(('127.0.0.1', 0))"), "unknown"),
        (AT_QUEUE.format(source="socket.create_server(folder + '/one', family=socket.AF_UNIX)"), "unknown"),
        (IN_LOOP.format(source="socket.create_server(('127.0.0.1', 0))"), "unknown"),
        (AT_QUEUE.format(source="os.pipe()[0]"), "blocked"),
        (IN_LOOP.format(source="os.pipe()[0]"), "blocked"),
    ],
)
def test_rank_that_any_process_may_wake_is_not_blocked(tmp_path: Path, waits: str, signature: str) -> None:
    with targets.python(f"{LIBC}{waits}", tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        (member,) = measured(targets.job_of_pids([pid]))
    assert member.signature is Signature(signature)


def test_rank_moves_as_its_worker_behind_a_socket_computes(tmp_path: Path) -> None:
    task = "while True: sum(range(1000)); len('0')"
    with targets.python(OVER_A_SOCKET.format(task=task), tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        (member,) = measured(targets.job_of_pids([pid]))
    assert member.signature is Signature.UNKNOWN, "it uses a core, at one line"


def test_line_of_an_awaited_process_with_a_task_is_known(tmp_path: Path) -> None:
    code = "def load(): queue.put(open(tasks.get()).read())\n"
    code += "import multiprocessing, os\ncontext = multiprocessing.get_context('fork')\n"
    code += "queue, tasks = context.Queue(), context.Queue()\nos.mkfifo(folder + '/shard')\n"
    code += "for _ in range(2): context.Process(target=load).start()\n"
    with targets.python(f"{code}tasks.put(folder + '/shard')\nready()\nqueue.get()", tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        workers = procfs.read_children(pid)
        wait_for(lambda: any(map(_is_in_open, workers)), "a worker to begin its task")
        (worker,) = filter(_is_in_open, workers)
        (group,) = targets.grouped(targets.job_of_pids([pid]), QUICK, activity.load()).groups
    assert f"waits for its worker process (pid {worker}, in load (" in clauses.describe_activity(group)


def _is_in_open(pid: int) -> bool:
    call = main_thread.read_call(pid, procfs.PROC)
    return call is not None and call.name == "openat"


def test_awaited_child_is_found_among_many(tmp_path: Path) -> None:
    code = "import os, time\nfor number in range(70):\n    child = os.fork()\n    if child == 0:\n        time.sleep(600)\n"
    with targets.python(code + "ready()\nos.waitpid(child, 0)", tmp_path) as pid:
        targets.wait_for_call(pid, "awaits_child")
        child = procfs.read_children(pid, procfs.PROC, 100)[-1]
        (member,) = measured(targets.job_of([pid]))
        for other in procfs.read_children(pid, procfs.PROC, 100):
            os.kill(other, signal.SIGKILL)
    assert member.signature is Signature.AWAITS_OUTSIDE
    assert member.waits.awaited is not None and f"its child {child} (" in member.waits.awaited.name


def test_stopped_descendant_of_a_rank_is_not_called_its_child(tmp_path: Path) -> None:
    code = "import subprocess\nready()\nsubprocess.run(['sh', '-c', 'sleep 600; :'], capture_output=True)"
    with targets.python(code, tmp_path) as pid:
        wait_for(lambda: len(procfs.read_children(pid)) > 1, "the shell to start its child")
        _, descendant = procfs.read_children(pid)
        targets.wait_for_call(descendant, "sleeps")
        targets.stop(descendant)
        targets.wait_for_call(pid, "receives")
        (member,) = measured(targets.job_of([pid]))
        os.kill(descendant, signal.SIGKILL)
    assert member.waits.awaited is not None
    assert member.waits.awaited.name == f"its descendant {descendant} (sleep), which is stopped"


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


LIBC = (
    "import ctypes, os, socket\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x8000000)\n"  # CLONE_NEWIPC: no queue is left
)
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
    groups = targets.grouped(targets.job_of_pids([*ranks, pid])).groups
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
    assert clauses.describe_activity(group) == f"{by_child} the lock of {path} (held by pid {other.pid}, {comm})"
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


def test_rank_that_reads_its_standard_input_may_get_an_answer(tmp_path: Path) -> None:
    with spawn("sleep", "600") as other:
        pipe = f"os.open('/proc/{other.pid}/fd/1', os.O_RDONLY)"
        code = f"import os\nos.dup2({pipe}, 0)\nready()\nos.read(0, 1)"
        with targets.python(code, tmp_path) as pid:
            targets.wait_for_call(pid, "receives")
            (member,) = measured(targets.job_of_pids([pid]))
    assert member.signature is Signature.AWAITS_OUTSIDE, "a person may type, as behind `kubectl exec -i`"
