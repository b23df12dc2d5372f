"""Real jobs of four ranks under real launchers: found, captured, grouped, and the rank not joined is named."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hangwatch import config
from hangwatch.capture.job_scan import JobScan
from hangwatch.cli.dump import dump
from hangwatch.model import Grouping, Job, Motion, RankDump, RankId, Verdict
from hangwatch.probes.process import pyspy
from hangwatch.tools.commands.explain import explain
from hangwatch.verdict import judge as culprit
from tests.conftest import wait_for
from tests.integration import targets
from tests.proc_tree import sweep
from tests.real_daemon import RealDaemon
from tests.servers import free_port, require_host_name

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

RANKS = 4
PROGRAM = Path(__file__).parents[1] / "jobs" / "odd_rank.py"
QUICK = config.Capture(rounds=3, pause_seconds=0.5, dump_deadline_seconds=60.0)


class RealJob:
    """A running job. The test controls it through files in its folder."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
        self.folder, self.launcher = folder, launcher
        self.scan = JobScan()
        self.has_gpus = True

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def step(self, rank: int) -> int:
        path = self.folder / f"step-{rank}"
        return int((path.exists() and path.read_text()) or 0)

    def order(self, rank: int, trouble: str) -> None:
        """Let `rank` miss the next collective by the fault `trouble`. Wait until the other ranks make no more steps."""
        order = self.folder / f"order-{rank}.new"
        order.write_text(trouble)
        order.rename(self.folder / f"order-{rank}")
        wait_for(lambda: not (self.folder / f"order-{rank}").exists(), f"rank {rank} to take its order")
        self.wait_until_the_others_wait_for(rank)

    def wait_until_the_others_wait_for(self, rank: int) -> None:
        """Wait until all other ranks sleep without a step for a second, in which a healthy job makes dozens."""
        seen = (self.steps(), time.monotonic())

        def waiting() -> bool:
            nonlocal seen
            asleep = all(targets.state(self.pid(other)) == "S" for other in range(RANKS) if other != rank)
            if not asleep or self.steps() != seen[0]:
                seen = (self.steps(), time.monotonic())
            return time.monotonic() - seen[1] > 1.0

        wait_for(waiting, f"the others to wait for rank {rank}")

    def steps(self) -> list[int]:
        return [self.step(rank) for rank in range(RANKS)]

    def wait_until_it_trains(self) -> None:
        before = self.steps()
        wait_for(
            lambda: self.launcher.poll() is None and all(self.step(rank) > before[rank] for rank in range(RANKS)),
            "all ranks to make steps",
            150,
        )

    def recover(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGUSR1)
        self.wait_until_it_trains()

    def find(self) -> Job:
        on_gpus = sweep({rank: (self.pid(rank),) for rank in range(RANKS)}) if self.has_gpus else None
        (job,) = wait_for(  # on a busy machine the first scan may not read all processes in its time
            lambda: [job for job in self.scan.find(on_gpus, "here").jobs if self.pid(0) in job.pids], "the job", 60
        )
        return job

    def judge(self) -> tuple[Job, Grouping, Verdict]:
        job = self.find()
        grouping = targets.grouped(job, QUICK, targets.USUAL)
        return job, grouping, culprit.judge(grouping)


@contextlib.contextmanager
def launched(folder: Path, *command: str) -> Iterator[RealJob]:
    """Run a launcher in a new session. At the end its processes are ended by their pids."""
    require_host_name()
    os.mkfifo(folder / "shard")
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    job = RealJob(folder, launcher)
    try:
        wait_for(lambda: len(list(folder.glob("pid-*"))) == RANKS or launcher.poll(), "the ranks to start", 150)
        assert launcher.poll() is None, (folder / "log").read_text()
        job.wait_until_it_trains()
        yield job
    finally:
        for path in folder.glob("pid-*"):  # each rank has its own session, with its loader workers
            with contextlib.suppress(ProcessLookupError, PermissionError):
                pid = int(path.read_text())
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(timeout=60)


def beside_python(name: str) -> str:
    program = Path(sys.executable).with_name(name)
    found = str(program) if program.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: pip install -e '.[torch]'")
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealJob]:
    """Yield a job under `torchrun` that all tests share. After each fault it continues to train."""
    folder = tmp_path_factory.mktemp("torchrun")
    with launched(folder, beside_python("torchrun"), f"--nproc-per-node={RANKS}", str(PROGRAM), str(folder)) as one:
        yield one


