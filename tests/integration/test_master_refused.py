"""Real ranks that cannot connect to their store: it does not listen, or only its own node can reach it."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hangwatch import config
from hangwatch.capture.job_scan import JobScan
from hangwatch.cli import node_jobs
from hangwatch.cli.dump import dump
from hangwatch.jobs import discovery
from hangwatch.jobs.collective_timeout import read_timeouts
from hangwatch.model import Grouping, Job, Verdict
from hangwatch.probes.base import procfs
from hangwatch.probes.network import sockets
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.verdict import judge
from tests.commands import spawn
from tests.conftest import wait_for
from tests.integration import targets
from tests.proc_tree import sweep

pytestmark = pytest.mark.timeout(400)

QUICK = config.Capture(rounds=3, pause_seconds=0.2, dump_deadline_seconds=60.0)
JOINS = """
import datetime, torch.distributed
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
"""
READS = """
import sys
def read_manifest():
    sys.stdin.read()
read_manifest()
"""


LISTENS = """
import socket, sys
listening = socket.create_server(({address!r}, 0))
sys.stdin.read()
"""
CONNECTS = """
import os, socket, sys
ours = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
sys.stdin.read()
"""


@contextlib.contextmanager
def ranks(*programs: str, world_size: int, master: str = "127.0.0.1", is_served: bool = False) -> Iterator[set[int]]:
    """Start the last ranks of a job, one for each program. Their master listens if `is_served`. Yield their pids."""
    with socket.socket() as kept:  # bound and not listening: no other process gets the port
        kept.bind(("", 0))
        if is_served:
            kept.listen()
        environ = {
            **os.environ,
            "MASTER_ADDR": master,
            "MASTER_PORT": str(kept.getsockname()[1]),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(len(programs)),
            "OMP_NUM_THREADS": "1",
        }
        with contextlib.ExitStack() as stack:
            pids = set()
            for place, program in enumerate(programs):
                rank = {"RANK": str(world_size - len(programs) + place), "LOCAL_RANK": str(place)}
                pids.add(stack.enter_context(spawn(sys.executable, "-c", program, env=environ | rank)).pid)
            yield pids


def looked_at(pids: set[int]) -> tuple[Grouping, int] | None:
    """Return the grouping of the job's ranks, and their number on this node; None until the job is found."""
    jobs = [
        job
        for job in discovery.find_jobs(ProcessScan().processes(pids)).jobs
        if pids <= {rank.id.pid for rank in job.ranks}
    ]
    if not jobs:
        return None
    return targets.grouped(jobs[0], QUICK, targets.USUAL), jobs[0].ranks_here


def judged(pids: set[int]) -> Verdict | None:
    """Return the verdict on the job if it reports a refused connection, else None."""
    found = looked_at(pids)
    verdict = judge.judge(*found) if found else None
    return verdict if verdict is not None and verdict.kind == "MasterRefused" else None


@pytest.mark.torch
def test_rank_0_that_reads_while_the_others_are_refused() -> None:
    with ranks(READS, JOINS, world_size=2) as pids:
        verdict = wait_for(lambda: judged(pids), "the other rank to be refused", 200)
    assert [rank.rank for rank in verdict.named] == [0]
    assert "does not listen at MASTER_ADDR:MASTER_PORT (127.0.0.1:" in verdict.message
    assert "read_manifest" in verdict.message


@pytest.mark.torch
def test_ranks_that_are_refused_by_another_node() -> None:
    with ranks(JOINS, world_size=2, master=socket.gethostname()) as pids:  # a name with the address of this machine
        verdict = wait_for(lambda: judged(pids), "the rank to be refused", 200)
    assert verdict.named == ()
    assert "Rank 0 should serve that address, but was not captured: check its node first." in verdict.message


@pytest.mark.parametrize(
    ("address", "world_size", "expected"),
    [
        ("127.0.1.1", 3, "127.0.1.1 port "),
        ("127.0.1.1", 2, None),  # all ranks of the job are on this node
        ("0.0.0.0", 3, None),
    ],
)
def test_ranks_that_wait_at_an_address_of_this_node_alone(address: str, world_size: int, expected: str | None) -> None:
    program = LISTENS.format(address=address)
    with ranks(program, program, world_size=world_size, master="192.0.2.1") as pids:

        def places() -> list[str | None] | None:
            found = looked_at(pids)
            members = found[0].members if found else ()
            return [member.waits.enclosed_at for member in members] or None

        wait_for(lambda: all(any(one.listens for one in _sockets(pid)) for pid in pids), "both to listen")
        found = wait_for(places, "both to be seen")
    assert [place and place.rstrip("0123456789") for place in found] == [expected] * 2


