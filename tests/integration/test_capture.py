"""Captures of real processes that act as ranks: rounds, deadlines, ranks that end, stop or are frozen."""

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture import stack_limits
from hangwatch.capture.request import NodePaths
from hangwatch.jobs import discovery
from hangwatch.model import Capture, Fault, Job, ProcessDump, ProcessId, Rank, RankDump, Signature, Worker
from hangwatch.probes.base import procfs
from hangwatch.probes.process import main_thread, pyspy
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.stacks import activity
from hangwatch.verdict import second_round
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.verdict.permanence import find_permanent
from tests.commands import spawn
from tests.conftest import identity, wait_for
from tests.fake_driver import FakeDriver, h100
from tests.fake_pyspy import fake_pyspy
from tests.integration import targets
from tests.integration.targets import QUICK, diagnosed
from tests.memory_cgroup import cgroup_below
from tests.other_users import needs_root
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode

RANK = """
import os, sys, time
def train(folder):
    for _ in range(int(sys.argv[2])):
        if not os.fork():
            load(folder)
    done(folder)
    time.sleep(600)
def load(folder):
    done(folder)
    time.sleep(600)
def done(folder):
    open(f"{folder}/up-{os.getpid()}", "w").close()
train(sys.argv[1])
"""


@contextlib.contextmanager
def ranks(folder: Path, count: int, workers: int = 0) -> Iterator[Job]:
    """Start `count` sleeping ranks with `workers` children each. Yield their job, as a scan returns it."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        for number in range(count):
            environ = {"RANK": str(8 + number), "WORLD_SIZE": "16", "LOCAL_RANK": str(number), "MASTER_ADDR": name}
            environ["LOCAL_WORLD_SIZE"] = str(count)
            stack.enter_context(spawn(sys.executable, "-c", RANK, folder, workers, env=environ, group=True))
        wait_for(lambda: len(list(folder.glob("up-*"))) == count * (1 + workers), "the ranks to be up")
        (job,) = (one for one in discovery.find_jobs(ProcessScan().processes()).jobs if one.job_id == name)
        pids = [one.id.pid for rank in job.ranks for one in (rank, *rank.workers)]
        wait_for(lambda: {targets.state(pid) for pid in pids} == {"S"}, "all to sleep")
        yield job


def one_rank(pid: int, start_ticks: int | None = None) -> Job:
    found = procfs.read_state(pid)
    identity = found[0] if found and start_ticks is None else ProcessId(pid=pid, start_ticks=start_ticks or 0)
    return Job(job_id="one", launcher="plain", launcher_id=None, ranks=(Rank(id=identity, rank=0, local_rank=0),))


def innermost(dump: ProcessDump) -> str:
    (main,) = (thread for thread in dump.threads if thread.is_main)
    return main.frames[0].function


def test_every_rank_and_its_workers_in_every_round(tmp_path: Path) -> None:
    seen: list[Fault | None] = []
    with ranks(tmp_path, 3, workers=2) as job:
        taken = targets.taken(job, observe_dump=lambda seconds, fault: seen.append(fault))
    assert (taken.rounds, taken.node, taken.world_size, taken.notes) == (2, "here", 16, ())
    ids = [(one.id.rank, one.id.local_rank, one.id.node, one.gone) for one in taken.ranks]
    assert ids == [(8 + local_rank, local_rank, "here", False) for local_rank in range(3)]
    for rank in taken.ranks:
        assert [innermost(dump) for dump in rank.rounds] == ["train", "train"]
        assert [[innermost(dump) for dump in worker.rounds] for worker in rank.workers] == [["load", "load"]] * 2
        first, second = rank.rounds
        assert second.taken_monotonic_seconds - first.taken_monotonic_seconds >= 0.2
        assert (first.state, first.state_after, first.fault) == ("S", "S", None)
        counted = [first.main.before, first.main.after, second.main.before, second.main.after]
        switches = [one.voluntary_switches for one in counted if one is not None]
        assert len(switches) == 4 and switches == sorted(switches)
        assert first.cpu_seconds is not None and first.io_bytes is not None
        wchan = first.main.wchan or ""
        assert any(word in wchan for word in ("nanosleep", "nsleep", "poll", "select")), wchan
    assert seen == [None] * 18


def test_a_rank_that_ends_between_two_rounds_is_gone_and_keeps_its_first_stack(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as job:
        victim = job.ranks[1].id.pid

        def end(seconds: float, fault: Fault | None) -> None:
            os.kill(victim, signal.SIGKILL)
            targets.wait_for_state(victim, "Z")

        taken = targets.taken(job, observe_dump=_once_after(2, end))
    alive, gone = taken.ranks
    assert (alive.gone, gone.gone) == (False, True)
    assert (innermost(gone.rounds[0]), gone.rounds[1].threads) == ("train", ())
    assert gone.rounds[1].fault is not None and gone.rounds[1].fault.reason == "ProcessGone"
    assert gone.rounds[1].state is None


def test_what_ports_of_the_node_count_during_a_look(tmp_path: Path) -> None:
    counters = tmp_path / "class" / "infiniband" / "mlx5_3" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    counts = {"port_xmit_data": 100, "port_rcv_data": 50, "link_downed": 4}

    def grow(*_: object) -> None:
        for name, count in counts.items():
            counts[name] = count + (1_000_000 if "data" in name else 1)
            (counters / name).write_text(f"{counts[name]}\n")

    grow()
    (tmp_path / "ranks").mkdir()
    with ranks(tmp_path / "ranks", 2) as job:
        settings = replace(QUICK, rounds=3)
        taken = targets.taken(job, settings, observe_dump=_once_after(3, grow), paths=NodePaths(sys_root=tmp_path))
        off = replace(settings, counters=False)
        unread = targets.taken(job, off, paths=NodePaths(sys_root=tmp_path))
    for rank in taken.ranks[:2]:
        assert rank.gpu.ports.worse == ("mlx5_3/1 link_downed +1",)
        assert rank.gpu.ports.bytes_per_second == pytest.approx(8e6 / taken.duration_seconds, rel=0.5)
    assert [rank.gpu.ports for rank in unread.ranks[:2]] == [None, None]


def test_the_kernels_log_is_evidence_unless_it_is_turned_off(tmp_path: Path) -> None:
    line = "mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged"
    (tmp_path / "kmsg").write_text(f"3,1,{int(time.monotonic() * 1e6)},-;{line}\n")
    with targets.python(targets.SLEEPING, tmp_path) as pid:

        def report_lines(**more: bool) -> list[str]:
            settings, paths = replace(QUICK, rounds=1, **more), NodePaths(kernel_log=tmp_path / "kmsg")
            taken = diagnosed(targets.job_of_pids([pid]), settings, paths=paths)
            return [line.text for rank in taken.capture.ranks for line in rank.kernel_lines]

        assert report_lines() == [line]
        assert report_lines(kernel_log=False) == []


def _once_after(count: int, call: object) -> object:
    """Return an observer of dumps. It calls `call` once, at dump number `count`."""
    numbers = itertools.count(1)

    def observe(seconds: float, fault: Fault | None) -> None:
        if next(numbers) == count:
            call(seconds, fault)  # type: ignore[operator]

    return observe


def test_rank_in_unknown_code_is_seen_in_a_second_round(tmp_path: Path) -> None:
    settings = replace(QUICK, rounds=3)
    needs_second_round = partial(second_round.find_reason, table=activity.load())
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        targets.wait_for_state(pid, "S")
        job = targets.job_of_pids([pid])
        look = diagnosed(job, settings, rounds=1, needs_second_round=needs_second_round)
        asked = diagnosed(job, settings, rounds=1)
    assert (look.capture.rounds, asked.capture.rounds) == (2, 1)


def test_another_process_of_the_same_pid_is_not_dumped(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        taken = targets.taken(one_rank(pid, start_ticks=1), rounds=1)
    (rank,) = taken.ranks
    assert (rank.gone, rank.rounds[0].threads) == (True, ())


def test_stopped_and_blocked_ranks_are_dumped_as_they_are(tmp_path: Path) -> None:
    for letter, code, place in (("T", targets.SPINNING, "spin"), ("D", targets.IN_KERNEL, "blocked_in_kernel")):
        folder = tmp_path / letter
        folder.mkdir()
        with targets.python(code, folder) as pid:
            wait_for(partial(_ranks_at, pid, place), f"{place} to be reached")
            if letter == "T":
                targets.stop(pid)
            targets.wait_for_state(pid, letter)
            (rank,) = targets.taken(one_rank(pid), rounds=1).ranks
            assert targets.state(pid) == letter
        (dump,) = rank.rounds
        assert (dump.state, dump.state_after, dump.fault, rank.gone) == (letter, letter, None, False)
        assert innermost(dump) == place


def _ranks_at(pid: int, place: str) -> tuple[RankDump, ...]:
    """Return the dumps of the rank if it is blocked at `place`, where the file system blocks it last."""
    taken = targets.taken(one_rank(pid), rounds=1).ranks
    return taken if innermost(taken[0].rounds[0]) == place else ()


def test_what_is_undumpable_keeps_its_place_with_the_reason() -> None:
    with spawn("sleep", "600") as child:
        wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", "sleep to be executed")
        targets.wait_for_state(child.pid, "S")
        (rank,) = targets.taken(one_rank(child.pid), rounds=1).ranks
    assert (rank.rounds[0].fault.reason, rank.rounds[0].state, rank.gone) == ("NotPython", "S", False)
    assert rank.rounds[0].fault.remedy.startswith("if it is not a Python process, give the pid of a rank")


def test_deadlines_hold_when_py_spy_hangs(tmp_path: Path) -> None:
    settings = config.Capture(rounds=1, parallel=2, dump_deadline_seconds=2.0, round_deadline_seconds=3.0)
    with ranks(tmp_path, 6) as job:
        began = time.monotonic()
        taken = targets.taken(job, settings, paths=NodePaths(pyspy_path=fake_pyspy(tmp_path, "exec sleep 600")))
        seconds = time.monotonic() - began
    assert seconds < 60, "py-spy hangs for 600 s"
    reasons = [rank.rounds[0].fault.reason for rank in taken.ranks if rank.rounds[0].fault is not None]
    assert (len(reasons), set(reasons)) == (6, {"Timeout", "RoundDeadline"})
    assert not any(rank.gone for rank in taken.ranks)


def test_a_dump_may_not_outlast_its_round(tmp_path: Path) -> None:
    settings = config.Capture(rounds=1, dump_deadline_seconds=30.0, round_deadline_seconds=3.0)
    with ranks(tmp_path, 1) as job:
        (rank,) = targets.taken(job, settings, paths=NodePaths(pyspy_path=fake_pyspy(tmp_path, "exec sleep 600"))).ranks
    (dump,) = rank.rounds
    assert dump.fault is not None and dump.fault.reason == "Timeout"
    assert (dump.duration_seconds or 0) < 25


STARTS_WORKER = """
import os, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
"""
AT_WORKER = f"{STARTS_WORKER}ready()\nchild.stdout.read()"
AT_FIFO = f"{STARTS_WORKER}ready()\nos.read(os.open(folder + '/fifo', os.O_RDWR), 1)"
AT_SOCKET = """import os, socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
connects = "import socket, sys; end = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); input()"
child = subprocess.Popen([sys.executable, "-c", connects, str(server.getsockname()[1])], stdin=subprocess.PIPE)
client, _ = server.accept()
ready()
os.read(client.fileno(), 1)"""
IN_ALL_REDUCE = """
lock = threading.Lock()
code = "def all_reduce():\\n    lock.acquire()\\n    ready()\\n    lock.acquire()"
exec(compile(code, "torch/distributed/distributed_c10d.py", "exec"))
all_reduce()
"""
HELD = "import fcntl, os, signal, sys\nheld = open(sys.argv[1], 'r+b', 0)\nfcntl.flock(held, fcntl.LOCK_EX)\n"
HOLDS = f"{HELD}print(flush=True)\nsignal.pause()"
AT_LOCK = "import fcntl, os\nheld = open(folder + '/../fifo', 'r+b', 0)\nready()\nfcntl.flock(held, fcntl.LOCK_EX)"
WORKER_AT_LOCK = AT_WORKER.replace('"input()"', f"{HELD!r}, folder + '/../fifo'")
OPENS = "import os, threading\nfifo = os.open(folder + '/../fifo', os.O_RDONLY)\n"
THREAD_AT_PIPE = f"{OPENS}threading.Thread(target=os.read, args=(fifo, 1)).start()\n{IN_ALL_REDUCE}"
IDLE_POOL = f"import multiprocessing, threading\npool = multiprocessing.Pool(2)\npool.map(abs, [0])\n{IN_ALL_REDUCE}"


@pytest.mark.parametrize(
    ("other_rank", "calls", "all_processes", "dumped", "named"),
    [
        (AT_WORKER, ["read", "read"], False, [0, 1], [1]),
        (AT_FIFO, ["read", "read"], False, [0, 0], [1]),
        (AT_SOCKET, ["read", "read"], False, [0, 1], []),
        (AT_WORKER, ["read", "read"], True, [1, 1], [1]),
        (AT_LOCK, ["flock"], False, [1, 0], [1]),
        (WORKER_AT_LOCK, ["read", "flock"], False, [1, 1], [1]),
        (f"{OPENS}ready()\nos.read(fifo, 1)", ["read"], False, [1, 0], [1]),
        (THREAD_AT_PIPE, ["futex"], False, [1, 0], []),
        (IDLE_POOL, ["futex"], False, [0, 0], []),
    ],
)
def test_worker_for_which_no_process_waits_is_dumped_only_on_request(
    other_rank: str, calls: list[str], all_processes: bool, dumped: list[int], named: list[int], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    first = STARTS_WORKER.replace('"input()"', f"{HOLDS!r}, folder + '/../fifo'") + "child.stdout.readline()"
    with targets.started(tmp_path, first + IN_ALL_REDUCE, other_rank) as pids:
        workers = [procfs.read_children(pid) for pid in pids]
        for pid, name in zip((*pids, *workers[1]), ("futex", *calls), strict=False):
            targets.wait_for_call(pid, name)
        for worker in workers[1]:
            targets.wait_until_blocked(worker)
        ranks = tuple(
            replace(rank, workers=tuple(Worker(id=identity(worker), comm="pt_data_worker") for worker in its))
            for rank, its in zip(targets.job_of(pids).ranks, workers, strict=True)
        )
        job = targets.job_of(pids, ranks=ranks)
        look = targets.diagnosed(job, targets.QUICK, activity.load(), all_processes=all_processes)
    found = [[(worker.pid, len(worker.rounds)) for worker in rank.workers] for rank in look.capture.ranks]
    assert found == [[(worker, 2) for worker in its[:most]] for its, most in zip(workers, dumped, strict=True)]
    left_out = len(workers[0] + workers[1]) - sum(dumped)
    assert any(note.startswith(f"{left_out} worker") for note in look.capture.notes) == bool(left_out)
    assert [rank.rank for rank in look.verdict.named] == named


HAS_HELPER = (
    """
