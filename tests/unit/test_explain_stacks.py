"""Stacks by faulthandler, pystack and gdb, also of processes that are not ranks but match `pgrep -f python`.

The example is a torchrun job. Rank 1 waits for a lock in its own code and the other ranks wait for rank 1.
"""

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hangwatch import config, words
from hangwatch.limits import MOST_DUMPED_FRAMES
from hangwatch.logs import enqueued_work, log_evidence, work_lines
from hangwatch.logs.rank_log import Log
from hangwatch.model import Frame, RankDump, RankId, Thread, Verdict
from hangwatch.report import text
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.tools.explain.stacks import (
    faulthandler_text,
    gdb_text,
    kernel_stack_text,
    profiling_text,
    pystack_text,
    strace_text,
)
from hangwatch.tools.explain.stacks.parsed_processes import Interned
from hangwatch.verdict import judge
from hangwatch.verdict.judge import complete
from tests.conftest import DATA, load_table
from tests.hangs import numbers
from tests.titled_processes import CASES, sources
from tests.unit.test_traces import WAITS, collect, process

TABLE = activity.load()
EXAMPLES = DATA / "explain"


def read(name: str) -> traces.Collected:
    """Read all files of the example `name`."""
    path = EXAMPLES / name
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return traces.collect(
        (str(file.relative_to(EXAMPLES)), file.read_text().splitlines(keepends=True)) for file in files
    )


def explained(collected: traces.Collected) -> tuple[Verdict, str]:
    """Return the verdict on these stacks, and the output of `hangwatch explain`."""
    grouping = group_ranks(collected.ranks, TABLE, config.Capture(), collected.world_size)
    verdict = complete(judge.judge(grouping) if collected.ranks else None, log_evidence.supplement(collected.logs))
    grouping = type(grouping)(groups=grouping.groups, world_size=grouping.world_size, notes=collected.notes)
    return verdict, text.render_verdict(grouping, verdict)


def main_thread(rank: RankDump) -> Thread:
    (main,) = [thread for thread in rank.rounds[-1].threads if thread.is_main]
    return main


def shown(rank: RankDump) -> list[str]:
    return [str(frame) for frame in main_thread(rank).frames]


LOCKED = [
    "update_cache (train.py:21)",
    "train (train.py:30)",
    "main (train.py:43)",
    "wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py:367)",
    "<module> (train.py:47)",
]


@pytest.mark.golden
@pytest.mark.parametrize("name", ["lock", "failed", "pgrep.txt", "torchrun-tee.txt"])
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"explain-{name.removesuffix('.txt')}.txt", explained(read(name))[1])


@pytest.mark.parametrize("name", ["lock", "pystack.txt", "gdb-py-bt.txt"])
def test_rank_in_its_own_lock_is_shown_for_any_dump_tool(name: str) -> None:
    """Only check it first: two of three that wait are too few to name a rank in an unlisted function."""
    found = read(name)
    assert len(found.ranks) == 3
    (locked,) = [rank for rank in found.ranks if "update_cache" in shown(rank)[0]]
    assert shown(locked) == LOCKED
    others = [shown(rank)[0] for rank in found.ranks if rank is not locked]
    assert others == ["all_reduce (torch/distributed/distributed_c10d.py:3252)"] * 2
    verdict = explained(found)[0]
    (first,) = verdict.check_first
    assert (verdict.named, first.pid, first.local_rank) == ((), locked.id.pid, locked.id.local_rank)
    assert "it is in update_cache (train.py:21), in the program's own code" in verdict.message
    assert found.notes == ()


@pytest.mark.parametrize(("name", "installed"), [("pystack.txt", [2, 0, 2]), ("gdb-py-bt.txt", [2, 0, 2])])
def test_whole_paths_tell_what_is_installed(name: str, installed: list[int]) -> None:
    assert [main_thread(rank).installed_frames for rank in read(name).ranks] == installed


