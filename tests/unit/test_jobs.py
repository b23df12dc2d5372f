"""The jobs in a tree like /proc, for each launcher: a real scan of written trees."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.capture.job_scan import JobScan
from hangwatch.jobs import discovery, membership, membership_search, owners, process_role, rank_gpus
from hangwatch.model import GpuSample, Job, Process, ProcessId, Rank
from hangwatch.probes.base import procfs
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.tables import launchers as launcher_table
from tests.commands import first_line, spawn
from tests.conftest import load_table, wait_for
from tests.proc_tree import FOLDER, describe, expected_jobs, jobs_in, lay_out, sweep

FACTS = load_table("process_facts.toml")
EIGHT = sweep(dict.fromkeys(range(8), ()))


def slots(job: Job) -> list[tuple[int | None, int | None, int]]:
    return [(rank.rank, rank.local_rank, rank.id.pid) for rank in job.ranks]


def rank(job: Job, number: int) -> Rank:
    return next(one for one in job.ranks if one.rank == number)


VARIANTS = load_table("proc/variants.toml")
TREES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.proc"))}


@pytest.mark.parametrize("name", [name for name, text in TREES.items() if expected_jobs(text)])
def test_the_jobs_that_a_tree_states(name: str, tmp_path: Path) -> None:
    assert [describe(job) for job in jobs_in(name, tmp_path)] == expected_jobs(TREES[name])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_jobs_in_a_changed_tree(variant: dict[str, Any], tmp_path: Path) -> None:
    text = TREES[variant["tree"]]
    for before, after in variant.get("replace", ()):
        assert before in text
        text = text.replace(before, after)
    gpus = sweep(dict(enumerate(variant["gpus"]))) if "gpus" in variant else None
    jobs = JobScan(lay_out(text, tmp_path)).find(gpus, node="").jobs
    assert [describe(job) for job in jobs] == variant["jobs"]
    assert not variant.get("orphans") or {job.launcher_id for job in jobs} == {None}


def test_workers_of_inference_engines_are_listed_and_are_no_job(tmp_path: Path) -> None:
    found = JobScan(lay_out(TREES["engines"], tmp_path)).find(EIGHT, node="")
    assert found.jobs == ()
    assert {(job.program, tuple(rank.id.pid for rank in job.ranks)) for job in found.engines} == {
        ("vLLM", (120, 121)),
        ("SGLang", (220, 221)),
        ("TensorRT-LLM", (320, 321)),
        ("TensorRT-LLM", (420, 421)),
        ("vLLM", (510, 511)),
        ("vLLM", (610,)),
    }
    assert {job.launcher for job in found.engines} == {"engine"}


def test_every_launcher_of_the_table_has_a_tree_in_which_its_ranks_are_found(tmp_path: Path) -> None:
    found = [job for name in TREES for job in jobs_in(name, tmp_path)]
    assert {row.name for row in launcher_table.TABLE.launchers} <= {job.launcher for job in found}
    variables = {row.ranks.rank for row in launcher_table.TABLE.launchers if row.ranks is not None}
    assert variables <= {name for job in found for name in job.environ}


def test_launcher_comms_and_programs_are_unique_and_fit_the_kernel() -> None:
    names = [name for row in launcher_table.TABLE.launchers for name in (*row.comms, *row.programs)]
    assert len(set(names)) == len(names)
    assert max(len(comm) for row in launcher_table.TABLE.launchers for comm in row.comms) <= 15


def test_job_of_torchrun_has_its_launcher_gpus_and_command(tmp_path: Path) -> None:
    (job,) = jobs_in("torchrun", tmp_path, EIGHT)
    assert job.launcher_id == ProcessId(pid=1000, start_ticks=1000)
    assert job.gpu_uuids == ("GPU-a4", "GPU-a5")
    assert job.command == "train.py"


def test_children_of_a_rank_are_its_workers_loaders_first_and_trackers_never(tmp_path: Path) -> None:
    (job,) = jobs_in("torchrun", tmp_path)
    assert [(worker.comm, worker.id.pid) for worker in rank(job, 2).workers] == [("pt_data_worker", 1020), ("sh", 1018)]
    assert [worker.id.pid for worker in rank(job, 3).workers] == [1021]


def test_only_launcher_variables_are_kept(tmp_path: Path) -> None:
    for name in ("torchrun", "slurm"):
        processes = ProcessScan(lay_out((FOLDER / f"{name}.proc").read_text(), tmp_path)).processes()
        assert "never" not in str(processes)
        kept = {name for process in processes for name in process.environ}
        assert kept > {"RANK", "WORLD_SIZE"}
        assert all(name in launcher_table.VARIABLES | launcher_table.SHOWN for name in kept)
    (job,) = jobs_in("torchrun", tmp_path)
    assert job.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"


@pytest.mark.parametrize("name", TREES)
def test_processes_related_to_jobs_are_enough_to_find_all_jobs(name: str, tmp_path: Path) -> None:
    root = lay_out(f"{TREES[name]}\n90001 (sleep) S parent=1 start=5\n", tmp_path)
    whole, related = ProcessScan(root).processes(), ProcessScan(root).processes(related_only=True)
    assert discovery.find_jobs(related) == discovery.find_jobs(whole)
    assert {process.id.pid for process in whole} - {process.id.pid for process in related} >= {90001}


def test_rank_that_takes_a_title_stays_related_to_its_job(tmp_path: Path) -> None:
    tree = "1 (init) S parent=0 start=1\n7 (python) S parent=1 start=9\n + RANK=3\n"
    scan = ProcessScan(lay_out(tree, tmp_path))
    scan.processes(related_only=True)
    lay_out(tree.replace("python", "trainer"), tmp_path)
    for _ in range(2):
        init, rank = scan.processes(related_only=True)
        assert (init.comm, rank.comm, rank.environ) == ("init", "trainer", {"RANK": "3"})


def test_process_that_becomes_python_is_read_by_the_next_scan(tmp_path: Path) -> None:
    tree = "1 (init) S parent=0 start=1\n7 (bash) S parent=1 start=9\n + RANK=3\n"
    scan = ProcessScan(lay_out(tree, tmp_path))
    assert scan.processes(related_only=True) == ()
    lay_out(tree.replace("bash", "python"), tmp_path)
    assert [process.environ for process in scan.processes(related_only=True)] == [{}, {"RANK": "3"}]


def test_kernel_threads_are_no_processes(tmp_path: Path) -> None:
    jobs_in("torchrun", tmp_path)
    assert 77 not in {process.id.pid for process in ProcessScan(tmp_path).processes()}


@pytest.mark.parametrize(
    ("tree", "launcher", "command"), [("spawn", "spawn", "train.py"), ("forks", "fork", "finetune.py")]
)
def test_children_with_a_gpu_each_are_ranks_in_order(tree: str, launcher: str, command: str, tmp_path: Path) -> None:
    (job,) = jobs_in(tree, tmp_path, sweep({0: (912,), 1: (913,)}))
    assert (job.job_id, job.launcher, job.command) == ("pid900-900", launcher, command)
    assert slots(job) == [(None, 0, 912), (None, 1, 913)]
    assert [worker.id.pid for worker in job.ranks[1].workers] == [920]
    assert job.gpu_uuids == ("GPU-a0", "GPU-a1")


SLOT = "RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=29511 TORCHELASTIC_RUN_ID=run-7"
PYTHON = "{0} (python) S parent={1} start={0}\n  $ /venv/bin/python {2}\n  + {3}\n"
AGENT = "1 (systemd) S parent=0 start=1\n100 (pt_elastic) S parent=1 start=2\n  $ python /venv/bin/torchrun train.py\n"


@pytest.mark.parametrize(
    ("helper", "parent"),
    [
        ("-c 'from multiprocessing.forkserver import main; main(4, 5, [], None)'", 300),
        ("-c 'from multiprocessing.resource_tracker import main; main(4)'", 1),
        ("-c 'from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=4, pipe_handle=8)'", 1),
        ("-c 'from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=4, pipe_handle=8)'", 100),
    ],
)
def test_helpers_that_outlive_a_rank_do_not_take_its_slot(tmp_path: Path, helper: str, parent: int) -> None:
    live = AGENT + PYTHON.format(201, 100, "train.py", SLOT.format(1))
    helpers = PYTHON.format(300, 1, helper, SLOT.format(0)) + PYTHON.format(301, parent, helper, SLOT.format(0))
    (job,) = JobScan(lay_out(live + helpers, tmp_path)).find(None, node="").jobs
    assert slots(job) == [(1, 1, 201)]
    assert "rank 0 has ended, its helpers live (pids 300-301)" in job.notes


def test_helpers_of_a_job_without_a_living_rank_are_told(tmp_path: Path) -> None:
    helper = "-c 'from multiprocessing.resource_tracker import main; main(4)'"
    tree = "1 (sh) S parent=0 start=1\n" + PYTHON.format(300, 1, helper, SLOT.format(0))
    tree += PYTHON.format(400, 1, "-m hangwatch dump", SLOT.format(1))
    tree += PYTHON.format(401, 400, "-m hangwatch.probes.gpu.driver_process", SLOT.format(1))
    assert JobScan(lay_out(tree, tmp_path)).find(None, node="").jobs == ()
    told = membership_search.list_ended_ranks(ProcessScan(tmp_path).processes())
    assert told == ["rank 0 has ended, its helpers live (pids 300)"]


def test_rank_that_a_fork_server_starts_has_its_own_slot(tmp_path: Path) -> None:
    server = "-c 'from multiprocessing.forkserver import main; main(4, 5, [], None)'"
    tree = AGENT.replace("pt_elastic", "python").replace("/venv/bin/torchrun ", "")
    tree += PYTHON.format(300, 100, server, "USER=ada")
    tree += "".join(PYTHON.format(301 + rank, 300, server, SLOT.format(rank)) for rank in range(2))
    (job,) = JobScan(lay_out(tree, tmp_path)).find(None, node="").jobs
    assert slots(job) == [(0, 0, 301), (1, 1, 302)]


@pytest.mark.parametrize("program", ["-m hangwatch dump", "/venv/bin/hangwatch run"])
def test_hangwatch_in_a_shell_with_a_rank_is_no_rank(tmp_path: Path, program: str) -> None:
    ours = PYTHON.format(400, 1, program, SLOT.format(0))
    ours += PYTHON.format(401, 400, "-m hangwatch.probes.gpu.driver_process", SLOT.format(0))
    assert JobScan(lay_out("1 (sh) S parent=0 start=1\n" + ours, tmp_path)).find(None, node="").jobs == ()


def test_program_on_a_gpu_is_the_rank_not_the_wrapper_above_it(tmp_path: Path) -> None:
    tree = AGENT + PYTHON.format(201, 100, "wrapper.py", SLOT.format(1))
    tree += PYTHON.format(202, 201, "train.py", SLOT.format(1))
    for gpus, pid in (({}, 201), ({0: (202,)}, 202), ({0: (201,), 1: (202,)}, 201)):
        (job,) = JobScan(lay_out(tree, tmp_path)).find(sweep(gpus), node="").jobs
        assert slots(job) == [(1, 1, pid)]


@contextmanager
def started(folder: Path, name: str, script: str, **variables: str) -> Iterator[int]:
    """Run a script under another process name until the block ends; yield its pid when it says that it is ready."""
    (folder / "rank.py").write_text(script)
    environ = os.environ | variables | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(os.getpid())}
    with spawn(name, folder / "rank.py", executable=sys.executable, env=environ) as process:
        yield int(first_line(process))


TITLED = """import os, signal
open("/proc/self/comm", "w").write("trainer")
print(os.getpid(), flush=True)
signal.pause()
"""
WRAPPER = """import asyncio, os, subprocess, sys
async def start(*command):
    return await (await asyncio.create_subprocess_exec(*command)).wait()