import fcntl, os, signal, socket, subprocess, sys, threading
signal.signal(signal.SIGALRM, print if "{how}" == "alarm" else signal.SIG_DFL)
ours, theirs = socket.socketpair()
back, forth = os.pipe()
lock = open(folder + "/lock", "w")
helper = """
    + repr("""
import fcntl, subprocess, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if sys.argv[2] == "shared":
    subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno(), *map(int, sys.argv[3:])])
print(flush=True)
time.sleep(600)
""")
    + """
ends = [theirs.fileno(), forth]
program = [sys.executable, "-c", helper, lock.name, "{how}", *map(str, ends)]
child = subprocess.Popen(program, pass_fds=ends, stdout=subprocess.PIPE)
child.stdout.readline()
theirs.close()
ready()
"""
)
WAITS_FOR_HELPER = {
    "child": "child.wait()",
    "pipe": "os.read(back, 1)",
    "Unix socket": "ours.recv(1)",
    "lock": "fcntl.flock(lock, fcntl.LOCK_EX)",
}


@pytest.mark.parametrize("how", ["stopped", "living", "traced", "shared", "invisible", "alarm"])
@pytest.mark.parametrize("code", WAITS_FOR_HELPER.values(), ids=WAITS_FOR_HELPER)
def test_rank_cannot_continue_if_all_that_it_waits_for_is_stopped(
    code: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper is stopped by a signal or a tracer. If it is shared, a living child of it has inherited its files.

    An alarm may end the call. In a pid namespace other than the initial one, such as that of a worker of the tests, processes may be invisible.
    """
    initial = "pid:[1]" if how == "invisible" else procfs.namespace(procfs.PROC, "self", "pid")
    monkeypatch.setattr(procfs, "_INITIAL_PID_NAMESPACE", initial)
    in_all_reduce = STARTS_WORKER.partition("child")[0] + IN_ALL_REDUCE
    with targets.started(tmp_path, in_all_reduce, HAS_HELPER.replace("{how}", how) + code) as pids:
        targets.wait_for_call(pids[0], "futex")
        targets.wait_until_blocked(pids[1])
        helper = procfs.read_children(pids[1])[0]
        with traced(helper) if how == "traced" else contextlib.nullcontext():
            if how not in ("living", "traced"):
                targets.stop(helper)
            look = diagnosed(targets.job_of(pids))
    ranks = {rank.rank for rank in find_permanent(look.grouping, look.verdict)}
    is_held = how == "stopped" or (how in ("shared", "invisible") and code == "child.wait()")
    assert ranks == ({1} if is_held else set()), look.verdict


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """Stop a process as a debugger does, see ptrace(2)."""
    ptrace, attach, detach = ctypes.CDLL(None, use_errno=True).ptrace, 16, 17
    assert ptrace(attach, pid, None, None) == 0
    try:
        targets.wait_for_state(pid, "t")
        yield
    finally:
        ptrace(detach, pid, None, None)