PLAIN = [
    line
    for pid in (7, 8, 9)
    for line in (
        f"Process {pid}: python train.py",
        "Python v3.11.4 (/usr/bin/python3.11)",
        "",
        f'Thread {pid} (idle): "MainThread"',
        "    read_shard (data.py:18)" if pid == 8 else "    all_reduce (torch/distributed/distributed_c10d.py:2501)",
        "    main (train.py:90)",
        "        Locals:",
        "            step: 7",
        "",
    )
]
ON_THE_WAY: dict[str, Callable[[str], str]] = {
    "quoted in a mail": lambda line: f"> {line}".rstrip(),
    "quoted twice": lambda line: f">> {line}",
    "indented in a page": lambda line: f"    {line}".rstrip(),
    "indented by a tab": lambda line: f"\t{line}",
    "quotes that an editor has turned": lambda line: line.replace('"M', "“M").replace('d"', "d”"),
    "the source of a page": lambda line: html.escape(line),
    "Docker's json-file log": lambda line: json.dumps({"log": f"{line}\n", "stream": "stdout"}),
    "vLLM's prefix": lambda line: f"(EngineCore pid=1) {line}",
    "a file below /var/log/pods": lambda line: f"2026-11-23T01:02:03.000000001Z stdout F {line}",
}


@pytest.mark.parametrize("way", ON_THE_WAY)
def test_stacks_are_read_as_they_were_pasted(way: str) -> None:
    assert collect(*map(ON_THE_WAY[way], PLAIN)) == collect(*PLAIN)


def test_stacks_quoted_in_a_mail_with_other_lines_are_read() -> None:
    mail = [
        "Hi,",
        "",
        "here are the stacks:",
        *(f"> {line}" for line in PLAIN),
        "",
        "On Tuesday, Ann wrote:",
        ">> why?",
    ]
    assert collect(*mail).ranks == collect(*PLAIN).ranks


def test_threads_without_a_number_are_read() -> None:
    bare = [re.sub(r"^Thread \d+ ", "Thread ", line) for line in PLAIN]
    assert [shown(rank) for rank in collect(*bare).ranks] == [shown(rank) for rank in collect(*PLAIN).ranks]


def test_stacks_of_which_only_the_threads_were_copied_are_of_several_processes() -> None:
    threads = [line for line in PLAIN if not line.startswith(("Process", "Python"))]
    assert [shown(rank) for rank in collect(*threads).ranks] == [shown(rank) for rank in collect(*PLAIN).ranks]


def test_the_pid_is_that_of_the_main_thread() -> None:
    for name in ("pystack.txt", "gdb-py-bt.txt", "gdb-bt.txt"):
        assert [rank.id.pid for rank in read(name).ranks] == [15854, 15855, 15856]


def test_compiled_frames_stand_beside_those_of_python() -> None:
    (rank,) = read("pystack-native.txt").ranks
    assert shown(rank)[:4] == [
        "__futex_abstimed_wait_common64 (libc.so.6)",
        "__futex_abstimed_wait_common (libc.so.6)",
        "__new_sem_wait_slow64.constprop.0 (libc.so.6)",
        "acquire_timed (libpython3.11.so.1.0)",
    ]
    assert LOCKED[0] in shown(rank)
    assert not [frame for frame in shown(rank) if frame.startswith(("_PyEval", "Py_", "pymain"))]


def pystack(thread: int, *frames: str) -> list[str]:
    return [
        f"Traceback for thread {thread} (python) [] (most recent call last):",
        *(f"    {frame}" for frame in frames),
    ]


MODULE = '(Python) File "/srv/train.py", line 9, in <module>'
NATIVE = '(C) File "???", line 0, in pthread_cond_wait (/usr/lib/libc.so.6)'