@pytest.mark.parametrize(
    ("program", "expected"),
    [(CONNECTS, "the store at 127.0.0.1"), (READS, None)],  # a variable alone is not evidence
)
def test_a_store_at_loopback_of_a_job_with_ranks_elsewhere(program: str, expected: str | None) -> None:
    with ranks(program, world_size=2, is_served=True) as pids:
        if expected:
            wait_for(lambda: any(one.is_open for pid in pids for one in _sockets(pid)), "it to connect")
        found = wait_for(lambda: looked_at(pids), "the rank to be seen")
    (member,) = found[0].members
    assert (member.waits.enclosed_at and member.waits.enclosed_at[:22]) == expected


def _sockets(pid: int) -> list[sockets.Connection]:
    table, held = sockets.read(pid, procfs.PROC) or {}, sockets.sockets_of_process(pid, procfs.PROC) or {}
    return [table[inode] for inode in held.values() if inode in table]


FORKS = """
import multiprocessing, os, time
def train(rank):
    os.environ["RANK"] = str(rank)  # as notebook_launcher does: other processes do not see it
    open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
    time.sleep(600)
for rank in range(2):
    multiprocessing.get_context("fork").Process(target=train, args=(rank,)).start()
ready()
"""
SPAWNED = """
import multiprocessing, os, sys, time
def train(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29518")
    open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    for rank in (2, 0, 1):  # the order of start says nothing
        multiprocessing.get_context("spawn").Process(target=train, args=(rank, sys.argv[1])).start()
    time.sleep(600)
"""
# A process that maps a file of this name and half a gigabyte looks like one that has imported torch or jax.
CONNECTED = """
import mmap, multiprocessing, os, socket, sys, time
def train(rank, library, folder):
    os.makedirs(os.path.dirname(f"{folder}/{library}"), exist_ok=True)
    with open(f"{folder}/{library}", "a+b") as file:
        file.truncate(4096)
        kept = [mmap.mmap(file.fileno(), 4096), mmap.mmap(-1, 1 << 29)]
    port = int(open(f"{folder}/port").read())
    if rank == 0:
        kept.append(socket.create_server(("127.0.0.1", port)))
    else:
        while not os.path.exists(f"{folder}/pid-0"):
            time.sleep(0.01)
    kept.append(socket.create_connection(("127.0.0.1", port)))
    open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
    if rank == 0:
        kept += [kept[2].accept()[0] for _ in range(4)]
        open(f"{folder}/ready", "w").close()
    time.sleep(600)
if __name__ == "__main__":
    library, folder = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as server:
        open(f"{folder}/port", "w").write(str(server.getsockname()[1]))
    for rank in (2, 0, 1):
        multiprocessing.get_context("spawn").Process(target=train, args=(rank, library, folder)).start()
    multiprocessing.get_context("spawn").Process(target=train, args=(3, "lib/none.so", folder)).start()
    time.sleep(600)
"""
ACTORS = """
import ctypes, os, time
def become(title, **variables):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)
        os.environ.update(variables)
        open(f"{folder}/pid-{variables['ACTOR']}", "w").write(str(os.getpid()))
        time.sleep(600)
ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)
actor, groups = 0, (("ray::Actor.step", "41001"), ("ray::Critic", "41002"))
for title, port in groups:
    for rank in "01":
        master = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": port}
        become(title, ACTOR=str(actor), RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, **master)
        actor += 1
become("ray::IDLE", ACTOR="4", RANK="0", WORLD_SIZE="2", **master)
ready()
time.sleep(600)
"""
FIRST_WITHOUT_ADDRESS = """
import os, socket, subprocess, sys, time
code = "import os, socket, sys, time\\nfolder, rank, port = sys.argv[1:]\\n"
code += "kept = socket.create_server(('127.0.0.1', int(port))) if rank == '0' else None\\n"
code += "open(f'{folder}/pid-{rank}', 'w').write(str(os.getpid()))\\ntime.sleep(600)"
with socket.create_server(("127.0.0.1", 0)) as server:
    port = str(server.getsockname()[1])
for rank in "01":
    number = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if rank == "1" else {}
    subprocess.Popen([sys.executable, "-c", code, folder, rank, port], env={**os.environ, **number, **master})
ready()
time.sleep(600)
"""
LED = """
import os, subprocess, sys, time
rank = int(os.environ.get("LOCAL_RANK", "0"))
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
if rank == 0:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", NODE_RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
    for other in (1, 2):
        subprocess.Popen(sys.orig_argv, env={**os.environ, "LOCAL_RANK": str(other)})
    ready()
time.sleep(600)
"""