if len(sys.argv) == 1:
    wait = os.environ["WAIT"]
    command = ["sh", "-c", f"$0 {__file__} inner; :", os.environ["PYTHON"]]
    if wait in ("compiler", "output of a compiler"):
        ends_with_rank = os.environ | {"FIFO": "/dev/stdin"}
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ends_with_rank)
        command = ["sh", "-c", "echo $PPID >&3; read x < $FIFO"]
        os.dup2(1, 3)
        sys.exit(subprocess.run(command, pass_fds=[3], capture_output=wait != "compiler").returncode)
    sys.exit(asyncio.run(start(*command)) if wait == "asyncio" else subprocess.run(command).returncode)
print(os.getpid(), flush=True)
open(os.environ["FIFO"]).read()
"""


def test_rank_with_a_title_of_its_own_is_python_by_its_executable(tmp_path: Path) -> None:
    with started(tmp_path, "trainer: step 4", TITLED) as pid:
        (process,) = (each for each in ProcessScan().processes((pid,)) if each.id.pid == pid)
        assert process.comm == "trainer" and process_role.is_python(process)


def test_ranks_with_an_overwritten_environment_are_below_their_launcher(tmp_path: Path) -> None:
    tree = AGENT + "".join(f"{pid} (trainer) S parent=100 start={pid}\n  $ 'trainer: step 4'\n" for pid in (201, 202))
    for program, ranks in ((sys.executable, [[(None, 0, 201), (None, 1, 202)]]), ("/usr/bin/perl", [])):
        root = lay_out(tree, tmp_path)
        for pid in (201, 202):
            (root / f"{pid}/exe").symlink_to(program)
        assert [slots(job) for job in JobScan(root).find(None, node="").jobs] == ranks


@pytest.mark.parametrize("wait", ["subprocess", "asyncio", "compiler", "output of a compiler"])
def test_process_that_waits_for_the_program_below_it_is_not_the_rank(tmp_path: Path, wait: str) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    with started(tmp_path, "python", WRAPPER, FIFO=str(fifo), PYTHON=sys.executable, WAIT=wait) as rank:
        port = str(os.getpid())

        def ranks() -> list[int]:
            jobs = (job for job in JobScan().find(None, node="").jobs if job.environ.get("MASTER_PORT") == port)
            return [one.id.pid for job in jobs for one in job.ranks]

        wait_for(lambda: ranks() == [rank], "the only rank: it waits for no other process with its variables")
        fifo.open("w").close()  # the rank ends


def test_a_script_that_starts_the_other_ranks_itself_is_their_first(tmp_path: Path) -> None:
    (job,) = jobs_in("lightning", tmp_path, sweep({0: (900,), 3: (913,)}))
    assert (job.local_world_size, job.absent_local_ranks, job.command) == (4, (), "fit.py")
    assert [[worker.id.pid for worker in one.workers] for one in job.ranks] == [[920], [921], [], []]
    assert job.ranks[0].gpu_uuids == ("GPU-a0",)


@pytest.mark.parametrize(("node", "rank"), [(0, 1), (1, None)])
def test_by_its_pid_alone_only_rank_of_first_node_has_number(tmp_path: Path, node: int, rank: int | None) -> None:
    root = lay_out(TREES["lightning"].replace("NODE_RANK=1", f"NODE_RANK={node}"), tmp_path)
    (one,) = discovery.job_of_pids(ProcessScan(root).processes(), [911]).ranks
    assert one.rank == rank


def test_actors_of_ray_that_were_started_with_a_rank_and_hold_gpus_are_ranks(tmp_path: Path) -> None:
    (job,) = jobs_in("ray", tmp_path, sweep({0: (300,), 1: (301,), 2: (302,)}))
    assert (job.launcher, job.world_size, slots(job)) == ("ray", 2, [(0, None, 300), (1, None, 301)])
    assert job.gpu_uuids == ("GPU-a0", "GPU-a1")
    assert (job.program, job.job_name) == ("Worker", "01000000")


def test_each_of_several_jobs_on_one_node_has_its_gpus(tmp_path: Path) -> None:
    found = {job.command: job.gpu_uuids for job in jobs_in("two_jobs", tmp_path, EIGHT)}
    assert found == {
        "a.py": ("GPU-a3", "GPU-a1"),
        "b.py": ("GPU-a0", "GPU-a2"),
        "trainer.main": ("GPU-a4", "GPU-a5"),
    }


def test_what_a_neighbour_copies_changes_nothing_of_a_job_in_either_order_of_start(tmp_path: Path) -> None:
    # Another user copies a job's variables and adds one process that could take the job over. It is a rank of a
    # higher attempt, a younger rank, a launcher of the same run, or a server.
    text = (FOLDER / "hostile_neighbour.proc").read_text()
    alone = "\n".join(line for part in text.split("# ")[:2] for line in part.splitlines()[1:])
    (mine,) = discovery.find_jobs(ProcessScan(lay_out(alone, tmp_path)).processes(), node="n").jobs
    assert (mine.owner, slots(mine)) == ("uid 1004", [(0, 0, 310), (1, 1, 311)])
    for start in ("start=1", "start=9"):
        hostile = re.sub(r"\b(3[234]\d) \(python3\) S parent=(\d+) start=3", rf"\1 (python3) S parent=\2 {start}", text)
        found = discovery.find_jobs(ProcessScan(lay_out(hostile, tmp_path)).processes(), node="n").jobs
        assert [job for job in found if job.owner == "uid 1004"] == [mine]
        assert mine.job_key not in {job.job_key for job in found if job != mine}


@pytest.mark.parametrize(
    ("paths", "uids", "reader"),
    [
        (("/user.slice",), (1004, 1004), 1004),
        (("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",), (1004, 1004), 1004),
        (("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",), (1004, 0), None),
        (("/kubepods/pod8c1f0a52-6d1e/c0ffee",), (1004, 1004), None),
    ],
)
def test_job_has_the_uid_of_all_its_ranks(paths: tuple[str, ...], uids: tuple[int, int], reader: int | None) -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    processes = [
        Process(
            id=ProcessId(pid=10 + rank, start_ticks=1),
            parent_pid=1,
            comm="python",
            state="S",
            cmdline=("python", "train.py"),
            environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            uid=uid,
            cgroups=paths,
        )
        for rank, uid in enumerate(uids)
    ]
    (job,) = discovery.find_jobs(processes).jobs
    assert (len(job.ranks), job.uid) == (2, reader)
    assert {rank.pod for rank in job.ranks} == {"8c1f0a52-6d1e" if "kubepods" in paths[0] else ""}


def test_second_claimant_of_a_live_rank_is_a_separate_job(tmp_path: Path) -> None:
    # Two containers of uid 0 each have all ranks of the same run.
    text = (FOLDER / "two_containers.proc").read_text()
    intruder = text.replace("RANK=1", "RANK=0")
    first, second = discovery.find_jobs(ProcessScan(lay_out(intruder, tmp_path)).processes(), node="n").jobs
    assert (slots(first), first.notes) == ([(0, None, 132)], ())
    assert slots(second) == [(0, None, 142)]
    assert second.notes == ("a separate job: another run of the same name already has ranks 0 (pid 132)",)


def test_a_pod_that_is_not_connected_to_the_store_is_no_part_of_the_job(tmp_path: Path) -> None:
    """In pods all users are uid 0, so a process that copies a job's variables can claim a rank."""
    text = (FOLDER / "pytorchjob_pods.proc").read_text()
    pod = text[text.index("140 (") : text.index("= plain")]
    intruder = re.sub(r"\b14(\d)\b", r"15\1", pod).replace("RANK=3", "RANK=1").replace("3b7d9e04", "f00dcafe")
    processes = ProcessScan(lay_out(text + intruder, tmp_path)).processes()
    assert [membership_search.needs_endpoint(process) for process in processes if process.environ] == [23456] * 3
    store = dict.fromkeys((process.id for process in processes if process.id.pid in (132, 142)), "10.0.0.5 port 23456")
    mine, other = discovery.find_jobs(processes, endpoints=store).jobs
    assert slots(mine) == [(2, None, 132), (3, None, 142)]
    assert slots(other) == [(1, None, 152)]
    assert other.notes == (
        "a separate job: it has the run name of pid 132, but hangwatch saw no store to which both are connected",
    )
    elsewhere = store | {process.id: "10.0.0.9 port 23456" for process in processes if process.id.pid == 152}
    assert len(discovery.find_jobs(processes, endpoints=elsewhere).jobs) == 2
    (joined,) = discovery.find_jobs(processes, endpoints=dict.fromkeys(elsewhere, "10.0.0.5 port 23456")).jobs
    assert [number for number, _, _ in slots(joined)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["pytorchjob_pods", "torchrun_pods", "two_containers"])
