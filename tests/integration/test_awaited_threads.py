"""Real ranks with a main thread that waits for another thread: what counts is the wait of that thread."""

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import GpuSources
from hangwatch.model import GpuLevels, GpuSample, GpuSweep, Job, Signature, SystemCall
from hangwatch.probes.base import procfs
from hangwatch.probes.process import blocked_call, main_thread
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from tests.conftest import wait_for
from tests.integration import targets
from tests.servers import silent_server

RANKS = 4
MEETS = (config.ActivityRule(activity="collective_wait", function="meet"),)
BEGIN = """
import asyncio, os, socket, sys, threading
from pathlib import Path
from tests.jobs import library_threads
store = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
if os.environ["LIBRARIES"] == "all":
    library_threads.start_all(Path(folder))
else:
    library_threads.start_loop_and_server()
"""
MEET = """
def meet():
    ready()
    threading.Event().wait()
meet()
"""
BEHIND_GPU = """
import hashlib
def read_loss():
    ready()
    os.nice(19)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", (1 << 31) - 1)
read_loss()
"""
OPENS = """
def read_shard():
    ready()
    os.open(folder + "/fifo", os.O_RDONLY)
"""
ASKS = """
def read_shard():
    with socket.create_connection(("127.0.0.2", int(os.environ["SERVER"]))) as server:
        ready()
        server.recv(1)
"""
POOL = """
import concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor(2)
def step():
    pool.submit(read_shard).result()
step()
"""
ALIKE = """
import concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor(4)
def step():
    concurrent.futures.wait([pool.submit(read_shard) for _ in range(4)])
step()
"""
QUEUE = """
import queue
batches, orders = queue.Queue(), queue.Queue()
def write_logs():
    orders.get()
threading.Thread(target=write_logs, daemon=True).start()
threading.Thread(target=read_shard, daemon=True).start()
def step():
    batches.get()
step()
"""
JOIN = """
reader = threading.Thread(target=read_shard, daemon=True)
reader.start()
def step():
    reader.join()
step()
"""
THREADS = """
import multiprocessing.pool
def step():
    multiprocessing.pool.ThreadPool(2).apply(read_shard)
step()
"""
ENDED = """
threading.Thread(target=read_shard).start()
"""
LOOP = """
async def step():
    await asyncio.get_running_loop().run_in_executor(None, read_shard)
asyncio.run(step())
"""
DIFFER = (
    """
import time
def report():
    while True:
        time.sleep(600)
threading.Thread(target=report, daemon=True).start()
"""
    + JOIN
)
CHILD = """
async def step():
    child = await asyncio.create_subprocess_exec("sleep", "600")
    open(folder + "/child", "w").write(str(child.pid))
    ready()
    await child.wait()
asyncio.run(step())
"""
WAYS = {"pool": POOL, "pool of four": ALIKE, "queue": QUEUE, "join": JOIN, "thread pool": THREADS, "event loop": LOOP}
WAYS |= {"main thread has ended": ENDED}


def in_call(pid: int, kind: str) -> bool:
    """True if any thread of a process is in a system call of this kind or name."""
    threads = (pid, *main_thread.list_other_threads(pid, procfs.PROC, 64))
    calls = (main_thread.read_call(pid, procfs.PROC, thread) for thread in threads)
    return any(call is not None and kind in (call.kind, call.name) for call in calls)


@contextlib.contextmanager
def job(odd: str, others: str, folder: Path, **environ: str) -> Iterator[Job]:
    """Start a job; rank 0 runs `odd`, and `others` is run by all others. Each is at its blocking call, or right before."""
    programs = [f"exec(compile({BEGIN + code!r}, folder + '/train.py', 'exec'))" for code in (odd, others)]
    programs += programs[1:] * (RANKS - 2)
    with targets.started(folder, *programs, **{"LIBRARIES": "some", **environ}) as pids:
        yield targets.job_of(pids, (f"GPU-{number}" for number in range(RANKS)))