def names(verdict: Verdict) -> list[int | None]:
    return [rank.rank for rank in verdict.named]


def test_it_is_found_whole_with_its_loaders(job: RealJob) -> None:
    found = wait_for(lambda: (seen := job.find()) and all(rank.workers for rank in seen.ranks) and seen, "its loaders")
    assert (found.launcher, found.world_size, found.local_world_size) == ("torchrun", RANKS, RANKS)
    assert found.launcher_id is not None and found.launcher_id.pid == job.launcher.pid
    assert [(one.rank, one.local_rank, one.id.pid) for one in found.ranks] == [(n, n, job.pid(n)) for n in range(RANKS)]
    assert [[worker.comm for worker in one.workers] for one in found.ranks] == [["pt_data_worker"]] * RANKS
    assert (found.absent_local_ranks, found.command) == ((), "odd_rank.py")


def test_the_counters_of_a_job_that_trains_grow_from_round_to_round(job: RealJob) -> None:
    """CPU time is counted in 10 ms. On a busy machine a rank may get less between two rounds."""

    def grow(rank: RankDump) -> bool:
        first, _, last = rank.rounds
        (loader,) = rank.workers
        return (
            (last.cpu_seconds or 0) > (first.cpu_seconds or 0)
            and (last.io_bytes or 0) > (first.io_bytes or 0)
            and (loader.rounds[-1].io_bytes or 0) > (loader.rounds[0].io_bytes or 0)
        )

    wait_for(lambda: all(map(grow, targets.taken(job.find(), QUICK).ranks)), "all to grow")


def test_a_rank_that_sleeps_in_user_code_is_named(job: RealJob) -> None:
    job.order(2, "sleep")
    _, grouping, verdict = job.judge()
    assert names(verdict) == [2]
    (odd,) = (group for group in grouping.groups if [member.id.rank for member in group.members] == [2])
    assert odd.frames[0].function == "poll_license_server"
    (others,) = (group for group in grouping.groups if group is not odd)
    assert (others.operation, others.waits, len(others.members)) == ("all_reduce", True, RANKS - 1)
    assert 0 not in [member.waits.peers for member in grouping.members]
    job.recover(2)


def dumped(job: RealJob) -> dict[str, Any]:
    """Return the JSON output of `hangwatch dump` on the job."""
    told = CliRunner().invoke(dump, ["--json", "--pid", str(job.launcher.pid)])
    (answer,) = json.loads(told.stdout)["jobs"]
    assert isinstance(answer, dict)
    return answer


def test_dump_takes_a_second_round_and_names_by_sequence_number(job: RealJob) -> None:
    assert dumped(job)["verdict"]["named"] == []
    job.order(2, "sleep")
    wait_for(lambda: dumped(job)["verdict"]["kind"] == "NotJoined", "all_reduce to be open for ten seconds", 60)
    verdict = dumped(job)["verdict"]
    assert (verdict["kind"], [one["rank"] for one in verdict["named"]]) == ("NotJoined", [2]), verdict["message"]
    assert verdict["message"].startswith("Rank 2 ") and "It has not joined all_reduce" in verdict["message"]
    job.recover(2)


def test_the_line_of_the_page_of_questions_gives_stacks_that_explain_reads(job: RealJob, tmp_path: Path) -> None:
    """Run it from a file: its pgrep would match the arguments of a shell. The machine may run other jobs, too."""
    page = (Path(__file__).parents[2] / "docs/faq.md").read_text()
    (line,) = re.findall(r"^pgrep .* > stacks.txt$", page, re.MULTILINE)
    of_this_job = line.replace("pgrep -d,", f"pgrep --session {job.launcher.pid} -d,", 1)
    assert of_this_job != line
    (tmp_path / "stacks.sh").write_text(of_this_job.replace("sudo py-spy", str(pyspy.find())))
    job.order(2, "sleep")
    subprocess.run(["bash", "stacks.sh"], cwd=tmp_path, check=True, timeout=120)
    told = CliRunner().invoke(explain, ["--json", str(tmp_path / "stacks.txt")])
    verdict = json.loads(told.stdout)["verdict"]
    assert [one["pid"] for one in (*verdict["named"], *verdict["check_first"])] == [job.pid(2)], verdict["message"]
    assert f"Pid {job.pid(2)} is " in verdict["message"], "on no node: stacks.txt names none"
    job.recover(2)