def test_pods_of_which_none_is_seen_connected_are_jobs_of_their_own(name: str, tmp_path: Path) -> None:
    # Each pod is a separate job, and pages separately, until both are connected to the store. A pod of another user
    # can copy all variables of a job.
    text = "".join(line for line in TREES[name].splitlines(keepends=True) if not line.strip().startswith(">"))
    first, second = JobScan(lay_out(text, tmp_path)).find(None, node="n").jobs
    assert (len(first.ranks), len(second.ranks)) == (1, 1)
    assert first.job_key != second.job_key
    assert first.notes == ()
    assert second.notes == (
        "a separate job: it has the run name of pid 132, but hangwatch saw no store to which both are connected",
    )


@pytest.mark.parametrize("space", ["user:[4026532999]", ""])
def test_store_address_in_a_user_made_network_joins_no_jobs(space: str, tmp_path: Path) -> None:
    """A user is root in its user namespace and can use the store address of another user there."""
    root = lay_out(TREES["pytorchjob_pods"], tmp_path)
    (root / "142/ns/user").unlink()
    if space:
        (root / "142/ns/user").symlink_to(space)
    assert [len(job.ranks) for job in JobScan(root).find(None, node="n").jobs] == [1, 1]


@pytest.mark.parametrize("row", FACTS["owners"])
def test_owner_of_a_process_is_read_from_its_control_group(row: list[str]) -> None:
    path, *owner = row
    process = Process(id=ProcessId(pid=1, start_ticks=1), parent_pid=0, comm="x", state="S", uid=7, cgroups=(path,))
    assert owners.owner_of(process) == owners.Owner(*owner)


