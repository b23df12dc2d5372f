"""Incidents as people paste them: what `explain` answers to servers, lock files, watchdogs and launchers' lines."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import config
from hangwatch.logs import log_evidence
from hangwatch.model import Verdict
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.verdict import judge
from hangwatch.verdict.judge import complete
from tests.conftest import load_table
from tests.hangs import TABLE

REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:3012)",
    "all_reduce (vllm/distributed/parallel_state.py:5)",
)
BATON = ("wait (aiter/jit/utils/file_baton.py:42)", "mp_lock (aiter/jit/core.py:118)")
IDLE = ("poll (zmq/sugar/poll.py:106)", "dequeue (vllm/distributed/device_communicators/shm_broadcast.py:779)")
PREFETCHES = ("_prefetch_loop (storage_controllers/prefetch_controller.py:691)", "run (threading.py:1012)")
SERVER = "/usr/bin/python3 -m lmcache.v1.multiprocess.server --port 6555"


def dump(pid: int, command: str, *frames: str) -> list[str]:
    return [f"Process {pid}: {command}", f'Thread {pid} (idle): "MainThread"', *(f"    {frame}" for frame in frames)]


def judge_lines(*sources: Sequence[str], world_size: int | None = None) -> tuple[Verdict, traces.Collected]:
    named = [(f"part-{number}.txt", [f"{line}\n" for line in lines]) for number, lines in enumerate(sources)]
    found = traces.collect(named, world_size)
    grouping = group_ranks(found.ranks, TABLE, config.Capture(), world_size)
    verdict = judge.judge(grouping) if found.ranks else None
    return complete(verdict, log_evidence.supplement(found.logs, found.works, world_size, found.unranked)), found


def check_first(verdict: Verdict) -> list[int | None]:
    assert not verdict.named
    return [rank.rank for rank in verdict.check_first]


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", ["VLLM::Worker_TP{}", "VLLM::Worker_PP{}", "sglang::scheduler_TP{}"])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_process_with_a_number_in_its_title_is_a_rank_and_no_server_is_named(title: str, servers: int) -> None:
    lines = [line for rank in range(2) for line in dump(441 + rank, title.format(rank), *IDLE)]
    lines += [line for pid in range(70, 70 + servers) for line in dump(pid, SERVER, *PREFETCHES)]
    verdict, found = judge_lines(lines)
    assert check_first(verdict) == []
    assert [rank.id.rank for rank in found.ranks] == [0, 1]


# --- lock files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["torch/utils", "aiter/jit/utils", "my_kernels"])
@pytest.mark.parametrize("waiting", [[], [3], [2, 3], [0, 1, 2, 3]])
def test_ranks_that_wait_for_a_lock_file_are_checked_first(file: str, waiting: list[int]) -> None:
    baton = (f"wait ({file}/file_baton.py:42)", BATON[1])
    frames = {rank: baton if rank in waiting else REDUCE for rank in range(4)}
    lines = [line for rank in range(4) for line in dump(7000 + rank, f"VLLM::Worker_TP{rank}", *frames[rank])]
    verdict, _ = judge_lines(lines)
    expected = waiting if len(waiting) < 3 else []
    assert [rank.rank for rank in verdict.named or verdict.check_first] == expected


# --- watchdogs of programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["[RANK {}] [E] ", "[rank {}] ", "2026-05-08 10:12:40 [Rank {}] "])
@pytest.mark.parametrize("odd", [None, 0, 2])
def test_stack_of_a_watchdog_is_that_of_the_rank_in_its_heading(mark: str, odd: int | None) -> None:
    lines = []
    for rank in range(4):
        call = "gather" if rank == odd else "allgather"
        lines += [
            f"{mark.format(rank)}Thread 140{rank}077123328 stack trace:",
            '  File "/srv/engine/executor.py", line 402, in _event_loop_wrapper',
            "    self.event_loop()",
            f'  File "/srv/engine/communicator.py", line 325, in {call}_sizes',
            f"    return self.comm.{call}(sizes)",
        ]
    _, found = judge_lines(lines)
    assert [(rank.id.rank, rank.id.pid) for rank in found.ranks] == [(rank, None) for rank in range(4)]
    innermost = [rank.rounds[0].threads[0].frames[0].function for rank in found.ranks]
    assert innermost == ["gather_sizes" if rank == odd else "allgather_sizes" for rank in range(4)]


# --- lines of NCCL and of launchers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "gpu-1:168:1226 [0] ", "2025-08-12 09:37:03 worker-9 >> :166:1226 [0] "])
def test_foreign_client_of_nccl_is_told_and_no_rank_is_checked_first(before: str) -> None:
    line = "misc/socket.cc:484 NCCL WARN socketFinalizeAccept: wrong magic 74656d2f20544547 != 7970663b906d70b9"
    verdict, _ = judge_lines([f"{before}{line}"])
    assert check_first(verdict) == []
    assert any("not a rank of this job" in evidence.message for evidence in verdict.evidence)


@pytest.mark.parametrize(
    "text",
    ["NCCL operation timed out", "NCCL operation timeout", "gloo collective timed out", "NCCL communicator aborted"],
)
def test_timeout_of_a_collective_is_no_failure_of_its_own(text: str) -> None:
    trace = ["[rank{}]: Traceback (most recent call last):", "[rank{}]: RuntimeError: " + text]
    lines = [line.format(0) for line in trace] + [line.format(1) for line in trace]
    assert check_first(judge_lines(lines)[0]) == []
    lines += [trace[0].format(2), "[rank2]: ValueError: bad sample"]
    assert check_first(judge_lines(lines)[0]) == [2]


@pytest.mark.parametrize(("code", "expected"), [("86", [0]), ("-9", [0]), ("-15", [])])
def test_line_of_torchruns_agent_tells_which_rank_has_ended(code: str, expected: list[int]) -> None:
    agent = (
        f"E0809 11:02:41.512000 7700 api.py:988] failed (exitcode: {code}) local_rank: 0 (pid: 7711) of binary: python"
    )
    stack = dump(7712, "/usr/bin/python3 -u train.py --global-rank=1", *REDUCE)
    verdict, _ = judge_lines([agent], stack, world_size=2)
    assert check_first(verdict) == expected


@pytest.mark.parametrize("is_restart", [True, False])
def test_failures_before_torchrun_restarted_the_job_are_ignored(is_restart: bool) -> None:
    agent = "E1129 17:11:14.009000 24217 api.py:1002] failed (exitcode: 1) local_rank: {} (pid: {}) of binary: python"
    lines = [
        "[rank1]: Traceback (most recent call last):",
        "[rank1]: ValueError: bad batch",
        agent.format(1, 101) if is_restart else "rank 1 goes on",
        "[rank2]: Traceback (most recent call last):",
        "[rank2]: KeyError: 'token'",
        agent.format(2, 202),
        "  time      : 2026-11-29_17:11:25",
        "  rank      : 2 (local_rank: 2)",
        "  exitcode  : 1 (pid: 202)",
        "-" * 60,
    ]
    verdict, found = judge_lines(lines)
    assert check_first(verdict) == ([2] if is_restart else [1])
    assert any("lines 1 to 3 are of earlier attempts" in note for note in found.notes) == is_restart


@pytest.mark.parametrize(("after", "expected"), [("[rank3]: OSError: stale file handle", [3]), ("step 7", [2])])
def test_failures_before_slurm_requeued_the_job_are_ignored(after: str, expected: list[int]) -> None:
    trace = "[rank{}]: Traceback (most recent call last):"
    lines = [trace.format(2), "[rank2]: RuntimeError: CUDA error: an illegal memory access", trace.format(3), after]
    lines.insert(2, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T10:31:00 DUE TO JOB REQUEUE ***")
    assert check_first(judge_lines(lines)[0]) == expected


# --- lines of frameworks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["megatron/training/utils.py", "deepspeed/runtime/engine.py", "accelerate/utils.py"])
@pytest.mark.parametrize("second", [118, 131])
def test_two_lines_of_a_framework_function_are_two_places(file: str, second: int) -> None:
    def stack(rank: int) -> list[str]:
        place = f"reduce_norm ({file}:{118 if rank < 2 else second})"
        return dump(
            8800 + rank, f"python pretrain.py --global-rank={rank}", REDUCE[0], place, "<module> (pretrain.py:3)"
        )

    verdict, _ = judge_lines(*map(stack, range(4)))
    assert check_first(verdict) == []
    assert verdict.kind == ("AllWaiting" if second == 118 else "Mismatch")
    assert (f"{file}:131" in verdict.message) == (second == 131)


# --- NCCL's RAS -------------------------------------------------------------------------------------------------------

RAS = load_table("nccl_ras.toml")
RAS_PLACE = " -- GPU 4 managed by process 3230 on node 10.137.190.124\n"


@pytest.mark.parametrize("case", RAS["case"])
def test_answer_of_nccl_ras_tells_which_ranks_are_behind(case: dict[str, Any]) -> None:
    verdict, _ = judge_lines(f"{RAS['head']}\nWarnings\n========\n{case['text']}".splitlines())
    assert [-1 if rank is None else rank for rank in check_first(verdict)] == case["check_first"]
    assert case["mentions"] in verdict.message


@pytest.mark.parametrize(("counts", "missing", "expected"), [
    ([9, 9, 9, 9], [], []), ([9, 9, 8, 9], [], [2]), ([9, 8, 8, 8], [], [1, 2, 3]), ([9, 9, 9], [3], [3]),
])  # fmt: skip
def test_answer_of_nccl_ras_in_json_tells_the_same(counts: list[int], missing: list[int], expected: list[int]) -> None:
    def describe(rank: int) -> dict[str, object]:
        return {"rank": rank, "host": "10.0.0.7", "pid": 400 + rank, "cuda_dev": rank, "nvml_dev": rank}

    def make(name: str, size: int) -> dict[str, object]:
        ranks = [
            {
                **describe(rank),
                "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                "collective_counts": {"Broadcast": 3, "AllReduce": count},
            }
            for rank, count in enumerate(counts[:size])
        ]
        silent = [{**describe(rank), "status": {"unresponsive": True}} for rank in missing]
        return {"hash": name, "size": size, "ranks_count": len(ranks), "ranks": ranks, "missing_ranks": silent}

    answer = {"nccl_version": "2.29.2", "cuda_runtime_version": 12090, "communicators": [make("0xfa", 4)]}
    verdict, _ = judge_lines(json.dumps(answer, indent=2).splitlines())
    assert check_first(verdict) == expected
    assert "NCCL RAS" in verdict.message


@given(st.lists(st.sampled_from([*RAS["head"].splitlines(), *RAS["mismatch"].splitlines(), f"  Rank 3{RAS_PLACE.rstrip()}",
    "  2 ranks have launched up to operation 641", '  "nccl_version": "2"', '"rank": 3,', '"pid": 7,', '"Broadcast": 3', "#"]) | st.text(max_size=20)))  # fmt: skip
def test_any_answer_of_nccl_ras_names_no_rank(lines: list[str]) -> None:
    assert judge_lines(lines)[0].named == ()


# --- stacks as people paste them --------------------------------------------------------------------------------------

KERNEL_ENTRY = ("do_syscall_64", "entry_SYSCALL_64_after_hwframe")
KERNEL_STACKS = {
    "futex": ("futex_wait_queue", "futex_wait", "do_futex", "__x64_sys_futex", *KERNEL_ENTRY),
    "nfs": ("rpc_wait_bit_killable", "__rpc_execute", "nfs4_do_open", "do_sys_openat2", *KERNEL_ENTRY),
}


@pytest.mark.parametrize(
    "heading", ["$ sudo cat /proc/{}/stack", "==> /proc/{0}/task/{0}/stack <==", "/proc/{}/stack:"]
)
@pytest.mark.parametrize("address", ["[<0>] ", "[<ffffffff81109f4a>] "])
@pytest.mark.parametrize("odd", [None, 2])
def test_kernel_stack_of_a_process_shows_its_call(heading: str, address: str, odd: int | None) -> None:
    lines = []
    for number in range(4):
        functions = KERNEL_STACKS["nfs" if number == odd else "futex"]
        lines += [heading.format(4100 + number), *(f"{address}{function}+0x1e/0x90" for function in functions)]
        lines += ["[<ffffffffffffffff>] 0xffffffffffffffff"] if "ffff" in address else []
    verdict, found = judge_lines(lines)
    assert [rank.id.pid for rank in found.ranks] == [4100, 4101, 4102, 4103]
    assert verdict.named == (), "one snapshot does not show that the other ranks wait for it"
    assert [rank.pid for rank in verdict.check_first] == ([4102] if odd else [])
    assert ("storage I/O (rpc_wait_bit_killable)" in verdict.message) == bool(odd)


@pytest.mark.parametrize("between", [[], ["(gdb) bt"], ["", "the other one:", ""]])
def test_two_backtraces_in_a_file_are_two_processes(between: Sequence[str]) -> None:
    waits = ["#0  0x00007f1 in poll () from /lib64/libc.so.6", "#1  0x00007f2 in ncclCommInit (comm=0x1) at init.cc:20"]
    reads = ["#0  0x00007f1 in read () from /lib64/libc.so.6", "#1  0x00007f2 in load (x=1) at load.c:9"]
    for second in (waits, reads):
        verdict, found = judge_lines([*waits, *between, *second])
        assert [len(rank.rounds) for rank in found.ranks] == [1, 1]
        assert not verdict.named


@pytest.mark.parametrize(
    "heading",
    [
        "# Thread: MainThread(14012{}11)",
        "--- Thread 14012{}11 (MainThread) ---",
        "Stack for thread 14012{}11:",
        "Thread ID: 14012{}11, name: MainThread",
        "Thread 14012{}11 (MainThread):",
    ],
)
@pytest.mark.parametrize("frame", ['  File "{}", line {}, in {}', 'File: "{}", line {}, in {}'])
@pytest.mark.parametrize("odd", [None, 1])
def test_stack_that_a_program_formats_itself_is_read(heading: str, frame: str, odd: int | None) -> None:
    def stack(rank: int) -> list[str]:
        call = ("/srv/data.py", 9, "next_batch") if rank == odd else ("/srv/sync.py", 7, "all_ranks_agree")
        return [
            heading.format(rank),
            frame.format("/srv/train.py", 90, "<module>"),
            "    main()",
            frame.format(*call),
            "    return wait()",
            "epoch 3",
        ]

    _, found = judge_lines([line for rank in range(3) for line in (f"rank {rank}:", *stack(rank))])
    assert [rank.id.rank for rank in found.ranks] == [0, 1, 2]
    innermost = [rank.rounds[0].threads[0].frames[0].function for rank in found.ranks]
    assert innermost == ["next_batch" if rank == odd else "all_ranks_agree" for rank in range(3)]


THREADS = ["Thread pool started", "thread 3: step 12", "Thread 12 finished", "Thread 1234 exits"]
CALLS = ["read(3) took 5 s", "open(x) failed", "INFO poll(a) = 3 ranks", "wait4(me)"]


@pytest.mark.parametrize("line", [*THREADS, *CALLS])
def test_line_of_a_log_about_a_thread_or_call_is_no_stack(line: str) -> None:
    _, found = judge_lines([f"[rank0]: {line}"])
    assert found.ranks == () and found.logs[0].last is not None


# --- lines of PyTorch and NCCL ----------------------------------------------------------------------------------------

WATCHDOG = (
    "[rank{0}]:[E1120 14:02:11.410025101 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600013 "
    "milliseconds before timing out.",
    "[rank{0}]:[E1120 14:02:11.410325101 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure "
    "detected by watchdog at work sequence id: 7 PG status: last enqueued work: 9, last completed work: 6",
    "[rank{0}]:[E1120 14:02:11.410425101 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective: ",
    "#0 all_reduce from /opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2968",
    "#1 wrapper from /opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83",
)


@pytest.mark.parametrize("odd", [None, 2, 3])
def test_stack_of_a_failed_collective_shows_which_rank_called_another(odd: int | None) -> None:
    lines = []
    for rank in range(4):
        call = "#2 clip_norm from /srv/norm.py:31" if rank == odd else "#2 step from /srv/train.py:88"
        lines += [*(line.format(rank) for line in WATCHDOG), call, "#3 main from /srv/train.py:120", ""]
    verdict, _ = judge_lines(lines)
    assert check_first(verdict) == ([] if odd is None else [odd])
    assert "called by step (train.py:88)" in verdict.message
    assert ("called by clip_norm (norm.py:31)" in verdict.message) == (odd is not None)


@pytest.mark.parametrize("status", ["12", "IBV_WC_RETRY_EXC_ERR(12)"])
@pytest.mark.parametrize("prefix", ["", "2026-01-02 03:04:05 gpu-a-very-long-name-of-a-node >> "])
def test_line_of_infiniband_keeps_peer_status_and_adapter(status: str, prefix: str) -> None:
    line = (
        f"{prefix}gpu-a:4122:4290 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB: Got completion from peer "
        f"10.2.0.5<33092> with status={status} opcode=129 len=524288 vendor err 129 (Send) localGid "
        "::ffff:29.87.4.221 remoteGids::ffff:29.87.88.182 hca mlx5_7"
    )
    verdict, _ = judge_lines([line])
    assert check_first(verdict) == []
    (message,) = (evidence.message for evidence in verdict.evidence if evidence.kind == "nccl_message")
    assert all(part in message for part in ("10.2.0.5<33092>", f"status={status}", "29.87.88.182", "hca mlx5_7"))


# --- strace -----------------------------------------------------------------------------------------------------------

ENDED = 'openat(AT_FDCWD, "/opt/x/libnccl-net.so", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)'
FUTEX = "futex(0x7f00, FUTEX_WAIT_BITSET_PRIVATE|FUTEX_CLOCK_REALTIME, 0, NULL, FUTEX_BITSET_MATCH_ANY <unfinished ...>"
POLLS = "poll([{fd=17, events=POLLIN}], 1, -1 <unfinished ...>"
OPENS = 'openat(AT_FDCWD, "/mnt/nfs/shard-3", O_RDONLY <unfinished ...>'


@pytest.mark.parametrize("prefix", ["[pid {:>5}] ", "{}  ", "{} 03:04:05.123456 "])
@pytest.mark.parametrize("odd", [None, 2])
def test_unfinished_call_and_its_file_are_read_from_strace(prefix: str, odd: int | None) -> None:
    def trace(rank: int) -> list[str]:
        lines = [f"{prefix.format(4100 + 10 * rank)}{line}" for line in (ENDED, OPENS if rank == odd else POLLS)]
        return [lines[0], f"{prefix.format(4101 + 10 * rank)}{FUTEX}", lines[1]]

    verdict, found = judge_lines(*map(trace, range(4)))
    assert [rank.id.pid for rank in found.ranks] == [4100, 4110, 4120, 4130]
    assert verdict.named == () and verdict.check_first == ()
    assert ("openat:/mnt/nfs/shard-3" in verdict.message) == (odd is not None)
    assert "libnccl-net" not in verdict.message


@pytest.mark.parametrize("last", ["read(17</mnt/nfs/shard-3>, ", "read(17</mnt/nfs/shard-3>,  <unfinished ...>"])
def test_call_of_one_attached_process_is_read_from_strace(last: str) -> None:
    verdict, found = judge_lines(["strace: Process 4102 attached", 'write(1, "x", 1) = 1', last])
    assert [rank.id.pid for rank in found.ranks] == [4102]
    assert "read:/mnt/nfs/shard-3" in verdict.message


def test_threads_that_have_returned_have_no_call() -> None:
    resumed = ["4102  futex(0x7f, FUTEX_WAIT, 0, NULL <unfinished ...>", "4102  <... futex resumed>) = 0"]
    verdict, found = judge_lines(["strace: Process 4102 attached", *resumed, "4102  +++ exited with 0 +++"])
    assert found.ranks == () and not verdict.check_first