def test_eight_ranks_and_64_workers_take_less_than_two_seconds(tmp_path: Path) -> None:
    """Allow longer while less than 10 % of the cores' time is idle."""
    quick = []
    with ranks(tmp_path, 8, workers=8) as job:
        for _ in range(3):
            idle_before = idle_seconds()
            taken = targets.taken(job, replace(QUICK, rounds=1))
            idle = (idle_seconds() - idle_before) / (os.cpu_count() or 1) / taken.duration_seconds
            dumps = [dump for one in taken.ranks for each in (one, *one.workers) for dump in each.rounds]
            print(f"{len(dumps)} dumps in {taken.duration_seconds:.2f} s, cores idle for {idle:.0%}")
            assert (len(dumps), [dump.fault for dump in dumps if dump.fault]) == (72, [])
            quick.append(taken.duration_seconds < 2 or idle < 0.1)
    assert any(quick)


def idle_seconds() -> float:
    """Return the idle seconds of all cores of this machine."""
    cpu = Path("/proc/stat").read_text().split("\n")[0].split()
    return (int(cpu[4]) + int(cpu[5])) / procfs.TICKS_PER_SECOND


def test_pids_that_a_person_names(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        taken = targets.taken(targets.job_of_pids([pid, 4_000_000]), rounds=1)
    there, nowhere = taken.ranks
    assert (there.id.pid, there.gone, innermost(there.rounds[0])) == (pid, False, "asleep")
    assert (nowhere.id.pid, nowhere.gone) == (4_000_000, True)


def test_a_worker_that_comes_from_nowhere_is_no_trouble() -> None:
    """Capture a rank and a worker, both of which ended before the first round."""
    nobody, worker = ProcessId(pid=4_000_000, start_ticks=1), ProcessId(pid=4_000_001, start_ticks=1)
    rank = Rank(id=nobody, rank=0, local_rank=0, workers=(Worker(id=worker, comm="pt_data_worker"),))
    job = Job(job_id="x", launcher="plain", launcher_id=None, ranks=(rank,))
    taken: Capture = targets.taken(job)
    assert (taken.rounds, taken.ranks[0].gone, len(taken.ranks[0].workers[0].rounds)) == (2, True, 2)


@needs_root
@pytest.mark.parametrize(("ids", "is_shown"), [((4001, 4001), True), ((4002, 4002), False), ((4001, 0), False)])
def test_a_process_that_is_not_the_readers_is_not_dumped(tmp_path: Path, ids: tuple[int, int], is_shown: bool) -> None:
    """Any process of a job can change its user: execve(2) of a setuid program keeps the pid."""
    real, effective = ids
    code = f"import os, time\nready()\nos.setresuid({real}, {effective}, {effective})\ntime.sleep(600)"
    with targets.python(code, tmp_path) as pid:
        wait_for(lambda: procfs.read_user_ids(pid) == (real, effective, effective), "the user")
        (rank,) = targets.taken(replace(targets.job_of_pids([pid]), uid=4001)).ranks
    reasons = [dump.fault.reason if dump.fault else "" for dump in rank.rounds]
    assert (any(dump.threads for dump in rank.rounds), set(reasons)) == (is_shown, {"" if is_shown else "AnotherUsers"})


MANY_THREADS = """
import threading, types
def wait():
    threading.Event().wait(600)
def step(number):
    return functions[number + 1](number + 1) if number < 30 else wait()
def named(number):
    name = f"f{number}_" + "x" * 4000
    called = {"co_name": name, "co_qualname": name} if hasattr(step.__code__, "co_qualname") else {"co_name": name}
    code = step.__code__.replace(**called, co_filename="/home/u/" + "y" * 4000 + ".py")
    return types.FunctionType(code, globals())
functions = [named(number) for number in range(31)]
for _ in range(20):
    threading.Thread(target=functions[0], args=(0,), daemon=True).start()
ready()
functions[0](0)
"""


def test_what_a_program_makes_of_its_stacks_fills_no_memory(tmp_path: Path) -> None:
    """The process has 20 threads with 30 functions each. Each name has 4,000 characters, so py-spy prints 7 MB."""
    with targets.python(MANY_THREADS, tmp_path) as pid:
        job = targets.job_of_pids([pid])
        found = [targets.taken(job), targets.taken(job, kept_stacks_bytes=400_000)]
    for seen, most_threads, least in ((found[0], 21, 21), (found[1], 10, 2)):
        for dump in seen.ranks[0].rounds:
            kept = [thread for thread in dump.threads if thread.frames]
            assert least <= len(kept) <= most_threads
            (main,) = [thread for thread in kept if thread.is_main]
            assert "wait" in {frame.function for frame in main.frames}
            assert max(len(frame.function) for frame in main.frames) == 256
    (first, second) = found[1].ranks[0].rounds
    assert stack_limits.size_bytes(first.threads) + stack_limits.size_bytes(second.threads) < 400_000
    assert first.threads == second.threads, "a blocked stack is the same in each round"
    assert "not shown" in (first.threads[-1].name or "")


RANKS, STUCK = 4, 2


def test_light_job_that_hangs_gets_light_capture_and_is_then_suspected(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with SimulatedNode(RANKS) as node, ExitStack() as stack:
        lines = [*h100(RANKS), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))]
        fake_driver.write([*lines, "gpu all power_watts 250"])  # before the daemon: else it sees the power fall
        daemon = stack.enter_context(RealDaemon(tmp_path / "hw", fake_driver.environ))
        daemon.wait_for_state(node.run_id, "training")
        assert _dumps(daemon) == 0
        node.order(STUCK, "lock")
        stuck = node.pids[STUCK]
        wait_for(lambda: _is_in(stuck, "log_metrics"), "a rank that waits for its lock")
        wait_for(lambda: targets.futex_call(stuck), "it to wait")
        waiting = [pid for pid in node.pids if pid != stuck]
        wait_for(lambda: _stand_in(waiting, "all_reduce"), "the other ranks to wait for it")
        before = _switches(stuck)

        fake_driver.write([*lines, "gpu all power_watts 160", f"gpu {STUCK} utilization_ratio 0"])
        wait_for(lambda: _dumps(daemon) >= RANKS, "the first round of a light capture")
        states, seen = [], set()
        deadline = time.monotonic() + 100
        while daemon.job_state(node.run_id) == "training" and time.monotonic() < deadline:
            states += map(targets.state, node.pids)
            seen.add(_switches(stuck))
        assert set(states) <= set("RSD"), "T and t are the states of a stopped process"
        assert seen <= {before}, "a process that is stopped and continued in a wait is scheduled once more"
        daemon.wait_for_state(node.run_id, "hung")

        assert ": taking stacks of 4 ranks: its power fell and has been flat for 3 s" in daemon.log
        assert "training -> quiet" not in daemon.log
        assert "ranks do not progress" in daemon.log.partition("training -> suspected")[2].splitlines()[0]
        ((row, _),) = daemon.samples("hangwatch_incident_info")
        assert row["named"].endswith(f":{STUCK}")

        before = _switches(stuck)
        subprocess.run([str(pyspy.find()), "dump", "--pid", str(stuck)], check=True, capture_output=True, timeout=60)
        assert _switches(stuck) > before, "a dump with a pause would have been seen"


