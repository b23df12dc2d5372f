"""The jobs of tests/data/waitfor.toml. Each line of stdin is a job: `{"name": ..., "folder": ..., "environ":
{...}}`.

One process imports torch, and all jobs and their ranks are forked from it: the import is most of the cost of a
short job. The program prints the pid of the job's first process and ends when its stdin ends. The pids of the ranks
are in FOLDER/pids. Each rank writes FOLDER/at-<rank> right before its blocking call. gloo uses loopback. A job ends
by itself.

With DUMPS in the environment, a rank writes FOLDER/dumps/fr_rank_<rank> each time FOLDER/ask changes. This is
torch's own dump: a pickle for even ranks, JSON for odd ranks.
"""

import asyncio
import concurrent.futures
import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

FOLDER = Path()
FOREVER = 3600
LIFETIME_SECONDS = 400
_CLONE_NEWNET = 0x40000000


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def mark_arrival() -> None:
    path = FOLDER / f"at-{os.environ['RANK']}.new"
    path.write_text("here")
    path.rename(FOLDER / f"at-{os.environ['RANK']}")


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)


def reduce(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(int(os.environ.get("NUMBERS", "4"))), group=group)


def later(group: dist.ProcessGroup | None = None) -> dist.Work:
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    return work


def steps(count: int, group: dist.ProcessGroup | None = None) -> None:
    for _ in range(count):
        reduce(group)


def prepare_batch() -> None:
    """Block in the program's own code."""
    mark_arrival()
    time.sleep(FOREVER)


LOCK = threading.Lock()


def read_metrics() -> None:
    """Wait for a lock that another thread of this rank holds forever."""
    LOCK.acquire()
    mark_arrival()
    with LOCK:
        pass


def read_shard() -> None:
    """Read from a pipe without a writer. For the reader, another rank may be the missing writer."""
    out, _ = os.pipe()
    mark_arrival()
    os.read(out, 1)


def pairs(name: str) -> dist.ProcessGroup:
    """Return this rank's group of two: 0 and 1, 2 and 3, ..."""
    made = [dist.new_group([first, first + 1], group_desc=name) for first in range(0, world(), 2)]
    return made[rank() // 2]


def halves(name: str) -> dist.ProcessGroup:
    """Return the group of the even ranks in an even rank, and the group of the odd ranks in an odd rank."""
    made = [dist.new_group(list(range(first, world(), 2)), group_desc=name) for first in range(2)]
    return made[rank() % 2]


# --- a rank that does not join ---------------------------------------------------------------------------------------


def in_thread(task: Callable[[], None]) -> Callable[[], None]:
    """Return a function that waits for a task of its executor."""
    return lambda: concurrent.futures.ThreadPoolExecutor(1).submit(task).result()


def before_reduce(
    count: int, blocked: dict[int, Callable[[], None]], prepare: Callable[[], object] | None = None
) -> None:
    """Make some steps. Then each rank in `blocked` blocks in its function, and the others wait for it."""
    if prepare:
        prepare()
    steps(count)
    if rank() in blocked:
        blocked[rank()]()
    mark_arrival()
    reduce()


def collective_in_threads() -> None:
    """Rank 1 is in its own code; the others wait for tasks that wait for it by `work.wait()`, without a frame."""
    steps(5)
    if rank() == 1:
        prepare_batch()
    mark_arrival()
    concurrent.futures.ThreadPoolExecutor(1).submit(wait_for_gradients).result()


def training_in_threads() -> None:
    """Train in a thread for which the main thread waits. Rank 2 blocks in that thread."""
    in_thread(lambda: before_reduce(5, {2: prepare_batch}))()


def training_beside_a_server() -> None:
    """Train in a thread, while the main thread waits for clients. Rank 2 blocks in that thread."""
    threading.Thread(target=before_reduce, args=[5, {2: open_fifo}], daemon=True).start()
    socket.create_server(("127.0.0.1", 0)).accept()


def wait_for_gradients() -> None:
    later().wait()


async def await_event() -> None:
    mark_arrival()
    await asyncio.Event().wait()


def begin_metrics() -> None:
    """Start a second thread that writes 200 kB/s."""
    threading.Thread(target=write_metrics, daemon=True).start()


def open_fifo() -> None:
    """Open a FIFO without a writer."""
    os.mkfifo(FOLDER / "shard")
    mark_arrival()
    (FOLDER / "shard").read_bytes()


def write_metrics() -> None:
    with Path(os.devnull).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(20_000))
            time.sleep(0.1)


