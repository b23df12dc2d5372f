"""Logs and dumps behind prefixes of launchers, containers, collectors: the verdict is that of the bare text."""

import json
from collections.abc import Sequence

import pytest

from hangwatch import config
from hangwatch.logs import line_prefixes, log_evidence
from hangwatch.model import RankId
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.verdict import judge
from hangwatch.verdict.judge import complete
from tests.conftest import load_table
from tests.hangs import TABLE
from tests.unit.test_traces import process

PREFIXES = load_table("log_prefixes.toml")["forms"]
WITHOUT_STACKS = {"tqdm", "tqdm in the same line"}
OF_ONE_PROCESS = {"ray", "coloured ray", "ray with address", "sagemaker"}
WITHOUT_PIDS = {"faulthandler", "format_stack"}
WATCHDOG = (
    "[rank{0}]:[E918 19:29:24.43695{0}737 ProcessGroupNCCL.cpp:689] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=50, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600097 "
    "milliseconds before timing out."
)
FAILED = [
    "[rank2]: Traceback (most recent call last):",
    '[rank2]:   File "/app/train.py", line 88, in step',
    "[rank2]:     loss.backward()",
    "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    *(WATCHDOG.format(rank) for rank in (0, 1, 3)),
]
BLAMED = [
    f"[rank{rank}]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms" for rank in (0, 2, 3)
]


REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:2936)", "main (train.py:20)")
LOADS = ("read (video.py:9)", "__getitem__ (dataset.py:14)", "main (train.py:18)")
ONE_LOADS = [line for rank in range(4) for line in process(41000 + rank, *(LOADS if rank == 2 else REDUCE))]
ALL_WAIT = [line for rank in range(4) for line in process(41000 + rank, *REDUCE)]
GDB = [
    line
    for rank in range(3)
    for line in (
        f'Thread 1 (Thread 0x7f0000000740 (LWP {4100 + rank}) "python3"):',
        "#0  0x00007f1 in poll () from /lib64/libc.so.6" if rank else "#0  0x00007f1 in read () from /lib64/libc.so.6",
        "#1  0x00007f2 in ncclCommInit (comm=0x1) at init.cc:20" if rank else "#1  0x00007f2 in load (x=1) at load.c:9",
    )
]


def in_each_rank(*parts: str, odd: str, of: int = 2) -> list[str]:
    """Return the lines of four ranks. `{rank}` is the rank, `{call}` is `odd` in the rank `of`, else a wait."""
    waits = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", "all_reduce"
    return [
        part.format(rank=rank, file=file, call=call)
        for rank in range(4)
        for file, call in [("/srv/train.py", odd) if rank == of else waits]
        for part in parts
    ]


STACKS = {
    "one loads": ONE_LOADS,
    "all wait": ALL_WAIT,
    "gdb": GDB,
    "faulthandler": in_each_rank(
        "Thread 0x00007f0{rank} (most recent call first):",
        '  File "{file}", line 31 in {call}',
        '  File "/srv/train.py", line 40 in <module>',
        odd="load_shard",
    ),
    "pystack": in_each_rank(
        "Traceback for thread 410{rank} (python) [] (most recent call last):",
        '    (Python) File "/srv/train.py", line 40, in <module>',
        '    (Python) File "{file}", line 31, in {call}',
        "",
        odd="load_shard",
    ),
    "format_stack": in_each_rank(
        "Thread 14012{rank}11 (MainThread):",
        '  File "/srv/train.py", line 40, in <module>',
        "    main()",
        '  File "{file}", line 31, in {call}',
        "    wait()",
        odd="load_shard",
    ),
    "profiling": in_each_rank(
        "Stack dump for PID 410{rank}, thread 410{rank} (main thread, idle; most recent call last):",
        '  File "/srv/train.py", line 40, in <module>',
        "    main()",
        '  File "{file}", line 31, in {call}',
        odd="load_shard",
    ),
    "kernel": [
        line
        for rank in range(4)
        for line in (
            f"==> /proc/410{rank}/stack <==",
            f"[<0>] {'rpc_wait_bit_killable' if rank == 2 else 'futex_wait_queue'}+0x1e/0x90",
            f"[<0>] {'nfs4_do_open' if rank == 2 else 'do_futex'}+0x106/0x1b0",
            "[<0>] do_syscall_64+0x3b/0x90",
        )
    ],
}
STATUS = (
    "[rank{0}]:[E918 19:29:24.44095{0}737 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure "
    "detected by watchdog at work sequence id: 50 PG status: last enqueued work: 51, last completed work: 49"
)
SIGNAL = (
    "[rank{0}]:[E918 19:29:25.43695{0}737 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Received "
    "a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last "
    "enqueued NCCL work: 48, last completed NCCL work: 48."
)
HOROVOD = [
    "[2026-09-18 19:29:24.123456: W horovod/common/stall_inspector.cc:105] One or more tensors were submitted to be "
    "reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds",
    "Missing ranks:",
    "2: [allreduce.conv1.weight, allreduce.bn1.weight ...]",
]


def failed_rank(place: int, rank: int, exit_code: int) -> list[str]:
    """Return the lines on a rank in torchrun's summary."""
    values = (
        ("time", f"2026-09-18_19:29:{24 + place}"),
        ("rank", f"{rank} (local_rank: {rank})"),
        ("exitcode", f"{exit_code} (pid: 189)"),
    )
    return [f"[{place}]:", *(f"  {key:<10}: {value}" for key, value in values), "-" * 60]


