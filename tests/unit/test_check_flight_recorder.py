"""flight_recorder: whether each job records its collectives, and the setting that enables the recorder."""

from pathlib import Path

import pytest

from hangwatch.checks.flight_recorder import MOST_JOBS_OF_AN_OWNER
from hangwatch.model import Job
from hangwatch.probes.node.machine import Node
from hangwatch.probes.torch_recorder import Recorders, layouts
from tests.integration import targets
from tests.node_tree import NodeTree, expect, job, rank, real_rank, run, status_and_reason, values
from tests.recorder_memory import Memory, Operation, as_process, recorder

NEWEST = layouts.candidates("")[-1]
TURN_ON = "set TORCH_FR_BUFFER_SIZE=2000 in the job (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 before torch 2.11)"
ALONE = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
ready()
import time
time.sleep(600)
"""


def recording(tree: NodeTree, pid: int, capacity: int = 2000, library: str = "cuda", share: str = "") -> Job:
    """Return a job of one rank. Its flight recorder has one collective."""
    tree.process(pid)
    memory = Memory(0x200000)
    address = recorder(memory, NEWEST, [Operation(is_completed=True, is_retired=True)], capacity=capacity)
    as_process(tree.proc / str(pid), memory, address, library)
    return job(rank(pid), job_id=f"J{pid}", job_key=f"k{pid}", share=share)


def test_a_recorder_that_is_there_is_told(tree: NodeTree) -> None:
    result = expect(("OK", "RecordersRead"), "flight_recorder", tree.node(recording(tree, 10)))
    assert values(result, "flight_recorder_capacity") == {("J10",): 2000}
    assert result.verdict.message == "flight recorder on in 1 of 1 job with PyTorch"


def test_each_process_is_read_once(tree: NodeTree) -> None:
    # The collective_timeout check has read the flight recorder. This check must not read it again.
    node = tree.node(recording(tree, 10), dump_after_seconds=135.0)
    assert "from its flight recorder" in run("collective_timeout", node).verdict.message
    (tree.proc / "10" / "mem").unlink()
    (tree.proc / "10" / "maps").unlink()
    assert values(run("flight_recorder", node), "flight_recorder_capacity") == {("J10",): 2000}
    new = tree.node(recording(tree, 10), recorders=Recorders(tree.proc))
    tree.process(10, start_ticks=200)
    expect(("OK", "NotPresent"), "flight_recorder", new)


def test_of_one_owner_a_few_are_asked_in_each_turn(tree: NodeTree) -> None:
    theirs = [recording(tree, pid, share="uid 1") for pid in range(10, 20)]
    node = tree.node(*theirs, recording(tree, 30, share="uid 2"))
    first = run("flight_recorder", node)
    assert len(values(first, "flight_recorder_capacity")) == MOST_JOBS_OF_AN_OWNER + 1
    assert first.verdict.message.endswith("; 2 jobs not read yet")
    assert len(values(run("flight_recorder", node), "flight_recorder_capacity")) == 11


def test_silent_ranks_do_not_take_the_turns_of_others(tree: NodeTree) -> None:
    for pid in range(10, 22):
        tree.process(pid)
    theirs = [job(rank(pid), job_id=f"J{pid}", share="uid 1") for pid in range(10, 22)]
    node = tree.node(*theirs, recording(tree, 30, share="uid 1"))
    found: dict[tuple[str, ...], float] = {}
    for _ in range(3):
        found |= values(run("flight_recorder", node), "flight_recorder_capacity")
        tree.time.pass_seconds(300)
    assert found == {("J30",): 2000}


def test_no_torch_says_nothing(tree: NodeTree) -> None:
    tree.process(10)
    launcher = job(job_id="waiting")
    result = expect(("OK", "NotPresent"), "flight_recorder", tree.node(job(rank(10)), job(rank(99)), launcher))
    assert not result.points and not result.faults


def test_what_cannot_be_read_is_no_finding(tree: NodeTree) -> None:
    broken = recording(tree, 10)
    mem = tree.proc / "10" / "mem"
    mem.write_bytes(mem.read_bytes()[:-4096])
    result = run("flight_recorder", tree.node(broken, recording(tree, 11)))
    assert result.verdict.status.name == "OK" and not result.faults
    assert result.verdict.message.startswith(
        "flight recorder on in 1 of 2 jobs with PyTorch; it cannot be read in job J10: "
    )
    assert values(result, "flight_recorder_capacity") == {("J11",): 2000}


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_real_jobs_with_it_on_and_off_and_one_that_has_made_no_collective(tmp_path: Path) -> None:
    unused = "import torch, torch.distributed\nready()\nimport time\ntime.sleep(600)"
    folders = [tmp_path / name for name in ("on", "off", "unused")]
    for folder in folders:
        folder.mkdir()
    with (
        targets.python(ALONE, folders[0]) as on,
        targets.python(ALONE, folders[1], TORCH_FR_BUFFER_SIZE="0") as off,
        targets.python(unused, folders[2]) as early,
    ):
        jobs = [job(real_rank(pid), job_id=name) for pid, name in ((on, "on"), (off, "off"), (early, "early"))]
        result = run("flight_recorder", Node(jobs=tuple(jobs)))
    assert status_and_reason(result) == ("OK", "Hint") and not result.faults
    assert values(result, "flight_recorder_capacity") == {("on",): 2000, ("off",): 0}
    assert result.verdict.message == (
        f"flight recorder on in 1 of 3 jobs with PyTorch; it is off in job off: {TURN_ON}; "
        "job early has not used a collective yet; without it, hangs are found in minutes instead of seconds"
    )