@pytest.mark.parametrize(
    ("lines", "owner"),
    [
        ("0::/system.slice/docker-c0ffee.scope", owners.Owner("uid 0", "/system.slice/docker-c0ffee.scope")),
        ("0::/machine.slice/libpod-c0ffee.scope", owners.Owner("uid 0", "/machine.slice/libpod-c0ffee.scope")),
        ("0::/lxc.payload.c1", owners.Owner("uid 0", "/lxc.payload.c1")),
        ("0::/system.slice/run-u12.service", owners.Owner("uid 0", "/system.slice/run-u12.service")),
        # v1, and the hybrid form with an empty group of v2: a container and a job have one path in each hierarchy.
        ("5:memory:/docker/c0ffee\n1:name=systemd:/docker/c0ffee", owners.Owner("uid 0", "/docker/c0ffee")),
        ("5:devices:/docker/c0ffee\n0::/", owners.Owner("uid 0", "/docker/c0ffee /")),
        ("5:freezer:/slurm/uid_0/job_4711/step_0\n0::/system.slice/slurmd.service", owners.Owner("Slurm job 4711")),
        ("5:devices:/kubepods/pod8c1f0a52-6d1e/c0ffee\n0::/", owners.Owner("uid 0", "8c1f0a52-6d1e")),
    ],
)
def test_container_of_root_is_an_owner_in_each_form_of_control_groups(lines: str, owner: owners.Owner) -> None:
    paths = procfs.paths_of_cgroups(lines.encode())
    process = Process(id=ProcessId(pid=1, start_ticks=1), parent_pid=0, comm="x", state="S", uid=0, cgroups=paths)
    assert owners.owner_of(process) == owner