def test_threads_without_python_belong_to_the_process_before_them() -> None:
    one = [*pystack(12, '(Python) File "/srv/data.py", line 3, in load'), *pystack(10, MODULE), *pystack(13, NATIVE)]
    two = [*pystack(20, MODULE), *pystack(21, NATIVE), *pystack(22, NATIVE)]
    ranks = collect(*one, *two).ranks
    assert [rank.id.pid for rank in ranks] == [10, 20]
    threads = [[thread.thread_id for thread in rank.rounds[0].threads] for rank in ranks]
    assert threads == [["12", "10", "13"], ["20", "21", "22"]]
    assert [main_thread(rank).thread_id for rank in ranks] == ["10", "20"]


BT = (
    "#0  0x00007f1 in epoll_wait (epfd=6, events=0x7f1, maxevents=64) at ../sysdeps/unix/sysv/linux/epoll_wait.c:30",
    "#1  0x00007f2 in acme::Ring::wait(std::chrono::duration<long> const&) const () from /opt/lib/libacme.so",
    "#2  0x00007f3 in _PyEval_EvalFrameDefault (tstate=0x1, frame=0x2) at Python/ceval.c:4769",
)


def test_gdb_bt_of_one_thread_is_a_process() -> None:
    (rank,) = collect("(gdb) bt", *BT).ranks
    assert shown(rank) == ["acme::Ring::wait(std::chrono::duration<long> const&) const (libacme.so)"]
    found = traces.collect([(f"rank{rank}.txt", list(BT)) for rank in range(2)])
    assert [rank.id.rank for rank in found.ranks] == [0, 1]
    assert "acme::Ring::wait" in explained(found)[1]


def test_py_bt_alone_is_a_process_and_after_bt_the_same_one() -> None:
    traceback = ("(gdb) py-bt", "Traceback (most recent call first):", '  File "/srv/a.py", line 4, in read', "    f()")
    assert [shown(rank) for rank in collect(*traceback, *traceback).ranks] == [["read (/srv/a.py:4)"]] * 2
    (rank,) = collect("(gdb) bt", *BT, *traceback).ranks
    assert shown(rank)[-1] == "read (/srv/a.py:4)"


def test_frames_that_torch_prints_in_a_log_are_no_stack_of_gdb() -> None:
    log = ["#0 all_reduce from /opt/torch/distributed/distributed_c10d.py:3174", "#1 step from /srv/train.py:9"]
    assert collect(*(f"[rank1]: {line}" for line in log)).ranks == ()


def test_gdb_stacks_without_python_frames_name_no_rank() -> None:
    found = read("gdb-bt.txt")
    assert "c10d::ProcessGroupGloo::runLoop(int) (libtorch_cpu.so)" not in shown(found.ranks[0])
    assert [thread.name for thread in found.ranks[0].rounds[0].threads] == ["gloo_tcp_loop", "python"]
    assert "gloo::transport::tcp::Loop::run() (libtorch_cpu.so)" in [
        str(frame) for frame in found.ranks[0].rounds[0].threads[0].frames
    ]
    assert "c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >) (libtorch_cpu.so)" in shown(
        found.ranks[0]
    )
    assert all(main_thread(rank).installed_frames == len(shown(rank)) for rank in found.ranks), "none is the user's"
    verdict, _ = explained(found)
    assert "Check pid 15855 first: it is in the function acquire_timed; both other ranks wait in c10d::Work::wait" in (
        verdict.message
    )
    assert verdict.named == ()


def test_gdb_shows_each_python_frame_once_where_its_arguments_tell_it() -> None:
    (rank,) = read("gdb-bt-python310.txt").ranks
    assert [frame for frame in shown(rank) if ".py:" in frame] == [
        "run (threads.py:7)",
        "main (threads.py:13)",
        "<module> (threads.py:14)",
    ]
    (worker,) = [thread for thread in rank.rounds[0].threads if not thread.is_main]
    assert Frame(function="worker", file="threads.py", line=3) in worker.frames