def read_slowly() -> None:
    """Read 500 kB/s."""
    mark_arrival()
    with Path("/dev/zero").open("rb", buffering=0) as file:
        while True:
            file.read(50_000)
            time.sleep(0.1)


def ask_server() -> None:
    """Wait for a server outside the job."""
    with socket.create_connection(("127.0.0.2", int(os.environ["SERVER"]))) as server:
        mark_arrival()
        server.recv(1)


def checkpoint_at_fifo() -> None:
    """Save a checkpoint in the background. The file of rank 1 is a FIFO without a reader."""
    folder = FOLDER / "checkpoint"
    if rank() == 1:
        folder.mkdir()
        os.mkfifo(folder / "__1_0.distcp")
    steps(5)
    save_checkpoint(checkpoint.FileSystemWriter(folder))


def slow_checkpoint() -> None:
    """Save a checkpoint in the background. Rank 1 writes 500 kB/s."""
    steps(5)
    save_checkpoint((SlowWriter if rank() == 1 else checkpoint.FileSystemWriter)(FOLDER / "checkpoint"))


def training_beside_checkpoint() -> None:
    """Save as in `checkpoint_at_fifo`, in a group of its own. Only rank 0 waits; the others train until they need it."""
    folder = FOLDER / "checkpoint"
    if rank() == 1:
        folder.mkdir()
        os.mkfifo(folder / "__1_0.distcp")
    save_checkpoint(checkpoint.FileSystemWriter(folder), group=dist.new_group(group_desc="save"))


def save_checkpoint(writer: checkpoint.FileSystemWriter, group: dist.ProcessGroup | None = None) -> None:
    saved = checkpoint.async_save({f"weight-{rank()}": torch.ones(4)}, storage_writer=writer, process_group=group)
    mark_arrival()
    if group is None or rank() == 0:
        saved.result()  # type: ignore[union-attr]
    reduce()


class SlowWriter(checkpoint.FileSystemWriter):
    """A writer for a slow disk."""

    def write_data(self, *given: Any) -> Any:
        with (FOLDER / "shard").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(50_000))
                time.sleep(0.1)


def gather_slowly() -> None:
    """Gather over a link with 1 MB/s for five minutes: see `limit_link`."""
    part = torch.ones(6_250_000)
    steps(5)
    mark_arrival()
    dist.all_gather([torch.empty_like(part) for _ in range(world())], part)
    time.sleep(FOREVER)


def limit_link() -> None:
    """Move this process and its children to a network of their own, in which loopback is slow."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
    limit = "tc qdisc add dev lo root tbf rate 8mbit burst 32kb latency 400ms"
    subprocess.run(limit.split(), check=True)


SHARED = multiprocessing.get_context("fork").Lock()  # each job has its own


def barrier_inside_of_a_shared_lock() -> None:
    """Let rank 0 hold a semaphore of all ranks and wait for rank 1. Rank 1 waits for the semaphore."""
    steps(5)
    if rank() == 0:
        SHARED.acquire()
    dist.barrier()
    mark_arrival()
    if rank() == 1:
        SHARED.acquire()
    reduce()


def wait_for_send() -> None:
    """Wait in `work.wait()` for a send that rank 1 skips."""
    work = dist.irecv(torch.ones(1), src=1)
    mark_arrival()
    work.wait()


def poll_skipped() -> None:
    """Poll for a send that rank 1 skips. Seen from outside, this rank may work or wait."""
    work = dist.irecv(torch.ones(1), src=1)
    mark_arrival()
    until(work.is_completed)


def receive_batch() -> None:
    """Wait for rank 1 in a batch of point-to-point operations."""
    batch = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(4), 1)])
    mark_arrival()
    for work in batch:
        work.wait()


def poll_store() -> None:
    """Poll for a key of the store that rank 1 does not set."""
    store = dist.distributed_c10d._get_default_store()
    mark_arrival()
    until(lambda: store.check(["of rank 1"]))


def train_pairs(count: int = 3) -> dist.ProcessGroup:
    """Make some steps in this rank's group of two, and return the group."""
    tp = pairs("tp")
    steps(count, tp)
    return tp


def pipe_in_own_code() -> None:
    tp = train_pairs()
    if rank() == 3:
        read_shard()
    mark_arrival()
    reduce(tp)
    reduce()


def early_return() -> None:
    for step in range(10):
        if rank() == 3 and step == 9:
            prepare_batch()
        if step == 9:
            mark_arrival()
        reduce()


