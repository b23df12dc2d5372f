"""The reader of stack dumps that users bring: py-spy text of any version, with prefixes, and JSON."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.model import RankDump, RankId
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import streams, traces
from hangwatch.verdict import judge
from tests.conftest import load_table

TABLE = activity.load()
WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:2501)", "train (train.py:50)", "<module> (train.py:80)")
LOADS = (
    "wait (threading.py:302)",
    "get (queue.py:170)",
    "_try_get_data (torch/utils/data/dataloader.py:1011)",
    "train (train.py:35)",
)


def process(pid: int, *frames: str, command: str = "python -u train.py", name: str | None = "MainThread") -> list[str]:
    """Return the lines of py-spy for a process with one thread."""
    title = f'Thread {pid} (idle): "{name}"' if name else f"Thread {pid} (idle)"
    lines = [f"Process {pid}: {command}", "Python v3.10.12 (/usr/bin/python3.10)", "", title]
    return [*lines, *(f"    {frame}" for frame in frames)]


def collect(*lines: str, name: str = "-") -> traces.Collected:
    return traces.collect([(name, [line + "\n" for line in lines])])


def ids(collected: traces.Collected) -> list[RankId]:
    return [rank.id for rank in collected.ranks]


def leaf(rank: RankDump) -> str:
    (main,) = [thread for thread in rank.rounds[-1].threads if thread.is_main]
    return str(main.frames[0])


@pytest.mark.parametrize(("prefix", "name", "expected"), load_table("log_prefixes.toml")["ranks"])
def test_rank_of_a_dump_is_read_from_prefix_or_file_name(prefix: str, name: str, expected: dict[str, Any]) -> None:
    found = collect(*(prefix + line for line in process(99, *WAITS)), name=name)
    assert ids(found) == [RankId(pid=99, **expected)]
    assert leaf(found.ranks[0]) == WAITS[0]
    assert found.notes == ()


def test_ranks_of_ray_are_read_from_the_marks_of_their_processes() -> None:
    stack = ["Thread 0x00007f0 (most recent call first):", '  File "/srv/train.py", line 31 in step']
    workers = [
        [f"(Worker pid={pid}, ip=10.0.0.3) {line}" for line in (*stack, f"[rank{pid - 41}] step 3")] for pid in (41, 42)
    ]
    assert ids(collect(*workers[0], *workers[1])) == [
        RankId(node="10.0.0.3", rank=rank, pid=41 + rank) for rank in (0, 1)
    ]


@pytest.mark.parametrize("prefix", ["", "[rank3] "])
def test_the_colours_of_a_terminal_are_no_part_of_a_dump(prefix: str) -> None:
    """Remove terminal colors, which `script` records. They once hid the function names from all rules."""
    header, version, *rest = process(99, *WAITS)
    coloured = [re.sub(r"^( *)(.+)$", "\\1\x1b[1;32m\\2\x1b[0m", line) for line in rest]
    lines = [f"Process \x1b[1m99\x1b[0m{header.removeprefix('Process 99')}", version, *coloured]
    found = collect(*(prefix + line for line in lines))
    assert found == collect(*(prefix + line for line in process(99, *WAITS)))


def test_in_a_log_a_stamp_of_time_stays_a_part_of_its_line() -> None:
    """Keep the timestamp of a log line: it may be the time of a failure."""
    (read,) = collect("2026-11-22T23:01:07Z RuntimeError: no", name="rank3.log").logs
    assert "2026-11-22" in str(read)


@pytest.mark.parametrize(
    ("command", "node", "rank", "local_rank"),
    [
        ("python -u train.py --local_rank=3", None, None, 3),
        ("python -u train.py --local-rank 3 --lr 1", None, None, 3),
        ("python train.py --node_rank=1 --local_rank=0", "node 1", None, 0),
        ("python train.py --global_rank 9", None, 9, None),
        ("python train_lora.py --rank 9", None, None, None),
    ],
)
def test_command_line_tells_rank(command: str, node: str | None, rank: int | None, local_rank: int | None) -> None:
    assert ids(collect(*process(99, *WAITS, command=command))) == [
        RankId(node=node, rank=rank, local_rank=local_rank, pid=99)
    ]


def test_processes_without_any_number_are_shown_by_pid() -> None:
    found = collect(*process(11, *WAITS), *process(12, *LOADS), *process(13, *WAITS), name="trace-n1.out")
    assert ids(found) == [RankId(node="n1", pid=pid) for pid in (11, 12, 13)]


def in_files(*names: str, pids: tuple[int, ...] = (41, 99, 17, 58)) -> traces.Collected:
    return traces.collect(
        [(name, [f"{line}\n" for line in process(pid, *WAITS)]) for name, pid in zip(names, pids, strict=False)]
    )


@pytest.mark.parametrize("shape", ["stack.{}.txt", "/tmp/x/{}.txt", "py-spy-{}.txt", "stacks{}", "d/gdb.{}.out"])
def test_files_of_stacks_that_are_numbered_from_0_on_are_ranks_and_it_is_said(shape: str) -> None:
    found = in_files(*(shape.format(number) for number in (2, 0, 1, 3)))
    assert [(one.rank, one.pid) for one in ids(found)] == [(2, 41), (0, 99), (1, 17), (3, 58)]
    assert found.notes == ("the numbers of ranks 0 to 3 come only from the file names",)


@pytest.mark.parametrize(
    "names",
    [
        ["stack.1.txt", "stack.2.txt", "stack.3.txt"],  # the numbers count something else
        ["0.txt", "4711.txt"],  # the number is a pid
        ["stack.0.txt", "dump.1.txt"],
        ["a/stack.0.txt", "b/stack.1.txt"],  # a file per node
        ["node0.txt", "node1.txt"],  # any rank of a node
        ["worker-0.txt", "worker-1.txt"],
        ["2026-0.txt", "2026-1.txt"],
        ["0.txt"],
        ["0.txt", "1.txt", "notes.txt"],
    ],
)
def test_names_of_files_that_may_number_something_else_tell_no_rank(names: list[str]) -> None:
    found = in_files(*names)
    assert {one.rank for one in ids(found)} == {None}
    assert not [note for note in found.notes if "by the numbers" in note]


def test_rounds_of_one_process_in_numbered_files_are_no_ranks() -> None:
    found = in_files("stack.0.txt", "stack.1.txt", "stack.2.txt", pids=(41, 41, 41))
    assert {one.rank for one in ids(found)} == {None}
    assert found.notes == ()


@pytest.mark.parametrize(
    "heading",
    [
        "### Rank {}", "rank {}:", "====rank{}====", "<summary>rank {}</summary>", "**Rank {}**", "# global rank: {}",
        "----- RANK={} -----", "Rank {} (pid 7):", "> rank {}", "== rank_{} ==",
        "<details><summary>rank {}</summary>", "<h3><b>Rank {}</b></h3>", "Here is the py-spy dump of rank {}:",
        "--- node-1, rank {} (hung) ---", "$ py-spy dump --pid 7  # rank {}", "Rank {}, which is stuck:",
    ],
)  # fmt: skip
def test_rank_alone_on_a_line_is_that_of_the_dump_below(heading: str) -> None:
    stacks = {3: process(41, *WAITS), 1: process(99, *LOADS), 0: process(17, *WAITS)}
    lines = [line for rank, stack in stacks.items() for line in (heading.format(rank), "```", *stack, "", "```")]
    lines = ["These are the stacks of rank 0, 1 and 3.", "", *lines]
    for text in (lines, [f"> {line}" for line in lines]):
        assert ids(collect(*text)) == [RankId(rank=3, pid=41), RankId(rank=1, pid=99), RankId(rank=0, pid=17)]


@pytest.mark.parametrize(
    "line", ["rank 2 has joined", "our rank 2:1 ratio", "[rank2]", "rank", "rank 2 rank 3", "2", "stacks of rank 2-5:"]
)
def test_line_with_other_words_tells_no_rank_of_a_dump(line: str) -> None:
    assert [rank.rank for rank in ids(collect(line, *process(41, *WAITS)))] == [None]


@pytest.mark.parametrize(
    "heading",
    ["=== llm-worker-{} ===", "gpu{}", "gpu{} | CHANGED | rc=0 >>", "$ kubectl exec -n ml gpu-{} -- py-spy dump"],
)
def test_heading_of_a_host_or_pod_separates_dumps_with_equal_pids(heading: str) -> None:
    found = collect(*(line for rank in range(3) for line in (heading.format(rank), *process(1, *WAITS))))
    nodes = [rank.node or "" for rank in ids(found)]
    assert [node[-1] for node in nodes] == ["0", "1", "2"]
    assert len(found.ranks[0].rounds) == 1


@pytest.mark.parametrize("heading", ["=== round-{} ===", "pass{}", "--- {} ---"])
def test_heading_of_a_round_separates_no_processes(heading: str) -> None:
    found = collect(*(line for number in (1, 2) for line in (heading.format(number), *process(1, *WAITS))))
    assert ids(found) == [RankId(pid=1)]


def test_rank_in_a_sentence_is_not_that_of_several_processes_below() -> None:
    dumps = [process(40 + rank, *WAITS, command=f"python t.py --local_rank={rank}") for rank in range(2)]
    found = collect("### rank 16 run: how it was taken", *dumps[0], *dumps[1])
    assert [(rank.rank, rank.local_rank) for rank in ids(found)] == [(None, 0), (None, 1)]


def test_rank_alone_on_a_line_of_a_log_tells_no_rank() -> None:
    assert collect("rank 2:", *["step 1"] * 20, *process(41, *WAITS)).ranks[0].id == RankId(pid=41)


def in_named_files(*names: str) -> traces.Collected:
    stacks = [process(number, *WAITS) for number in map(pid_of, names)]
    return traces.collect([(name, stack) for name, stack in zip(names, stacks, strict=True)])


def pid_of(name: str) -> int:
    return int(re.findall(r"\d+", name.rpartition("/")[2])[-1])


def test_folders_are_nodes_if_their_files_have_the_same_names() -> None:
    found = in_named_files("d/gpu-a/101.txt", "d/gpu-b/101.txt", "d/gpu-b/102.txt")
    nodes = [RankId(node="gpu-a", pid=101), RankId(node="gpu-b", pid=101), RankId(node="gpu-b", pid=102)]
    assert ids(found) == nodes


@pytest.mark.parametrize("folders", [("round1", "round2"), ("1", "2"), ("20261120-1402", "20261120-1403")])
def test_folders_of_rounds_are_no_nodes(folders: tuple[str, str]) -> None:
    found = in_named_files(*(f"d/{folder}/101.txt" for folder in folders))
    assert {rank.node for rank in ids(found)}.isdisjoint(folders)


def test_name_with_host_local_rank_and_pid_tells_all_three() -> None:
    found = in_named_files("trace-gpu-a-0-4711.txt", "trace-gpu-a-1-4712.txt", "trace-gpu-b-0-990.txt")
    assert ids(found) == [
        RankId(node="gpu-a", local_rank=0, pid=4711),
        RankId(node="gpu-a", local_rank=1, pid=4712),
        RankId(node="gpu-b", local_rank=0, pid=990),
    ]


def test_files_of_processes_are_numbered_as_ranks() -> None:
    names = [f"d/proc_{rank}.log" for rank in range(4)]
    assert [rank.rank for rank in ids(in_files(*names))] == [0, 1, 2, 3]
    bare = ["Current thread 0x7f12 (most recent call first):", '  File "/srv/train.py", line 9 in <module>']
    assert [rank.id for rank in traces.collect([(name, bare) for name in names]).ranks] == [
        RankId(rank=rank) for rank in range(4)
    ]
    rounds = traces.collect([(f"d/stack_{number}.log", bare) for number in range(4)])
    assert all(rank.id.rank is None for rank in rounds.ranks)


def test_where_anything_else_tells_a_rank_the_names_of_files_tell_none() -> None:
    texts = [
        ("stack.0.txt", process(41, *WAITS)),
        ("stack.1.txt", process(42, *WAITS, command="python --local_rank 7")),
    ]
    found = traces.collect([(name, [f"{line}\n" for line in lines]) for name, lines in texts])
    assert [(one.rank, one.local_rank) for one in ids(found)] == [(None, None), (None, 7)]


def failed(*failures: tuple[int, int], host: str = "localhost") -> list[str]:
    """Return the last lines of torchrun's output. `failures` are (rank, pid) of the failed ranks."""
    rows = [
        [
            f"[{number}]:",
            "  time      : 2026-11-22_02:51:44",
            f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : -6 (pid: {pid})",
            "  error_file: <N/A>",
            "  traceback : Signal 6 (SIGABRT) received by PID",
        ]
        for number, (rank, pid) in enumerate(failures)
    ]
    return [f"{line}\n" for row in rows for line in row] + [
        "------------------------------------------------------------\n"
    ]