def test_each_dump_of_faulthandler_is_a_round_of_one_process() -> None:
    (rank,) = read("faulthandler.txt").ranks
    assert shown(rank) == ["run (threads.py:7)", "main (threads.py:13)", "<module> (threads.py:14)"]
    assert [len(dump.threads) for dump in rank.rounds] == [3, 1, 3]
    assert main_thread(rank).name is None
    assert str(rank.rounds[0].threads[0].frames[0]) == "wait (threading.py:355)"


FAULTHANDLER = (
    "Thread {other} (most recent call first):",
    '  File "/usr/lib/python3.12/threading.py", line 355 in wait',
    '  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap',
    "",
    "{main} (most recent call first):",
    '  File "/srv/job/train.py", line 7 in step',
    '  File "/srv/job/train.py", line ??? in main',
    '  File "/srv/job/train.py", line 14 in <module>',
)


@pytest.mark.parametrize(
    "main", ["Current thread 0x00007f9bd360bb80", "Thread 0x00007f9bd360bb80", "Thread 0x00007f9bd360bb80 [python3]"]
)
def test_faulthandler_of_all_versions(main: str) -> None:
    extension = ["", "Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)"]
    stack = [
        "",
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "/lib/libc.so.6", at f+0x4 [0x7f]',
    ]
    for before, after in (((), ()), (("Fatal Python error: Aborted", ""), extension), ((), stack)):
        lines = [line.format(main=main, other="0x00007f9bd25f06c0 [w0]") for line in FAULTHANDLER]
        (rank,) = collect(*before, *lines, *after, name="rank3.log").ranks
        assert shown(rank) == ["step (train.py:7)", "main (train.py)", "<module> (train.py:14)"]
        assert len(rank.rounds[0].threads) == 2


def test_last_stack_with_cut_outer_end_is_main_thread() -> None:
    deep = ['  File "/srv/job/train.py", line 3 in f'] * 100
    lines = [*FAULTHANDLER[:4], "Thread 0x7f (most recent call first):", *deep, "  ..."]
    (rank,) = collect(*lines, name="rank0.log").ranks
    assert len(main_thread(rank).frames) == 100


def test_dumps_of_two_processes_in_one_file_are_two_ranks() -> None:
    one = [line.format(main="Thread 0x01", other="0x0a") for line in FAULTHANDLER]
    two = [line.format(main="Thread 0x02", other="0x0b") for line in FAULTHANDLER]
    found = collect("Timeout (0:00:05)!", *one, "Timeout (0:00:05)!", *two, "Timeout (0:00:10)!", *one, name="all.log")
    assert sorted(len(rank.rounds) for rank in found.ranks) == [1, 2]
    assert len({rank.id for rank in found.ranks}) == 2


def test_mixed_lines_of_faulthandler_are_told_apart_by_their_prefix() -> None:
    lines = [line.format(main="Current thread 0x01", other="0x0a") for line in FAULTHANDLER]
    mixed = [f"[default{rank}]:{line}" for line in lines for rank in range(4)]
    found = collect(*mixed)
    assert [rank.id.local_rank for rank in found.ranks] == [0, 1, 2, 3]
    assert {shown(rank)[0] for rank in found.ranks} == {"step (train.py:7)"}


def test_what_runs_python_and_is_no_rank_is_listed_and_not_counted() -> None:
    found = read("pgrep.txt")
    verdict, _ = explained(found)
    assert [rank.id.pid for rank in found.ranks] == [18579, 18580, 18581, 18582]
    assert [rank.pid for rank in verdict.named] == [18580]
    assert found.notes == (
        "pgrep.txt: 1 launcher processes skipped",
        "pgrep.txt: not ranks of this job: pid 18490 (gpu_exporter.py), pid 18491 (-m http.server)",
    )


STUCK = ("update_cache (train.py:21)", "train (train.py:30)", "<module> (train.py:80)")