def chain_of_groups() -> None:
    """Block rank 5 of eight. Rank 4 waits for it in tp, the odd ranks wait in dp, the even ones for rank 4."""
    tp, dp = pairs("tp"), halves("dp")
    for _ in range(3):
        reduce(tp)
        reduce(dp)
    if rank() == 5:
        prepare_batch()
    mark_arrival()
    reduce(tp)
    reduce(dp)


def asleep_before_receiving() -> None:
    steps(3)
    if rank() == 4:
        prepare_batch()
    mark_arrival()
    match rank():
        case 0:
            dist.recv(torch.ones(1), src=4)
        case 1:
            dist.new_group([0, 1, 4], group_desc="late")
        case 2:
            dist.monitored_barrier(timeout=timedelta(seconds=FOREVER))
        case _:
            reduce()


def again() -> None:
    """Create the default group a second time: its name is the same and its numbers start again."""
    steps(7)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["NEXT_PORT"]
    init()
    steps(2)
    if rank() == 1:
        prepare_batch()
    mark_arrival()
    reduce()


def enqueued_ahead() -> None:
    works = [later()]
    if rank() == 3:
        prepare_batch()
    works += [later() for _ in range(1 if rank() == 2 else 2)]
    mark_arrival()
    for work in works:
        work.wait()


def objects() -> None:
    for step in range(3):
        if step == 2:
            if rank() == 1:
                read_metrics()
            mark_arrival()
        dist.all_gather_object([None] * world(), {"step": step})


def begin_heartbeat() -> None:
    """Let another thread continue in its own group, on all ranks."""
    beat = dist.new_group(group_desc="heartbeat")

    def run() -> None:
        while True:
            reduce(beat)
            time.sleep(0.02)

    steps(3)
    threading.Thread(target=run, daemon=True).start()


def begin_a_checkpoint() -> None:
    """Start a thread of rank 2 that enters a collective of its own group. The other ranks do not join."""
    saving = dist.new_group(group_desc="checkpoint")
    steps(3, saving)
    steps(3)
    if rank() == 2:
        threading.Thread(target=reduce, args=[saving], daemon=True).start()