def test_the_key_of_a_job_is_equal_on_its_nodes_and_on_no_other_job(tmp_path: Path) -> None:
    text = (FOLDER / "torchrun.proc").read_text()
    processes = ProcessScan(lay_out(text, tmp_path)).processes()

    def keys(**changes: object) -> list[str]:
        changed = [replace(process, **changes) for process in processes]
        return [job.job_key for node in ("a", "b") for job in discovery.find_jobs(changed, node=node).jobs]

    mine = keys(uid=1004)
    assert mine[0] == mine[1], "ranks of other nodes: one job everywhere"
    assert not set(mine) & set(keys(uid=1005))
    here = [
        job.job_key
        for node in ("a", "b")
        for job in discovery.find_jobs(
            ProcessScan(lay_out((FOLDER / "sweep.proc").read_text(), tmp_path)).processes(), node=node
        ).jobs
    ]
    assert len(set(here)) == 6, "all ranks here: a job of this node"


def test_two_jobs_of_one_name_keep_apart(tmp_path: Path) -> None:
    agents = "".join(
        f"{agent} (pt_elastic) S parent=1 start={agent}\n  $ /venv/bin/python /venv/bin/torchrun t.py\n"
        f"{agent + 1} (python) S parent={agent} start={agent}\n  $ python t.py\n"
        f"  + RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 SLURM_JOB_ID=9 TORCHELASTIC_RUN_ID=r{agent}\n"
        for agent in (100, 200)
    )
    found = discovery.find_jobs(
        ProcessScan(lay_out(f"1 (init) S parent=0 start=1\n{agents}", tmp_path)).processes()
    ).jobs
    assert [job.job_id for job in found] == ["9", "9-p201"], "the older keeps the name"