def test_the_lines_of_the_page_find_the_launcher_and_its_ranks(job: RealJob) -> None:
    page = (Path(__file__).parents[2] / "docs/runbooks/when-the-verdict-is-not-enough.md").read_text()
    lines = [*re.findall(r"^(pgrep .*?) +#", page, re.MULTILINE), *re.findall(r"`(pgrep -af .*?)`", page)]
    assert len(lines) == 3
    launchers, ranks, older = (
        {int(found.split()[0]) for found in subprocess.getoutput(line).splitlines()} for line in lines
    )
    assert job.launcher.pid in launchers & older
    assert {job.pid(rank) for rank in range(RANKS)} <= ranks


def test_a_rank_that_waits_for_a_stuck_loader_is_named_with_what_the_loader_does(job: RealJob) -> None:
    job.order(1, "loader")
    _, grouping, verdict = job.judge()
    assert names(verdict) == [1]
    (odd,) = (group for group in grouping.groups if [member.id.rank for member in group.members] == [1])
    assert odd.activity == "data_loading"
    assert "read_shard" in [frame.function for stack in odd.workers for frame in stack.frames]
    (job.folder / "shard").write_bytes(b"at last")
    job.wait_until_it_trains()


def test_a_rank_that_spins_with_the_gil_is_named(job: RealJob) -> None:
    job.order(3, "spin")
    before = targets.scheduled(job.pid(3))
    _, grouping, verdict = job.judge()
    after = targets.scheduled(job.pid(3))
    assert names(verdict) == [3]
    (odd,) = (group for group in grouping.groups if [member.id.rank for member in group.members] == [3])
    assert odd.frames[0].function == "search_best_split"
    # CPU use relative to the cores that the rank got. It is a whole core only if no other process needs it.
    ran, waited = after[0] - before[0], after[1] - before[1]
    assert (odd.members[0].usage.cpu_ratio or 0) > 0.3 * ran / (ran + waited)
    job.recover(3)


def test_a_stopped_rank_is_named_and_left_stopped(job: RealJob) -> None:
    targets.stop(job.pid(0))
    job.wait_until_the_others_wait_for(0)
    _, _, verdict = job.judge()
    assert names(verdict) == [0]
    assert targets.state(job.pid(0)) == "T"
    os.kill(job.pid(0), signal.SIGCONT)
    job.wait_until_it_trains()


def test_ranks_in_different_collectives_are_shown_and_none_is_named(job: RealJob) -> None:
    """Run this test last: the job cannot recover from it."""
    job.order(2, "mismatch")
    _, grouping, verdict = job.judge()
    assert (verdict.kind, verdict.named) == ("Cycle", ())
    split = {group.operation: [member.id.rank for member in group.members] for group in grouping.groups}
    assert split == {"all_reduce": [0, 1, 3], "barrier": [2]}


@pytest.mark.parametrize("trouble", ["lock", "sleep"])
def test_sleep_of_a_rank_is_that_of_its_trainer_and_not_a_poll_beside_it(tmp_path: Path, trouble: str) -> None:
    command = (beside_python("torchrun"), f"--nproc-per-node={RANKS}", str(PROGRAM), str(tmp_path), "served")
    with launched(tmp_path, *command) as one:
        one.order(2, trouble)
        diagnosis = targets.diagnosed(one.find(), QUICK)
    assert names(diagnosis.verdict) == [2]
    odd = next(member for member in diagnosis.grouping.members if member.id.rank == 2)
    assert odd.motion is Motion.FROZEN
    assert (odd.stack.sleep is not None and odd.stack.sleep.seconds > 1000) is (trouble == "sleep")


def idle_judgement(job: RealJob) -> tuple[Grouping, Verdict] | None:
    _, grouping, verdict = job.judge()
    is_idle = not any(member.waits.active_peers for member in grouping.members)
    return (grouping, verdict) if is_idle else None