def collect_with_logs(*logs: list[str], name: str = "stacks.txt", pids: tuple[int, ...] = (41, 99)) -> traces.Collected:
    stacks = [f"{line}\n" for pid in pids for line in process(pid, *WAITS)]
    return traces.collect([(name, stacks), *((f"out{number}.log", lines) for number, lines in enumerate(logs))])


def test_what_torchrun_lists_at_its_end_tells_the_ranks_of_pids_and_it_is_said() -> None:
    found = collect_with_logs(failed((1, 41), (0, 99), (2, 7)))
    assert ids(found) == [RankId(rank=1, local_rank=1, pid=41), RankId(rank=0, local_rank=0, pid=99)]
    assert "the numbers of 2 ranks come only from the pids in the logs" in found.notes
    named = collect_with_logs(failed((1, 41), (0, 99), host="n1"), name="trace-n1.out")
    assert ids(named)[0] == RankId(node="n1", rank=1, local_rank=1, pid=41)


@pytest.mark.parametrize(
    ("logs", "name"),
    [
        ([failed((1, 42))], "stacks.txt"),
        ([failed((1, 41)), failed((3, 41))], "stacks.txt"),  # two runs
        ([failed((1, 41), host="a"), failed((2, 50), host="b")], "stacks.txt"),
        ([failed((1, 41), host="a")], "trace-b.out"),
    ],
)
def test_a_list_that_may_be_of_other_processes_tells_no_rank(logs: list[list[str]], name: str) -> None:
    found = collect_with_logs(*logs, name=name)
    assert {(one.rank, one.local_rank) for one in ids(found)} == {(None, None)}
    assert not [note for note in found.notes if "by the pids" in note]