def pids(folder: Path, ranks: int) -> list[int]:
    """Wait until each rank has written its pid. Return the pids in rank order."""

    def read_pids() -> list[int]:
        files = [folder / f"pid-{rank}" for rank in range(ranks)]
        return [int(file.read_text()) for file in files if file.exists() and file.read_text()]

    return wait_for(lambda: found if len(found := read_pids()) == ranks else None, f"{ranks} ranks") or []


def job_of(ranks: list[int]) -> Job | None:
    """Return the job of these ranks, which hold one GPU each, or None if a scan does not find it."""
    found = JobScan().find(sweep({gpu: (pid,) for gpu, pid in enumerate(ranks)}), node="here").jobs
    return next((job for job in found if ranks[0] in {rank.id.pid for rank in job.ranks}), None)


def test_forks_are_found_by_the_gpus_that_they_hold(tmp_path: Path) -> None:
    with targets.python(FORKS, tmp_path) as launcher:
        forks = pids(tmp_path, 2)
        job = job_of(forks)
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("fork", launcher)
    assert [(rank.local_rank, rank.id.pid, rank.gpu_uuids) for rank in job.ranks] == [
        (number, pid, (f"GPU-a{number}",)) for number, pid in enumerate(forks)
    ]


def test_a_program_that_starts_the_other_ranks_is_the_first_of_them(tmp_path: Path) -> None:
    with targets.python(LED, tmp_path) as first:
        ranks = pids(tmp_path, 3)
        job = job_of(ranks)
        assert job is not None
        (of_pid,), _ = node_jobs.jobs_of_pids((first,), None, config.Jobs())
        assert [rank.id.pid for rank in of_pid.ranks] == ranks
        compared = targets.diagnosed(job, QUICK).capture.environment
    assert compared is not None and "WORLD_SIZE" not in {difference.name for difference in compared.differences}
    assert (job.launcher, job.world_size, job.local_world_size) == ("lightning", 3, 3)
    assert [(rank.rank, rank.id.pid) for rank in job.ranks] == list(enumerate(ranks))
    assert (ranks[0], job.environ["MASTER_PORT"]) == (first, "29517")