def _dumps(daemon: RealDaemon) -> float:
    return sum(value for _, value in daemon.samples("hangwatch_dump_seconds_count"))


def _is_in(pid: int, function: str) -> bool:
    answer = pyspy.dump(pid, deadline_seconds=60.0, mode=pyspy.DumpMode(may_pause=False))
    return answer.json is not None and f'"{function}"'.encode() in answer.json


def _stand_in(pids: list[int], function: str) -> bool:
    """True if all processes are in `function` and none ran, and so perhaps left it, during the dumps."""
    before = [_switches(pid) for pid in pids]
    return all(_is_in(pid, function) for pid in pids) and before == [_switches(pid) for pid in pids]


def _switches(pid: int) -> int:
    counters = main_thread.read_counters(pid, procfs.PROC)
    assert counters is not None and counters.voluntary_switches is not None
    return counters.voluntary_switches


V1 = Path("/sys/fs/cgroup/freezer")
V2 = next((root for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
           if (root / "cgroup.controllers").exists()), Path("/sys/fs/cgroup"))  # fmt: skip


@contextlib.contextmanager
def frozen(pid: int, root: Path) -> Iterator[str]:
    """Move the process to a new group below a frozen group. Yield the folder of the frozen group below /sys/fs/cgroup."""
    is_v1 = root == V1
    switch, held, free = ("freezer.state", "FROZEN", "THAWED") if is_v1 else ("cgroup.freeze", "1", "0")
    with cgroup_below(root) as above:
        if not (above / switch).exists():
            pytest.skip(f"{root} has no freezer")
        group = above / "job"
        group.mkdir()
        try:
            (group / "cgroup.procs").write_text(str(pid))
            (above / switch).write_text(held)
            wait_for(lambda: _is_frozen(group, is_v1), "the group to be frozen")
            yield f"{root}/{above.name}".removeprefix("/sys/fs/cgroup")
        finally:
            with contextlib.suppress(OSError):
                (above / switch).write_text(free)
            with contextlib.suppress(OSError):
                (root / "cgroup.procs").write_text(str(pid))
            group.rmdir()