def convert_shard() -> None:
    """Wait for a child program. It ends when this process ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as tool:
        mark_arrival()
        tool.wait()


def poll_checkpoint() -> None:
    """Poll another thread of this rank until it ends."""
    mark_arrival()
    until(lambda: threading.active_count() == 1)


def ddp_buckets() -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    for step in range(4):
        loss = model(torch.ones(2, 64)).sum()
        if step == 3:
            if rank() == 3:
                prepare_batch()
            mark_arrival()
        loss.backward()


def fsdp_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(3):
        if step == 2:
            if rank() == 2:
                prepare_batch()
            mark_arrival()
        model(torch.ones(2, 16)).sum().backward()


def wrapped_reaches_back() -> None:
    """Fill the buffer of rank 1 until it has no record of the default group.

    Its oldest record is older than the last record of the default group on the other ranks.
    """
    own = dist.new_group([1], group_desc="own")
    steps(3)
    if rank() == 1:
        steps(60, own)
        prepare_batch()
    mark_arrival()
    until(lambda: (FOLDER / "at-1").exists())  # the last record of rank 1 must be older
    reduce()


def stop_itself() -> None:
    mark_arrival()
    os.kill(os.getpid(), signal.SIGSTOP)


# --- ranks to check first --------------------------------------------------------------------------------------------


def open_and_stuck() -> None:
    """Block rank 2 in its own code. One of its operations is open in tp."""
    tp = train_pairs(2)
    steps(2)
    if rank() == 2:
        later(tp)
        prepare_batch()
    mark_arrival()
    reduce()


# --- cycles ----------------------------------------------------------------------------------------------------------


def wrong_group() -> None:
    tp = pairs("tp")
    for step in itertools.count():
        reduce(tp)
        if step == 9:
            mark_arrival()
        reduce(tp if rank() == 1 and step == 9 else None)


def skipped() -> None:
    """Let rank 2 skip one collective of the default group."""
    tp = pairs("tp")
    for step in range(6):
        if step == 5:
            mark_arrival()
        if not (rank() == 2 and step == 5):
            reduce()
        reduce(tp)


def other_order() -> None:
    """Let rank 0 of six call tp before the default group. All other ranks call the default group first."""
    tp = train_pairs(2)
    steps(2)
    mark_arrival()
    for group in (tp, None) if rank() == 0 else (None, tp):
        reduce(group)


def other_order_later() -> None:
    """Let rank 0 of four call tp first. The others wait in `work.wait()`, which has no Python frame."""
    tp = train_pairs()
    steps(3)
    mark_arrival()
    if rank() == 0:
        reduce(tp)
        reduce()
    else:
        later().wait()
        reduce(tp)


def crossed_groups(count: int = 0) -> None:
    """After `count` steps in each of two groups of all ranks, 0 and 1 call a first, 2 and 3 call b first."""
    first, second = (dist.new_group(group_desc=name) for name in ("a", "b"))
    steps(count, first)
    steps(count, second)
    mark_arrival()
    for group in (first, second) if rank() < 2 else (second, first):
        reduce(group)


def crossed_groups_later() -> None:
    crossed_groups(3)


def unused_group() -> None:
    """Let rank 2 first call a group of all ranks that was never used before. The others call the default group."""
    unused = dist.new_group(group_desc="unused")
    steps(3)
    mark_arrival()
    for group in (unused, None) if rank() == 2 else (None, unused):
        reduce(group)


def ring_of_three() -> None:
    """Make three ranks wait in a cycle: 0 for 1 in group a, 1 for 2 in b, 2 for 0 in c."""
    made = [dist.new_group(ranks, group_desc=name) for name, ranks in (("a", [0, 1]), ("b", [1, 2]), ("c", [2, 0]))]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}.get(rank(), ())
    for index in range(3):
        if index in mine:
            reduce(made[index])
    mark_arrival()
    for index in mine:
        reduce(made[index])
    reduce()


# --- mismatches ------------------------------------------------------------------------------------------------------


def other_operation() -> None:
    steps(4)
    mark_arrival()
    if rank() == 1:
        dist.all_gather([torch.ones(4) for _ in range(world())], torch.ones(4))
    else:
        dist.barrier()
    time.sleep(FOREVER)


def other_operation_of_half() -> None:
    tp = halves("tp")
    steps(4, tp)
    mark_arrival()
    if rank() % 4 < 2:
        dist.barrier(tp)
    else:
        dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size(tp))], torch.ones(4), group=tp)
    time.sleep(FOREVER)


# --- all ranks have joined, or nothing is known ----------------------------------------------------------------------


def stopped_inside() -> None:
    """Stop rank 3 after it has enqueued its operation and before gloo has executed it."""
    steps(4)
    mark_arrival()
    if rank() == 3:
        later()
        (FOLDER / "enqueued").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: _is_stopped(FOLDER / "enqueued"))
    reduce()


def _is_stopped(pid_file: Path) -> bool:
    pid = pid_file.read_text() if pid_file.exists() else ""
    return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def receive_from_the_other() -> None:
    """Let ranks 0 and 1 receive from each other, which is not recorded. The others wait for both."""
    mark_arrival()
    dist.recv(torch.ones(1), src=1 - rank())


def wrapped_over_the_open() -> None:
    """Overwrite the record of the operation in which ranks 0, 2 and 3 wait."""
    rest = dist.new_group([0, 2, 3], group_desc="rest")
    steps(3)
    if rank() == 1:
        prepare_batch()
    work = later()
    steps(60, rest)
    mark_arrival()
    work.wait()


def wrapped_over_a_rare_one() -> None:
    """Let rank 1 use the evaluation group. Its buffer no longer shows this."""
    evaluation = dist.new_group(group_desc="evaluation")
    steps(1, evaluation)
    steps(60)
    if rank() == 1:
        prepare_batch()
    mark_arrival()
    reduce(evaluation)


def pipeline() -> None:
    """Let stages send and receive, which is not recorded. The last stage blocks in its own code."""
    steps(2)
    if rank() == world() - 1:
        prepare_batch()
    mark_arrival()
    dist.recv(torch.ones(1), src=rank() + 1)


# --- healthy ---------------------------------------------------------------------------------------------------------


def slow_rank() -> None:
    tp = pairs("tp")
    mark_arrival()
    while True:
        reduce(tp)
        if rank() == 1:
            time.sleep(0.05)
        reduce()


def healthy() -> None:
    """Train with rooted, object and plain collectives in three kinds of groups, and with unrecorded operations."""
    tp, dp = pairs("tp"), halves("dp")
    mark_arrival()
    for step in itertools.count():
        reduce(tp)
        works = [later(dp), later()]
        dist.gather(torch.ones(2), [torch.ones(2) for _ in range(world())] if rank() == 0 else None)
        for work in works:
            work.wait()
        if rank() == 0:
            dist.send(torch.ones(1), dst=1)
        if rank() == 1:
            dist.recv(torch.ones(1), src=0)
        dist.broadcast_object_list([step], src=step % world())
        dist.barrier(dp)
        time.sleep(0.05)


def dump_when_asked() -> None:
    from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

    ctypes.CDLL(None).prctl(15, b"dump_when_asked", 0, 0, 0)  # PR_SET_NAME: a test knows this thread by its name
    number = int(os.environ["RANK"])
    path, asked = FOLDER / "dumps" / f"fr_rank_{number}", ""
    while True:
        ask = FOLDER / "ask"
        if ask.exists() and (now := ask.read_text()) != asked:
            new = FOLDER / f"fr-{number}.new"
            is_json = number % 2 or os.environ["DUMPS"] == "json"
            new.write_bytes(_dump_fr_trace_json() if is_json else _dump_fr_trace())
            new.rename(path)
            asked = now
            (FOLDER / f"dumped-{number}.new").write_text(asked)
            (FOLDER / f"dumped-{number}.new").rename(FOLDER / f"dumped-{number}")
        time.sleep(0.02)


BEFORE_REDUCE: dict[str, Any] = {
    "own_code": (5, {2: prepare_batch}),
    "thread_in_own_code": (5, {2: in_thread(prepare_batch)}),
    "lock_in_own_code": (5, {1: read_metrics}),
    "thread_reads": (5, {2: in_thread(read_slowly)}),
    "thread_asks": (5, {2: in_thread(ask_server)}),
    "two_do_not_join": (4, {1: prepare_batch, 4: prepare_batch}),
    "detail": (3, {1: prepare_batch}),
    "other_node": (3, {5: prepare_batch}),  # only ranks 0 to 3 are captured
    "fifo_beside_metrics": (5, {3: open_fifo}, begin_metrics),
    "waits_for_skipped_send": (3, {2: wait_for_send}),
    "asks_for_skipped_send": (3, {2: poll_skipped}),
    "asleep_before_a_batch": (3, {1: prepare_batch, 2: receive_batch}),
    "asks_the_store": (3, {3: poll_store}),
    "before_the_first": (0, {0: prepare_batch}, train_pairs),
    "event_loop": (5, {2: lambda: asyncio.run(await_event())}),
    "side_thread": (0, {2: prepare_batch}, begin_heartbeat),
    "side_thread_open": (0, {2: convert_shard}, begin_a_checkpoint),  # the open operation is that of another thread
    "waits_for_own_thread": (0, {2: poll_checkpoint}, begin_a_checkpoint),
    "stopped_before": (5, {2: stop_itself}),
    "recv_of_each_other": (3, {0: receive_from_the_other, 1: receive_from_the_other}),
}


def init() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def ordered() -> str:
    """Fork a process for each request on stdin. Return the job's name in it, and "" in the parent at the end."""
    importlib.import_module("torch._dynamo")  # imported late by DDP and pickle dumps: here once, not per rank
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a job
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            begin(**json.loads(line))
            return str(json.loads(line)["name"])
        print(pid, flush=True)
    return ""


