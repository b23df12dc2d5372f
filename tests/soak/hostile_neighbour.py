"""Attack another user's job as an unprivileged user of the node can. State, page and named rank must not change.

usage: python -m tests.soak.hostile_neighbour [--minutes 20]      as root, on Linux with cgroup v1 `pids` or cgroup v2

A real daemon monitors five GPUs of the fake driver and a job of eight ranks, run id 100, with four ranks on this
node. The job trains, hangs at rank 2 and pages. Its neighbours are, in turn, a user (nobody) and a container (uid 0
without capabilities, in a pod's own control group). They attack in all known ways: in some rows before the job
starts, in others after it.

Each row is one life of the job: its state, page and named rank. All load is bounded in number and time, and on
loopback. The script ends only processes that it started.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fake_driver import FakeDriver, compile_library, h100
from tests.real_daemon import RealDaemon
from tests.soak import number_options

LIBC = ctypes.CDLL(None)
RANKS = 4
ADA, NOBODY = 1004, 65534
RUN = {
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "100",
    "MASTER_ADDR": "gpu-01",
    "MASTER_PORT": "29500",
}
PYTHON = "/usr/bin/python3"  # every user may run it
SLEEP = [PYTHON, "-SE", "-c", "import time; time.sleep(3600)"]
CONNECTED = [
    PYTHON,
    "-SE",
    "-c",
    "import contextlib, socket, time\n"
    "with contextlib.suppress(OSError): listening = socket.create_server(('127.0.0.1', 29500))\n"
    "store = socket.create_connection(('127.0.0.1', 29500))\ntime.sleep(3600)\n",
]
RANK = Path(__file__).with_name("rank.py")
PODS = [f"8c1f0a52-6d1e-4f0e-9f57-0d2c6a1b7e{number}" for number in range(10, 14)]  # the job's and the neighbour's
LIVES = [(who, first) for who in ("another user", "another container") for first in ("job first", "hostile first")]
PAGE_SECONDS = 45.0
VISITS = 2
WATCHED_SECONDS = 15.0


class Cgroup:
    """A control group like those that the kubelet makes for a container of a pod."""

    def __init__(self, pod: str) -> None:
        base = next(
            path
            for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
            if path.is_dir()
        )
        self.path = base / "kubepods" / "burstable" / f"pod{pod}" / "c1"
        self.path.mkdir(parents=True, exist_ok=True)

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        for folder in (self.path, self.path.parent, self.path.parent.parent, self.path.parent.parent.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def as_user(uid: int) -> Callable[[], None]:
    def change() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        libc_prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the process ends with this script

    return change


def in_pod(cgroup: Cgroup) -> Callable[[], None]:
    """Return a function that moves the calling process into this control group, as uid 0 without capabilities."""

    def change() -> None:
        cgroup.join()
        for capability in range(41):
            libc_prctl(24, capability)  # PR_CAPBSET_DROP
        libc_prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        libc_prctl(1, signal.SIGKILL)

    return change


def libc_prctl(option: int, value: int) -> None:
    LIBC.prctl(option, value, 0, 0, 0)


class Crowd:
    """The processes that this script has started. They are ended by pid."""

    def __init__(self, become: Callable[[], None]) -> None:
        self.become = become
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], environ: dict[str, str], count: int = 1) -> None:
        for _ in range(count):
            self.processes.append(
                subprocess.Popen(
                    command, env={"PATH": os.environ["PATH"], **environ}, preexec_fn=self.become, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
                )
            )  # fmt: skip

    def end(self) -> None:
        for process in self.processes:  # each has its own session: its pid is its group id
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()


def attack(crowd: Crowd, folder: Path, job: list[int]) -> None:
    """Start at once copied ranks of two attempts, launchers, servers, floods, and signals to the job's pids."""
    for rank in range(RANKS):
        crowd.start(SLEEP, {**RUN, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        crowd.start(SLEEP, {**RUN, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "99"})
    for name in ("torchrun", "vllm", "pt_elastic", "py-spy"):
        script = folder / name
        script.write_text("import subprocess, sys, time\nsubprocess.Popen(sys.argv[1:])\ntime.sleep(3600)\n")
        script.chmod(0o755)
        crowd.start([PYTHON, "-SE", str(script), *SLEEP], {**RUN, "RANK": "2", "LOCAL_RANK": "2"})
    busy = [PYTHON, "-SE", "-c", "while True: sum(range(1000))"]
    crowd.start(busy, {**RUN, "RANK": "1", "LOCAL_RANK": "1"})
    crowd.start(SLEEP, {**RUN, "RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "TORCHELASTIC_RUN_ID": "100"})
    big = {"WORLD_SIZE": "4000000", "LOCAL_WORLD_SIZE": "1024", "TORCHELASTIC_RUN_ID": "big"}
    for rank in range(2):
        crowd.start(SLEEP, {**RUN, **big, "RANK": str(rank)})
    for number in range(60):
        crowd.start(SLEEP, {**big, "RANK": "0", "WORLD_SIZE": "1024", "TORCHELASTIC_RUN_ID": f"many{number}"})
    flood = {f"NCCL_{number}": "x" * 120_000 for number in range(8)}
    crowd.start(SLEEP, {**RUN, "RANK": "0", "TORCHELASTIC_RUN_ID": "flood", **flood}, count=10)
    crowd.start(SLEEP, {**RUN, "RANK": "0", "USER": "root\x1b[2J\x07", "TORCHELASTIC_RUN_ID": '100\n\x1b]0;x\x07"} 1'})
    deep = "import threading, time\ndef f(n):\n    f(n - 1) if n else time.sleep(3600)\n"
    deep += "import sys; sys.setrecursionlimit(20000)\nthreading.stack_size(64 << 20)\n"
    deep += "[threading.Thread(target=f, args=(5000,)).start() for _ in range(8)]\n"
    crowd.start([PYTHON, "-SE", "-c", deep], {**RUN, "RANK": "3", "LOCAL_RANK": "3"})
    stop = [PYTHON, "-SE", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    crowd.start(stop, {**RUN, "RANK": "2", "LOCAL_RANK": "2"})
    kill = "import os, signal, sys\nfor pid in map(int, sys.argv[1:]):\n    for number in (signal.SIGSTOP, signal.SIGTERM):\n"
    kill += "        try: os.kill(pid, number)\n        except OSError: pass\n"
    if job and crowd.become.__qualname__.startswith("as_user"):  # a container sees only its own pids
        crowd.start([PYTHON, "-SE", "-c", kill, *map(str, job)], {})


def join(crowd: Crowd) -> None:
    """Claim ranks of the job on other nodes, but no rank on this node."""
    for rank in range(RANKS):
        crowd.start(SLEEP, {**RUN, "RANK": str(RANKS + rank), "LOCAL_RANK": str(rank)})


@contextlib.contextmanager
def slow_clients(port: int, idle: int = 100, slow: int = 20) -> Iterator[None]:
    """Open `idle` connections that send nothing, and `slow` connections that send only the beginning of a request."""
    doors: list[socket.socket] = []
    try:
        for number in range(idle + slow):
            with contextlib.suppress(OSError):
                door = socket.create_connection(("127.0.0.1", port), timeout=2)
                doors.append(door)
                if number >= idle:
                    door.send(b"GET /metrics HTT")
        yield
    finally:
        for door in doors:
            door.close()


class Visitor:
    """A false rank 0 with the strongest evidence: the driver lists it on a GPU, and it is connected to a store."""

    def __init__(self, crowd: Crowd, driver: FakeDriver) -> None:
        self.crowd, self.driver = crowd, driver
        self.line = ""

    def come(self) -> None:
        self.crowd.start(CONNECTED, {**RUN, "RANK": "0", "LOCAL_RANK": "0"})
        self.line = f"gpu {RANKS} pids {self.crowd.processes[0].pid}"
        self.driver.add(self.line)

    def go(self) -> None:
        self.driver.remove(self.line)
        self.crowd.end()


class Life:
    """One run of the job: start, hang, diagnosis, recovery."""

    def __init__(self, daemon: RealDaemon, driver: FakeDriver, become: Callable[[], None], owner: str) -> None:
        self.daemon, self.driver, self.owner = daemon, driver, owner
        self.folder = Path(tempfile.mkdtemp(prefix="ada-"))
        self.folder.chmod(0o755)
        os.mkfifo(self.folder / "shard")
        shutil.copy(RANK, self.folder / "train.py")
        self.crowd = Crowd(become)
        self.states: list[str] = []
        self.latencies: list[float] = []

    def start(self) -> list[int]:
        for rank in range(RANKS):
            self.crowd.start(
                [PYTHON, "-SE", str(self.folder / "train.py"), str(self.folder)],
                {**RUN, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        pids = [process.pid for process in self.crowd.processes]
        self.driver.write([*h100(RANKS + 1), *(f"gpu {gpu} pids {pid}" for gpu, pid in enumerate(pids))])
        return pids

    def look(self) -> tuple[str | None, bool, str]:
        """Return the state, the page and the named rank of the job 100 that holds the GPUs of our ranks."""
        began = time.monotonic()
        keys = {
            row["job_key"]
            for row, _ in self.daemon.samples("hangwatch_job_info", job_id="100", owner=self.owner)
            if self.daemon.samples("hangwatch_job_ranks", job_key=row["job_key"]) and row["job_key"] == self.key()
        }
        self.latencies.append(time.monotonic() - began)
        state = page = named = None
        for key in keys:
            state = next(
                (r["state"] for r, v in self.daemon.samples("hangwatch_job_state", job_key=key) if v == 1), None
            )
            page = any(v == 1 for _, v in self.daemon.samples("hangwatch_job_page", job_key=key))
            named = next((r["named"] for r, _ in self.daemon.samples("hangwatch_incident_info", job_key=key)), "")
        if state and (not self.states or self.states[-1] != state):
            self.states.append(state)
        return state, bool(page), named or ""

    def ranks(self) -> int:
        """Return the number of ranks that the daemon exports for the job."""
        return int(sum(value for _, value in self.daemon.samples("hangwatch_job_ranks", job_key=self.key() or "none")))

    def key(self) -> str | None:
        """Return the key of the job that holds the GPUs of our ranks according to the driver."""
        rows = self.daemon.samples("hangwatch_job_gpu_info", job_id="100")
        owners = {row["job_key"] for row, _ in self.daemon.samples("hangwatch_job_info", owner=self.owner)}
        return next(
            (row["job_key"] for row, _ in rows if row["job_key"] in owners and row["uuid"] and row["rank"] == "2"), None
        )

    def until(
        self, wanted: Callable[[tuple[str | None, bool, str]], bool], seconds: float
    ) -> tuple[str | None, bool, str]:
        end = time.monotonic() + seconds
        while True:
            seen = self.look()
            if wanted(seen) or time.monotonic() > end:
                return seen
            time.sleep(0.5)

    def end(self) -> None:
        (self.folder / "end").touch()
        self.crowd.end()


def play(daemon: RealDaemon, driver: FakeDriver, attacker: str, first: str) -> tuple[bool, str]:  # long: a sequence
    """Run one row of the table. Return True if it passed, and its text."""
    cgroups = [Cgroup(pod) for pod in PODS]
    is_user = attacker == "another user"
    victim = as_user(ADA) if is_user else in_pod(cgroups[0])
    hostile, joining, visiting = (
        Crowd(as_user(NOBODY - number) if is_user else in_pod(cgroups[1 + number])) for number in range(3)
    )
    visitor = Visitor(visiting, driver)
    life = Life(daemon, driver, victim, "uid 1004" if is_user else "uid 0")
    tools = Path(tempfile.mkdtemp(prefix="hostile-"))
    tools.chmod(0o777)
    try:
        if first == "hostile first":
            attack(hostile, tools, [])
            join(joining)
            time.sleep(3)
        pids = life.start()
        life.until(lambda seen: seen[0] == "training", 30)
        if first == "job first":
            attack(hostile, tools, pids)
            join(joining)
        with slow_clients(daemon.port):
            for _ in range(VISITS):
                visitor.come()
                life.until(lambda seen: False, 3)
                visitor.go()
                life.until(lambda seen: False, 2)
            visitor.come()
            life.until(lambda seen: False, 3)
            (life.folder / "hang").touch()
            driver.write(
                [*driver.lines, "gpu all power_watts 118", "gpu 2 power_watts 86", "gpu 2 utilization_ratio 0"]
            )
            began = time.monotonic()
            state, page, named = life.until(lambda seen: seen[0] == "hung" and seen[1], PAGE_SECONDS)
            took = time.monotonic() - began
            ranks = life.ranks()
            shaky = 0
            end = time.monotonic() + WATCHED_SECONDS
            while time.monotonic() < end:
                shaky += life.look()[1] is not True
                time.sleep(0.5)
        alive = sum(process.poll() is None for process in life.crowd.processes)
        (life.folder / "hang").unlink()
        with (
            contextlib.suppress(OSError),
            os.fdopen(os.open(life.folder / "shard", os.O_WRONLY | os.O_NONBLOCK), "wb") as shard,
        ):
            shard.write(b"x")
        for process in life.crowd.processes:
            process.send_signal(signal.SIGCONT)
        right = state == "hung" and page and named.endswith(":2") and not shaky and alive == ranks == RANKS
        wait = statistics.median(life.latencies)
        words = (
            f"{' '.join(life.states)}; page after {took:.1f} s, named {named or 'nobody'}, page lost {shaky} times, "
        )
        return right, f"{words}{alive} ranks alive, {ranks} in the job, look {wait:.2f} s (median)"
    finally:
        visitor.go()
        hostile.end()
        joining.end()
        life.end()
        driver.write(h100(RANKS + 1))
        life.until(lambda seen: seen[0] in (None, "ended"), 20)
        for cgroup in cgroups:
            cgroup.remove()


def resident_mebibytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> None:
    options = number_options(__doc__, minutes=20.0)
    wrong = lives = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "nvml").mkdir()
        driver = FakeDriver(compile_library(folder / "nvml"), folder / "gpus.scenario", h100(RANKS + 1))
        with RealDaemon(folder / "hw", driver.environ) as daemon:
            print(f"daemon {resident_mebibytes(daemon.process.pid):.0f} MiB at the start", flush=True)
            end = time.monotonic() + 60 * options.minutes
            most = 0.0
            while time.monotonic() < end or lives < len(LIVES):
                who, first = LIVES[lives % len(LIVES)]
                right, words = play(daemon, driver, who, first)
                lives, wrong = lives + 1, wrong + (not right)
                most = max(most, resident_mebibytes(daemon.process.pid))
                print(
                    f"{lives:3} {'ok   ' if right else 'WRONG'} {who}, {first}: {words}; daemon {most:.0f} MiB",
                    flush=True,
                )
            print(f"{lives} lives, {wrong} changed by a neighbour; the daemon used {most:.0f} MiB at most")
            if wrong:
                print(daemon.log[-4000:])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