def _is_frozen(group: Path, is_v1: bool) -> bool:
    name, text = ("freezer.state", "FROZEN") if is_v1 else ("cgroup.events", "frozen 1")
    return text in (group / name).read_text()


def look(*pids: int) -> Diagnosis:
    return diagnosed(targets.job_of_pids(pids))


def thaw_command(root: Path, cgroup: str) -> str:
    value, file = ("THAWED", "freezer.state") if root == V1 else ("0", "cgroup.freeze")
    return f"`echo {value} > /sys/fs/cgroup{cgroup}/{file}`"


def sleeping_ranks(folder: Path) -> contextlib.AbstractContextManager[list[int]]:
    """Start three processes that all sleep at the same line."""
    return targets.started(folder, *[targets.SLEEPING] * 3)


@pytest.mark.parametrize("root", [V1, V2], ids=["v1", "v2"])
def test_frozen_rank_among_sleeping_ranks_is_checked_first(tmp_path: Path, root: Path) -> None:
    with sleeping_ranks(tmp_path) as pids, frozen(pids[1], root) as cgroup:
        verdict = look(*pids).verdict
    assert [hint.pid for hint in verdict.check_first] == [pids[1]]
    assert verdict.next_step == f"thaw its control group: {thaw_command(root, cgroup)} on here"