SUMMARY = ["train.py FAILED", "Failures:", *failed_rank(1, 3, -6), "Root Cause (first observed failure):"]
SUMMARY += failed_rank(0, 1, -11)
LOGS = {
    "failed": FAILED,
    "horovod": HOROVOD,
    "summary": SUMMARY,
    "blamed": BLAMED,
    "behind": [line.format(rank) for rank in (0, 1, 3) for line in (WATCHDOG, STATUS)] + [SIGNAL.format(2)],
    "all joined": [line.format(rank) for rank in range(4) for line in (WATCHDOG, STATUS)],
    "mismatch": [
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
        "collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[20], TensorDtypes=Float), but "
        "Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[20], "
        "TensorDtypes=Float)."
        for rank in (0, 1, 3)
    ],
}
ENDS_INSIDE = "the text ends inside the dump of this process"
CUT_AT = {"format_stack": {2}, "kernel": {2}, "profiling": {1, 2}, "gdb": set()}
"""The numbers of lines at the end without which a frame is lost that the other processes show."""

CHECK_FIRST_OF_LOGS = {
    "failed": [2],
    "horovod": [2],
    "summary": [1],
    "blamed": [1],
    "behind": [2],
    "all joined": [],
    "mismatch": [2],
}


def judge_lines(lines: Sequence[str]) -> tuple[object, ...]:
    """Return the kind of the verdict, the named ranks, the ranks to check first, and the ranks with a stack."""
    found = traces.collect([("job.txt", [line + "\n" for line in lines])])
    grouping = group_ranks(found.ranks, TABLE, config.Capture())
    verdict = judge.judge(grouping) if found.ranks else None
    verdict = complete(verdict, log_evidence.supplement(found.logs, found.works, None, found.unranked))
    named, first = (sorted(map(number_of, ranks)) for ranks in (verdict.named, verdict.check_first))
    return verdict.kind, named, first, sorted(number_of(rank.id) for rank in found.ranks)


def number_of(rank: RankId) -> int:
    return rank.rank if rank.rank is not None else rank.pid or -1


def decorate(prefix: str, lines: list[str]) -> list[str]:
    form = PREFIXES[prefix]
    return [form.replace("{line}", line).replace("{escaped}", json.dumps(line)[1:-1]) for line in lines]


def colour(line: str) -> str:
    return line if line.lstrip().startswith(("{", '"')) else f"\x1b[31m{line}\x1b[0m"


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_log_behind_a_prefix_has_the_verdict_of_the_bare_log(prefix: str, kind: str) -> None:
    bare = judge_lines(LOGS[kind])
    decorated = decorate(prefix, LOGS[kind])
    assert bare[2] == CHECK_FIRST_OF_LOGS[kind]
    assert judge_lines(decorated) == bare
    assert judge_lines([f"{line}\r" for line in decorated]) == bare
    assert judge_lines([*map(colour, decorated)]) == bare
    for cut in (1, 2):
        for part in (decorated[cut:], decorated[:-cut]):
            _, named, first, _ = judge_lines(part)
            assert named == [] and set(first) <= {*CHECK_FIRST_OF_LOGS[kind]}


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        (prefix, kind)
        for prefix in PREFIXES
        for kind in STACKS
        if prefix not in WITHOUT_STACKS and not (prefix in OF_ONE_PROCESS and kind in WITHOUT_PIDS)
    ],
)
def test_stacks_behind_a_prefix_have_the_verdict_of_the_bare_text(prefix: str, kind: str) -> None:
    bare = judge_lines(STACKS[kind])
    decorated = decorate(prefix, STACKS[kind])
    assert len(bare[3]) > 2
    assert judge_lines(decorated) == bare
    assert judge_lines([line.rstrip(" ") + "\r" for line in decorated]) == bare
    assert judge_lines([*map(colour, decorated)]) == bare


@pytest.mark.parametrize(
    ("group", "rank"),
    [
        *(("PG 0 Rank 3", 3), ("PG 0 (default_pg) Rank 3", 3), ("PG ID 0 PG GUID 0(default_pg) Rank 3", 3)),
        *(("PG ID 2 PG GUID 9 Rank 3", None), ("PG ID 2 PG GUID 0 Rank 3", None)),
    ],
)
def test_only_member_numbers_of_the_default_group_are_global_ranks(group: str, rank: int | None) -> None:
    line = f"[1]:E0423 02:10:44.182842  8355 ProcessGroupNCCL.cpp:1329] [{group}] Heartbeat monitor timed out!"
    assert line_prefixes.split(line, RankId())[0].rank == rank


@pytest.mark.parametrize("kind", STACKS)
def test_cut_stacks_name_no_other_rank_or_are_known_to_be_cut(kind: str) -> None:
    _, named, first, ranks = judge_lines(STACKS[kind])
    lines = STACKS[kind]
    assert named or first or kind in ("all wait", "gdb")
    for cut in range(1, len(lines) - 8):
        _, named_now, first_now, ranks_now = judge_lines(lines[cut:])
        assert {*named_now} <= {*named, -1}
        assert {*first_now} <= {*named, *first, *(() if len(ranks_now) == len(ranks) else ranks), -1}
        _, named_now, first_now, _ = judge_lines(lines[:-cut])
        assert {*named_now} <= {*named, -1}
        assert {*first_now} <= {*named, *first}


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_text_that_ends_inside_a_stack_says_so(kind: str, cut: int) -> None:
    lines = STACKS[kind][: len(STACKS[kind]) - cut - (not STACKS[kind][-1])]
    *others, last = traces.collect([("job.txt", [line + "\n" for line in lines])]).ranks
    assert not any(rank.rounds[-1].fault for rank in others)
    fault = last.rounds[-1].fault
    assert (fault is not None and fault.detail == ENDS_INSIDE) == (cut in CUT_AT.get(kind, {1}))
