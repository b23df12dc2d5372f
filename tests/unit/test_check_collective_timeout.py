"""collective_timeout: the collective timeout of a job, compared with the time after which its stacks are taken."""

import os

import pytest

from hangwatch.jobs import collective_timeout
from hangwatch.probes.node.machine import Node
from tests.node_tree import NodeTree, expect, job, rank, real_rank, refuse_open, run, values

NAME, OK, EARLY = "collective_timeout", ("OK", "StacksComeFirst"), ("WARNING", "EndsItselfFirst")


def node_of(tree: NodeTree, environ: dict[str, str], *, nccl: bool = True, ours: float | None = 135.0) -> Node:
    """Return a node with a job of one rank, of which a daemon takes the stacks after `ours` seconds."""
    tree.process(10, environ=environ)
    return tree.node(job(rank(10, gpu_uuids=("GPU-0",) if nccl else ())), dump_after_seconds=ours)


def test_the_defaults_of_nccl_leave_time(tree: NodeTree) -> None:
    result = expect(OK, NAME, node_of(tree, {}))
    assert values(result, "collective_timeout_seconds") == {("77",): 600}
    assert values(result, "collective_heartbeat_timeout_seconds") == {("77",): 480}
    assert values(result, "collective_dump_after_seconds") == {(): 135}
    assert "unless its code sets another" in result.verdict.message


def test_a_job_without_gpus_waits_as_gloo_does(tree: NodeTree) -> None:
    result = run(NAME, node_of(tree, {}, nccl=False))
    assert values(result, "collective_timeout_seconds") == {("77",): 1800}
    assert values(result, "collective_heartbeat_timeout_seconds") == {}


@pytest.mark.parametrize(
    ("environ", "ours", "words"),
    [
        ({}, 580.0, ["480 s", "heartbeat", "if the NCCL watchdog is stuck", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=610"]),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, 135.0, ["60 s", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=165"]),
        ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, 580.0, ["600 s", "init_process_group", "610"]),
        ({"DEEPSPEED_TIMEOUT": "2"}, 135.0, ["120 s", "DEEPSPEED_TIMEOUT", "init_process_group"]),
    ],
)
def test_a_job_that_ends_itself_first(tree: NodeTree, environ: dict[str, str], ours: float, words: list[str]) -> None:
    result = expect(EARLY, NAME, node_of(tree, environ, ours=ours))
    for word in words:
        assert word in result.verdict.message + result.verdict.remedy


def test_the_margin_counts(tree: NodeTree) -> None:
    expect(OK, NAME, node_of(tree, {"DEEPSPEED_TIMEOUT": "3"}, ours=150.0))
    expect(EARLY, NAME, node_of(tree, {"DEEPSPEED_TIMEOUT": "3"}, ours=151.0))


def test_a_number_of_hundreds_of_digits_is_a_number_that_can_be_shown(tree: NodeTree) -> None:
    result = run(NAME, node_of(tree, {"DEEPSPEED_TIMEOUT": "9" * 400}))
    assert values(result, "collective_timeout_seconds") == {("77",): 60 * collective_timeout.MOST}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_a_job_that_never_gives_up(tree: NodeTree, name: str) -> None:
    result = expect(OK, NAME, node_of(tree, {name: "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}, ours=5000.0))
    assert "no collective timeout" in result.verdict.message
    assert values(result, "collective_timeout_seconds") == {}
    expect(EARLY, NAME, node_of(tree, {name: "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}, ours=5000.0))


def test_a_myth_is_called_one(tree: NodeTree) -> None:
    result = run(NAME, node_of(tree, {"NCCL_TIMEOUT": "3600"}))
    assert "NCCL_TIMEOUT is set but ignored by PyTorch" in result.verdict.message
    assert values(result, "collective_timeout_seconds") == {("77",): 600}


def test_job_without_a_running_daemon_is_ok(tree: NodeTree) -> None:
    expect(("OK", "DaemonNotRunning"), NAME, node_of(tree, {}, ours=None))


def test_odd_values_are_taken_as_not_set(tree: NodeTree) -> None:
    result = run(NAME, node_of(tree, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "ten", "DEEPSPEED_TIMEOUT": "-3"}))
    assert values(result, "collective_timeout_seconds") == {("77",): 600}
    assert values(result, "collective_heartbeat_timeout_seconds") == {("77",): 480}


def test_job_with_vanished_ranks_has_no_finding(tree: NodeTree) -> None:
    result = run(NAME, tree.node(job(rank(10)), dump_after_seconds=135.0))
    assert result.verdict.status.name == "OK" and not result.faults


def test_an_environment_that_may_not_be_read(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.process(10)
    refuse_open(monkeypatch, "/environ")
    result = expect(("UNKNOWN", "PermissionDenied"), NAME, tree.node(job(rank(10)), dump_after_seconds=135.0))
    assert "CAP_SYS_PTRACE" in result.verdict.remedy


def test_the_second_rank_answers_when_the_first_is_gone(tree: NodeTree) -> None:
    tree.process(11, environ={"DEEPSPEED_TIMEOUT": "1"})
    result = run(NAME, tree.node(job(rank(10), rank(11, 1)), dump_after_seconds=135.0))
    assert values(result, "collective_timeout_seconds") == {("77",): 60}


def test_this_real_process(monkeypatch: pytest.MonkeyPatch) -> None:
    expect(OK, NAME, Node(jobs=(job(real_rank(os.getpid())),), dump_after_seconds=135.0))