def test_a_rank_that_is_known_stays_with_its_process() -> None:
    texts = [("rank1.txt", process(7, *WAITS)), ("stacks.txt", process(41, *WAITS))]
    lines = [(name, [f"{line}\n" for line in text]) for name, text in texts]
    found = traces.collect([*lines, ("out.log", failed((1, 41)))])
    assert [(one.rank, one.pid) for one in ids(found)] == [(1, 7), (None, 41)]


def test_more_prefixes_than_are_told_apart_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_STREAMS", 4)
    few = [f"[n1:{rank}]{line}" for rank in range(4) for line in process(100 + rank, *WAITS)]
    assert (len(collect(*few).ranks), collect(*few).notes) == (4, ())
    more = [f"[n1:{rank}]{line}" for rank in range(4, 9) for line in process(100 + rank, *WAITS)]
    assert "-: more than 4 prefixes; a further prefix is read as part of its line" in collect(*few, *more).notes


def test_mixed_lines_of_several_ranks_are_told_apart() -> None:
    texts = {
        rank: [f"[n1:{rank}]{line}" for line in process(100 + rank, *(LOADS if rank == 2 else WAITS))]
        for rank in range(8)
    }
    chance = random.Random(1)
    mixed = []
    while any(texts.values()):
        rank = chance.choice([rank for rank, lines in texts.items() if lines])
        mixed.append(texts[rank].pop(0))
    found = collect(*mixed)
    assert {rank.id.rank: leaf(rank) for rank in found.ranks} == {
        rank: (LOADS if rank == 2 else WAITS)[0] for rank in range(8)
    }