def looked_at(job: Job, *, have_gpus: bool = False) -> Diagnosis:
    """Capture a job, with GPUs like a daemon: that of rank 0 is idle, and those of all others run a kernel."""
    gpus = tuple(
        GpuSample(index=n, uuid=f"GPU-{n}", power_watts=120.0, utilization_ratio=1.0 if n else 0.0)
        for n in range(RANKS)
    )
    sweep = GpuSweep(taken_monotonic_seconds=0.0, taken_unix_seconds=0.0, gpus=gpus)
    limits = config.Capture(rounds=3, pause_seconds=0.5, dump_deadline_seconds=60.0)
    levels = {gpu.uuid: GpuLevels(floor_watts=70.0, busy_watts=400.0) for gpu in gpus}
    sources = GpuSources(read_sweep=lambda: sweep, levels=levels) if have_gpus else GpuSources()
    return targets.diagnosed(job, limits, activity.load(MEETS), gpus=sources)


def looked_at_call(name: str, odd: str, others: str, folder: Path, **environ: str) -> Diagnosis:
    """Return the diagnosis of a job after rank 0 has begun a system call of this name. The other ranks may have GPUs."""
    with job(odd, others, folder, **environ) as started:
        wait_for(lambda: in_call(started.ranks[0].id.pid, name), f"rank 0 to be in {name}")
        return looked_at(started, have_gpus=others is BEHIND_GPU)