def test_stopped_rank_among_sleeping_ranks_is_checked_first(tmp_path: Path) -> None:
    with sleeping_ranks(tmp_path) as pids:
        targets.stop(pids[2])
        verdict = look(*pids).verdict
        os.kill(pids[2], signal.SIGCONT)
    assert [hint.pid for hint in verdict.check_first] == [pids[2]]
    assert f"`kill -CONT {pids[2]}`" in verdict.next_step


@pytest.mark.parametrize("root", [V1, V2], ids=["v1", "v2"])
def test_a_rank_in_a_frozen_control_group_is_suspended_and_the_group_is_named(tmp_path: Path, root: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid, frozen(pid, root) as cgroup:
        seen = look(pid)
        (member,) = seen.grouping.members
        assert (member.signature, member.waits.frozen_cgroup) == (Signature.STOPPED, cgroup)
        assert member.kernel.state == ("D" if root == V1 else "S")  # v2 shows it as sleeping
        assert seen.verdict.kind == "Suspended"
        assert seen.verdict.message.endswith(f"is frozen: control group {cgroup} is frozen.")
        assert seen.verdict.next_step == f"thaw its control group: {thaw_command(root, cgroup)} on here"
        assert seen.grouping.groups[0].frames  # read without a pause: the process cannot stop


def test_a_rank_that_was_stopped_is_suspended_and_stays_stopped(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        targets.stop(pid)
        verdict = look(pid).verdict
        assert targets.state(pid) == "T"
    assert (verdict.kind, verdict.named) == ("Suspended", ())
    assert "scontrol suspend, a gang scheduler, `kill -STOP`" in verdict.message