@pytest.mark.parametrize(
    "header",
    ['Thread 0x7FA6E7C01740 (idle): "MainThread"', 'Thread 99 (active+gil): "MainThread"', 'Thread 99 (idle): "MainThread"',
     "Thread 99 (active)", "Thread 0x7fa6e7c01740 (active)"],
)  # fmt: skip
def test_thread_headers_of_all_versions(header: str) -> None:
    found = collect(
        "Process 99: python train.py", "Python v3.8.1 (/usr/bin/python3.8)", "", header, *(f"    {f}" for f in WAITS)
    )
    (rank,) = found.ranks
    (thread,) = rank.rounds[0].threads
    assert thread.is_main and leaf(rank) == WAITS[0]
    assert thread.owns_gil == ("gil" in header)
    assert thread.active == ("active" in header)


def test_frames_without_lines_native_frames_and_addresses() -> None:
    odd = [
        "0x7f0011223344 (libcuda.so.550.54)",
        "std::vector<int (*)()>::at(int) (libtorch.so)",
        "?? (?)",
        "barrier (torch/distributed/distributed_c10d.py)",
    ]
    (rank,) = collect(*process(9, *odd)).ranks
    assert [str(frame) for frame in rank.rounds[0].threads[0].frames] == odd


def test_threads_without_frames_and_without_names() -> None:
    more = ("Thread 900 (active)", 'Thread 901 (idle): "QueueFeederThread"', "Thread 902 (active)")
    found = collect(*process(9, *WAITS), *more)
    assert len(found.ranks[0].rounds[0].threads) == 4
    assert leaf(found.ranks[0]) == WAITS[0]