@pytest.mark.parametrize(
    "tool",
    [
        process(90, "run (dispatcher.py:3)", command="/usr/bin/python3 /usr/bin/networkd-dispatcher --run-startup"),
        process(90, "poll (select.py:3)", command="/opt/venv/bin/python /opt/venv/bin/tensorboard --logdir train.py"),
        process(90, "wait (a.py:1)", command="python /opt/venv/bin/wandb-agent --pid 11"),
        process(90, "run (a.py:1)", command="python -X dev -c import idle; idle.run()"),
        ["Error: Permission Denied: Try running again with elevated permissions"],
        ["Error: Failed to find python version from target process"],
        ["Process 90: /usr/bin/python3 /usr/bin/unattended-upgrade-shutdown", "Error: Permission Denied: Try again"],
    ],
)
def test_a_tool_beside_the_ranks_lowers_no_confidence(tool: list[str]) -> None:
    ranks = [line for pid in (10, 11, 12) for line in process(pid, *(STUCK if pid == 11 else WAITS))]
    alone = explained(collect(*ranks))[0]
    beside = collect(*tool, *ranks)
    assert explained(beside)[0] == alone
    assert "not ranks of this job" in beside.notes[0]


def test_a_rank_of_another_program_that_takes_part_is_a_rank() -> None:
    actor = [line for pid in (10, 11, 12) for line in process(pid, *WAITS, command="python actor.py")]
    learner = process(13, *WAITS, command="python learner.py")
    assert len(collect(*actor, *learner).ranks) == 4


def test_the_same_program_with_other_arguments_is_a_rank() -> None:
    ranks = [line for pid in (10, 11, 12) for line in process(pid, *WAITS)]
    assert len(collect(*ranks, *process(13, *STUCK, command="python -u /srv/train.py --is-first")).ranks) == 4


def test_programs_of_which_none_is_the_most_common_are_all_ranks() -> None:
    lines = [line for pid, name in ((10, "a"), (11, "b")) for line in process(pid, *STUCK, command=f"python {name}.py")]
    assert len(collect(*lines).ranks) == 2


def test_pystack_of_several_interpreters_gives_the_frames_of_the_main_one() -> None:
    lines = [
        "Traceback for thread 12 (worker) (most recent call last):",
        "  Not currently attached to any interpreter []",
        "* - Unable to merge native stack due to insufficient native information - *",
        "",
        "Traceback for thread 10 (most recent call last):",
        "  In the main interpreter [Has the GIL]",
        '    (Python) File "/srv/train.py", line 9, in <module>',
        '    (Python) File "/srv/train.py", line 3, in step',
        "  In interpreter 1 []",
        '    (Python) File "/srv/plugin.py", line 5, in serve',
        "The frame stack for thread 13 is empty",
    ]
    reader = pystack_text.Reader(Interned())
    assert all(map(reader.feed, lines))
    (process,) = reader.end()
    assert process.pid == 10
    (main,) = (thread for thread in process.threads if thread.is_main)
    assert [frame.function for frame in main.frames] == ["step", "<module>"]
    assert main.owns_gil


PROFILING = """
Stack dump for PID 4{rank}, thread 4{rank} (main thread, idle; most recent call last):
  File "train.py", line 30, in <module>
    main()
  File "train.py", line {line}, in main
    {call}
{frames}
Stack dump, thread 77 (has GIL, on CPU; most recent call last):
  File "/usr/lib/python3.15/threading.py", line 1044, in Thread._bootstrap
  File "train.py", line 8, in watch  opcode=CALL
  <GC>

Stack dump, thread 78 (idle; most recent call last):
No Python frames
"""
ALL_REDUCE = (
    '  File "/site-packages/torch/distributed/distributed_c10d.py", line 3001, in all_reduce\n    work.wait()\n'
)


def profiled(rank: int) -> str:
    call = {"line": 21, "call": "os.read(fifo, 1)", "frames": ""} if rank == 3 else {"line": 22, "call": "all_reduce()"}
    return PROFILING.format(rank=rank, **{"frames": ALL_REDUCE} | call)


