"""Real gloo jobs read from outside, and the wait-for graph of their ranks, as tests/data/waitfor.toml expects."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from click.testing import CliRunner

from hangwatch.collectives import wait_graph
from hangwatch.collectives.rank_records import merge_rounds
from hangwatch.model import Member, Motion, RankId, RecorderFacts, Signature
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import pyspy
from hangwatch.tools.commands.explain import explain
from hangwatch.verdict import sequence_rules
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.verdict.sequence_rules import Answer
from tests.conftest import wait_for
from tests.node_tree import run, values
from tests.recorder_jobs.started import KEY, Started, started
from tests.servers import silent_server

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

ROUNDS_APART = 10
GONE_ON = 24  # operations, three steps of the jobs: on a busy machine a step may take a second
GOES_ON = ("slow_rank", "healthy")
SLOW = {"gather_slowly": (0, 1, 2, 3), "slow_checkpoint": (1,)}  # the ranks that progress
HANGS = sorted(KEY.keys() - set(GOES_ON) - SLOW.keys())


def traits(name: str) -> tuple[object, ...]:
    """Return the kind of the expected result `name`, and for each optional part if it has the part."""
    row = KEY[name]
    return row["kind"], *(part in row for part in ("named", "check_first", "cycle", "stacks", "environ", "read"))


FIRST_OF_A_KIND = {traits(name): name for name in reversed(HANGS)}.values()


def hang(name: str) -> object:
    return pytest.param(name, id=name, marks=[] if name in FIRST_OF_A_KIND else [pytest.mark.series])


def expected(name: str) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    row = KEY[name]
    return row["kind"], tuple(row.get("named", ())), tuple(row.get("check_first", ())), tuple(row.get("cycle", ()))


def summarise(answer: Answer) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    cycle = answer.graph.cycle if answer.kind == "Cycle" else ()
    return answer.kind, answer.named, answer.check_first, cycle


def accuses_nobody_else(name: str, taken: Diagnosis, answer: Answer) -> None:
    """Assert that no innocent rank is named, even by a capture before all ranks had stopped."""
    row = KEY[name]
    may_be = {*row.get("named", ()), *row.get("stacks", ())}
    assert set(answer.named) <= set(row.get("named", ())), answer
    assert {rank.rank for rank in taken.verdict.named} <= may_be, taken.verdict.message


@pytest.mark.parametrize("name", [hang(name) for name in HANGS])
def test_the_answer_to_a_real_hang(name: str, tmp_path: Path) -> None:
    with silent_server() as port, started(name, tmp_path, SERVER=str(port)) as job:

        def settled() -> bool:
            taken = job.look()
            answer = job.answer(taken)
            print(answer, taken.verdict.message)
            accuses_nobody_else(name, taken, answer)
            return summarise(answer) == expected(name)

        wait_for(settled, f"the answer {expected(name)}", 60)


def test_groups_used_in_another_order_are_reported_if_they_were_never_used_before(tmp_path: Path) -> None:
    """The groups are known only by the ranks that wait in them."""
    said = "ranks 0-1 in all_reduce #1 of a of ranks 0-1 and ranks 2-3 in all_reduce #1 of b of ranks 2-3"
    with started("crossed_groups", tmp_path) as job:
        wait_for(lambda: said in job.look().verdict.message, "the open operations of both groups", 60)


Snapshot = dict[int, tuple[RankRecords, ...]]


def have_gone_on(first: Snapshot, last: Snapshot) -> bool:
    """True if a rank has enqueued `GONE_ON` operations since `first`: those open then have ended."""
    before = {(rank, one.library): one.next_id for rank, found in first.items() for one in found}
    after = {(rank, one.library): one.next_id for rank, found in last.items() for one in found}
    return any(after[key] - before[key] >= GONE_ON for key in before.keys() & after.keys())


@pytest.mark.parametrize("wanted", [50, pytest.param(200, marks=pytest.mark.series)])
@pytest.mark.parametrize("name", GOES_ON)
def test_running_job_names_no_rank(name: str, wanted: int, tmp_path: Path) -> None:
    """Judge a running job `wanted` times, at random moments. Sometimes a recorder changes while it is read."""
    looks = whole = 0
    with started(name, tmp_path) as job:
        pace = threading.Event()
        snapshots: deque[Snapshot] = deque()
        while looks < wanted:
            snapshots.append(job.recorders())
            last = snapshots[-1]
            while len(snapshots) > ROUNDS_APART + 1 and have_gone_on(snapshots[1], last):
                snapshots.popleft()
            if len(snapshots) > ROUNDS_APART and have_gone_on(snapshots[0], last):
                first = snapshots[0]
                looks += 1
                members = [
                    Member(
                        id=RankId(node="here", rank=rank),
                        recorder=RecorderFacts(libraries=merge_rounds([first[rank], last[rank]])),
                    )
                    for rank in job.read
                ]
                whole += all(member.recorder.libraries for member in members)
                graph = wait_graph.build(members, lambda _member, _thread: "elsewhere", len(members))
                assert sequence_rules.decide(graph) == Answer("Unknown")
            pace.wait(0.05)
    print(f"{whole} of {wanted} looks were of all ranks")
    assert whole >= wanted / 2


def test_side_threads_of_a_real_hang_are_no_motion(tmp_path: Path) -> None:
    with started("fifo_beside_metrics", tmp_path) as job:

        def settled() -> Diagnosis | None:
            taken = job.look()
            is_blocked = {member.signature for member in taken.grouping.members} == {Signature.BLOCKED}
            return taken if is_blocked and job.answer(taken).kind == "NotJoined" else None

        taken = wait_for(settled, "the hang")
    assert all((member.usage.io_bytes_per_second or 0) > 50_000 for member in taken.grouping.members)
    assert max(dump.traffic.rank_bytes or 0 for rank in taken.capture.ranks for dump in rank.rounds) < 10_000
    assert [rank.rank for rank in taken.verdict.named] == [3]


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        pytest.param(name, wanted, marks=[pytest.mark.series] if wanted > 10 else [])
        for wanted in (10, 300)
        for name in SLOW
    ],
)
def test_slow_job_progresses_in_each_capture(name: str, seconds: int, tmp_path: Path) -> None:
    """Only a capture in which all ranks are frozen makes a page: see `detector.on_capture`."""
    if "SLOW_LINK" in KEY[name].get("environ", {}) and (os.geteuid() != 0 or shutil.which("tc") is None):
        pytest.skip("needs root and tc (Debian package iproute2): slows the loopback of a network namespace down")
    with started(name, tmp_path) as job:

        def look() -> dict[Motion, tuple[int, ...]]:
            members = job.look(5.0).grouping.members
            return {kind: tuple(sorted(one.id.rank for one in members if one.motion is kind)) for kind in Motion}

        wait_for(lambda: look()[Motion.MOVING] == SLOW[name], "the first bytes")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert len(look()[Motion.FROZEN]) < 4


LATE = {
    "fifo_beside_metrics": Signature.BLOCKED,
    "thread_in_own_code": Signature.BLOCKED,
    "thread_reads": Signature.TRANSFERS,
    "thread_asks": Signature.AWAITS_OUTSIDE,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fifo_beside_metrics", "thread_reads") else [pytest.mark.series])
        for name in LATE
    ],
)
def test_threads_of_libraries_change_no_answer(name: str, tmp_path: Path) -> None:
    """Start wandb, fsspec, a TensorBoard writer and a Prometheus server in each rank of a hung and a healthy job."""
    with silent_server() as port, started(name, tmp_path, LIBRARIES="all", SERVER=str(port)) as job:
        (late,) = KEY[name]["named"]

        def settled() -> Diagnosis | None:
            taken = job.look()
            by_rank = {member.id.rank: member.signature for member in taken.grouping.members}
            print(by_rank, taken.verdict.message)
            is_still = by_rank == {**dict.fromkeys(by_rank, Signature.BLOCKED), late: LATE[name]}
            return taken if is_still and summarise(job.answer(taken)) == expected(name) else None

        taken = wait_for(settled, "the answer")
    assert [rank.rank for rank in taken.verdict.named] == [late]


def test_bytes_of_a_collective_are_motion(tmp_path: Path) -> None:
    with started("slow_rank", tmp_path, NUMBERS=str(1 << 22)) as job:

        def have_moved() -> bool:
            (first, last) = zip(*(rank.rounds for rank in job.look(2.0).capture.ranks), strict=True)
            assert all(dump.traffic.rank_bytes == 0 for dump in first), "counted since the first round"
            return all((dump.traffic.rank_bytes or 0) > 1 << 20 for dump in last)

        wait_for(have_moved, "a collective of all ranks")


def test_equal_stacks_in_a_cycle_are_found_by_sequence_numbers(tmp_path: Path) -> None:
    with started("wrong_group", tmp_path) as job:
        verdict = wait_for(lambda: settled if (settled := job.look().verdict).kind == "Cycle" else None, "the cycle")
        assert (verdict.named, [rank.rank for rank in verdict.check_first]) == ((), [1])
        assert "rank 1 for rank 0 in all_reduce #11 of tp of ranks 0-1" in verdict.message


def test_the_time_out_of_a_job_is_what_its_ranks_recorded(tmp_path: Path) -> None:
    """Report 600 s, which the program set, instead of gloo's default of 1800 s."""
    with started("own_code", tmp_path) as job:
        node = Node(jobs=(job.job(),), dump_after_seconds=135.0)
        result = run("collective_timeout", node)
        assert list(values(result, "collective_timeout_seconds").values()) == [600.0]
        assert "collective timeout of 600 s (from its flight recorder)" in result.verdict.message
        waits = wait_for(
            lambda: [one.message for one in job.look().verdict.evidence if one.kind == "sequence"], "the hang"
        )
        assert "the collective times out in 9 min" in waits[0] and "(timeout 10 min 00 s)" in waits[0]