def test_a_parent_that_is_younger_than_its_child_is_another_process(tmp_path: Path) -> None:
    text = (FOLDER / "torchrun.proc").read_text().replace("parent=900 start=1000", "parent=900 start=9999")
    job, other = sorted(
        discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs, key=lambda job: not job.ranks
    )
    assert (job.launcher_id, slots(job)) == (None, [(2, 0, 1010), (3, 1, 1011)])
    assert other.waiting is not None and [one.pid for one in other.processes] == [1000]


def test_a_pid_that_the_driver_named_before_the_process_began_is_not_its_gpu(tmp_path: Path) -> None:
    held = {0: (), 1: (), 6: (1010,)}
    before, after = sweep(held, taken_monotonic_seconds=10.0), sweep(held, taken_monotonic_seconds=12.0)
    stale, fresh = (jobs_in("torchrun", tmp_path, gpus)[0] for gpus in (before, after))
    assert rank(fresh, 2).gpu_uuids == ("GPU-a6",)
    assert (
        rank(stale, 2).gpu_uuids == ()
    )  # started 11 s after boot; its environment names GPUs 4 and 5, which do not exist


def test_of_two_jobs_of_one_key_the_one_on_the_gpus_keeps_it(tmp_path: Path) -> None:
    # The job on the GPUs keeps the key, even if the other job is older: any process can copy the variables.
    text = (FOLDER / "pytorchjob_pods.proc").read_text()
    pod = text[text.index("140 (") : text.index("= plain")]
    intruder = re.sub(r"\b14(\d)\b", r"12\1", pod).replace("RANK=3", "RANK=2").replace("3b7d9e04", "f00dcafe")
    processes = ProcessScan(lay_out(text + intruder, tmp_path)).processes()
    store = dict.fromkeys((process.id for process in processes if process.id.pid in (132, 142)), "10.0.0.5 port 23456")
    (alone,) = discovery.find_jobs([one for one in processes if one.id.pid not in (120, 122)], endpoints=store).jobs
    on_gpus = sweep({0: (132,), 1: (142,)})
    found = {job.ranks[0].id.pid: job for job in discovery.find_jobs(processes, on_gpus, endpoints=store).jobs}
    assert found[132].job_key == alone.job_key != found[122].job_key
    assert (found[132].job_id, found[122].job_id) == (alone.job_id, f"{alone.job_id}-p122")


def test_environment_does_not_claim_a_gpu_that_another_process_holds() -> None:
    gpus = [GpuSample(index=0, uuid="GPU-a0", pids=(10,)), GpuSample(index=1, uuid="GPU-a1")]
    assert rank_gpus.find_gpus({99}, {"CUDA_VISIBLE_DEVICES": "0"}, 0, gpus) == ()
    assert rank_gpus.find_gpus({99}, {"CUDA_VISIBLE_DEVICES": "1"}, 0, gpus) == ("GPU-a1",)
    assert rank_gpus.find_gpus({10}, {}, 0, gpus) == ("GPU-a0",)


def test_gpus_of_the_driver_win_over_the_environment(tmp_path: Path) -> None:
    (job,) = jobs_in("torchrun", tmp_path, sweep({0: (1011,), 1: (1010,), 4: (), 5: ()}))
    assert [one.gpu_uuids for one in job.ranks] == [("GPU-a1",), ("GPU-a0",)]


def test_pids_as_ranks_with_what_is_known_of_them(tmp_path: Path) -> None:
    jobs_in("torchrun", tmp_path)
    job = discovery.job_of_pids(ProcessScan(tmp_path).processes({900}), [1011, 900, 4242])
    assert slots(job) == [(3, 1, 1011), (None, None, 900), (None, None, 4242)]
    assert [worker.id.pid for worker in job.ranks[0].workers] == [1021]
    assert job.job_id == "pids-1011-900-4242"


