"""A rank of the simulated job, by the standard library, with more orders than the demo's: slow but real work."""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path

from hangwatch.tools.demo import loader, worker
from hangwatch.tools.demo.phases import Phase
from hangwatch.tools.demo.process_setup import set_identity
from hangwatch.tools.demo.worker import Rank
from tests.scenarios import long_waits
from tests.scenarios.long_waits import SERVER
from tests.simulated import faults
from tests.simulated.barriers import barrier
from tests.simulated.worker import evaluate, leave

SLOW_SHARD = "slow"
SLOW_READS = 100

_read_shard = loader.read_shard


def read_shard(shard: str) -> bytes:
    """Return the bytes of a shard, as the demo's rank does.

    Reading the slow shard takes six seconds, in small pieces. A shard may also name a task of `long_waits`.
    """
    task, _, argument = shard.partition(" ")
    if task in long_waits.TASKS:
        long_waits.TASKS[task](argument)
        shard = loader.GOOD_SHARD
    if shard != SLOW_SHARD:
        return _read_shard(shard)
    batch = b""
    for _ in range(SLOW_READS):
        batch = _read_shard(loader.GOOD_SHARD)
        time.sleep(6.0 / SLOW_READS)
    return batch


def starve(me: Rank, steps: str) -> None:
    """Train `steps` steps, each with a slow batch."""
    for _ in range(int(steps)):
        me.begins(Phase.LOADING)
        batch = loader.next_batch(me.loader, SLOW_SHARD)
        me.begins(Phase.COMPUTE)
        worker.compute(batch)
        me.begins(Phase.COLLECTIVE)
        barrier(me.peers)


def compile_model(me: Rank, seconds: str) -> None:
    """Use only the CPU for `seconds` before the first step, as a compiler does."""
    me.begins(Phase.STARTING)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        lower(sum(range(2000)))
        optimise(sum(range(2000)))
    barrier(me.peers)


def lower(graph: int) -> None:
    """Do one pass of the compiler."""
    time.sleep(0.02 + graph % 2 * 0.001)


def optimise(graph: int) -> None:
    """Do another pass of the compiler, at another line."""
    time.sleep(0.03 + graph % 2 * 0.001)


def join_late(me: Rank, late: str) -> None:
    """Let rank `late` wait for a lock before its first step. The others wait for it."""
    me.begins(Phase.STARTING)
    if me.rank == int(late):
        faults.deadlock(me)
    barrier(me.peers)


