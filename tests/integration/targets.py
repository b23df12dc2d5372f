"""Real processes in every state that a dump may find, ready when they are yielded, and ended by their pids."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hangwatch import config
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture
from hangwatch.jobs import discovery
from hangwatch.model import Capture, Grouping, Job, ProcessId, Rank
from hangwatch.probes.base import procfs, system_calls
from hangwatch.probes.process import main_thread
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.stacks import activity
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict.diagnosis import Diagnosis
from tests.commands import rank_environ
from tests.conftest import identity, wait_for
from tests.dead_mount import dying_mount

QUICK = config.Capture(rounds=2, pause_seconds=0.2, dump_deadline_seconds=60.0)
USUAL = activity.load()

SLEEPING = "import time\ndef asleep():\n    ready()\n    time.sleep(600)\nasleep()"
SPINNING = "def spin():\n    ready()\n    while True:\n        pass\nspin()"
# The frames change all the time: a dump that does not pause its target often reads an inconsistent stack.
CHANGING = """
def deep(n):
    return deep(n - 1) + wide(n - 1) if n > 0 else 1
def wide(n):
    return sum(deep(n // 3) for _ in range(2)) if n > 0 else 1
ready()
while True:
    deep(9)
"""
# posix_spawn waits like vfork until its child executes. The child first opens a FIFO that has no writer.
IN_KERNEL = """
import os
def blocked_in_kernel():
    ready()
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, folder + "/fifo", os.O_RDONLY, 0)])
blocked_in_kernel()
"""
THREAD_IN_KERNEL = """
import ctypes, os, threading, time
def blocked_in_kernel():
    libc = ctypes.CDLL(None)  # lets go of the GIL, unlike os.posix_spawn
    actions = ctypes.create_string_buffer(256)
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 0, (folder + "/fifo").encode(), os.O_RDONLY, 0)
    argv = (ctypes.c_char_p * 2)(b"true", None)
    libc.posix_spawn(ctypes.byref(ctypes.c_int()), b"/bin/true", actions, None, argv, argv)
threading.Thread(target=blocked_in_kernel, daemon=True).start()
ready()
time.sleep(600)
"""
# A process that changes its user is not readable by that user: PR_SET_DUMPABLE in prctl(2). So with ptrace_scope=1.
_OF_USER = """
import os, time
ready()
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
def train_of_{uid}():
    time.sleep(6000)
train_of_{uid}()
"""
_ON_MOUNT = """
import os, time
def wait(name):
    while not os.path.exists(folder + name): time.sleep(0.02)
ready()
wait("/mounted")
data = os.open(folder + "/mnt/data", os.O_RDWR)
{before}
open(folder + "/opened", "w").close()
wait("/silent")
{then}
"""
# Not a Python function: a dump of a process that has just said it shows no frame of it.
_READY = "import functools, os\nfolder = {folder!r}\nready = functools.partial(os.mknod, folder + '/ready')\n"


def job_of_pids(pids: Sequence[int]) -> Job:
    """Return a job with these processes as ranks, and with their workers. A pid that is gone becomes a rank, too."""
    return discovery.job_of_pids(ProcessScan().processes(pids), pids)


@contextlib.contextmanager
def python(code: str, folder: Path, **environ: str) -> Iterator[int]:
    """Run `code`, which may use `folder`, in a new Python. Yield its pid when it has called `ready()`."""
    if not (folder / "fifo").exists():
        os.mkfifo(folder / "fifo")
    (folder / "ready").unlink(missing_ok=True)
    program = [sys.executable, "-c", _READY.format(folder=str(folder)) + code]
    child = subprocess.Popen(program, env={**os.environ, **environ}, start_new_session=True)
    try:
        wait_for((folder / "ready").exists, "the target to be ready")
        yield child.pid
    finally:
        with contextlib.suppress(OSError):  # ENXIO: no process waits at the FIFO
            os.close(os.open(folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=60)


@contextlib.contextmanager
def rank_of_user(uid: int, folder: Path, run_id: str) -> Iterator[int]:
    """Run the one rank of a job as user `uid`. Yield its pid when it is about to sleep in `train_of_UID`."""
    with python(_OF_USER.format(uid=uid), folder, **rank_environ(run_id)) as pid:
        wait_for(lambda: procfs.read_user_ids(pid) == (uid, uid, uid), "the user")
        yield pid


@contextlib.contextmanager
def on_silent_mount(folder: Path, then: str, *, first: str = "", before: str = "") -> Iterator[int]:
    """Run code with a file `data` of a mount: `first`, `before` the mount falls silent, and `then`. Yield the pid."""
    (folder / "content").write_bytes(bytes(1 << 20))
    with (
        python(first + _ON_MOUNT.format(before=before, then=then), folder) as pid,
        dying_mount(folder / "mnt", {"data": folder / "content"}) as die,
    ):
        (folder / "mounted").touch()
        wait_for((folder / "opened").exists, "the file to be open")
        die()
        (folder / "silent").touch()
        yield pid


@contextlib.contextmanager
def started(folder: Path, *programs: str, **environ: str) -> Iterator[list[int]]:
    """Run each program as `python` does, in FOLDER/0, FOLDER/1, ..., with a store at `STORE`. Yield their pids."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        environ = {"STORE": str(store.getsockname()[1]), **environ}
        folders = [folder / str(number) for number in range(len(programs))]
        for each in folders:
            each.mkdir()
        yield [
            stack.enter_context(python(program, each, **environ))
            for program, each in zip(programs, folders, strict=True)
        ]