def begin(name: str, folder: str, environ: dict[str, str]) -> None:
    """Separate the job from the other jobs: signals, streams, environment, the lock."""
    global FOLDER, SHARED
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    FOLDER = Path(folder)
    log = os.open(FOLDER / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(target, stream)
    os.environ.update(environ)
    if "SLOW_LINK" in environ:
        limit_link()
    dist.set_debug_level_from_env()
    SHARED = multiprocessing.get_context("fork").Lock()


def forked() -> bool:
    """Fork the ranks. Return True in each rank, and False in the parent after all have ended."""
    pids = []
    for number in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
            os.setsid()
            log = os.open(FOLDER / f"log-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            return True
        pids.append(str(pid))
    (FOLDER / "pids.new").write_text(" ".join(pids))
    (FOLDER / "pids.new").rename(FOLDER / "pids")
    for pid in pids:
        os.waitpid(int(pid), 0)
    return False


if __name__ == "__main__" and (name := ordered()) and forked():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFETIME_SECONDS)
    torch.set_num_threads(1)
    init()
    if "LIBRARIES" in os.environ:
        from tests.jobs import library_threads

        library_threads.start_all(FOLDER)
    if "DUMPS" in os.environ:
        threading.Thread(target=dump_when_asked, daemon=True).start()
    if name in BEFORE_REDUCE:
        before_reduce(*BEFORE_REDUCE[name])
    else:
        globals()[name]()
    time.sleep(FOREVER)
