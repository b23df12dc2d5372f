"""ranks: each rank exists and none is stuck, stopped or dead. On fixture trees and with real processes."""

import os
import signal

import pytest

from hangwatch.probes.base import procfs
from hangwatch.probes.node.machine import Node
from tests.commands import spawn
from tests.conftest import wait_for
from tests.node_tree import Checked, NodeTree, expect, job, rank, real_rank, run, status_and_reason, values


def test_all_ranks_alive(tree: NodeTree) -> None:
    for pid in (10, 11, 12):
        tree.process(pid, state="R", rss_kib=2048)
    node = tree.node(job(rank(10), rank(11, 1, workers=[12]), local_world_size=2))
    result = expect(("OK", "RanksAlive"), "ranks", node)
    assert values(result, "ranks_expected") == {("77",): 2}
    assert values(result, "ranks_alive") == {("77",): 2}
    memory = values(result, "ranks_resident_memory_bytes")
    assert memory == {("77", "0"): 2 << 20, ("77", "1"): 4 << 20}, "workers count for their rank"


@pytest.mark.parametrize(
    ("state", "once", "twice"),
    [
        ("D", ("WARNING", "RankUninterruptible"), ("WARNING", "RankUninterruptible")),
        ("T", ("WARNING", "RankStopped"), ("CRITICAL", "RankStopped")),
        ("t", ("WARNING", "RankStopped"), ("CRITICAL", "RankStopped")),
        ("Z", ("WARNING", "RankExited"), ("CRITICAL", "RankExited")),
    ],
)
def test_states_seen_once_and_twice(tree: NodeTree, state: str, once: tuple[str, str], twice: tuple[str, str]) -> None:
    check, node = Checked("ranks"), tree.node(job(rank(10), rank(11, 1)))
    tree.process(10)
    tree.process(11, state=state)
    tree.write("proc/11/wchan", "folio_wait_bit_common")
    first = check.expect(once, node)
    assert "seen once" in first.verdict.message
    second = check.expect(twice, node)
    assert "local rank 1" in second.verdict.message and "seen once" not in second.verdict.message
    if state == "D":
        assert "folio_wait_bit_common" in second.verdict.message


def test_a_short_d_among_many_looks_is_how_a_process_reads_a_file(tree: NodeTree) -> None:
    check, node = Checked("ranks"), tree.node(job(rank(10)))
    for state, expected in (("S", "OK"), ("D", "OK"), ("S", "OK"), ("D", "OK"), ("D", "WARNING")):
        tree.process(10, state=state)
        assert check.run(node).verdict.status.name == expected


def test_a_rank_that_is_gone_while_the_others_live(tree: NodeTree) -> None:
    check, node = Checked("ranks"), tree.node(job(rank(10), rank(11, 1)))
    tree.process(10)
    check.run(node)
    result = check.expect(("WARNING", "RankGone"), node)
    assert values(result, "ranks_alive") == {("77",): 1}


def test_reused_pid_means_that_the_rank_is_gone(tree: NodeTree) -> None:
    tree.process(10, start_ticks=999, rss_kib=1 << 20)
    result = run("ranks", tree.node(job(rank(10, start_ticks=100))))
    assert result.verdict.reason == "RankGone"
    assert values(result, "ranks_resident_memory_bytes") == {}, "the stranger's memory is not the rank's"


def test_a_rank_that_never_came(tree: NodeTree) -> None:
    tree.process(10)
    half = job(rank(10), local_world_size=2, absent_local_ranks=((1, 1),))
    check, node = Checked("ranks"), tree.node(half)
    check.expect(("WARNING", "RankGone"), node)
    result = check.expect(("WARNING", "RankGone"), node)
    assert "local rank 1 of job 77" in result.verdict.message
    assert values(result, "ranks_expected") == {("77",): 2}


def test_a_thousand_ranks_that_never_came_are_one_finding(tree: NodeTree) -> None:
    tree.process(10)
    sparse = job(rank(10), rank(11, 700), local_world_size=1024, absent_local_ranks=((1, 699), (701, 1023)))
    result = run("ranks", tree.node(sparse))
    assert "local ranks 1-699 of job 77" in result.verdict.message
    assert result.verdict.message.count("local rank") <= 3


def test_dead_workers_are_counted(tree: NodeTree) -> None:
    tree.process(10)
    tree.process(11, state="Z")
    result = expect(("OK", "RanksAlive"), "ranks", tree.node(job(rank(10, workers=[11, 12]))))
    assert values(result, "ranks_zombies") == {("77",): 1}


def test_a_stat_that_cannot_be_understood_is_a_rank_gone_not_a_crash(tree: NodeTree) -> None:
    tree.process(10)
    tree.write("proc/10/stat", "10 (py) thon) ???\n")
    assert run("ranks", tree.node(job(rank(10)))).verdict.reason == "RankGone"


def state_of(pid: int) -> str:
    found = procfs.read_state(pid)
    return found[1] if found else ""


def test_real_processes_stopped_and_dead() -> None:
    with spawn("sleep", 600) as stopped, spawn("sleep", 600) as dead, spawn("sleep", 600) as well:
        node = Node(jobs=(job(*(real_rank(child.pid, at) for at, child in enumerate((stopped, dead, well)))),))
        expect(("OK", "RanksAlive"), "ranks", node)
        os.kill(stopped.pid, signal.SIGSTOP)
        dead.kill()
        wait_for(lambda: (state_of(stopped.pid), state_of(dead.pid)) == ("T", "Z"), "a stopped and a dead process")
        check = Checked("ranks")
        check.run(node)
        result = check.run(node)
        assert status_and_reason(result)[0] == "CRITICAL"
        assert "is stopped" in result.verdict.message and "has ended" in result.verdict.message
        assert values(result, "ranks_stopped") == {("77",): 1}
        assert values(result, "ranks_alive") == {("77",): 2}
        assert [row[3] for row in result.table[1:3]] == ["T", "Z"]