def job_of(processes: Iterable[int | ProcessId], gpus: Iterable[str] = (), **facts: Any) -> Job:
    """Return a job with these processes as its ranks, in this order. `gpus`: the uuid of the GPU of each rank."""
    ranks = tuple(
        Rank(
            id=one if isinstance(one, ProcessId) else identity(one),
            rank=number,
            local_rank=number,
            gpu_uuids=(uuid,) if uuid else (),
        )
        for number, (one, uuid) in enumerate(zip_longest(processes, gpus))
    )
    usual = {"job_id": "x", "launcher": "plain", "launcher_id": None, "world_size": len(ranks), "share": "test"}
    return Job(**{**usual, "ranks": ranks, **facts})


def taken(job: Job, settings: config.Capture = QUICK, **more: Any) -> Capture:
    return capture(job, CaptureRequest(settings=settings, node="here", **more))


def grouped(job: Job, settings: config.Capture = QUICK, table: Table = Table(()), **more: Any) -> Grouping:  # noqa: B008
    """Capture the job. By default, function names do not matter: the table of activities is empty."""
    return group_ranks(taken(job, settings, **more), table, settings)


def diagnosed(job: Job, settings: config.Capture = QUICK, table: Table = USUAL, **more: Any) -> Diagnosis:
    """Capture the job and judge it."""
    return diagnose_job(job, CaptureRequest(settings=settings, node="here", **more), table)


def state(pid: int) -> str:
    """Return the state letter of a process, as in proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def scheduled(pid: int) -> tuple[float, float]:
    """Return two times of the main thread, in seconds: running, and runnable without a core."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def futex_call(pid: int) -> tuple[int, int] | None:
    """Return the stack pointer and instruction pointer of a main thread that sleeps in futex(2), else None."""
    fields = Path(f"/proc/{pid}/syscall").read_text().split()
    is_futex = len(fields) == 9 and system_calls.names_by_number().get(int(fields[0])) == "futex"
    return (int(fields[7], 16), int(fields[8], 16)) if is_futex else None


def wait_for_state(pid: int, letter: str) -> None:
    """Wait until the kernel shows the state `letter`."""
    wait_for(lambda: state(pid) == letter, f"state {letter} of {pid}")


def wait_until_blocked(pid: int) -> None:
    """Wait until all threads of a process sleep, and none of them runs between two looks."""

    def threads() -> dict[str, str]:
        return {task.name: (task / "schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}

    def are_blocked() -> bool:
        before = threads()
        return {state(int(thread)) for thread in before} == {"S"} and threads() == before

    wait_for(are_blocked, f"all threads of {pid} to sleep")


def wait_for_call(pid: int, kind: str) -> None:
    """Wait until the main thread is in a system call of this kind or name. The program must call `ready()` before."""

    def is_in_call() -> bool:
        call = main_thread.read_call(pid, procfs.PROC)
        return call is not None and kind in (call.kind, call.name)

    wait_for(is_in_call, f"a call {kind!r} of {pid}")


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until the process is stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