def test_a_command_line_of_several_lines() -> None:
    lines = ["[n:0]Process 9: python -c import os", "[n:0]", "[n:0]def f():", "[n:0]    return (1)", "[n:0]f()"]
    lines += [f"[n:0]{line}" for line in process(9, *WAITS)[1:]]
    found = collect(*lines)
    assert leaf(found.ranks[0]) == WAITS[0]
    assert found.notes == ()


def test_locals_are_no_frames() -> None:
    lines = [
        *process(9, WAITS[0]),
        "        Arguments:",
        "            self: <function f (x.py:3)>",
        "        Locals:",
        "            n: 3",
        "    train (train.py:50)",
    ]
    found = collect(*lines)
    assert len(found.ranks[0].rounds[0].threads[0].frames) == 2
    assert found.notes == ()


def test_worker_processes_belong_to_their_rank() -> None:
    def child(pid: int) -> list[str]:
        lines = process(pid, "read (video.py:9)", "fetch (video.py:3)")
        return ["", "-" * 80, *lines[:2], "Parent Process 50: python -u train.py", *lines[2:]]

    found = collect(*(f"[n:0]{line}" for line in [*process(50, *LOADS), *child(51), *child(52)]))
    assert ids(found) == [RankId(node="n", rank=0, pid=50)]
    assert [worker.pid for worker in found.ranks[0].workers] == [51, 52]
    assert found.notes == ()
    grouping = group_ranks(found.ranks, TABLE, config.Capture())
    assert [(stack.name, str(stack.frames[0])) for stack in grouping.groups[0].workers] == [
        ("2 x child process", "read (video.py:9)")
    ]


def test_a_prefix_with_a_rank_has_one_rank() -> None:
    lines = [f"[n:3]{line}" for pid in (50, 51) for line in process(pid, *LOADS)]
    found = collect(*lines)
    assert ids(found) == [RankId(node="n", rank=3, pid=50)]
    assert [worker.pid for worker in found.ranks[0].workers] == [51]


def test_loader_workers_without_a_parent_line_are_no_ranks() -> None:
    worker = [
        "read (shards.py:9)",
        "_worker_loop (torch/utils/data/_utils/worker.py:308)",
        "run (multiprocessing/process.py:108)",
    ]
    found = collect(*process(50, *LOADS), *process(51, *worker), *process(52, *worker), name="trace-n1.out")
    assert ids(found) == [RankId(node="n1", pid=50)]
    assert len(found.ranks[0].workers) == 2


