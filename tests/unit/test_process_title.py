"""Process titles (setproctitle): the numbers and names in them, and the title of a live rank and its workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import words
from hangwatch.formats import process_title
from hangwatch.jobs.discovery import find_jobs
from hangwatch.model import Process, ProcessId, RankId


@pytest.mark.parametrize(
    ("command", "family", "name", "rank"),
    [
        ("VLLM::Worker_TP2", "VLLM::Worker", "VLLM::Worker_TP2", 2),
        ("VLLM::Worker_DP1_TP2_EP6", "VLLM::Worker", "VLLM::Worker_DP1_TP2_EP6", None),
        ("VLLM::EngineCore", "VLLM::EngineCore", "VLLM::EngineCore", None),
        ("VLLM::EngineCore_DP3", "VLLM::EngineCore", "VLLM::EngineCore_DP3", 3),
        ("sglang::scheduler_TP11_EP11", "sglang::scheduler", "sglang::scheduler_TP11_EP11", 11),
        ("sglang::scheduler_PP1_TP0", "sglang::scheduler", "sglang::scheduler_PP1_TP0", None),
        ("ray::WorkerDict.update(x=1)", "ray::WorkerDict", None, None),
        ("ray::WorkerDict.update", "ray::WorkerDict", "ray::WorkerDict.update", None),
        ("train_worker_3 --step 7", "train_worker_#", "train_worker_3", None),
        ("/opt/app/bin/lmp -in melt.lj", "lmp", None, None),
        ("my-trainer", "my-trainer", None, None),
        ("x::\x1b[31m", "x::\x1b[#m", None, None),
    ],
)
def test_title_is_read(command: str, family: str, name: str | None, rank: int | None) -> None:
    title = process_title.read(command)
    assert (title.family, title.name, title.rank) == (family, name, rank)


@pytest.mark.parametrize(
    "command", ["", "...", "python train.py", "/usr/bin/python3.12 -u x.py", "pypy3 x.py", "/v/bin/python3-dbg x.py"]
)
def test_command_line_of_python_has_no_title(command: str) -> None:
    assert process_title.read(command) is None


@given(st.text())
def test_any_text_gives_a_title_with_a_bounded_name(command: str) -> None:
    title = process_title.read(command)
    if title is not None and title.name is not None:
        assert len(title.name) <= 64
        assert title.name.isprintable()


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (RankId(rank=2, pid=4122, title="VLLM::Worker_TP2"), "VLLM::Worker_TP2 (pid 4122)"),
        (RankId(pid=7, title="ray::Actor.step", node="a"), "ray::Actor.step (a, pid 7)"),
        (RankId(rank=9, local_rank=1, pid=7, title="ray::Actor"), "ray::Actor (rank 9, local rank 1, pid 7)"),
    ],
)
def test_rank_with_a_title_is_named_by_it(rank: RankId, text: str) -> None:
    assert words.name_ranks([rank]) == text
    assert words.sentence(text) == text


def live(pid: int, parent: int, comm: str, title: str, environ: dict[str, str]) -> Process:
    return Process(
        id=ProcessId(pid=pid, start_ticks=pid),
        parent_pid=parent,
        comm=comm,
        state="S",
        cmdline=(title,),
        environ=environ,
    )


def test_live_rank_and_worker_have_the_whole_title() -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    processes = [
        live(10, 1, "ray::WorkerDict.", "ray::WorkerDict.update", variables),
        live(11, 10, "VLLM::Worker_TP", "VLLM::Worker_TP0", variables),
        live(12, 10, "pt_data_worker", "python", variables),
        live(13, 1, "python", "python", {**variables, "RANK": "1", "LOCAL_RANK": "1"}),
    ]
    (job,) = find_jobs(processes).jobs
    assert [rank.title for rank in job.ranks] == ["ray::WorkerDict", None]
    assert {worker.comm for worker in job.ranks[0].workers} == {"VLLM::Worker_TP0", "pt_data_worker"}