@pytest.mark.parametrize(
    ("cmdline", "program"),
    [
        ((), ""),
        (("/venv/bin/python", "-u", "/data/train.py", "--lr", "1"), "train.py"),
        (("python3.11", "-X", "dev", "-W", "error", "-m", "torch.distributed.run", "t.py"), "torch.distributed.run"),
        (("python", "-c", "import x"), "-c"),
        (("python", "-m"), ""),
        (("python",), "python"),
        (("/usr/bin/torchrun", "train.py"), "torchrun"),
    ],
)
def test_what_a_command_line_runs(cmdline: tuple[str, ...], program: str) -> None:
    assert process_role.program(cmdline) == process_role.program_name(cmdline) == program


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (("train.py --lr 3 --token=hunter2/x",), "train.py"),
        (("python train.py --password hunter2",), "train.py"),
        (("/venv/bin/python -m trl.cli\t--token hunter2", ""), "trl.cli"),
        (("python", "train.py --token hunter2"), "train.py"),
        (("python", "-m", "trl --token hunter2"), "trl"),
        (("--password=hunter2 train.py",), "--password=***"),
        ((" ",), ""),
    ],
)
def test_program_name_is_one_word_without_secrets(cmdline: tuple[str, ...], name: str) -> None:
    # setproctitle puts a whole command line into the first argument.
    assert process_role.program_name(cmdline) == name


def test_job_of_ranks_with_titles_is_told_without_their_arguments(tmp_path: Path) -> None:
    tree = (FOLDER / "pytorchjob_pods.proc").read_text()
    tree = tree.replace("$ python3 train.py", "$ 'train.py --lr 3 --token=hunter2'")
    jobs = discovery.find_jobs(ProcessScan(lay_out(tree, tmp_path)).processes()).jobs
    assert {(job.program, job.command) for job in jobs} == {("train.py", "train.py")}


@pytest.mark.parametrize(("environ", "expected"), FACTS["rank_slots"])
def test_rank_slot_needs_plausible_numbers(environ: dict[str, str], expected: list[int]) -> None:
    process = Process(id=ProcessId(pid=7, start_ticks=1), parent_pid=1, comm="python", state="S", environ=environ)
    slot = process_role.find_rank_slot(process)
    numbers = (slot.rank, slot.local_rank, slot.local_world_size) if slot else ()
    assert [number for number in numbers if number is not None] == expected


@pytest.mark.parametrize(
    ("layout", "node", "tasks"),
    [("8(x2),4", "2", 4), ("8(x2),4", "1", 8), ("8", "0", 8), ("8", "1", None), ("x", "0", None)],
)
def test_slurm_tasks_per_node(layout: str, node: str, tasks: int | None) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "20", "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": layout}
    process = Process(id=ProcessId(pid=7, start_ticks=1), parent_pid=1, comm="python", state="S", environ=environ)
    slot = process_role.find_rank_slot(
        process, next(row for row in launcher_table.TABLE.launchers if row.name == "srun")
    )
    assert slot is not None and slot.local_world_size == tasks


@pytest.mark.parametrize(("environ", "local_rank", "uuids"), FACTS["gpus"])
def test_gpus_by_environment(environ: dict[str, str], local_rank: int, uuids: list[str]) -> None:
    gpus = [GpuSample(index=index, uuid=f"GPU-a{index}") for index in (7, 6, 5, 4, 3, 1, 0)]
    gpus.insert(
        5,
        GpuSample(index=2, uuid="GPU-a2", mig_uuids=("MIG-2a", "MIG-2b"), pids=(99,) if "MIG" in str(environ) else ()),
    )
    assert rank_gpus.find_gpus([1], environ, None if local_rank < 0 else local_rank, gpus) == tuple(uuids)


_texts = st.text(max_size=6) | st.sampled_from(
    ["0", "1", "2", "none", "..", "a/b", "localhost", "GPU-a1", "8(x2)", "-m"]
)
_processes = st.builds(
    Process,
    id=st.builds(ProcessId, pid=st.integers(1, 12), start_ticks=st.integers(0, 3)),
    parent_pid=st.integers(0, 12),
    comm=st.sampled_from(["python", "pt_elastic", "pt_data_worker", "slurmstepd", "mpirun", "bash"]),
    state=st.sampled_from("RSDTZ"),
    cmdline=st.lists(_texts | st.sampled_from(["python", "torchrun", "multiprocessing.spawn"]), max_size=3).map(tuple),
    environ=st.dictionaries(
        st.sampled_from(sorted(launcher_table.VARIABLES)) | st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        _texts,
        max_size=9,
    ),
)


@given(
    st.lists(_processes, max_size=12, unique_by=lambda process: process.id.pid),
    st.lists(st.integers(1, 12), max_size=4),
)
def test_any_processes_give_safe_job_names_and_each_one_place(processes: list[Process], held: list[int]) -> None:
    result = discovery.find_jobs(processes, sweep({0: tuple(held), 1: tuple(reversed(held))})).jobs
    names = [job.job_id for job in result]
    assert len(set(names)) == len(names)
    for job in result:
        assert job.job_id and len(job.job_id) <= 72
        assert not set(job.job_id) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert job.job_id[0] not in ".-"
        assert bool(job.ranks) == (job.waiting is None)
    places = [one for job in result for one in job.processes]
    assert len(set(places)) == len(places)
    workers = {worker.id for job in result for one in job.ranks for worker in one.workers}
    assert not workers & set(places)


