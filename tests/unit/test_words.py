"""Values as words, and titles of processes: a folded list means the same as its input, foreign text is harmless."""

import re
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import words
from hangwatch.formats import process_title
from hangwatch.jobs.discovery import find_jobs
from hangwatch.model import Job, Process, ProcessId, RankId
from tests import titled_processes
from tests.commands import finished


@given(st.lists(st.integers(0, 3000)))
def test_folded_numbers_unfold_to_themselves(numbers: list[int]) -> None:
    unfolded: list[int] = []
    for run in filter(None, words.fold(numbers).split(",")):
        first, _, last = run.partition("-")
        unfolded += range(int(first), int(last or first) + 1)
    assert unfolded == sorted(set(numbers))


def test_runs_of_numbers_are_as_long_as_they_can_be() -> None:
    assert words.fold([5, 2, 0, 1, 9, 8]) == "0-2,5,8-9"


def test_node_names_fold() -> None:
    assert words.fold_nodes(["node3", "node1", "node2", "login"]) == "login,node[1-3]"


def test_node_names_that_no_set_can_hold_are_listed() -> None:
    assert words.fold_nodes(["b", "a[", "\x1b[2J"]) == "b,\\x1b[2J,a["
    assert words.fold_nodes(["n2", "n1", "@*", "a[0-999999999]"]) == "n[1-2],@*,a[0-999999999]"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([RankId(rank=rank) for rank in (0, 1, 2, 8, 9)], "0-2,8-9"),
        (
            [RankId(node="a", local_rank=1), RankId(node="a", local_rank=0), RankId(node="b", pid=7)],
            "a local 0-1; b pid 7",
        ),
        ([RankId()], "?"),
    ],
)
def test_ranks_fold(ids: list[RankId], expected: str) -> None:
    assert words.fold_ids(ids) == expected


def test_numbered_titles_fold_with_their_pids() -> None:
    workers = [RankId(rank=rank, pid=40 + rank, title=f"VLLM::Worker_TP{rank}") for rank in (0, 1, 3)]
    assert words.fold_titles(workers) == "VLLM::Worker_TP0-1,3 (pid 40-41,43)"
    assert words.fold_titles([*workers, RankId(rank=4, title="VLLM::EngineCore_DP4")]) == "0-1,3-4"
    assert words.fold_titles([*workers, RankId(rank=5, node="b", title="VLLM::Worker_TP5")]) == "0-1,3,5"
    assert words.fold_titles([RankId(rank=5)]) == words.fold_ids([RankId(rank=5)])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([RankId(node="a12", rank=15, local_rank=7, pid=4711)], "rank 15 (a12, local rank 7, pid 4711)"),
        ([RankId(rank=15)], "rank 15"),
        ([RankId(node="a12", local_rank=7, pid=4711)], "local rank 7 (a12, pid 4711)"),
        ([RankId(node="a12", pid=4711)], "pid 4711 (a12)"),
        ([RankId(node="\x1b[2J")], "a rank (\\x1b[2J)"),
        ([RankId(node="b", rank=1), RankId(node="a", rank=0)], "ranks 0-1 on a and b"),
        ([RankId(node=f"n{rank}", rank=rank) for rank in range(4)], "ranks 0-3 on 4 nodes"),
        ([RankId(local_rank=0), RankId(rank=9, local_rank=1)], "local ranks 0-1"),
        ([RankId(pid=7), RankId(rank=3, pid=8)], "2 ranks (pids 7-8)"),
        ([RankId(), RankId()], "2 ranks"),
        ([RankId(rank=rank) for rank in range(0, 99, 2)], f"50 ranks (ranks {','.join(map(str, range(0, 56, 2)))},…)"),
    ],
)
def test_ranks_are_named_with_node_and_pid(ids: list[RankId], expected: str) -> None:
    assert words.name_ranks(ids) == expected


@pytest.mark.parametrize(("number", "expected"), [(0, "0 ranks"), (1, "1 rank"), (16384, "16,384 ranks")])
def test_counts(number: int, expected: str) -> None:
    assert words.count(number) == expected


@given(st.text())
def test_foreign_text_cannot_act(text: str) -> None:
    shown = words.printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert words.printable(shown) == shown


@given(st.text(max_size=60), st.integers(1, 40))
def test_elided_text_has_its_length(text: str, characters: int) -> None:
    assert len(words.elided(text, characters)) <= characters


@given(st.text(max_size=300), st.floats(0, 4e9))
def test_names_of_incidents_are_safe_and_bounded(job_id: str, opened: float) -> None:
    name = words.incident_name(a_job(job_id, key=job_id), opened)
    assert re.fullmatch(r"\d{8}T\d{6}Z-[A-Za-z0-9._-]{1,73}", name)


@given(st.lists(st.text(max_size=120), unique=True, max_size=10))
def test_two_jobs_never_share_a_name(job_ids: list[str]) -> None:
    assert len({words.incident_name(a_job(job_id), 0.0) for job_id in job_ids}) == len(job_ids)


def test_two_owners_jobs_of_one_id_have_a_name_each() -> None:
    keys = ("6d1c0f5a9e27b384", "0123456789abcdef", "")
    names = [words.incident_name(a_job("100", key=key), 0.0) for key in keys]
    assert names == ["19700101T000000Z-100-6d1c0f5a", "19700101T000000Z-100-01234567", "19700101T000000Z-100"]


def a_job(job_id: str, key: str = "") -> Job:
    return Job(job_id=job_id, job_key=key, launcher="torchrun", launcher_id=None, ranks=())


@given(st.floats(0, 1e7, allow_nan=False))
def test_durations_have_two_units_at_most(seconds: float) -> None:
    assert re.fullmatch(r"[\d.e-]+ s|\d+ (min \d\d s|h \d\d min|d \d\d h)", words.duration(seconds))


DAEMON_ONLY = {"tornado", "prometheus_client", "apscheduler"}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("daemon", {"ClusterShell", "rich", "jinja2"}),
        ("cli", {"msgspec", "psutil", "ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("tools.commands.explain_files", {"psutil", "ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("tools.commands.many_nodes", {"psutil", "ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("cli.local_dump", {"ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("cli.check", {"ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("tools.commands.incidents", {"psutil", "ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("cli.daemon_commands", {"psutil", "ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("tools.commands.timeline", {"ClusterShell", "rich", "jinja2", *DAEMON_ONLY}),
        ("tools.commands.status_tables", {"psutil", "ClusterShell", "jinja2", *DAEMON_ONLY}),
    ],
)
def test_what_starts_loads_no_more_than_it_needs(module: str, without: set[str]) -> None:
    loaded = f"import sys, hangwatch.{module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    names = finished(sys.executable, "-c", loaded, check=True).stdout.split()
    assert "hangwatch" in names
    assert not without & set(names)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1.0, "0 s ago"), (59.4, "59 s ago"), (60.0, "1 min ago"), (7200.0, "2 h ago")]
)
def test_how_long_ago(seconds: float, text: str) -> None:
    assert words.ago(seconds) == text


@pytest.mark.parametrize("row", titled_processes.TABLE["titles"])
def test_title_is_read(row: dict[str, Any]) -> None:
    title = process_title.read(row["command"])
    assert (title.family, title.name, title.rank) == (row["family"], row.get("name"), row.get("rank"))


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
