"""The simulated node: processes block where the test wants, power follows their activity, and none remains."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hangwatch.probes.base import procfs
from hangwatch.tools.demo import simulated_gpus
from hangwatch.tools.demo.phases import Phase, PhaseAge
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from hangwatch.tools.demo.simulated_node import NodeError
from tests.commands import finished
from tests.conftest import wait_for
from tests.integration import targets
from tests.simulated.node import SimulatedNode

RANKS = 3
PY_SPY = str(Path(sys.executable).with_name("py-spy"))


def environ_of(pid: int) -> dict[str, str]:
    parts = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if part)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def comm_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def is_gone(pid: int) -> bool:
    return procfs.read_thread_states(pid) in ("", "Z")


def stack_of(pid: int) -> list[str]:
    """Return the names of the functions in all threads, innermost first."""
    shown = finished(PY_SPY, "dump", "--pid", pid, check=True).stdout
    return [line.split("(")[0].strip() for line in shown.splitlines() if line.startswith("    ")]


@pytest.fixture(scope="module")
def training() -> SimulatedNode:
    """Yield a node with a training job. The tests that share it cause no fault."""
    with SimulatedNode(RANKS, nodes=2) as node:
        yield node


def test_processes_look_like_a_torchrun_job(training: SimulatedNode) -> None:
    launchers = {parent_of(pid) for pid in training.pids}
    assert len(launchers) == 1
    assert comm_of(launchers.pop()) == "pt_elastic"
    for local_rank, pid in enumerate(training.pids):
        environ = environ_of(pid)
        assert environ["RANK"] == environ["LOCAL_RANK"] == str(local_rank)
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["GROUP_RANK"]) == ("6", "3", "0")
        assert environ["TORCHELASTIC_RUN_ID"] == training.run_id
        (loader,) = children_of(pid)
        assert comm_of(loader) == "pt_data_worker"
        assert environ_of(loader)["RANK"] == str(local_rank)


def test_the_view_of_proc_shows_the_processes_of_this_node_only(training: SimulatedNode) -> None:
    shown = {int(entry.name) for entry in training.proc_root.iterdir() if entry.name.isdigit()}
    loaders = {child for pid in training.pids for child in children_of(pid)}
    assert shown - {parent_of(training.pids[0])} == {*training.pids, *loaders}
    assert (training.proc_root / str(training.pids[0]) / "comm").read_text()
    assert (training.proc_root / "stat").read_text().startswith("cpu ")


def test_no_variable_of_an_outer_batch_job_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with SimulatedNode(1) as node:
        assert "SLURM_JOB_ID" not in environ_of(node.pids[0])


def test_training_draws_power_and_little_cpu(training: SimulatedNode) -> None:
    def cpu_seconds() -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in training.pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    gpus = SimulatedGpus(training)
    assert [gpu.pids for gpu in gpus.latest().gpus] == [(pid,) for pid in training.pids]
    wait_for(lambda: all(gpu.power_watts > 500 for gpu in gpus.latest().gpus), "all to draw what training draws")
    assert {gpu.power_limit_watts for gpu in gpus.latest().gpus} == {700}
    before, began = cpu_seconds(), time.monotonic()
    time.sleep(1.0)  # the test measures this time
    assert (cpu_seconds() - before) / (time.monotonic() - began) < 0.10 * RANKS


@pytest.mark.parametrize(
    ("order", "function"),
    [("lock", "log_metrics"), ("spin", "pack_sequences"), ("loader", "next_batch")],
)
def test_a_stuck_rank_is_stuck_where_it_should_be_and_the_others_wait(order: str, function: str) -> None:
    with SimulatedNode(RANKS) as node:
        node.order(1, order)
        wait_for(lambda: function in stack_of(node.pids[1]), "rank 1 to be stuck")
        wait_for(lambda: stack_of(node.pids[0])[0] == stack_of(node.pids[2])[0] == "all_reduce", "the others to wait")
        gpus = SimulatedGpus(node)
        wait_for(lambda: max(gpu.power_watts for gpu in gpus.latest().gpus) < 140, "power to fall")
        assert [gpu.utilization_ratio for gpu in gpus.latest().gpus] == [1.0, 0.0, 1.0]
        if order == "loader":
            assert stack_of(children_of(node.pids[1])[0])[0] == "read_shard"


def test_a_stopped_rank_is_stopped() -> None:
    with SimulatedNode(RANKS) as node:
        node.order(2, "stopped")
        targets.wait_for_state(node.pids[2], "T")
        wait_for(lambda: stack_of(node.pids[0])[0] == "all_reduce", "rank 0 to wait")


def test_a_rank_that_leaves_takes_its_loader_along_and_the_others_wait() -> None:
    with SimulatedNode(RANKS) as node:
        (loader,) = children_of(node.pids[0])
        node.order(0, "exited")
        wait_for(lambda: not node.is_alive(0), "rank 0 to be reaped")
        wait_for(lambda: is_gone(loader), "its loader to end")
        gpus = SimulatedGpus(node)
        wait_for(lambda: stack_of(node.pids[1])[0] == "all_reduce", "rank 1 to wait")
        wait_for(lambda: gpus.latest().gpus[1].power_watts < 140, "its power to fall")
        assert gpus.latest().gpus[0].pids == ()


def test_peers_on_other_nodes_can_stay_away() -> None:
    with SimulatedNode(RANKS, nodes=2) as node:
        node.order("peers", "stay-away")
        wait_for(lambda: min(node.phases.read(i).age_seconds for i in range(RANKS)) > 1, "all ranks to wait")
        wait_for(lambda: {stack_of(pid)[0] for pid in node.pids} == {"all_reduce"}, "their stacks to show it")


def test_a_checkpoint_writes_real_bytes_and_training_goes_on_after_it() -> None:
    with SimulatedNode(RANKS) as node:
        node.order("all", "checkpoint 0.5")
        node.wait_for_event("resumed", 60)
        checkpoint = node.folder / "checkpoint.pt"
        assert not checkpoint.exists()
        node.order("all", "checkpoint 600")
        wait_for(lambda: checkpoint.exists() and checkpoint.stat().st_size > 1 << 20, "bytes")
        assert "save_checkpoint" in stack_of(node.pids[0])
        wait_for(lambda: "barrier" in stack_of(node.pids[1]), "rank 1 to wait")
        assert not node.has_said("resumed")


def test_evaluation_is_low_power_on_all_ranks() -> None:
    with SimulatedNode(RANKS) as node:
        node.order("all", "evaluation 0.1")
        node.wait_for_event("resumed", 60)
        node.order("all", "evaluation 600")
        gpus = SimulatedGpus(node)
        wait_for(lambda: "evaluate" in stack_of(node.pids[1]), "the evaluation")
        wait_for(lambda: all(140 < gpu.power_watts < 200 for gpu in gpus.latest().gpus), "power to fall")


def test_the_first_order_comes_before_the_first_step() -> None:
    with SimulatedNode(2, first_order="1 lock") as node:
        wait_for(lambda: node.phases.read(0).phase is Phase.COLLECTIVE, "rank 0 to wait")
        wait_for(lambda: stack_of(node.pids[0])[0] == "all_reduce", "its stack to show it")
        assert node.phases.read(1).phase is Phase.STARTING


def test_a_restart_replaces_every_rank_and_training_goes_on() -> None:
    with SimulatedNode(2) as node:
        before = node.pids
        node.restart()
        assert not set(before) & set(node.pids)
        assert all(is_gone(pid) for pid in before)
        node.order("all", "evaluation 0.1")
        node.wait_for_event("resumed", 60)


def test_a_job_that_ends_takes_its_launcher_along() -> None:
    with SimulatedNode(2) as node:
        launcher = parent_of(node.pids[0])
        node.order("all", "exited")
        wait_for(lambda: is_gone(launcher), "the launcher to exit")


def test_a_notebook_is_no_rank_and_holds_its_gpu() -> None:
    with SimulatedNode(1, program="tests.simulated.notebook") as node:
        gpus = SimulatedGpus(node)
        wait_for(lambda: gpus.latest().gpus[0].power_watts > 500, "the cell to run")
        node.order("all", "idle")
        wait_for(lambda: gpus.latest().gpus[0].power_watts < 130, "the cell to end")
        assert "RANK" not in environ_of(node.pids[0])
        assert gpus.latest().gpus[0].pids == node.pids


@pytest.mark.parametrize(
    ("seen", "alive", "expected"),
    [
        (PhaseAge(Phase.COMPUTE, 0.1), True, simulated_gpus.TRAINING),
        (PhaseAge(Phase.COLLECTIVE, 0.9), True, simulated_gpus.TRAINING),
        (PhaseAge(Phase.COLLECTIVE, 1.1), True, simulated_gpus.WAITING),
        (PhaseAge(Phase.COMPUTE, 1.1), True, simulated_gpus.STUCK),
        (PhaseAge(Phase.LOADING, 5.0), True, simulated_gpus.STUCK),
        (PhaseAge(Phase.EVALUATION, 0.1), True, simulated_gpus.EVALUATION),
        (PhaseAge(Phase.COMPUTE, 0.1), False, simulated_gpus.IDLE),
    ],
)
def test_power_follows_what_rank_does_and_how_long(seen: PhaseAge, alive: bool, expected: simulated_gpus.Load) -> None:
    assert simulated_gpus.load(seen, alive) == expected


def test_nothing_is_left_over() -> None:
    with SimulatedNode(RANKS) as node:
        everybody = [*node.pids, *(child for pid in node.pids for child in children_of(pid))]
        node.order(0, "stopped")
        targets.wait_for_state(node.pids[0], "T")
    assert all(is_gone(pid) for pid in everybody)
    assert not node.folder.exists()


def test_nothing_is_left_over_when_the_demo_itself_is_killed() -> None:
    program = """
from hangwatch.tools.demo.simulated_node import SimulatedNode
import signal
with SimulatedNode(2) as node:
    print(node.folder, *node.pids, flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as demo:
        folder, *pids = demo.stdout.readline().split()
        os.kill(demo.pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(int(pid)) for pid in pids), "the ranks to end")
    subprocess.run(["rm", "-r", folder], check=True)


def test_a_launcher_that_dies_is_told_and_takes_even_a_stopped_rank_along() -> None:
    with SimulatedNode(1) as node:
        (loader,) = children_of(node.pids[0])
        node.order(0, "stopped")
        targets.wait_for_state(node.pids[0], "T")
        launcher = parent_of(node.pids[0])
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: is_gone(launcher), "the launcher to end")  # else the launcher might still receive the order
        with pytest.raises(NodeError, match="has ended"):
            node.order("all", "checkpoint 1")
        wait_for(lambda: is_gone(node.pids[0]) and is_gone(loader), "the rank and its loader to end with it")