@pytest.mark.parametrize("decoration", ["", "2026-11-28T07:00:00Z "])
def test_dumps_of_python_315_show_the_rank_to_check_first(decoration: str) -> None:
    files = ((f"rank{rank}.txt", [f"{decoration}{one}" for one in profiled(rank).splitlines()]) for rank in range(4))
    found = traces.collect(files)
    assert [rank.id.pid for rank in found.ranks] == [40, 41, 42, 43]
    (dump,) = found.ranks[3].rounds
    (main,) = (thread for thread in dump.threads if thread.is_main)
    assert [str(frame) for frame in main.frames] == ["main (train.py:21)", "<module> (train.py:30)"]
    assert [thread.owns_gil for thread in dump.threads] == [False, True]
    verdict, _ = explained(found)
    assert [rank.rank for rank in verdict.check_first] == [3]


def test_tasks_of_asyncio_are_read_from_python_315() -> None:
    task = 'thread 9 (task 1{task}; most recent call last):\n  Task-1\n  File "serve.py", line {task}, in fetch\n'
    lines = f"Stack dump for PID 9, {task.format(task=5)}\nStack dump, {task.format(task=6)}".splitlines()
    reader = profiling_text.Reader(Interned())
    assert profiling_text.begins(lines[0]) and all(map(reader.feed, lines)) and not reader.feed("epoch 3")
    (process,) = reader.end()
    assert (process.pid, [thread.name for thread in process.threads]) == (9, ["task 15", "task 16"])
    assert [thread.frames[0].line for thread in process.threads if thread.is_main] == [5]


READERS = {
    "faulthandler": faulthandler_text,
    "pystack": pystack_text,
    "gdb": gdb_text,
    "profiling": profiling_text,
    "kernel": kernel_stack_text,
    "strace": strace_text,
}
OF_THE_KERNEL = [
    "$ cat /proc/41/stack",
    "[<0>] do_futex+0x106/0x1b0",
    "[<0>] do_syscall_64+0x3b/0x90",
    "strace: Process 41 attached with 2 threads",
    "[pid    41] read(3</mnt/a>,  <unfinished ...>",
    '42  03:04:05.1 openat(AT_FDCWD, "/x", O_RDONLY) = -1 ENOENT (No such file or directory)',
    "[pid 42] <... futex resumed>) = 0",
]
LINES = [
    line
    for name in ("faulthandler.txt", "pystack.txt", "pystack-native.txt", "gdb-py-bt.txt", "gdb-bt-python310.txt")
    for line in (EXAMPLES / name).read_text().splitlines()
] + [*profiled(3).splitlines(), *OF_THE_KERNEL]
HOSTILE = st.one_of(
    st.sampled_from(LINES), st.sampled_from(LINES).map(lambda line: line[: len(line) // 2]), st.text(max_size=60)
)


@pytest.mark.parametrize("tool", READERS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(HOSTILE, max_size=60))
def test_a_reader_takes_any_lines(tool: str, lines: list[str]) -> None:
    reader = READERS[tool].Reader(Interned())
    for line in lines:
        reader.feed(line)
    for found in reader.end():
        assert any(thread.frames for thread in found.threads)
        assert sum(thread.is_main for thread in found.threads) <= 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["", "[default1]:", "[rank2]: ", "3: "]), HOSTILE), max_size=60))
def test_mixed_tools_never_crash_and_name_each_rank_once(lines: list[tuple[str, str]]) -> None:
    found = collect(*(prefix + line for prefix, line in lines), name="x.log")
    verdict, _ = explained(found)
    grouping = group_ranks(found.ranks, TABLE, config.Capture())
    placed = [member.id for group in grouping.groups for member in group.members]
    assert len(placed) == len(set(placed)) == len(found.ranks)
    assert set(verdict.named) <= set(placed)


def test_stack_of_gdb_after_log_lines_that_look_like_a_process_is_read() -> None:
    (rank,) = collect("Process 7: starts", 'Thread 1 (LWP 7 "python"):', "#0  f () at a.c:1", "#1  g () at a.c:2").ranks
    assert [frame.function for frame in main_thread(rank).frames] == ["f", "g"]