THREADS_THAT_LOOK = {"gloo_tcp_loop", "dump_when_asked"}  # again and again, also if nothing happens


def verdict(folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(explain, ["--json", str(folder)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["verdict"]


def ranks(of: list[dict[str, Any]]) -> list[int]:
    return [one["rank"] for one in of]


def settled(job: Started) -> Path:
    """Return the folder of a job's dumps after the job has stopped.

    It has stopped if all threads sleep while those that look for events look twice. On a busy machine a thread that
    does not run may only wait for a core.
    """
    before: dict[Path, int] = {}

    def has_stopped() -> bool:
        nonlocal before
        tasks = [task for rank in job.read for task in Path(f"/proc/{job.pids[rank]}/task").iterdir()]
        looking = {task for task in tasks if (task / "comm").read_text().strip() in THREADS_THAT_LOOK}
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks if task not in looking]
        runs = {task: int((task / "schedstat").read_text().split()[2]) for task in tasks}
        if set(states) != {"S"} or any(runs[task] != before.get(task) for task in runs.keys() - looking):
            before = runs
            return False
        return all(runs[task] >= before.get(task, runs[task]) + 2 for task in looking)

    wait_for(has_stopped, "the job to stop")
    return job.dumps("settled")


@pytest.mark.parametrize(
    "name",
    [
        *("own_code", "two_do_not_join", "enqueued_ahead", "again", "chain_of_groups"),
        *("open_and_stuck", "wrong_group", "skipped", "other_operation"),
        *("wrapped_over_the_open", "detail", "pipeline", "wrapped_reaches_back"),
    ],
)
def test_a_hang_by_its_dumps_alone(name: str, tmp_path: Path) -> None:
    """Name no rank by dumps without stacks. Suspects are only ranks to check first."""
    row = KEY[name]
    with started(name, tmp_path, DUMPS="1") as job:
        folder = settled(job)
    found = verdict(folder)
    first = row.get("check_first") or row.get("named", [])
    assert (found["named"], ranks(found["check_first"])) == ([], list(first)), found["message"]
    kind = "Cycle" if name == "open_and_stuck" else row["kind"]  # only a stack shows that it does not wait
    assert found["kind"] == (kind if kind != "Unknown" and (first or "cycle" in row) else "RecordsOnly")
    assert "the moment when torch wrote its dumps" in found["message"]
    assert ("only stacks show that" in found["message"]) == (found["kind"] == "Cycle")
    if name == "two_do_not_join":
        assert "Ranks 1,4 have not joined" in found["message"]


def test_with_their_stacks_the_rank_is_named(tmp_path: Path) -> None:
    with started("own_code", tmp_path, DUMPS="1") as job:
        folder = settled(job)
        for rank, pid in job.pids.items():
            command = [str(pyspy.find()), "dump", "--pid", str(pid)]
            stack = subprocess.run(command, capture_output=True, check=True, timeout=60)
            (folder / f"stack-rank{rank}.txt").write_bytes(stack.stdout)
    found = verdict(folder)
    assert (found["kind"], ranks(found["named"]), found["confidence"]) == ("NotJoined", [2], "medium")
    assert "prepare_batch" in found["message"] and "the moment when torch wrote its dumps" in found["message"]
    told = [one["message"].rpartition(":")[0] for one in found["evidence"] if one["kind"] == "last_enqueued"]
    assert "rank 2 enqueued last: all_reduce 5 of default_pg, in reduce (program.py" in told


@pytest.mark.parametrize("name", ["healthy", "slow_rank"])
def test_dumps_of_a_healthy_job_at_different_moments_name_no_rank(name: str, tmp_path: Path) -> None:
    """Dump each rank at a different moment."""
    with started(name, tmp_path, DUMPS="1") as job:
        cuts = [copytree(job.dumps(str(number)), tmp_path / f"cut-{number}") for number in range(40)]
    verdicts = list(map(verdict, cuts))
    pointed = [ranks(found["check_first"]) for found in verdicts]
    print([found["kind"] for found in verdicts], pointed)
    assert [found["named"] for found in verdicts] == [[]] * 40
    assert any(one["kind"] == "sequence" for found in verdicts for one in found["evidence"])