def test_what_a_command_line_mentions_makes_no_helper() -> None:
    command = "python -u pretrain_gpt.py --tensorboard-dir /logs --wandb-project x"
    assert len(collect(*process(50, *WAITS, command=command), *process(51, *LOADS, command=command)).ranks) == 2
    tracker = process(
        52,
        "main (multiprocessing/resource_tracker.py:180)",
        command="python -c from multiprocessing.resource_tracker import main",
    )
    assert len(collect(*process(50, *WAITS), *tracker).ranks) == 1


FORKED = (
    "_bootstrap (multiprocessing/process.py:315)",
    "_launch (multiprocessing/popen_fork.py:71)",
    "start (multiprocessing/process.py:121)",
)


def test_ranks_that_were_forked_are_ranks() -> None:
    assert len(collect(*process(50, *WAITS, *FORKED), *process(51, *LOADS, *FORKED)).ranks) == 2


def test_forked_helper_is_no_rank_next_to_unforked_ranks() -> None:
    helper = process(52, "accept (socket.py:294)", "serve_metrics (metrics.py:20)", *FORKED)
    found = collect(*process(50, *WAITS), *process(51, *LOADS), *helper)
    assert [rank.pid for rank in ids(found)] == [50, 51]
    assert "not ranks of this job: pid 52 (train.py)" in found.notes[0]


@pytest.mark.parametrize("function", ["Popen._launch", "poll"])
def test_rank_that_forks_or_joins_its_child_is_a_rank(function: str) -> None:
    parent = (f"{function} (multiprocessing/popen_fork.py:66)", "start (multiprocessing/process.py:121)")
    found = collect(*process(50, *WAITS), *process(51, *parent, "load (train.py:40)"))
    assert [rank.pid for rank in ids(found)] == [50, 51]


def test_rank_below_a_fork_server_is_a_rank_and_the_server_is_none() -> None:
    command = "python -c from multiprocessing.forkserver import main; main(5, 6, ['__main__'])"
    server = ("main (multiprocessing/forkserver.py:240)", "<module> (<string>:1)")
    boot = ("_bootstrap (multiprocessing/process.py:314)", "_serve_one (multiprocessing/forkserver.py:314)", *server)
    stacks = [("recv (socket.py:1)", *server), (WAITS[0], *boot), (LOADS[0], "read_shard (data.py:4)", *boot)]
    lines = [line for pid, stack in enumerate(stacks, 40) for line in process(pid, *stack, command=command)]
    assert [rank.pid for rank in ids(collect(*lines))] == [41, 42]


def test_ranks_started_by_rank_0_are_ranks() -> None:
    child = process(51, *WAITS)
    found = collect(*process(50, *LOADS), "-" * 80, *child[:2], "Parent Process 50: python train.py", *child[2:])
    assert ids(found) == [RankId(pid=50), RankId(pid=51)]


def test_the_launcher_is_no_rank_and_its_children_are() -> None:
    agent = process(
        40,
        "sleep (utils.py:3)",
        "_invoke_run (torch/distributed/elastic/agent/server/api.py:870)",
        "main (torch/distributed/run.py:900)",
    )
    children = []
    for pid in (41, 42):
        lines = process(pid, *WAITS)
        children += ["-" * 80, *lines[:2], "Parent Process 40: torchrun", *lines[2:]]
    found = collect(*agent, *children)
    assert [rank.pid for rank in ids(found)] == [41, 42]
    assert "launcher" in found.notes[0]


def test_one_label_per_node_covers_all_its_ranks() -> None:
    lines = [f"0: {line}" for pid in (11, 12) for line in process(pid, *WAITS)] + [
        f"1: {line}" for pid in (11, 13) for line in process(pid, *LOADS)
    ]
    assert ids(collect(*lines)) == [
        RankId(node=f"task {task}", pid=pid) for task, pid in ((0, 11), (0, 12), (1, 11), (1, 13))
    ]


