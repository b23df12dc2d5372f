"""The signatures of real processes by a real capture, with an empty activity table: no function name matters."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture.request import CaptureRequest, GpuSources
from hangwatch.capture.rounds import capture
from hangwatch.model import GpuSample, GpuSweep, Job, Member, Motion, Rank, Signature, Store, Worker
from hangwatch.probes.base import procfs
from hangwatch.probes.gpu import query
from hangwatch.stacks import activity
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict.wording import clauses
from tests import debug_client
from tests.commands import first_line, spawn
from tests.conftest import identity, wait_for
from tests.fake_driver import FakeDriver, sampling, uuid_of
from tests.integration import targets
from tests.servers import serving

SETTINGS = config.Capture(rounds=3, pause_seconds=1.0, dump_deadline_seconds=60.0)
CONNECT = "import os, socket, select, selectors\npeer = socket.create_connection(('127.0.0.1', {port}))\n"
SPINS = (
    "import hashlib\nready()\nhashlib.pbkdf2_hmac('sha256', b'a', b'b', (1 << 31) - 1)"  # one C call, without the GIL
)
PYTHON_SPINS = "ready()\nwhile True: pass"
# Each page read of a private mapping without a file is the zero page: faults without memory. 0x4000: MAP_NORESERVE.
READS_MAPPING = """
import hashlib, mmap
mapped = mmap.mmap(-1, 1 << 37, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
ready()
hashlib.sha256(mapped)
"""
POLLS = "import time\nready()\nwhile True: time.sleep(0.3)"
SLEEPS_AGAIN = "import time\nready()\nwhile True: time.sleep(1.5)"
SELECTS_NOTHING = "import select\nready()\nwhile True: select.select([], [], [], 1.5)"
SLEEPS_ONCE = "import time\nready()\ntime.sleep(600)"
LOCKED = "import threading\nlock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()"
OPENS_FIFO = "ready()\nopen(folder + '/fifo')"
ACCEPTS = "import socket\nlistening = socket.create_server(('127.0.0.1', 0))\nready()\nlistening.accept()"
READS_EVENT = "import ctypes, os\none = ctypes.CDLL(None).eventfd(0, 0)\nready()\nos.read(one, 8)"
WRITES_METRICS = """
import threading, time
def write_metrics():
    with open('/dev/null', 'wb', buffering=0) as file:
        while True:
            file.write(bytes(20_000))
            time.sleep(0.1)
threading.Thread(target=write_metrics, daemon=True).start()
"""
RECEIVES = CONNECT + "ready()\npeer.recv(1)"
STARTS_LATE = CONNECT + "import time\nready(); time.sleep(0.05); peer.recv(1)"  # reads late, as on a busy machine
WITH_TIMEOUT = CONNECT + "peer.settimeout(600)\nready()\npeer.recv(1)"
SELECTS = CONNECT + "ready()\nselect.select([peer], [], [])"
EPOLLS = CONNECT + "one = selectors.EpollSelector()\none.register(peer, 1)\nready()\none.select()"
DOWNLOADS = CONNECT + "ready()\npeer.recv(1 << 30, socket.MSG_WAITALL)"
# The child connects and its parent keeps no connection, as with `ssh` and `srun`.
CHILD = """
import os, socket
child = os.fork()
if child == 0:
    peer = socket.create_connection(('127.0.0.1', {port}))
    ready()
    peer.recv(1)
os.waitpid(child, 0)
"""
PIPED_CHILD = """
import os, socket
back, forth = os.pipe()
if os.fork() == 0:
    peer = socket.create_connection(('127.0.0.1', {port}))
    ready()
    peer.recv(1)
os.close(forth)
os.read(back, 1)
"""
LONE_CHILD = (
    "import os, time\nchild = os.fork()\nif child == 0:\n    ready()\n    time.sleep(600)\nos.waitpid(child, 0)"
)


def server(send: bytes = b"") -> contextlib.AbstractContextManager[int]:
    """Accept one connection, and send `send` to it ten times a second. Yield the port."""

    def serve(listening: socket.socket, over: threading.Event) -> None:
        with listening.accept()[0] as peer:
            while not over.wait(0.1):
                peer.sendall(send)

    return serving(serve, "127.0.0.1")


def job_of(pid: int, gpu_uuid: str = "GPU-0", **environ: str) -> Job:
    rank = Rank(id=identity(pid), rank=0, local_rank=0, gpu_uuids=(gpu_uuid,))
    return Job(job_id="one", launcher="plain", launcher_id=None, ranks=(rank,), environ=environ)


def measured(job: Job, utilization_ratio: float | None = None, search_seconds: float = 60.0) -> Member:
    gpu = GpuSample(index=0, uuid="GPU-0", power_watts=120.0, utilization_ratio=utilization_ratio)
    sweep = GpuSweep(taken_monotonic_seconds=0.0, taken_unix_seconds=0.0, gpus=(gpu,))
    sources = GpuSources(read_sweep=lambda: sweep)
    (member,) = targets.grouped(job, SETTINGS, gpus=sources, search_seconds=search_seconds).members
    return member


ALONE = {
    "behind its GPU": (SPINS, 1.0, Signature.BEHIND_GPU),
    "spins": (SPINS, 0.0, Signature.SPINS),
    "spins in Python": (PYTHON_SPINS, 1.0, Signature.SPINS),
    "reads a mapping": (READS_MAPPING, 0.0, Signature.TRANSFERS),
    "polls": (POLLS, 0.0, Signature.POLLS),
    "sleeps longer than between two rounds, again and again": (SLEEPS_AGAIN, 0.0, Signature.POLLS),
    "sleeps in select": (SELECTS_NOTHING, 0.0, Signature.POLLS),
    "sleeps once": (SLEEPS_ONCE, 0.0, Signature.BLOCKED),
    "locked": (LOCKED, 0.0, Signature.BLOCKED),
    "blocked behind its GPU": (LOCKED, 1.0, Signature.BEHIND_GPU),
    "opens a FIFO without a writer, whatever its GPU reads": (OPENS_FIFO, 1.0, Signature.BLOCKED),
    "reads an eventfd, which its GPU may signal": (READS_EVENT, 1.0, Signature.BEHIND_GPU),
    "sleeps, whatever its GPU reads": (SLEEPS_ONCE, 1.0, Signature.BLOCKED),
    "opens a FIFO, and another thread writes": (WRITES_METRICS + OPENS_FIFO, 0.0, Signature.BLOCKED),
    "waits for a lock, maybe of the thread that writes": (WRITES_METRICS + LOCKED, 0.0, Signature.TRANSFERS),
    "polls, whatever its GPU reads": (POLLS, 1.0, Signature.POLLS),
    "a child sleeps": (LONE_CHILD, 0.0, Signature.AWAITS_OUTSIDE),
    "waits for a client": (ACCEPTS, 0.0, Signature.AWAITS_OUTSIDE),
}


@pytest.mark.parametrize(("code", "use", "expected"), ALONE.values(), ids=ALONE)
def test_a_rank_alone(code: str, use: float, expected: Signature, tmp_path: Path) -> None:
    # A process that wakes during its dump was not seen awake. On a busy machine dumps take long.
    looks = 4 if expected is Signature.POLLS else 1
    with targets.python(code, tmp_path) as pid:
        if expected is Signature.AWAITS_OUTSIDE:
            targets.wait_for_call(pid, "receives" if code is ACCEPTS else "awaits_child")
        if code.endswith(OPENS_FIFO):  # its line changes after ready(), and on a busy machine during the first round
            wait_for(lambda: Path(f"/proc/{pid}/wchan").read_text() == "wait_for_partner", "it to open the FIFO")
        found = (measured(job_of(pid), use).signature for _ in range(looks))
        told = list(itertools.takewhile(lambda one: one is not expected, found))
    assert len(told) < looks, f"{told} in place of {expected}"


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        (("138 7", "139 7", "197 1e6/s", "198 3e8/s"), Signature.BEHIND_GPU),
        (("138 2e6/s", "139 2e6/s", "197 1e6/s", "198 1e6/s"), Signature.GPU_WORKS),
        (("197 2e9/s", "198 2e9/s"), Signature.GPU_WORKS),
        ((), Signature.BEHIND_GPU),
    ],
    ids=["links carry nothing except a poll", "NVLink carries", "PCIe carries, no NVLink", "nothing is counted"],
)
def test_signature_of_a_rank_waiting_for_its_gpu_uses_link_traffic(
    counters: tuple[str, ...], expected: Signature, fake_driver: FakeDriver, tmp_path: Path
) -> None:
    fake_driver.add("gpu all power_watts 120", *(f"gpu all field {counter}" for counter in counters))
    with sampling(fake_driver, 0.2, 20.0) as sampler, targets.python(SPINS, tmp_path) as pid:
        sweep = sampler.latest()
        job = job_of(pid, uuid_of(0))
        sources = GpuSources(read_sweep=lambda: sweep, read_traffic=partial(query.traffic, sampler))

        def counted() -> Member | None:
            (member,) = targets.grouped(job, SETTINGS, gpus=sources).members
            is_known = (member.gpu.pcie_bytes_per_second is not None) is bool(counters)
            return member if is_known else None  # the driver may need more than the second that it has

        member = wait_for(counted, "the traffic")
    print(member.gpu.nvlink_bytes_per_second, member.gpu.pcie_bytes_per_second)
    assert member.signature is expected


FIFO = "import os\nfd = os.open(folder + '/fifo', os.O_RDWR)\n"
READS_FIFO = f"{FIFO}ready()\nos.read(fd, 1)"
WRITES_FIFO = f"{FIFO}ready()\nwhile True:\n    os.write(fd, bytes(4096))"
FIFO_OF_CHILD = f"{FIFO}import time\nif os.fork() == 0:\n    ready()\n    time.sleep(600)\nos.read(fd, 1)"
PIPE = "import os, time\nback, forth = os.pipe()\n"
OWN_WORKER = f"{PIPE}if os.fork() == 0:\n    ready()\n    time.sleep(600)\nos.close(forth)\nos.read(back, 1)"
OWN_PIPE = f"{PIPE}ready()\nos.read(back, 1)"
ORPHANS_PIPE = f"""{PIPE}
import sys
if os.fork() == 0:
    os.close(back)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.close(forth)
os.wait()
ready()
os.read(back, 1)
"""


PLACES = {
    "reads a FIFO": (READS_FIFO, "{folder}/fifo"),
    "writes a full FIFO": (WRITES_FIFO, "{folder}/fifo"),
    "an orphan's pipe": (ORPHANS_PIPE, "a pipe; no process of its job has its other end"),
    "a child's FIFO": (FIFO_OF_CHILD, None),
    "a worker's pipe": (OWN_WORKER, None),
    "own pipe": (OWN_PIPE, None),
    "lock": (LOCKED, None),
}


@pytest.mark.parametrize(("code", "where"), PLACES.values(), ids=PLACES)
def test_rank_blocked_on_file_or_pipe_outside_job_is_stuck_on_it(code: str, where: str | None, tmp_path: Path) -> None:
    with targets.python(code, tmp_path) as pid:
        targets.wait_until_blocked(pid)
        member = measured(job_of(pid))
    assert member.waits.stuck_on == (where and where.format(folder=tmp_path))
    assert where is None or member.signature is Signature.BLOCKED, "it pages as before"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (RECEIVES, "receives"),
        (STARTS_LATE, "receives"),
        (WITH_TIMEOUT, "receives"),
        (SELECTS, "receives"),
        (EPOLLS, "receives"),
        (CHILD, "awaits_child"),
        (PIPED_CHILD, "receives"),
    ],
    ids=["recv", "recv after a moment", "recv with a time-out", "select", "epoll", "child", "child at a pipe"],
)
def test_rank_waiting_for_an_outside_server_awaits_outside(code: str, kind: str, tmp_path: Path) -> None:
    with server() as port, targets.python(code.replace("{port}", str(port)), tmp_path) as pid:
        targets.wait_for_call(pid, kind)
        member = measured(job_of(pid))
        assert member.signature is Signature.AWAITS_OUTSIDE
        assert f"127.0.0.1 port {port}" in member.waits.awaited.name
        at_store = measured(job_of(pid, MASTER_PORT=str(port)))
        assert at_store.signature is Signature.BLOCKED, "a rank that waits for the job's store waits for the job"


ASKS_SIDECAR = """
import socket
peer = socket.socket(socket.AF_UNIX)
peer.connect(folder + '/socket')
ready()
peer.recv(1)
"""
SIDECAR = """
import os, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print(flush=True)
peer = listening.accept()[0]
if sys.argv[2] == 'copies':
    exec(sys.argv[3])
peer.recv(1)
"""
COPIES = "import os\nnull = os.open(os.devnull, os.O_WRONLY)\nwhile True: os.write(null, bytes(1 << 16))"


@contextlib.contextmanager
def sidecar(does: str, folder: Path) -> Iterator[int]:
    """Run a process outside the job at a Unix socket: it "copies" or "receives". Yield its pid."""
    command = [sys.executable, "-c", SIDECAR, str(folder / "socket"), does, COPIES]
    with spawn(*command) as process:
        first_line(process)
        yield process.pid


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("copies", Signature.TRANSFERS),
        ("receives", Signature.AWAITS_OUTSIDE),
        ("is stopped", Signature.BLOCKED),
    ],
)
def test_rank_that_asks_process_of_node_moves_as_that_process(does: str, expected: Signature, tmp_path: Path) -> None:
    with sidecar(does, tmp_path) as other, targets.python(ASKS_SIDECAR, tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        if does == "is stopped":
            targets.stop(other)
        member = measured(job_of(pid))
    assert member.signature is expected
    assert member.waits.awaited is not None and f"process {other} (python" in member.waits.awaited.name
    assert (member.waits.awaited.end == "held") is (does == "is stopped")


def test_rank_with_an_unfinished_search_for_its_peer_is_unknown(tmp_path: Path) -> None:
    with sidecar("copies", tmp_path), targets.python(ASKS_SIDECAR, tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        member = measured(job_of(pid), search_seconds=0.0)
    assert member.signature is Signature.UNKNOWN
    assert member.waits.awaited is not None and member.waits.awaited.end == "unknown"


WRITES_TO_READER = (
    "import os, sys\npipe = os.open('/proc/{pid}/fd/0', os.O_WRONLY)\nready()\nwhile True: os.write(pipe, bytes(4096))"
)


@pytest.mark.parametrize(
    ("reader", "search_seconds", "expected"),
    [
        ("copies", 60.0, Signature.TRANSFERS),
        ("copies", 0.0, Signature.UNKNOWN),
        ("sleeps", 60.0, Signature.BLOCKED),
        ("sleeps", 0.0, Signature.UNKNOWN),
    ],
)
def test_rank_at_a_pipe_of_a_process_outside_its_job_moves_as_that_process(
    reader: str, search_seconds: float, expected: Signature, tmp_path: Path
) -> None:
    """A pipe such as that to `tee`, which the shell started beside the rank."""
    command = [sys.executable, "-c", COPIES] if reader == "copies" else ["sleep", "600"]
    with (
        spawn(*command, stdout=subprocess.DEVNULL) as other,
        targets.python(WRITES_TO_READER.format(pid=other.pid), tmp_path) as pid,
    ):
        targets.wait_for_call(pid, "writes")
        member = measured(job_of(pid), search_seconds=search_seconds)
    assert member.signature is expected


READS_ONLY = READS_FIFO.replace("O_RDWR", "O_RDONLY").replace("/fifo", "/../fifo")
LOCKS = "import fcntl\none = open(folder + '/../fifo', 'r+b', buffering=0)\nready()\nfcntl.flock(one, fcntl.LOCK_EX)"
HOLDS = (
    "import fcntl, time\none = open({path!r}, 'r+b', buffering=0)\nfcntl.flock(one, fcntl.LOCK_EX)\nprint(flush=True)\n"
)


@pytest.mark.parametrize(
    ("then", "search_seconds", "expected"),
    [
        ("while True: pass", 60.0, [Signature.UNKNOWN] * 2),
        ("time.sleep(600)", 60.0, [Signature.BLOCKED] * 2),
        ("time.sleep(600)", 0.0, [Signature.UNKNOWN, Signature.BLOCKED]),
    ],
)
def test_rank_at_a_fifo_or_lock_moves_as_the_process_that_holds_it(
    then: str, search_seconds: float, expected: list[Signature], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    holds = HOLDS.format(path=str(tmp_path / "fifo"))
    with spawn(sys.executable, "-c", holds + then, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with targets.started(tmp_path, READS_ONLY, LOCKS) as pids:
            targets.wait_for_call(pids[0], "receives")
            targets.wait_for_call(pids[1], "locks")
            signatures = [measured(job_of(pid), search_seconds=search_seconds).signature for pid in pids]
    assert signatures == expected


def test_what_a_rank_has_to_do_with_the_store_of_its_job(tmp_path: Path) -> None:
    serves = "import os, socket\none = socket.create_server(('127.0.0.1', 0))\n"
    serves += "open(folder + '/port', 'w').write(str(one.getsockname()[1]))\nready()\none.accept()[0].recv(1)"
    with targets.python(serves, tmp_path) as pid:
        port = (tmp_path / "port").read_text()
        (tmp_path / "other").mkdir()
        seen = {"none": measured(job_of(os.getpid(), MASTER_ADDR="127.0.0.1", MASTER_PORT=port))}
        with targets.python(RECEIVES.replace("{port}", port), tmp_path / "other") as other:
            seen["connected"] = measured(job_of(other, MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
            seen["serving"] = measured(job_of(pid, MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    assert {use: member.waits.store for use, member in seen.items()} == {
        use: Store(endpoint=f"127.0.0.1:{port}", socket=use) for use in seen
    }


def test_which_thread_waits_for_an_answer_of_the_store(tmp_path: Path) -> None:
    """`store.wait` has no Python frame. Another thread counts if the main thread sleeps."""
    joins = CONNECT + "import threading\nready()\n"
    joins += "waits = threading.Thread(target=lambda: peer.recv(1))\nwaits.start()\nwaits.join()"
    with server() as port:
        for code, which, store in (RECEIVES, "main", port), (joins, "thread", port), (RECEIVES, None, 1):
            with targets.python(code.replace("{port}", str(port)), tmp_path) as pid:
                targets.wait_until_blocked(pid)
                job = job_of(pid, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store))
                taken = capture(job, CaptureRequest(settings=SETTINGS, node="here"))
            assert {dump.waits.awaits_store for dump in taken.ranks[0].rounds} == {which}


def test_worker_awaited_by_pid_counts_as_outside(tmp_path: Path) -> None:
    with server() as port, targets.python(CHILD.replace("{port}", str(port)), tmp_path) as pid:
        targets.wait_for_call(pid, "awaits_child")
        job = job_of(pid)
        (child,) = procfs.read_children(pid)
        worker = Worker(id=identity(child), comm="python")
        member = measured(replace(job, ranks=(replace(job.ranks[0], workers=(worker,)),)))
    assert member.signature is Signature.AWAITS_OUTSIDE
    assert member.waits.awaited.name.startswith(f"its child {child} (python")


def test_a_peer_that_is_a_process_of_the_job_is_not_outside(tmp_path: Path) -> None:
    listens = """
import socket
listening = socket.create_server(('127.0.0.1', 0))
open(folder + '/port', 'w').write(str(listening.getsockname()[1]))
ready()
peer = listening.accept()[0]
peer.recv(1)
"""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with targets.python(listens, tmp_path / "one") as first:
        port = int((tmp_path / "one/port").read_text())
        with targets.python(RECEIVES.format(port=port), tmp_path / "two") as second:
            grouping = targets.grouped(targets.job_of((first, second)), SETTINGS)
    assert {member.signature for member in grouping.members} == {Signature.BLOCKED}


def test_bytes_that_a_rank_receives_into_memory_are_motion(tmp_path: Path) -> None:
    with server(bytes(40_000)) as port, targets.python(DOWNLOADS.format(port=port), tmp_path) as pid:
        member = measured(job_of(pid))
    assert member.signature is Signature.TRANSFERS
    assert 100_000 < member.usage.io_bytes_per_second < 1_000_000


def test_rank_in_a_debugger_waits_for_a_person() -> None:
    """The rank waits for a person, not for the job, so it is not judged."""
    ours, theirs = os.openpty()
    with spawn(sys.executable, "-c", "breakpoint()", stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        said = b""
        while b"(Pdb)" not in said:
            said += os.read(ours, 4096)
        targets.wait_until_blocked(child.pid)
        (group,) = targets.grouped(targets.job_of_pids([child.pid]), table=activity.load()).groups
    os.close(ours)
    (member,) = group.members
    assert member.signature is Signature.AWAITS_OUTSIDE
    assert member.waits.awaited is not None and member.waits.awaited.name.startswith(
        "a person at the terminal /dev/pts/"
    )
    assert clauses.describe_activity(group) == "is in a debugger and waits for a person"


DEBUGGED = """
import debugpy
_, port = debugpy.listen(("127.0.0.1", 0), in_process_debug_adapter=True)
print(port, flush=True)
debugpy.wait_for_client()
debugpy.breakpoint()
step = 1
"""


@pytest.mark.parametrize("comes", [False, True], ids=["no debugger has attached", "at a breakpoint"])
def test_rank_in_debugpy_polls(comes: bool) -> None:
    """Its main thread wakes 47 times a second while it waits for the editor, and 5 times at a breakpoint."""
    with spawn(sys.executable, "-Xfrozen_modules=off", "-c", DEBUGGED) as child:
        port = int(first_line(child))
        with debug_client.attach_debugger(port) if comes else contextlib.nullcontext():
            taken = capture(targets.job_of_pids([child.pid]), CaptureRequest(settings=SETTINGS, node="here"))
    (nameless,) = group_ranks(taken, Table(()), SETTINGS).members
    assert (nameless.signature, nameless.motion) == (Signature.POLLS, Motion.UNKNOWN)
    (group,) = group_ranks(taken, activity.load(), SETTINGS).groups
    assert clauses.describe_activity(group) == "is in a debugger and waits for a person"


# TCP as between nodes: over shared memory TensorPipe always polls in its own thread.
RANK = """
import hashlib, os, threading
import torch.distributed.rpc as rpc
lock = threading.Lock()
lock.acquire()
def locks():
    ready()
    lock.acquire()
def computes():
    ready()
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 100000)
options = rpc.TensorPipeRpcBackendOptions(
    rpc_timeout=3600, init_method="file://{meeting}", _transports=["uv"], _channels=["basic"]
)
"""
CLIENT = RANK + "ready()\nrpc.init_rpc('client', rank=0, world_size=2, rpc_backend_options=options)\n"
SERVER = RANK + "rpc.init_rpc('server', rank=1, world_size=2, rpc_backend_options=options)\nrpc.shutdown()\n"


@pytest.mark.torch
@pytest.mark.parametrize(("does", "expected"), [("locks", Signature.BLOCKED), ("computes", Signature.UNKNOWN)])
def test_rank_waiting_by_rpc_is_blocked(does: str, expected: Signature, tmp_path: Path) -> None:
    programs = (CLIENT + f"rpc.rpc_sync('server', {does})\n", SERVER)
    meeting = str(tmp_path / "meeting")
    with targets.started(tmp_path, *(each.replace("{meeting}", meeting) for each in programs)) as (asks, asked):
        taken = capture(targets.job_of_pids([asks, asked]), CaptureRequest(settings=SETTINGS, node="here"))
    measured = {one.id.pid: one.signature for one in group_ranks(taken, Table(()), SETTINGS).members}
    assert measured == {asks: Signature.BLOCKED, asked: expected}
    named = {group.members[0].id.pid: group for group in group_ranks(taken, activity.load(), SETTINGS).groups}
    assert (named[asks].activity, named[asks].operation) == ("rpc_wait", "rpc_sync")