def test_a_stack_without_an_end_is_cut() -> None:
    endless = ['  File "/srv/a.py", line 3 in f'] * (MOST_DUMPED_FRAMES + 10)
    (rank,) = collect("Current thread 0x01 (most recent call first):", *endless, name="rank0.log").ranks
    assert len(main_thread(rank).frames) == MOST_DUMPED_FRAMES
    (rank,) = collect('Thread 1 (LWP 7 "python"):', *["#0  f (x=1) at a.c:1"] * (MOST_DUMPED_FRAMES + 10)).ranks
    assert len(main_thread(rank).frames) == MOST_DUMPED_FRAMES


@pytest.mark.parametrize(("node", "named"), [("rank", []), ("gpu-07:", [1004])])
def test_refused_dump_names_a_rank_only_beside_others_of_its_node(node: str, named: list[int]) -> None:
    waits = ['Thread 1 (idle): "MainThread"', "    barrier (torch/distributed/distributed_c10d.py:3683)"]
    lines = [
        f"[{node}{rank}]: {line}"
        for rank in range(5)
        for line in (
            f"Process {1000 + rank}: python train.py",
            *(waits if rank < 4 else ["Error: Permission Denied: Try running again with elevated permissions"]),
        )
    ]
    verdict, _ = explained(collect(*lines))
    assert [rank.pid for rank in verdict.named] == named


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_of_servers_toml_is_explained(case: dict[str, Any]) -> None:
    found = traces.collect(sources(case))
    verdict, _ = explained(found)
    assert [rank.pid for rank in verdict.named] == case.get("named", []), verdict.message
    assert [rank.pid for rank in verdict.check_first] == case.get("check", []), verdict.message
    titles = {process["pid"]: process["title"] for process in case["processes"]}
    for rank in (*verdict.named, *verdict.check_first):
        if "--" not in titles[rank.pid]:
            name = f"{titles[rank.pid]} (pid {rank.pid})"
            assert words.name_ranks([rank]) == name
            assert name in verdict.message
    notes = " ".join(found.notes)
    for pid in case.get("not_ranks", ()):
        assert f"pid {pid} (" in notes
        assert pid not in {rank.id.pid for rank in found.ranks}


def of_vllm(*pids: int) -> list[tuple[str, str]]:
    """Return the dumps of these processes of a vLLM server, or of all of them."""
    (case,) = (one for one in CASES if one["name"] == "vLLM, each process in a file of its own")
    files = [f"dumps/{pid}.txt" for pid in pids]
    return [source for source in sources(case) if source[0] in files or not pids]


def test_one_dump_of_a_server_says_nothing_about_its_job() -> None:
    verdict, text = explained(traces.collect(of_vllm(4122)))
    assert verdict.message.startswith("VLLM::Worker_TP2 (pid 4122) is in the forward pass (read_table) at ")
    assert not [line for line in text.splitlines() if line.startswith(("Verdict", "Named", "Ranks", "Not captured"))]


def test_dumps_of_servers_alone_ask_for_their_workers() -> None:
    verdict, text = explained(traces.collect(of_vllm(4100, 4110)))
    assert verdict.kind == "CannotTell"
    assert verdict.message.startswith("No rank can be named: none of these 2 processes is in a collective: pid 4100 ")
    assert "two paths" not in text
    assert "on an inference server, the workers of the GPUs" in verdict.next_step


def test_rank_to_check_first_in_text_is_not_settled_by_one_dump() -> None:
    once, text = explained(traces.collect(of_vllm()))
    assert "on its host" in once.next_step
    assert "second dump" in once.next_step
    assert "or a rank is late" in text
    twice, _ = explained(traces.collect([*of_vllm(), *((f"later/{name}", text) for name, text in of_vllm())]))
    assert [rank.pid for rank in twice.check_first] == [4122]
    assert "second dump" not in twice.next_step


