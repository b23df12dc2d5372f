"""Processes that may be ranks although no launcher is known: holders of GPUs, and titles of workers."""

import pytest

from hangwatch.jobs.likely_ranks import describe, find_likely_ranks, find_ranks_below
from hangwatch.model import Process, ProcessId


def process(pid: int, title: str, parent: int = 1, comm: str = "", state: str = "S") -> Process:
    cmdline = tuple(title.split()) if title else ()
    identity = ProcessId(pid=pid, start_ticks=pid)
    return Process(id=identity, parent_pid=parent, comm=comm or title[:15], state=state, cmdline=cmdline)


VLLM = [
    process(10, "python serve.py", comm="python"),
    process(11, "VLLM::EngineCore", parent=10),
    *(process(12 + rank, f"VLLM::Worker_TP{rank}", parent=11) for rank in range(4)),
]
SGLANG = [
    process(10, "sglang::server"),
    process(11, "sglang::detokenizer", parent=10),
    *(process(12 + rank, f"sglang::scheduler_TP{rank}", parent=10) for rank in range(2)),
]
RAY = [
    process(10, "ray::TaskRunner.run"),
    *(process(20 + number, "ray::IDLE", parent=2) for number in range(3)),
    *(process(30 + number, "ray::WorkerDict.update", parent=2) for number in range(2)),
]
PLAIN = [process(10, "/usr/sbin/nginx"), process(11, "/usr/sbin/nginx", parent=10), process(12, "agetty tty1")]


@pytest.mark.parametrize(
    ("processes", "gpu_pids", "expected"),
    [
        (VLLM, (), [12, 13, 14, 15]),
        (SGLANG, (), [12, 13]),
        (RAY, (), [30, 31]),
        (PLAIN, (), []),
        (PLAIN, (11,), [11]),
        ([process(5, "", comm="VLLM::Worker_TP"), process(6, "", comm="VLLM::Worker_TP")], (), [5, 6]),
        ([process(5, "VLLM::Worker_TP0", state="Z")], (5,), []),
    ],
)
def test_likely_ranks_hold_gpus_or_have_the_title_of_a_worker(
    processes: list[Process], gpu_pids: tuple[int, ...], expected: list[int]
) -> None:
    assert [found.id.pid for found in find_likely_ranks(processes, gpu_pids)] == expected


def test_pid_of_a_server_means_its_workers_but_a_rank_stays_alone() -> None:
    assert find_ranks_below(10, VLLM, ()) == [12, 13, 14, 15]
    assert find_ranks_below(12, VLLM, ()) == []
    assert find_ranks_below(10, [*VLLM, process(20, "VLLM::Worker_TP0")], (10,)) == []
    assert find_ranks_below(99, VLLM, ()) == []
    assert [describe(found) for found in VLLM[:2]] == ["python", "VLLM::EngineCore"]