@pytest.mark.parametrize(("dumps", "motion"), [("WL", "moving"), ("WLLL", "frozen")])
def test_rounds_of_a_process_are_its_last_three_dumps(dumps: str, motion: str) -> None:
    stacks = {"W": WAITS, "L": (WAITS[0], "train (train.py:70)", WAITS[2])}
    (rank,) = collect(*(f"[n:0]{line}" for name in dumps for line in process(9, *stacks[name]))).ranks
    assert len(rank.rounds) == min(len(dumps), 3)
    assert group_ranks([rank], TABLE, config.Capture()).groups[0].motion.value == motion


def test_another_process_of_the_same_rank_in_another_file_replaces_it() -> None:
    first, second = ([f"[n:0]{line}" for line in process(pid, *frames)] for pid, frames in ((9, WAITS), (10, LOADS)))
    found = traces.collect([("a", first), ("b", second)])
    assert ids(found) == [RankId(node="n", rank=0, pid=10)]
    assert "pid 9 and as pid 10" in found.notes[0]


@pytest.mark.parametrize(
    ("lines", "reason", "detail"),
    [
        (["Process 9: ...", "Error: Failed to suspend process", "Reason: EPERM: Operation not permitted"], "PermissionDenied", "Failed to suspend process: EPERM: Operation not permitted"),
        (["Error: Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"], "PermissionDenied", "elevated"),
        (["Process 9: python", "Python v3.8.16 (/usr/bin/python3.8)", "", "Error: Failed to get stack traces", "", "Caused by:", "    0: Failed to suspend process",
          "    1: EPERM: Operation not permitted", "", "Stack backtrace:", "   0: <E as anyhow::context::ext::StdError>::ext_context", "   1: py_spy::main"], "PermissionDenied", "Failed to get stack traces: Failed to suspend process: EPERM"),
        (["Error: No such process (os error 3)"], "ProcessGone", "No such process"),
        (["Error: Failed to find python version from target process"], "NotPython", "python version"),
        (["bash: py-spy: command not found"], "NoPyspy", "not found"),
        (["Process 9: python", "Python v3.8.16 (/usr/bin/python3.8)", ""], "NoStack", "no stack"),
    ],
)  # fmt: skip
def test_errors_stand_in_place_of_a_dump(lines: list[str], reason: str, detail: str) -> None:
    is_of_nobody = not lines[0].startswith("Process") and reason != "NoPyspy"
    for prefix in ("[n:0]", "0: ") if is_of_nobody else ("[n:0]", "0: ", ""):
        extra = [prefix.replace("0", "1") + line for line in process(10, *WAITS)]
        found = collect(*(prefix + line for line in lines), *extra)
        (failed,) = [rank for rank in found.ranks if rank.rounds[0].fault]
        fault = failed.rounds[0].fault
        assert fault is not None and fault.reason == reason and detail in fault.detail
        assert "ext_context" not in fault.detail
        assert found.notes == ()


def test_equal_numbers_on_the_command_line_are_no_ranks() -> None:
    lines = [line for pid in (11, 12) for line in process(pid, *WAITS, command="python train.py --local_rank=0")]
    assert ids(collect(*lines)) == [RankId(pid=11), RankId(pid=12)]


def test_two_files_without_node_names_are_two_nodes() -> None:
    first = process(7, *WAITS, command="python train.py --local_rank=0")
    found = traces.collect([("a/one.txt", first), ("a/two.txt", first), ("three.txt", process(7, *LOADS))])
    assert ids(found) == [RankId(local_rank=0, pid=7), RankId(node="two.txt", local_rank=0, pid=7), RankId(pid=7)]
    assert [len(rank.rounds) for rank in found.ranks] == [1, 1, 1]