@pytest.mark.parametrize("more", [(), ("ddp",)], ids=["plain", "ddp"])
def test_job_is_over_once_it_has_destroyed_its_process_group(more: tuple[str, ...], tmp_path: Path) -> None:
    """With DDP, idle connections to the store and between the ranks remain."""
    program, torchrun = PROGRAM.with_name("ends.py"), beside_python("torchrun")
    with launched(tmp_path, torchrun, f"--nproc-per-node={RANKS}", str(program), str(tmp_path), *more) as one:
        _, before, verdict = one.judge()
        assert 0 not in [member.waits.active_peers for member in before.members]
        assert verdict.kind != "Over"
        (tmp_path / "end").write_text("")
        wait_for(lambda: len(list(tmp_path.glob("over-*"))) == RANKS, "the ranks to destroy their group")
        # On a busy machine gloo's threads may still send the last bytes of the group.
        after, verdict = wait_for(lambda: idle_judgement(one), "idle connections")
        assert [bool(member.waits.peers) for member in after.members] == [bool(more)] * RANKS
        assert (verdict.kind, verdict.named) == ("Over", ()), verdict.message


@pytest.mark.series
def test_python_m_torch_distributed_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-id=a b:c"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(PROGRAM), str(tmp_path)]
    with launched(tmp_path, *command) as one:
        one.order(1, "sleep")
        found, _, verdict = one.judge()
        assert (found.launcher, found.job_id[:5]) == ("torchrun", "a_b_c")
        assert names(verdict) == [1]


@pytest.mark.series
def test_accelerate_launch(tmp_path: Path) -> None:
    options = ["--multi_gpu", f"--num_processes={RANKS}", "--num_machines=1", "--mixed_precision=no"]
    options += ["--dynamo_backend=no", "--main_process_port=0"]
    with launched(tmp_path, beside_python("accelerate"), "launch", *options, str(PROGRAM), str(tmp_path)) as one:
        one.order(3, "sleep")
        found, _, verdict = one.judge()
        assert (found.launcher, found.world_size) == ("accelerate", RANKS)
        assert names(verdict) == [3]


def test_mp_spawn(tmp_path: Path) -> None:
    with launched(tmp_path, sys.executable, str(PROGRAM), str(tmp_path), "spawn", str(RANKS)) as one:
        one.order(2, "sleep")
        found, _, verdict = one.judge()
        assert (found.launcher, found.launcher_id and found.launcher_id.pid) == ("spawn", one.launcher.pid)
        assert verdict.named == (RankId(node="here", rank=None, local_rank=2, pid=one.pid(2)),)


def ranks_by_daemon(daemon: RealDaemon, pid: int) -> list[float]:
    """Return the number of ranks of the jobs that process `pid` has launched."""
    ranks = daemon.samples("hangwatch_job_ranks")
    return [number for labels, number in ranks if labels["job_id"].startswith(f"pid{pid}-")]


@pytest.mark.parametrize(
    "method", ["tcp", "file", *(pytest.param(each, marks=pytest.mark.series) for each in ("env", "node"))]
)
def test_mp_spawn_without_gpus_is_found(method: str, tmp_path: Path) -> None:
    """Ranks in arguments have no number. The number in the environment is that of the node."""
    (tmp_path / "port").write_text(str(free_port()))
    urls = {"env": "env://", "tcp": f"tcp://127.0.0.1:{(tmp_path / 'port').read_text()}"}
    url = urls.get(method, f"file://{tmp_path}/store")
    numbers = ["RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=job-master-0", "MASTER_PORT=23456"] if method == "node" else []
    command = ["env", *numbers, sys.executable, str(PROGRAM), str(tmp_path), "spawn", str(RANKS), url]
    with launched(tmp_path, *command) as one:
        one.has_gpus = False
        one.order(2, "sleep")
        wait_for(lambda: len(one.find().ranks) == RANKS, "a scan that reads all processes in its time", 60)
        found, _, verdict = one.judge()
        assert (found.launcher, found.launcher_id and found.launcher_id.pid) == ("spawn", one.launcher.pid)
        assert len(found.ranks) == RANKS and [rank.pid for rank in verdict.named] == [one.pid(2)]
        assert names(verdict) == [2 if method == "env" else None]
        assert any(f"pid {one.pid(0)} is likely rank 0" in note for note in found.notes) == (method == "tcp")
        (answer,) = json.loads(CliRunner().invoke(dump, ["--json", "--pid", str(one.launcher.pid)]).stdout)["jobs"]
        assert sum(len(group["members"]) for group in answer["groups"]) == RANKS
        if method == "node":
            with RealDaemon(tmp_path / "hw", os.environ) as daemon:
                wait_for(
                    lambda: ranks_by_daemon(daemon, one.launcher.pid) == [RANKS], "the daemon to find the ranks", 90
                )
