"""Targets of the system calls in which real processes are blocked: files, pipes, peers, locks, dead file systems."""

import contextlib
import fcntl
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
from hangwatch.model import CallTarget, KernelCall, MainThread, ProcessDump, Worker
from hangwatch.probes.base import procfs
from hangwatch.probes.network import sockets
from hangwatch.probes.process import blocked_call, main_thread
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.verdict.wording.next_steps import next_step
from tests.commands import spawn
from tests.conftest import identity, wait_for
from tests.dead_mount import dead_mount
from tests.integration import targets

RECEIVES = "import socket\none = socket.create_connection(('127.0.0.1', {number}))\nready()\none.recv(1)"
FLOCK = "import fcntl\nlock = open(folder + '/the.lock', 'r+')\nready()\nfcntl.flock(lock, fcntl.LOCK_EX)"
POLLS = "import os, select\nboth = select.poll()\n"
POLLS += "for _ in range(2): both.register(os.pipe()[0], select.POLLIN)\nready()\nboth.poll()"
CHILD = "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\nready()\nos.waitpid(child.pid, 0)"


def read_call(pid: int, name: str, kin: tuple[int, ...] = ()) -> KernelCall:
    """Wait until `pid` is blocked in the call `name`. Return it with its target. `kin` are related pids."""
    targets.wait_for_call(pid, name)
    found = blocked_call_of(pid, pid, kin)
    assert found is not None
    return found


def blocked_call_of(
    pid: int, dumped_pid: int, kin: tuple[int, ...] = (), cpu_seconds: float = 60.0
) -> KernelCall | None:
    """Return the blocked call of process `pid`, with dumps in which it was in the call of process `dumped_pid`."""
    call = main_thread.read_call(dumped_pid, procfs.PROC)
    dumps = [ProcessDump(taken_monotonic_seconds=0.0, main=MainThread(call=call))] * 2
    return blocked_call.read(pid, dumps, kin, blocked_call.Strangers((), procfs.PROC, cpu_seconds))


def _reads(pid: int, descriptor: int) -> bool:
    call = main_thread.read_call(pid, procfs.PROC)
    return call is not None and call.name == "read" and call.descriptors == (descriptor,)


