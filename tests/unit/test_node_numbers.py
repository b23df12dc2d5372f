"""Pods that have the numbers of their node in their environment, and jobs that only look like them."""

from pathlib import Path

import pytest

from hangwatch.capture.job_scan import JobScan
from hangwatch.model import Job
from tests.proc_tree import lay_out

SPAWNED = "/venv/bin/python -c 'from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=4, pipe_handle={})'"
TRAIN, TORCHRUN = "/venv/bin/python train.py", "/venv/bin/python /venv/bin/torchrun train.py"
NODE = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456"
OTHER = "RANK={} LOCAL_RANK={} WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT={}"
GROUP, LOADER = "pt_gloo_runloop", "pt_data_worker"


class Pod:
    """The processes of a pod, in the order of their pids. Each has a slot, and may have a thread of this name."""

    def __init__(self, root: Path) -> None:
        self._root, self._text, self._threads = root, "1 (systemd) S parent=0 start=1\n", dict[int, str]()
        self._scan = JobScan(root)

    def add(
        self, pid: int, parent: int, command: str, slot: str = NODE, thread: str = "", comm: str = "python"
    ) -> None:
        shown = f"  + {slot}\n" if slot else "  + USER=ada\n"
        self._text += f"{pid} ({comm}) S parent={parent} start={pid}\n  $ {command}\n{shown}"
        self._threads[pid] = thread

    def jobs(self) -> list[Job]:
        lay_out(self._text, self._root)
        for pid, thread in self._threads.items():
            for tid, name in ((pid, "python"), (pid + 5000, thread)):
                (self._root / f"{pid}/task/{tid}").mkdir(parents=True)
                (self._root / f"{pid}/task/{tid}/comm").write_text(f"{name}\n")
        return list(self._scan.find(None, node="here").jobs)

    def ranks(self) -> list[list[tuple[int | None, int]]]:
        return [[(rank.rank, rank.id.pid) for rank in job.ranks] for job in self.jobs()]


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_spawned_ranks_that_inherit_the_number_of_their_node_are_the_ranks(pod: Pod) -> None:
    pod.add(100, 1, TRAIN)
    for pid in range(101, 105):
        pod.add(pid, 100, SPAWNED.format(pid), thread=GROUP)
        pod.add(pid + 100, pid, SPAWNED.format(pid), comm=LOADER)
    pod.add(110, 100, SPAWNED.format(110))  # a Manager
    (job,) = pod.jobs()
    assert [rank.id.pid for rank in job.ranks] == [101, 102, 103, 104]
    assert {rank.rank for rank in job.ranks} == {None} and [rank.local_rank for rank in job.ranks] == [0, 1, 2, 3]
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("spawn", 100)
    assert job.world_size is None


def test_script_of_a_node_is_the_launcher_of_the_ranks_that_it_starts(pod: Pod) -> None:
    pod.add(100, 1, "bash run.sh", comm="bash")
    for pid in (101, 102):
        pod.add(pid, 100, f"{TRAIN} --local-rank {pid}", thread=GROUP)
    (job,) = pod.jobs()
    assert [rank.id.pid for rank in job.ranks] == [101, 102]
    assert (job.launcher, job.launcher_id is not None and job.launcher_id.pid) == ("plain", 100)


def test_log_monitor_of_ray_is_not_the_rank_of_its_pod(pod: Pod) -> None:
    pod.add(100, 1, "/venv/bin/python /venv/lib/ray/log_monitor.py")
    pod.add(101, 1, "/venv/lib/ray/raylet", comm="raylet")
    for pid in range(102, 106):
        pod.add(pid, 101, "ray::Actor.step", thread=GROUP, comm="ray::Actor.step")
    assert pod.ranks() == [[(None, pid) for pid in range(102, 106)]]


def test_rank_of_a_node_stays_removed_when_one_of_its_ranks_has_ended(pod: Pod) -> None:
    pod.add(100, 1, TRAIN)
    pod.add(101, 100, SPAWNED.format(1), thread=GROUP)
    before = pod._text
    pod.add(102, 100, SPAWNED.format(2), thread=GROUP)
    assert pod.ranks() == [[(None, 101), (None, 102)]]
    pod._text = before
    del pod._threads[102]
    assert 100 not in [pid for ranks in pod.ranks() for _, pid in ranks]


@pytest.mark.parametrize("thread", ["", GROUP])
def test_one_process_of_a_pod_with_workers_keeps_its_number(pod: Pod, thread: str) -> None:
    pod.add(100, 1, TRAIN, thread=thread)
    pod.add(101, 100, SPAWNED.format(1))
    pod.add(102, 100, SPAWNED.format(2), comm=LOADER)
    pod.add(103, 100, SPAWNED.format(3), thread=thread)
    assert pod.ranks() == [[(0, 100)]]


def test_rank_with_a_group_in_each_of_its_programs_keeps_its_number(pod: Pod) -> None:
    pod.add(100, 1, "/venv/bin/python wrapper.py")
    pod.add(101, 100, TRAIN, thread=GROUP)
    pod.add(102, 101, SPAWNED.format(1), thread=GROUP)
    pod.add(103, 101, SPAWNED.format(2), thread=GROUP)
    assert pod.ranks() == [[(0, 100)]]


def test_shells_with_the_number_of_their_rank_stay(pod: Pod) -> None:
    pod.add(99, 1, "bash start.sh", slot="", comm="bash")
    for rank in range(2):
        slot = OTHER.format(rank, rank, 23456)
        pod.add(100 + rank, 99, "bash run.sh", slot=slot, comm="bash")
        pod.add(110 + rank, 100 + rank, TRAIN, slot=slot, thread=GROUP)
    assert pod.ranks() == [[(0, 110), (1, 111)]]


@pytest.mark.parametrize(
    ("launcher", "comm"),
    [(TORCHRUN, "pt_elastic"), ("/venv/bin/python -m deepspeed.launcher.launch train.py", "python")],
)
@pytest.mark.parametrize("port", [23456, 29400])
def test_launcher_with_the_number_of_its_node_stays(pod: Pod, launcher: str, comm: str, port: int) -> None:
    pod.add(99, 1, TRAIN)
    pod.add(100, 99, launcher, comm=comm)
    for rank in range(2):
        pod.add(101 + rank, 100, TRAIN, slot=OTHER.format(rank, rank, port), thread=GROUP)
    assert pod.ranks() == [[(0, 101), (1, 102)]]


def test_torchrun_below_slurm_stays(pod: Pod) -> None:
    task = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=7"
    pod.add(90, 1, "slurmstepd: [7.0]", slot="", comm="slurmstepd")
    pod.add(100, 90, TORCHRUN, slot=task, comm="pt_elastic")
    for rank in range(2):
        pod.add(101 + rank, 100, TRAIN, slot=f"{task} {OTHER.format(rank, rank, 29400)}", thread=GROUP)
    assert pod.ranks() == [[(0, 101), (1, 102)]]


def test_elastic_restart_beside_the_attempt_before_stays(pod: Pod) -> None:
    pod.add(100, 1, TORCHRUN, comm="pt_elastic")
    for attempt in range(2):
        for rank in range(2):
            slot = f"{OTHER.format(rank, rank, 29400)} TORCHELASTIC_RESTART_COUNT={attempt} TORCHELASTIC_RUN_ID=run-7"
            pod.add(101 + 10 * attempt + rank, 100, TRAIN, slot=slot, thread=GROUP)
    assert pod.ranks() == [[(0, 111), (1, 112)]]