def with_libraries(*ways: str, quick: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test for each of these ways, with some libraries and with all; `make test` runs the `quick` pairs."""
    pairs = list(itertools.product(ways, ("some", "all")))
    marks = [[] if pair in quick else [pytest.mark.series] for pair in pairs]
    rows = [pytest.param(*pair, marks=mark, id=" with ".join(pair)) for pair, mark in zip(pairs, marks, strict=True)]
    return pytest.mark.parametrize(("way", "libraries"), rows)


@with_libraries(*WAYS, quick=[("pool", "some"), ("queue", "some")])
def test_rank_with_thread_blocked_in_open_is_named(way: str, libraries: str, tmp_path: Path) -> None:
    look = looked_at_call("openat", OPENS + WAYS[way], BEHIND_GPU, tmp_path, LIBRARIES=libraries)
    member = look.grouping.members[[one.id.rank for one in look.grouping.members].index(0)]
    assert member.signature is Signature.BLOCKED, look.verdict.message
    assert [rank.rank for rank in look.verdict.named] == [0], look.verdict.message
    assert member.kernel.call is not None and member.kernel.call.thread
    assert f"is in openat() on {tmp_path}/0/fifo, in each of 3 rounds" in look.verdict.message
    assert "read_shard" in look.verdict.message


@with_libraries(*WAYS, quick=[("pool", "some"), ("event loop", "all")])
def test_rank_with_thread_that_asks_a_server_is_not_known_to_be_stuck(way: str, libraries: str, tmp_path: Path) -> None:
    with silent_server() as port:
        environ = {"SERVER": str(port), "LIBRARIES": libraries}
        look = looked_at_call("recvfrom", ASKS + WAYS[way], MEET, tmp_path, **environ)
    by_rank = {member.id.rank: member for member in look.grouping.members}
    assert by_rank[0].signature is Signature.AWAITS_OUTSIDE, look.verdict.message
    assert [by_rank[number].signature for number in (1, 2, 3)] == [Signature.BLOCKED] * 3
    assert [rank.rank for rank in look.verdict.named] in ([], [0])


METRICS = """
import time
def write_metrics():
    with open(os.devnull, "wb", buffering=0) as file:
        while True:
            file.write(bytes(20_000))
            time.sleep(0.1)
threading.Thread(target=write_metrics, daemon=True).start()
"""
READS = """
import subprocess
feed = "while head -c 50000 /dev/zero; do sleep 0.1; done"
def read_shard():
    with subprocess.Popen(["sh", "-c", feed], stdout=subprocess.PIPE) as child:
        ready()
        while os.read(child.stdout.fileno(), 65536): pass
"""


@with_libraries("pool", quick=[("pool", "all")])
def test_bytes_of_a_thread_that_is_not_awaited_do_not_hide_a_hang(way: str, libraries: str, tmp_path: Path) -> None:
    look = looked_at_call("openat", METRICS + OPENS + WAYS[way], METRICS + MEET, tmp_path, LIBRARIES=libraries)
    member = next(one for one in look.grouping.members if one.id.rank == 0)
    assert member.signature is Signature.BLOCKED, look.verdict.message
    assert [rank.rank for rank in look.verdict.named] == [0], look.verdict.message


@with_libraries("pool", quick=[("pool", "some")])
def test_bytes_of_the_awaited_thread_are_motion(way: str, libraries: str, tmp_path: Path) -> None:
    with job(READS + WAYS[way], MEET, tmp_path, LIBRARIES=libraries) as started:
        look = looked_at(started)
    member = next(one for one in look.grouping.members if one.id.rank == 0)
    assert member.signature is Signature.TRANSFERS, look.verdict.message
    assert look.verdict.named == ()


# Clients of object stores read in compiled threads, which have no Python stack.
READER = """
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>
static sem_t done;
static void *read_on(void *path) {
    static char part[50000];
    int file = open(path, O_RDONLY);
    while (read(file, part, sizeof part) > 0) usleep(100000);
    return 0;
}
void read_shard(const char *path) {
    pthread_t thread;
    sem_init(&done, 0, 0);
    pthread_create(&thread, 0, read_on, (void *)path);
    sem_wait(&done);
}
"""
NATIVE = """
import ctypes
reader = ctypes.CDLL(os.environ["READER"])
path = os.environ["SHARD"].encode()
def step():
    ready()
    reader.read_shard(path)
step()
"""


@pytest.mark.parametrize("libraries", ["some", pytest.param("all", marks=pytest.mark.series)])
@pytest.mark.parametrize(("shard", "expected"), [("/dev/zero", Signature.TRANSFERS), ("fifo", Signature.BLOCKED)])
def test_bytes_of_a_native_thread_are_motion(shard: str, expected: Signature, libraries: str, tmp_path: Path) -> None:
    """The main thread waits in futex(2) for a compiled thread that reads 500 kB/s, or that opens a FIFO."""
    made = tmp_path / "reader.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-xc", "-", "-o", made], input=READER.encode(), check=True)
    environ = {"READER": str(made), "SHARD": str(tmp_path / "0" / shard), "LIBRARIES": libraries}
    with job(NATIVE, MEET, tmp_path, **environ) as started:
        wait_for(lambda: targets.futex_call(started.ranks[0].id.pid), "the main thread to wait")
        look = looked_at(started)
    by_rank = {member.id.rank: member.signature for member in look.grouping.members}
    assert by_rank == {0: expected, 1: Signature.BLOCKED, 2: Signature.BLOCKED, 3: Signature.BLOCKED}
    assert "still progresses" in look.verdict.message or expected is Signature.BLOCKED
    assert [rank.rank for rank in (*look.verdict.named, *look.verdict.check_first)] == [0], look.verdict.message


BUILTIN = POOL.replace("submit(read_shard)", 'submit(os.open, folder + "/fifo", os.O_RDONLY)')
NO_THREAD = "read_shard()"
OWN_PIPE = """
back, forth = os.pipe()
def read_shard():
    ready()
    os.read(back, 1)
"""
FIFO_OF_OTHERS = """
def read_shard():
    ready()
    os.read(os.open(os.environ["SHARED"], os.O_RDONLY), 1)
"""
WRITES_FIFO = 'shared = os.open(os.environ["SHARED"], os.O_RDWR)\n'


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("ready()" + BUILTIN, id="builtin function in a pool"),
        pytest.param(OPENS + POOL, id="pool"),
        pytest.param(OPENS + JOIN, id="join", marks=pytest.mark.series),
        pytest.param(OPENS + NO_THREAD, id="main thread", marks=pytest.mark.series),
    ],
)
def test_rank_to_check_first_is_named_if_the_kernel_shows_it_blocked_on_a_file(way: str, tmp_path: Path) -> None:
    look = looked_at_call("openat", way, MEET, tmp_path)
    assert [rank.rank for rank in look.verdict.named] == [0], look.verdict.message
    assert f"is in openat() on {tmp_path}/0/fifo, in each of 3 rounds" in look.verdict.message


def test_rank_with_thread_at_a_pipe_of_a_rank_is_only_checked_first(tmp_path: Path) -> None:
    """A thread of rank 0 reads a pipe of its own, into which another thread may write, or a FIFO of the other ranks."""
    os.mkfifo(tmp_path / "shared")
    for program, others in ((OWN_PIPE, MEET), (FIFO_OF_OTHERS, WRITES_FIFO + MEET)):
        folder = tmp_path / str(len(others))
        folder.mkdir()
        look = looked_at_call("read", program + POOL, others, folder, SHARED=str(tmp_path / "shared"))
        assert look.verdict.named == (), look.verdict.message
        assert [rank.rank for rank in look.verdict.check_first] == [0], look.verdict.message


def test_threads_that_differ_are_both_reported_and_no_rank_is_named(tmp_path: Path) -> None:
    look = looked_at_call("openat", OPENS + DIFFER, MEET, tmp_path)
    by_rank = {member.id.rank: member for member in look.grouping.members}
    assert by_rank[0].signature is Signature.UNKNOWN
    assert look.verdict.named == ()
    assert [rank.rank for rank in look.verdict.check_first] == [0]
    assert "read_shard" in look.verdict.message and "report" in look.verdict.message


def test_rank_that_awaits_a_child_in_an_event_loop_awaits_that_child(tmp_path: Path) -> None:
    with job(CHILD, MEET, tmp_path) as started:
        pid = started.ranks[0].id.pid
        wait_for(lambda: in_call(pid, "awaits_child") or in_call(pid, "epoll_wait"), "rank 0 to wait for its child")
        look = looked_at(started)
        os.kill(int((tmp_path / "0" / "child").read_text()), signal.SIGKILL)
    by_rank = {member.id.rank: member for member in look.grouping.members}
    assert by_rank[0].signature is Signature.AWAITS_OUTSIDE, look.verdict.message
    group = next(group for group in look.grouping.groups if group.members[0].id.rank == 0)
    assert (group.activity, group.waits_for) == ("subprocess", "nothing")


def test_rank_that_awaits_a_stopped_child_in_an_event_loop_is_named(tmp_path: Path) -> None:
    with job(CHILD, MEET, tmp_path) as started:
        child = int((tmp_path / "0" / "child").read_text())
        targets.stop(child)
        look = looked_at(started)
        os.kill(child, signal.SIGKILL)
    by_rank = {member.id.rank: member for member in look.grouping.members}
    assert by_rank[0].signature is Signature.BLOCKED, look.verdict.message
    assert [rank.rank for rank in look.verdict.named] == [0], look.verdict.message
    assert f"its child {child} (sleep)" in look.verdict.message


WRITES_BESIDE = """
import concurrent.futures, os, socket, threading
store = socket.create_connection(("127.0.0.1", int(os.environ["STORE"])))
pool = concurrent.futures.ThreadPoolExecutor(1)
writes = threading.Event()
def write_shard():
    writes.set()
    if folder.endswith("/2"):
        os.open(folder + "/fifo", os.O_RDONLY)
def meet():
    writes.wait()
    ready()
    threading.Event().wait()
def step():
    written = pool.submit(write_shard)
    meet()
step()
"""


def test_rank_with_executor_thread_stuck_in_user_code_is_checked_first(tmp_path: Path) -> None:
    """The main threads of all ranks wait in the same call. Rank 2 has a blocked thread for which none waits."""
    program = f"exec(compile({WRITES_BESIDE!r}, folder + '/train.py', 'exec'))"
    with targets.started(tmp_path, *[program] * RANKS) as pids:
        verdict = looked_at(targets.job_of(pids, world_size=8)).verdict
    assert verdict.named == ()
    assert [look.rank for look in verdict.check_first] == [2]
    assert "write_shard" in verdict.check_first[0].why
    assert "all 4 ranks" in verdict.message and "Check rank 2" in verdict.message


def test_poll_of_a_pidfd_is_a_wait_for_that_child() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        descriptor = os.pidfd_open(child.pid)
        call = SystemCall(number=0, name="epoll_wait", kind="receives", descriptors=(0, descriptor))
        found = blocked_call.follow_child(os.getpid(), call, procfs.PROC)
        os.close(descriptor)
        child.kill()
    assert found is not None and (found.kind, found.child) == ("awaits_child", child.pid)