def test_spawned_ranks_are_found_by_the_variables_that_they_set_later(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    with spawn(sys.executable, tmp_path / "train.py", tmp_path, group=True) as launcher:
        ranks = pids(tmp_path, 3)
        job = job_of(ranks)
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("spawn", launcher.pid)
    assert (job.world_size, [(rank.rank, rank.id.pid) for rank in job.ranks]) == (3, list(enumerate(ranks)))


def test_actors_that_set_their_rank_later_are_a_job_for_each_group(tmp_path: Path) -> None:
    with targets.python(ACTORS, tmp_path):
        actors, scan = pids(tmp_path, 5), JobScan()

        def find_jobs() -> list[tuple[str | None, int | None, list[int]]]:
            found = ((job, [rank.id.pid for rank in job.ranks]) for job in scan.find(None, node="here").jobs)
            return sorted((job.launcher, job.world_size, ranks) for job, ranks in found if set(ranks) & set(actors))

        expected = [("ray", 2, actors[:2]), ("ray", 2, actors[2:4])]
        wait_for(lambda: find_jobs() == expected, "a job for each group; one scan of a busy node may miss a rank")


def test_rank_that_is_set_after_the_first_scan_is_found_later(tmp_path: Path) -> None:
    code = "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'ray::Late', 0, 0, 0)\nready()\nopen(folder + '/fifo').read()\n"
    code += "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1')\nopen(folder + '/pid-0', 'w').write('1')\ntime.sleep(600)"
    with targets.python(code, tmp_path) as pid:
        scan, began = JobScan(), time.monotonic()
        assert not has_rank(scan, pid)
        (tmp_path / "fifo").write_text("go")
        pids(tmp_path, 1)
        wait_for(lambda: has_rank(scan, pid), "the rank to be found")
        assert time.monotonic() - began < 30


def has_rank(scan: JobScan, pid: int) -> bool:
    return any(pid == rank.id.pid for job in scan.find(None, node="here").jobs for rank in job.ranks)


@pytest.mark.parametrize("library", ["torch/lib/libtorch_cpu.so", "jaxlib/libjax_common.so"])
def test_ranks_with_their_number_as_an_argument_are_found_by_their_store(library: str, tmp_path: Path) -> None:
    """A fourth process is connected, too, but maps neither library."""
    (tmp_path / "train.py").write_text(CONNECTED)
    command = [sys.executable, tmp_path / "train.py", library, tmp_path]
    with spawn(*command, group=True) as launcher:
        ranks = pids(tmp_path, 4)
        wait_for((tmp_path / "ready").exists, "the connections")
        found = JobScan().find(None, node="here").jobs
    (job,) = (job for job in found if ranks[0] in {rank.id.pid for rank in job.ranks})
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("spawn", launcher.pid)
    assert (job.ranks[0].id.pid, {rank.id.pid for rank in job.ranks}) == (ranks[0], set(ranks[:3]))
    assert {(rank.rank, rank.local_rank) for rank in job.ranks} == {(None, None)}
    assert f"pid {ranks[0]} is likely rank 0" in job.notes[0]
    timeout = read_timeouts(job, job.environ).collective_seconds
    assert (timeout is None) == ("jaxlib" in library)


def dumped(pid: int) -> list[dict[str, Any]]:
    answer = json.loads(CliRunner().invoke(dump, ["--json", "--pid", str(pid)]).stdout)
    jobs = answer["jobs"]
    assert isinstance(jobs, list)
    return jobs


def test_pid_of_a_shell_around_the_launcher_means_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONNECTED)
    command = f"{sys.executable} {tmp_path}/train.py torch/lib/libtorch_cpu.so {tmp_path}; true"
    with spawn("bash", "-c", command, group=True) as shell:
        ranks = pids(tmp_path, 4)[:3]
        wait_for((tmp_path / "ready").exists, "the connections")
        (job,) = dumped(shell.pid)
        (alone,) = dumped(ranks[1])
    assert {member["pid"] for group in job["groups"] for member in group["members"]} == set(ranks)
    assert [member["pid"] for group in alone["groups"] for member in group["members"]] == [ranks[1]]


def test_pid_of_a_launcher_that_waits_gives_the_sentence_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(f"open({str(tmp_path / 'ready')!r}, 'w').close()\nimport time\ntime.sleep(600)")
    command = [sys.executable, tmp_path / "torchrun", "--nnodes=2", "--rdzv-id=waits-here", "train.py"]
    with spawn(*command, start_new_session=True) as launcher:
        wait_for((tmp_path / "ready").exists, "the launcher")
        (by_pid,) = dumped(launcher.pid)
        answer = json.loads(CliRunner().invoke(dump, ["--json", "--job", "waits-here"]).stdout)
    verdict, same = answer["jobs"][0]["verdict"], by_pid["verdict"]
    assert (same["kind"], verdict["kind"]) == ("NoRanks", "NoRanks")
    sentences = [re.sub(r"in [\d.]+ s", "in N s", each["message"]) for each in (same, verdict)]
    assert sentences[0] == sentences[1]


def test_rank_0_without_an_address_joins_the_ranks_that_meet_at_its_socket(tmp_path: Path) -> None:
    with targets.python(FIRST_WITHOUT_ADDRESS, tmp_path):
        ranks = pids(tmp_path, 2)
        found = JobScan().find(None, node="here").jobs
    jobs = [job for job in found if {rank.id.pid for rank in job.ranks} & set(ranks)]
    assert [[rank.id.pid for rank in job.ranks] for job in jobs] == [ranks]