def test_json_of_one_process_and_of_many() -> None:
    def dumped(pid: int, *frames: str) -> list[dict[str, object]]:
        parts = [frame.rstrip(")").replace(" (", ":").split(":") for frame in frames]
        found = [
            {"name": name, "filename": f"/x/{file}", "short_filename": file, "line": int(line)}
            for name, file, line in parts
        ]
        return [
            {
                "pid": pid,
                "thread_id": 5,
                "thread_name": None,
                "os_thread_id": pid,
                "active": True,
                "owns_gil": False,
                "frames": found,
            }
        ]

    pretty = json.dumps(dumped(7, *WAITS), indent=2).splitlines()
    found = traces.collect([("rank0.json", pretty), ("rank1.json", [json.dumps(dumped(8, *LOADS))])])
    assert ids(found) == [RankId(rank=0, pid=7), RankId(rank=1, pid=8)]
    assert [leaf(rank) for rank in found.ranks] == [WAITS[0], LOADS[0]]
    several = traces.collect([("all.json", [*pretty, *json.dumps(dumped(8, *LOADS), indent=2).splitlines()])])
    assert [rank.id.pid for rank in several.ranks] == [7, 8]
    prefixed = traces.collect([("x", [f"[n:{rank}]{line}" for rank in (0, 1) for line in pretty])])
    assert ids(prefixed) == [RankId(node="n", rank=0, pid=7), RankId(node="n", rank=1, pid=7)]


def test_lines_that_are_no_dump_are_counted_and_told() -> None:
    found = collect(
        "hello",
        "srun: error: node7: task 3: Killed",
        *process(9, *WAITS),
        "Traceback (most recent call last):",
        name="x.out",
    )
    assert found.notes == ("x.out: 3 lines are not part of a stack dump, for example 'hello'",)
    assert len(found.ranks) == 1
    one = collect("hello", *process(9, *WAITS), name="x.out")
    assert one.notes == ("x.out: 1 line is not part of a stack dump, for example 'hello'",)


def test_a_source_without_any_dump_is_told() -> None:
    assert (
        collect("", "what is this", name="x.out").notes[-1]
        == "x.out: holds no known stack dump and no log of a known rank"
    )
    assert collect(name="empty.out").ranks == ()


def test_dos_line_ends() -> None:
    found = traces.collect([("x", [f"[n:0]{line}\r\n" for line in process(9, *WAITS)])])
    assert leaf(found.ranks[0]) == WAITS[0]


PIECES = st.sampled_from(
    [*process(9, *WAITS, *LOADS), "", "-" * 80, "Parent Process 9: python", "Error: Failed to suspend process", "Reason: EPERM",
     "Caused by:", "    0: x", "Stack backtrace:", "[", "]", "[{", '[{"frames": []}]', "Thread 1 (", "Process", "Process 1:", "    (", "    x ()", "    x (y:99999999999999999999)", "        Locals:", "Process 99999999999999999999999: x"]
)  # fmt: skip
PREFIXES = st.sampled_from(
    [
        "",
        "[n1:0]",
        "[n1:1]",
        "[n2:3]:",
        "[default1]:",
        "[rank2]:",
        "[1,4]<stdout>:",
        "3: ",
        "node1: ",
        "[pod/a/b] ",
        "[",
        "[:1]",
        "[n:99999999999]",
    ]
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(PREFIXES, st.one_of(PIECES, st.text(max_size=40))), max_size=60))
def test_garbage_truncated_and_mixed_input_never_crashes(lines: list[tuple[str, str]]) -> None:
    found = traces.collect([("x.out", [prefix + line for prefix, line in lines])])
    grouping = group_ranks(found.ranks, TABLE, config.Capture())
    placed = [member.id for group in grouping.groups for member in group.members]
    assert len(placed) == len(set(placed)) <= len(found.ranks)
    judge.judge(grouping)


def test_truncated_at_every_byte(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"[n:{rank}]{line}" for rank in range(3) for line in process(9 + rank, *(LOADS if rank else WAITS))]
    text = "\n".join(lines)
    for end in range(len(text)):
        found = traces.collect([("x.out", text[:end].splitlines())])
        judge.judge(group_ranks(found.ranks, TABLE, config.Capture()))
    with capsys.disabled():
        print(f" [{len(text)} truncations]", end="")