def _with_users(child: str, rank: str = "1004") -> str:
    """Return the tree of a rank and of a process below it. `child` and `rank` are their user ids."""
    variables = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1"
    return f"""
1 (systemd) S parent=0 start=1
10 (python) S parent=1 start=5
  @ uid={rank} /user.slice
  $ python train.py
  + {variables}
11 (python) S parent=10 start=6
  @ uid={child} /user.slice
  $ python secret.py
12 (pt_data_worker) S parent=10 start=7
  @ uid=1004 /user.slice
  $ python train.py
  + {variables}
"""


@pytest.mark.parametrize("child", ["0", "1005", "1004,0"])
def test_children_of_a_rank_under_another_user_are_omitted_and_noted(tmp_path: Path, child: str) -> None:
    """Omit processes of other users below a rank: the job's owner may read all stacks of the incident."""
    (job,) = JobScan(lay_out(_with_users(child), tmp_path)).find(None, "here").jobs
    assert ([worker.id.pid for worker in job.ranks[0].workers], job.uid) == ([12], 1004)
    assert "child processes of its ranks that run as another user are not dumped: 1" in job.notes


def test_the_incident_of_a_rank_that_is_a_setuid_program_is_not_its_users_to_read(tmp_path: Path) -> None:
    (job,) = JobScan(lay_out(_with_users("1004", rank="1004,0"), tmp_path)).find(None, "here").jobs
    assert (job.owner, job.uid) == ("uid 1004", None)


def claimant(pid: int, uid: int, place: str, ranks: Iterable[int]) -> membership.Membership:
    """Return a membership with these ranks, one process each. All memberships claim the same run."""
    members = []
    for number in sorted(ranks):
        environ = {"RANK": str(number), "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        identity = ProcessId(pid=pid * 100 + number, start_ticks=pid)
        process = Process(id=identity, parent_pid=1, comm="python", state="S", uid=uid, environ=environ)
        members.append((process, process_role.find_rank_slot(process)))
    return membership.Membership("plain", None, members, owners.Owner(f"uid {uid}", place))


def joined_by_comparing_each_with_each(
    claimants: Sequence[membership.Membership], endpoints: Mapping[ProcessId, str]
) -> list[list[ProcessId]]:
    """Join the claimants by comparing each with each, as the reference for the fast algorithm.

    A claimant joins the first job with the same owner that lacks its ranks and has the same user or a common store.
    """
    every: list[list[membership.Membership]] = []

    def ranks(part: membership.Membership) -> set[int]:
        return {slot.rank for _, slot in part.members if slot}

    def stores(part: membership.Membership) -> set[str]:
        return {endpoints[process.id] for process in part.processes if process.id in endpoints}

    for part in sorted(claimants, key=lambda part: membership.claim_order(part, (), endpoints)):
        for job in every:
            of_it = part.owner in {other.owner for other in job}
            at_its_stores = stores(part) and stores(part) == set().union(*map(stores, job))
            is_free = not any(ranks(other) & ranks(part) for other in job)
            if job[0].owner.name == part.owner.name and is_free and (of_it or at_its_stores):
                job.append(part)
                break
        else:
            every.append([part])
    members = ([member for part in job for member in part.members] for job in every)
    return sorted([process.id for process, _ in sorted(job, key=membership.rank_number)] for job in members)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2]),
            st.sampled_from(["", "p", "q"]),
            st.frozensets(st.integers(0, 4), min_size=1, max_size=3),
            st.sampled_from(["", "s", "t"]),
        ),
        max_size=12,
    )
)
def test_claimants_are_joined_as_if_all_were_compared(
    drawn: list[tuple[int, str, frozenset[int], str]],
) -> None:
    found = [claimant(pid, uid, place, ranks) for pid, (uid, place, ranks, _) in enumerate(drawn, 1)]
    endpoints = {
        process.id: store for part, (*_, store) in zip(found, drawn, strict=True) for process in part.processes if store
    }
    jobs_of = membership.join_parts(found, (), endpoints)
    by_members = sorted([process.id for process, _ in part.members] for part in jobs_of)
    assert by_members == joined_by_comparing_each_with_each(found, endpoints)


def test_claimants_of_one_rank_are_not_compared_each_with_each() -> None:
    # Twice as many claimants need at most about twice as many calls: one user can start thousands of them.
    def calls(count: int) -> int:
        found, made = [claimant(pid, 1, "", {0}) for pid in range(1, count + 1)], 0

        def count_call(_frame: object, event: str, _what: object) -> None:
            nonlocal made
            made += event in {"call", "c_call"}

        sys.setprofile(count_call)
        try:
            assert len(membership.join_parts(found, (), {})) == count
        finally:
            sys.setprofile(None)
        return made

    calls(1)
    assert calls(400) < 2.2 * calls(200)


@given(st.text(alphabet="ab./\0 \\", max_size=12))
@example("a/b/")
@example("a/.")
def test_base_name_is_that_of_pathlib(path: str) -> None:
    assert process_role.base_name(path) == PurePosixPath(path).name