def test_single_dump_of_a_waiting_rank_asks_for_the_other_dumps() -> None:
    verdict, _ = explained(traces.collect(of_vllm(4120)))
    assert verdict.next_step.startswith("give the dumps of all ranks of the job")


def test_ranks_that_no_text_has_are_not_in_the_input() -> None:
    """A text does not show if the other ranks are on another node, did not respond, or were not given."""
    verdict, text = explained(traces.collect(of_vllm(4120, 4122), world_size=6))
    assert "\nNot in the input  4 ranks: 1,3-5\n" in text
    assert verdict.next_step == "give the dumps of all ranks of the job"
    assert "respond" not in text
    assert "other nodes" not in text.casefold()


def test_group_of_titled_processes_lists_titles_and_pids() -> None:
    _, text = explained(traces.collect(of_vllm()))
    assert "\n  3 ranks: VLLM::Worker_TP0-1,3 (pid 4120-4121,4123)  wait in all_reduce\n" in text


def test_stack_of_a_group_is_printed_once() -> None:
    for dumps in (of_vllm(4122), of_vllm()):
        _, answer = explained(traces.collect(dumps))
        assert answer.count("read_table (lookup.py:41)\n") == 1


LOGS = load_table("logs.toml")["case"]


def lines(text: str) -> list[str]:
    written = []
    for line in text.strip("\n").split("\n"):
        ranks, _, rest = line.partition("|")
        places = (
            (rank, rest.replace("{rank}", str(rank)).replace("{rank4}", str(rank - 4))) for rank in numbers(ranks)
        )
        written += [place for _, place in places]
    return written


def named(rank: RankId) -> int | str | None:
    return rank.rank if rank.rank is not None else words.name_ranks([rank])


@pytest.mark.parametrize("case", LOGS, ids=[case["name"] for case in LOGS])
def test_case_of_logs_toml_is_explained(case: dict[str, Any]) -> None:
    found = traces.collect([(name, lines(text)) for name, text in case["files"].items()])
    verdict = complete(None, log_evidence.supplement(found.logs, found.works, found.world_size, found.unranked))
    assert [named(rank) for rank in verdict.check_first] == case.get("check", []), verdict
    assert verdict.named == ()
    texts = [verdict.message, *(one.message for one in verdict.evidence), *(rank.why for rank in verdict.check_first)]
    for mention in case.get("mentions", ()):
        assert any(mention.casefold() in shown.casefold() for shown in texts), texts
    assert not [word for word in case.get("lacks", ()) for shown in texts if word in shown], texts


PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(sorted({line for case in LOGS for text in case["files"].values() for line in lines(text)})),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "[rank1]: ", "[rank2]:", "3: "]), PIECES, PIECES), max_size=30))
def test_any_numbers_give_an_answer_that_names_no_rank(parts: list[tuple[str, str, str]]) -> None:
    text = [f"{prefix}{first[: len(first) // 2]}{second}" for prefix, first, second in parts]
    found = traces.collect([("job.log", text), ("rank9.log", text[::-1])])
    assert complete(None, log_evidence.supplement(found.logs, found.works, None, found.unranked)).named == ()


@given(st.text())
def test_any_line_is_searched_for_numbers(text: str) -> None:
    work_lines.parse(text)


def test_lines_with_numbers_are_bounded() -> None:
    log = Log()
    for number in range(3 * 4096):
        log.feed(f"[PG ID {number} PG GUID {number} Rank 0] last enqueued work: 1, last completed work: 1", number)
    assert len(log.works) == 4096
    assert len(list(enqueued_work.read_works("x", RankId(rank=1), log))) == 4096


@pytest.mark.parametrize("piece", ["[", "[1, ", "[PG ID ", "WorkNCCL(SeqNum=1, ", "last enqueued work: 1, "])
def test_a_long_line_is_searched_in_bounded_time(piece: str) -> None:
    log = Log()
    log.feed(f"collective enqueued {piece * 100_000}", 1)