def on_rank_0(phase: Phase) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for an order that only rank 0 obeys, as this phase. The others wait for it in a barrier."""

    def wrap(task: Callable[..., None]) -> Callable[..., None]:
        @wraps(task)
        def order(me: Rank, *words: str) -> None:
            if me.rank == 0:
                me.begins(phase)
                task(me, *words)
            me.begins(Phase.COLLECTIVE)
            barrier(me.peers)

        return order

    return wrap


@on_rank_0(Phase.EVALUATION)
def evaluate_on_one(me: Rank, seconds: str) -> None:
    """Let rank 0 evaluate for `seconds`. The others wait for it."""
    evaluate(me, float(seconds))


def stop_all(me: Rank) -> None:
    """Stop all ranks, as when a batch system suspends the job. Later all ranks continue together."""
    me.begins(Phase.STARTING)
    faults.stop(me)
    barrier(me.peers)


MET: list[socket.socket] = []


def meet(me: Rank) -> None:
    """Connect to rank 0 over TCP, as communication libraries do. Rank 0 listens."""
    port = me.folder / "port"
    if me.rank == 0:
        MET.append(socket.create_server(("127.0.0.1", 0)))
        port.with_suffix(".new").write_text(str(MET[0].getsockname()[1]))
        port.with_suffix(".new").rename(port)
    barrier(me.peers)
    if me.rank:
        MET.append(socket.create_connection(("127.0.0.1", int(port.read_text()))))
    else:
        MET.extend(MET[0].accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1))
    barrier(me.peers)


def linger(me: Rank, seconds: str) -> None:
    """Close all connections to other ranks after the end of training and stay alive for `seconds`."""
    for one in MET:
        one.close()
    me.begins(Phase.STARTING)
    time.sleep(float(seconds))


def read_dead_file(me: Rank, path: str) -> None:
    """Open a file that does not respond, here a FIFO without a writer. Each rank opens it without the others."""
    me.begins(Phase.LOADING)
    Path(path).read_text()


def end_but_read(me: Rank, path: str, last: str) -> None:
    """End all ranks, except rank `last`, which opens a file that does not respond."""
    if me.rank != int(last):
        leave(me)
    read_dead_file(me, path)


def behind_gpu(me: Rank, odd: str) -> None:
    """Let rank `odd` wait for a lock. The others wait for their GPUs, as `.read_loss()` does with NCCL."""
    if me.rank == int(odd):
        faults.deadlock(me)
    me.begins(Phase.COLLECTIVE)
    read_loss()


def read_loss() -> None:
    """Spin in one C call without the GIL, as CUDA does, but yield the core: small machines need it."""
    os.nice(19)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", (1 << 31) - 1)


def gpu_hangs(me: Rank, hung: str, asking: str) -> None:
    """Let the GPU of rank `hung` hang. Rank `asking` polls for its result; the others are in a barrier."""
    if me.rank == int(asking):
        while True:
            time.sleep(0.5)
    me.begins(Phase.COLLECTIVE)
    if me.rank == int(hung):
        read_loss()
    barrier(me.peers)


def poll_gpu(me: Rank, odd: str) -> None:
    """Let rank `odd` wait for a lock. The others poll in Python until their collective ends."""
    if me.rank == int(odd):
        faults.deadlock(me)
    me.begins(Phase.COLLECTIVE)
    until_done([])


def until_done(done: list[bool]) -> None:
    """Poll as `while not work.is_completed()` does. Both lines take time, so that captures see both."""
    os.nice(19)
    while not done:
        sum(range(10_000))
        sum(range(20_000))


def log_behind_gpu(me: Rank, odd: str, port: str) -> None:
    """Let rank `odd` wait for a server, and rank 0 for its GPU in a logging call."""
    if me.rank == int(odd):
        ask(port)
    me.begins(Phase.COLLECTIVE)
    if me.rank == 0:
        add_scalar()
    barrier(me.peers)


def add_scalar() -> None:
    """Log a number that is still on the GPU, so that the call waits for the GPU."""
    read_loss()


def ask(port: str) -> bytes:
    """Send a request to a server and wait for the response without a timeout."""
    with connected(port) as server:
        return server.recv(1)


def connected(port: str) -> socket.socket:
    """Return a connection to a server with its own address, as if it were on another machine."""
    return socket.create_connection((SERVER, int(port)))


@on_rank_0(Phase.LOADING)
def wait_for_server(me: Rank, port: str) -> None:
    """Let rank 0 wait for a server. The others wait for it."""
    ask(port)


@on_rank_0(Phase.LOADING)
def wait_for_child(me: Rank, port: str) -> None:
    """Let rank 0 wait for a child that waits for a server, as with ssh or srun. The others wait for rank 0."""
    rank, child = os.getpid(), os.fork()
    if child == 0:
        set_identity("ssh", rank, me.folder)
        ask(port)
        os._exit(0)
    os.waitpid(child, 0)


@on_rank_0(Phase.LOADING)
def wait_for_idle_child(me: Rank, seconds: str, how: str) -> None:
    """Let rank 0 wait for a program that sleeps without connections, as sbatch --wait does between its requests.

    If `how` is "exit", rank 0 waits for its exit. If it is "output", rank 0 waits for its output, as subprocess.run
    does with `capture_output`.
    """
    reads, writes = os.pipe()
    rank, child = os.getpid(), os.fork()
    if child == 0:
        set_identity("sbatch", rank, me.folder)
        os.set_inheritable(writes, True)
        os.execlp("sleep", "sleep", seconds)
    os.close(writes)
    if how == "output":
        os.read(reads, 1)
    os.waitpid(child, 0)
    os.close(reads)


@on_rank_0(Phase.LOADING)
def ask_again(me: Rank, seconds: str, pause_seconds: str) -> None:
    """Let rank 0 sleep repeatedly, as between two checks for a file. The others wait for it."""
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        time.sleep(float(pause_seconds))


@on_rank_0(Phase.LOADING)
def sleep_once(me: Rank, seconds: str) -> None:
    """Let rank 0 sleep once. The others wait for it."""
    time.sleep(float(seconds))


@on_rank_0(Phase.LOADING)
def poll_for_file(me: Rank, path: str, pause_seconds: str) -> None:
    """Let rank 0 poll until a file exists. The others wait for it."""
    while not Path(path).exists():
        time.sleep(float(pause_seconds))


@on_rank_0(Phase.EVALUATION)
def evaluate_slowly(me: Rank, seconds: str) -> None:
    """Let rank 0 evaluate, with sleeps in between. The others wait for it."""
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        answer = sum(range(20_000))
        time.sleep(0.3 + answer % 2 * 0.001)


@on_rank_0(Phase.LOADING)
def sync_checkpoint(me: Rank, path: str, size_bytes: str) -> None:
    """Let rank 0 wait in one fsync(2) until `size_bytes` are on the disk. The others wait for it."""
    write_and_sync(path, int(size_bytes))


def write_and_sync(path: str, size_bytes: int) -> None:
    """Write every second page and sync the file: the kernel writes page by page, so its counters grow steadily."""
    page = os.sysconf("SC_PAGE_SIZE")
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for at in range(0, 2 * size_bytes, 2 * page):
        os.pwrite(file, bytes(page), at)
    os.fsync(file)
    os.close(file)


def save_behind_gpu(me: Rank, odd: str, path: str, size_bytes: str) -> None:
    """Block rank `odd` in fsync(2). Rank 0 waits for its GPU in a call that saves, the others in another call."""
    if me.rank == int(odd):
        me.begins(Phase.LOADING)
        write_and_sync(path, int(size_bytes))
    me.begins(Phase.COLLECTIVE)
    if me.rank == 0:
        torch_save()
    read_loss()


def torch_save() -> None:
    """Wait for the GPU, from which a tensor is copied first."""
    read_loss()


@on_rank_0(Phase.LOADING)
def receive_shard(me: Rank, port: str, size_bytes: str) -> None:
    """Let rank 0 receive a shard into memory. The others wait for it."""
    with connected(port) as server:
        server.recv(int(size_bytes), socket.MSG_WAITALL)


@on_rank_0(Phase.LOADING)
def upload_parts(me: Rank, port: str, parts: str, size_bytes: str) -> None:
    """Let rank 0 upload a file in parts, each in a separate thread. The others wait for it."""
    upload(port, int(parts), int(size_bytes))


@on_rank_0(Phase.LOADING)
def upload_whole(me: Rank, port: str, size_bytes: str) -> None:
    """Let rank 0 upload a file in its main thread. The others wait for it."""
    upload_part(port, int(size_bytes))


def upload(port: str, parts: int, size_bytes: int) -> None:
    """Upload a file as a client of an object store does: four parts in parallel."""
    from concurrent.futures import ThreadPoolExecutor  # most ranks only train and do not need it

    with ThreadPoolExecutor(4) as pool:
        for sent in [pool.submit(upload_part, port, size_bytes) for _ in range(parts)]:
            sent.result()


def upload_part(port: str, size_bytes: int) -> None:
    """Upload one part. Only little of it fits into the buffers between client and server."""
    with connected(port) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        server.sendall(bytes(size_bytes))


def end_but_upload(me: Rank, port: str, parts: str, size_bytes: str) -> None:
    """Let rank 0 upload after the end of training. All other ranks end."""
    if me.rank:
        leave(me)
    me.begins(Phase.STARTING)
    upload(port, int(parts), int(size_bytes))
    time.sleep(600)


@on_rank_0(Phase.LOADING)
def ask_in(me: Rank, way: str, port: str) -> None:
    """Let rank 0 wait for a server in another thread. The others wait for rank 0."""
    await_task(way, partial(ask, port))


def open_in(me: Rank, odd: str, way: str, path: str) -> None:
    """Let one rank open a FIFO in another thread. The others wait for their GPUs."""
    if me.rank == int(odd):
        me.begins(Phase.LOADING)
        await_task(way, partial(read_index, path))
    me.begins(Phase.COLLECTIVE)
    read_loss()


def read_index(path: str) -> bytes:
    """Open a file of the data set."""
    return Path(path).read_bytes()


def await_task(way: str, task: Callable[[], object]) -> None:
    """Run a task in another thread and wait for it in a "pool", a "queue" or a "loop" of events."""
    import asyncio  # most ranks only train and need none of them
    import queue
    from concurrent.futures import ThreadPoolExecutor

    results: queue.Queue[object] = queue.Queue()

    def put() -> None:
        results.put(task())

    async def in_loop() -> None:
        await asyncio.get_running_loop().run_in_executor(None, task)

    if way == "pool":
        ThreadPoolExecutor(2).submit(task).result()
    elif way == "loop":
        asyncio.run(in_loop())
    else:
        threading.Thread(target=put, daemon=True).start()
        results.get()


@on_rank_0(Phase.LOADING)
def await_child_in_loop(me: Rank, seconds: str) -> None:
    """Let rank 0 wait for a child in an event loop. The others wait for rank 0."""
    import asyncio

    async def run_child() -> None:
        named = partial(set_identity, "sbatch", os.getpid(), me.folder)
        child = await asyncio.create_subprocess_exec("sleep", seconds, preexec_fn=named)
        await child.wait()

    asyncio.run(run_child())


@on_rank_0(Phase.LOADING)
def ask_for_word(me: Rank, path: str) -> None:
    """Let rank 0 read from a FIFO until a process writes to it. The others wait for rank 0."""
    Path(path).read_text()


def open_beside_metrics(me: Rank, odd: str, path: str) -> None:
    """Let rank `odd` open a FIFO without a writer while a thread of each rank writes metrics."""
    threading.Thread(target=write_metrics, daemon=True).start()
    if me.rank == int(odd):
        me.begins(Phase.LOADING)
        Path(path).read_text()
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def write_metrics() -> None:
    """Write 200 kB/s, as a thread does that logs metrics."""
    with Path(os.devnull).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(20_000))
            time.sleep(0.1)


@on_rank_0(Phase.LOADING)
def await_reader(me: Rank, seconds: str) -> None:
    """Let rank 0 wait for a lock of its own thread, which reads 500 kB/s for `seconds`. The others wait for rank 0."""
    reads = threading.Lock()
    reads.acquire()
    threading.Thread(target=read_slowly, args=(float(seconds), reads), daemon=True).start()
    reads.acquire()


def read_slowly(seconds: float, reads: threading.Lock) -> None:
    """Read for `seconds`, then release the lock `reads`."""
    end = time.monotonic() + seconds
    with Path("/dev/zero").open("rb", buffering=0) as file:
        while time.monotonic() < end:
            file.read(50_000)
            time.sleep(0.1)
    reads.release()


@on_rank_0(Phase.LOADING)
def debug(me: Rank, seconds: str) -> None:
    """Stop rank 0 in a debugger for `seconds`, until the person at its terminal continues. The others wait for it."""
    stand_at_prompt(float(seconds))


def stand_at_prompt(seconds: float) -> None:
    """Show the prompt of pdb on a new terminal for `seconds`."""
    from pdb import Pdb

    ours, theirs = os.openpty()
    threading.Timer(seconds, os.write, (ours, b"continue\n")).start()
    with os.fdopen(theirs, "r") as reads, os.fdopen(os.dup(theirs), "w") as writes:
        Pdb(stdin=reads, stdout=writes).set_trace()


def ask_whom_is_gone(me: Rank, port: str, odd: str) -> None:
    """Let rank `odd` send a request that is never acknowledged. The others wait for it."""
    if me.rank == int(odd):
        me.begins(Phase.LOADING)
        with connected(port) as server:
            server.recv(1)  # the server greets and vanishes
            server.sendall(b"a question")
            server.recv(1)
    me.begins(Phase.COLLECTIVE)
    barrier(me.peers)


def ask_driver(me: Rank, way: str, task: str) -> None:
    """Let all ranks wait for the driver of `driven`, and rank 2 open a FIFO if the driver "waits" for it.

    If the driver "pings", let rank 0 wait for a lock, and the others for rank 0.
    """
    me.begins(Phase.LOADING)
    if way == "unix":
        driver = socket.socket(socket.AF_UNIX)
        driver.connect(str(me.folder / "driver"))
    else:
        driver = connected((me.folder / "driver-port").read_text())
    driver.sendall(f"{me.rank} {task}".encode())
    if task == "waits" and me.rank == 2:
        os.mkfifo(me.folder / "dead")
        read_index(str(me.folder / "dead"))
    elif task == "pings":
        if me.rank == 0:
            long_waits.lock_beside(driver, "lock")
        me.begins(Phase.COLLECTIVE)
        barrier(me.peers)
    driver.recv(1)


@on_rank_0(Phase.LOADING)
def wait_long(me: Rank, way: str, task: str, argument: str) -> None:
    """Let rank 0 wait in one of the ways of `long_waits`. The others wait for it."""
    long_waits.WAYS[way](me, task, argument)


def main() -> None:
    """Run the rank of `tests.simulated` with the orders of this module: its functions of `me`."""
    loader.read_shard = read_shard
    own = (function for function in globals().values() if getattr(function, "__module__", "") == __name__)
    orders = (function for function in own if function.__code__.co_varnames[:1] == ("me",))
    worker.ORDERS |= {function.__name__.replace("_", "-"): function for function in orders}
    worker.main()


if __name__ == "__main__":
    main()