def test_pipe_is_reported_with_the_process_at_its_other_end(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with spawn(sys.executable, "-c", f"import os\nos.read({read_end}, 1)", pass_fds=[read_end]) as child:
        wait_for(lambda: _reads(child.pid, read_end), "the target to read its pipe")
        found = read_call(child.pid, "read")
    os.close(read_end)
    os.close(write_end)
    (pipe,) = found.behind
    assert (found.says, found.rounds, pipe.kind, pipe.other_pid) == ("read() on", 2, "pipe", os.getpid())
    assert pipe.other_comm


def test_a_connection_is_told_with_its_peer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with targets.python(RECEIVES.format(number=port), tmp_path) as pid, listening.accept()[0]:
            (peer,) = read_call(pid, "recvfrom").behind
    assert (peer.kind, peer.what) == ("connection", f"127.0.0.1 port {port}")
    assert (peer.other_pid, peer.is_lost) == (os.getpid(), False)


def test_file_lock_is_reported_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "the.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with targets.python(FLOCK, tmp_path) as pid:
            found = read_call(pid, "flock")
    assert (found.file_lock.path, found.file_lock.holder_pid) == (str(path), os.getpid())


def test_of_many_descriptors_a_few_are_told(tmp_path: Path) -> None:
    with targets.python(POLLS, tmp_path) as pid:
        found = read_call(pid, "poll")
        assert found.descriptors == 2
        assert [(one.kind, one.other_pid) for one in found.behind] == [("pipe", pid)] * 2, "it has both ends itself"


def test_a_child_is_told(tmp_path: Path) -> None:
    with targets.python(CHILD, tmp_path) as pid:
        found = read_call(pid, "wait4")
        assert (found.child_pid, found.child_comm) == (procfs.read_children(pid)[0], "sleep")


def test_what_a_path_is_called_is_absolute_bounded_and_printable(tmp_path: Path) -> None:
    """Block a process at a FIFO in its working directory that has a hostile name and no writer."""
    code = "import os\nos.chdir(folder)\nname = './a\\n\\x1b[31m' + 'b' * 220\nos.mkfifo(name)\nready()\nopen(name)"
    with targets.python(code, tmp_path) as pid:
        found = read_call(pid, "openat")
        assert found.path.startswith(f"{tmp_path}/a\\n\\x1b[31mb")
        assert found.path.isprintable() and len(found.path) <= 200
        assert found.behind == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_file_of_a_silent_file_system_is_told_and_not_touched(tmp_path: Path) -> None:
    """Take the path from /proc only: any access to the file or its folder would block."""
    with targets.on_silent_mount(tmp_path, "os.read(data, 9)") as pid:
        found = read_call(pid, "read")
    assert found.behind == (
        CallTarget(kind="file", what=f"{tmp_path}/mnt/data", mount=f"{tmp_path}/mnt (fuse.deadfs)", is_remote=True),
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_path_on_a_dead_file_system_is_told_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    code = f"ready()\nopen({str(tmp_path / 'mnt/shard-3')!r})"
    with dead_mount(tmp_path / "mnt"), targets.python(code, tmp_path) as pid:
        assert read_call(pid, "openat").path == f"{tmp_path}/mnt/shard-3"


def test_searches_of_a_job_find_its_own_processes_before_those_outside() -> None:
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:

        def start(stdin: int, stdout: int) -> int:
            process = stack.enter_context(subprocess.Popen(["sleep", "600"], stdin=stdin, stdout=stdout))
            stack.callback(process.kill)
            return process.pid

        outside = start(subprocess.DEVNULL, write_end)
        readers = [start(read_end, subprocess.DEVNULL) for _ in range(2)]
        sibling = start(read_end, write_end)
        os.close(read_end)
        os.close(write_end)

        def found_by(pids: list[int], cpu_seconds: float = 60.0) -> list[tuple[str, int] | None]:
            def holding(link: str, _is_written: bool) -> list[int]:
                return [pid for pid in pids if link in (sockets.descriptors(pid, procfs.PROC) or {}).values()]

            job = blocked_call.JobHolders(pids, holding, blocked_call.Strangers(pids, procfs.PROC, cpu_seconds))
            return [search(pid, job) for pid in pids]

        def search(pid: int, job: blocked_call.JobHolders) -> tuple[str, int] | None:
            try:
                return blocked_call.find_other_process(pid, 0, job, procfs.PROC)
            except LookupError:
                return ("unknown", pid)

        assert found_by(readers) == [("pipe", outside)] * 2
        assert found_by(readers, 0.0) == [("unknown", pid) for pid in readers]
        assert found_by([*readers, sibling]) == [*[("pipe", sibling)] * 2, ("pipe", outside)]


def test_own_pipe_is_told_only_after_a_whole_search(tmp_path: Path) -> None:
    with targets.python("import os\nback, forth = os.pipe()\nready()\nos.read(back, 1)", tmp_path) as pid:
        assert [target.other_pid for target in read_call(pid, "read").behind] == [pid]
        found = blocked_call_of(pid, pid, cpu_seconds=0.0)
    assert [target.other_pid for target in found.behind] == [None]


def test_process_that_has_continued_has_no_blocked_call() -> None:
    assert blocked_call_of(os.getpid(), 1) is None
    assert blocked_call_of(4_000_000, 1) is None


TABLE = activity.load((config.ActivityRule(activity="collective_wait", function="all_wait", file="<string>"),))
WAITS = "import os\nback, forth = os.pipe()\ndef all_wait():\n    ready()\n    os.read(back, 1)\nall_wait()"
READS = "import os\ndef read_shard():\n    ready()\n    open(folder + '/fifo').read()\nread_shard()"


LOADER_TABLE = activity.load(
    (
        config.ActivityRule(activity="collective_wait", function="all_wait", file="<string>"),
        config.ActivityRule(activity="data_loading", function="next_batch", file="<string>"),
    )
)


def looked_at(pids: list[int], *loaders: int, table: activity.Table = TABLE) -> Diagnosis:
    """Capture these ranks. The last rank has these loader workers."""
    *others, last = (job := targets.job_of(pids, job_key="x")).ranks
    workers = tuple(Worker(id=identity(pid), comm="pt_data_worker") for pid in loaders)
    job = replace(job, ranks=(*others, replace(last, workers=workers)))
    return targets.diagnosed(job, targets.QUICK, table)


def test_verdict_has_the_blocked_call_of_the_named_rank_only(tmp_path: Path) -> None:
    with targets.started(tmp_path, WAITS, WAITS, WAITS, READS) as pids:
        odd = pids[3]
        targets.wait_for_call(odd, "openat")
        look = looked_at(pids)
    assert [rank.pid for rank in look.verdict.named] == [odd]
    calls = {member.id.pid: member.kernel.call for member in look.grouping.members}
    assert [pid for pid, call in calls.items() if call is not None] == [odd]
    said = f"is in openat() on {tmp_path}/3/fifo, in each of 2 rounds"
    assert said in look.verdict.message
    assert look.verdict.next_step.startswith(f"look at {tmp_path}/3/fifo: ")
    assert any(vote.kind == "system_call" and said in vote.message for vote in look.verdict.evidence)


@pytest.mark.parametrize("last", [1, 2])
def test_last_of_few_ranks_blocked_on_a_file_is_named(tmp_path: Path, last: int) -> None:
    with targets.started(tmp_path, *[WAITS] * last, READS) as (*waiting, odd):
        targets.wait_for_call(odd, "openat")
        verdict = looked_at([*waiting, odd]).verdict
    assert [rank.pid for rank in verdict.named] == [odd]
    assert next_step(verdict).startswith(f"look at {tmp_path}/{last}/fifo: ")
    assert verdict.stuck_on == f'open("{tmp_path}/{last}/fifo") in rank {last} (here, pid {odd})'
    assert f"is in openat() on {tmp_path}/{last}/fifo" in verdict.message


# py-spy derives the name of a file in a package from the start of the package's path.
LOADS = (
    "import multiprocessing, multiprocessing.connection, os, pathlib\n"
    "package = pathlib.Path(folder, 'torch/utils/data/_utils')\npackage.mkdir(parents=True)\n"
    "for place in (package, *package.parents[:3]): (place / '__init__.py').touch()\n"
    'shard = "def read_shard(path):\\n    open(path).read()"\n'
    "exec(compile(shard, folder + '/train.py', 'exec'))\n"
    "loop = \"def serve(results):\\n    read_shard(folder + '/fifo')\"\n"
    "exec(compile(loop, folder + '/torch/utils/data/_utils/worker.py', 'exec'))\n"
    "def next_batch(results):\n    return results.recv()\n"
    "back, forth = multiprocessing.Pipe(False)\n"
    "worker = multiprocessing.get_context('fork').Process(target=serve, args=(forth,))\nworker.start()\n"
    "open(folder + '/worker', 'w').write(str(worker.pid))\nready()\nnext_batch(back)"
)


def test_of_a_rank_that_waits_for_its_worker_the_call_of_the_worker_is_told(tmp_path: Path) -> None:
    """Name the file in the verdict, because the user has to repair it."""
    odd = tmp_path / "3"
    with targets.started(tmp_path, WAITS, WAITS, WAITS, LOADS) as pids:
        worker = int((odd / "worker").read_text())
        targets.wait_for_call(worker, "openat")
        look = looked_at(pids, worker, table=LOADER_TABLE)
        os.kill(worker, signal.SIGKILL)
    assert [rank.pid for rank in look.verdict.named] == pids[3:]
    assert f"its worker (pid {worker}) is in openat() on {odd}/fifo, in each of 2 rounds" in look.verdict.message
    assert look.verdict.stuck_on.startswith(f'open("{odd}/fifo") in pid {worker}, data-loader worker of ')


CONNECTED = "import os, socket\nkept = socket.create_connection(('127.0.0.1', int(os.environ['STORE'])))\n"
LOGS = """
pipe = os.open({path!r}, os.O_WRONLY)
def write_logs():
    ready()
    while True:
        os.write(pipe, bytes(4096))
write_logs()
"""


@contextlib.contextmanager
def three_ranks(code: str, call: str, folder: Path) -> Iterator[list[int]]:
    """Start three ranks that run this code, connected to a store; yield their pids once they are in this call."""
    with targets.started(folder, *[CONNECTED + code] * 3) as pids:
        for pid in pids:
            targets.wait_for_call(pid, call)
        yield pids


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped reader", "reader that does not read"])
def test_call_of_one_rank_is_reported_if_all_ranks_are_blocked_alike(is_stopped: bool, tmp_path: Path) -> None:
    """All ranks write to one pipe, which is full: for example the standard output that they share, through `tee`."""
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE) as reader, contextlib.ExitStack() as stack:
        stack.callback(reader.kill)
        logs = LOGS.format(path=f"/proc/{reader.pid}/fd/0")
        pids = stack.enter_context(three_ranks(logs, "write", tmp_path))
        if is_stopped:
            targets.stop(reader.pid)
        verdict = looked_at(pids).verdict
    assert (verdict.named, verdict.check_first) == ((), ())
    state = ", stopped" if is_stopped else ""
    assert f"is blocked in write() to a pipe that pid {reader.pid} (sleep{state}) reads." in verdict.message
    assert "--native" not in verdict.message
    assert [one.kind for one in verdict.evidence].count("system_call") == 1


@pytest.mark.parametrize("have_ended", [True, False], ids=["the others have ended", "the others poll"])
def test_rank_blocked_in_open_is_checked_first(tmp_path: Path, have_ended: bool) -> None:
    polls = "import time\nready()\nwhile True: time.sleep(0.1)"
    with targets.started(tmp_path, *[CONNECTED + code for code in (polls, polls, READS)]) as pids:
        targets.wait_for_call(pids[2], "openat")
        for pid in pids[:2] if have_ended else ():
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not procfs.read_thread_states(pid).strip("ZX"), "the rank to end")
        verdict = looked_at(pids).verdict
    assert ([rank.rank for rank in verdict.named], [rank.rank for rank in verdict.check_first]) == ([], [2])
    why = f"{'all other ranks have ended, and ' * have_ended}it is blocked in a call that no rank ends"
    assert f"first: {why}." in verdict.message
    assert verdict.next_step.startswith(f"look at {tmp_path}/2/fifo: ")
    assert "Look again" not in verdict.message


def test_path_is_reported_if_all_ranks_are_blocked_in_open(tmp_path: Path) -> None:
    with three_ranks(READS, "openat", tmp_path) as pids:
        verdict = looked_at(pids).verdict
    assert f"is blocked in openat() on {tmp_path}/0/fifo." in verdict.message
