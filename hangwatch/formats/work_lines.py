"""The sequence numbers that PyTorch, its debugging wrapper and JAX write into logs at a timeout. Pure.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (watchdog, PG status, dump signal), TraceUtils.h (desync
report), ProcessGroupWrapper.cpp; xla coordination_service.cc (barrier); horovod/common/stall_inspector.cc. Forms of
torch 2.0 to 2.9 were compared.
"""

import re
from typing import Literal, NamedTuple

from hangwatch import words
from hangwatch.model import RankId

DEFAULT_GROUP = "default_pg"

_NUMBER = r"(-?\d{1,18})"
_GROUP = re.compile(r"\[PG (?:ID \d{1,9} PG GUID )?([\w:.-]{1,64}?) ?(?:\(([^()\[\]]{1,64})\))? Rank (\d{1,7})\]")
_RANK = re.compile(r"\[Rank (\d{1,7})\]")
_WORK = re.compile(  # of an operation that failed in another way, the number tells nothing
    r"WorkNCCL\((?:SeqNum=(\d{1,18}), ?)?OpType=(\w{1,40})(?![^()]*(?:\([^()]*\)[^()]*)?\) raised )"
)
_TIMED_OUT = re.compile(r"(?:Timeout at NCCL work: |watchdog at work: |at work sequence id: )(\d{1,18})")
_COUNTS = re.compile(
    rf"[Ll]ast enqueued (?:NCCL )?work: {_NUMBER}(?:, last started work: -?\d{{1,18}})?"
    rf", last completed (?:NCCL )?work: {_NUMBER}"
)
_SIGNAL = re.compile(r"Received a (?:dump|timeout) signal (?:due to a collective timeout )?from +(this local rank)?")
_RAN = re.compile(r"\) ran for (\d{1,12}) milliseconds")
_ELEMENTS = re.compile(r"NumelIn=(\d{1,18}), ?NumelOut=(\d{1,18})")
_RANKS = r"\[(\d{1,7}(?:, ?\d{1,7}){0,4095})\]"
_LAGGING = re.compile(rf"{_RANKS} finished collective #(\d{{1,18}}), but didn't join collective #(\d{{1,18}})")
_NEVER_JOINED = re.compile(rf"ranks {_RANKS} are the lagging ranks that caused this timeout")
_STARTED = re.compile(rf"^\s*{_RANKS} started (\w{{1,40}})\b")
_RUNS = re.compile(
    r"[Rr]ank (\d{1,7}) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d{1,18}),? ?)?OpType=(\w{1,40})(?:, TensorShape=(\[[\d, ]{0,80}\]), TensorDtypes=(\w{1,40}))?"
)
_BARRIER = re.compile(r"# of tasks that reached the barrier: (\d{1,7})/(\d{1,7})")
_TASKS_FOLLOW = re.compile(r"(tasks are unhealthy \(stopped sending heartbeats\))|\bTimed out task names:")
_TASK = re.compile(r"(?:^|\s)/job:[\w-]{1,64}/replica:\d{1,7}/task:(\d{1,7})$")
_SETUP = re.compile(
    r"NCCL INFO (?:\[Rank \d{1,7}\] )?(?:nccl\w{1,30} )?comm 0x[0-9a-f]{1,16} rank (\d{1,7}) n[rR]anks (\d{1,7})\b"
    r".{0,120}?(?: commId (0x[0-9a-f]{1,16}).{0,40}?)? - Init (START|COMPLETE)"
)
_MISSED_BARRIER = "did not reach a barrier of JAX"
_SILENT = "sent no more heartbeats to the coordination service of JAX"
_ABSENT = {
    "did not reach a monitored barrier in time": re.compile(
        r"(?:\[Rank (?P<writer>\d{1,7})\]: )?\bRanks? (\d{1,7}(?:, ?\d{1,7}){0,4095}) failed to pass monitoredBarrier"
    ),
    "did not answer the others in a monitored barrier": re.compile(
        r"\bRank (?P<writer>\d{1,7}) (?:timed out in|successfully reached) monitoredBarrier(?:, but .{0,80} rank (0))?"
    ),
    _SILENT: re.compile(r"Task /job:[\w-]{1,64}/replica:\d{1,7}/task:(\d{1,7}) heartbeat timeout"),
    "did not give the others the id of their communicator of NCCL": re.compile(
        r"retrieving ncclUniqueId from \[(\d{1,7})\] .{0,200}[Tt]ime ?out.{0,200}/default_pg/"
    ),
    "did not submit the tensors that other ranks of Horovod submitted": re.compile(
        r"\[missing ranks: (\d{1,7}(?:, ?\d{1,7}){0,4095})\]"
        r"|(?<![\w.])(\d{1,7}): \[\S{0,200}(?:Horovod|allreduce|broadcast|allgather|alltoall|reducescatter)[A-Z._]"
    ),
}
_WORDS = (
    *(" - Init ", "monitoredBarrier", "ncclUniqueId", "enqueued", "WorkNCCL(", "collective"),
    *("lagging ranks", " started ", "the barrier: ", "/task:", "unhealthy", "task names:", "[missing ranks: ", ": ["),
)
_HIGHEST = 1 << 48  # torch 2.2 prints a variable that was never set

Kind = Literal["work", "operation", "lagging", "started", "running", "barrier", "task", "ras", "setup", "absent"]


class WorkLine(NamedTuple):
    """The numbers in one log line. A number that the line does not contain is None.

    The meaning depends on `kind`:
    * "work": the numbers of a rank in a process group. `group` is the key of the group, `name` its name for people.
      `ranks` contains the rank's number within the group.
    * "operation": the `operation` with the number `timed_out`, which ran for `ran_seconds`. `size` is that of tensors,
      `place` the line of the program that called it.
    * "lagging": `ranks` have not joined the number `timed_out`. "started": `ranks` have joined it.
    * "running": one rank and its `operation`, with its `size`.
    * "ras": a sentence (`name`) on an answer of NCCL's RAS, and the `processes` to check first because of `operation`.
    * "setup": a rank began to create a communicator of `enqueued` ranks; `completed` is 1 if it has finished.
    * "absent": `ranks` did not do what `operation` says, for example reach PyTorch's monitored barrier.
    * "barrier": `ranks` contains the number of tasks that reached it, and the number of all tasks; it is empty for a
      heading of tasks that did not do what `operation` says. "task": a task that did not reach it, or is silent.

    `is_answer` is true if the rank wrote the line because another rank timed out, `is_own_timeout` if itself did.
    `writer` is the number that the line gives to the process that wrote it, within the process group.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    group: str = ""
    name: str = ""
    timed_out: int | None = None
    operation: str = ""
    size: str = ""
    place: str = ""
    ran_seconds: float = 0.0
    enqueued: int | None = None
    completed: int | None = None
    is_answer: bool = False
    is_own_timeout: bool = False
    writer: int | None = None
    processes: tuple[RankId, ...] = ()


def parse(text: str) -> tuple[WorkLine, ...]:
    """Return the sequence numbers in a log line; () if it contains none."""
    if not words.holds_any(text, _WORDS):
        return ()
    if counts := _COUNTS.search(text):
        return _parse_work(text, counts)
    if work := _WORK.search(text):
        rank, elements, ran = (pattern.search(text) for pattern in (_RANK, _ELEMENTS, _RAN))
        return (
            WorkLine(
                "operation",
                (int(rank.group(1)),) if rank else (),
                writer=int(rank.group(1)) if rank else None,
                timed_out=int(work.group(1)) if work.group(1) else None,
                operation=work.group(2),
                size=_describe_elements(*map(int, elements.groups())) if elements else "",
                ran_seconds=int(ran.group(1)) / 1000 if ran else 0.0,
            ),
        )
    if lagging := _LAGGING.search(text):
        return (WorkLine("lagging", _parse_numbers(lagging.group(1)), timed_out=int(lagging.group(3))),)
    if never := _NEVER_JOINED.search(text):
        return (WorkLine("lagging", _parse_numbers(never.group(1))),)
    if runs := _RUNS.findall(text):
        return tuple(
            WorkLine(
                "running",
                (int(rank),),
                timed_out=int(number) if number else None,
                operation=operation,
                size=f"{dtype} {shape}" if shape else "",
                writer=int(runs[0][0]),
            )
            for rank, number, operation, shape, dtype in runs[:2]
            if shape or rank == runs[0][0]  # else the other operation may be wrong: findings/torch-mismatch-*.sh
        )
    if barrier := _BARRIER.search(text):
        return (WorkLine("barrier", (int(barrier.group(1)), int(barrier.group(2)))),)
    heading = [
        WorkLine("barrier", operation=_SILENT if title[1] else _MISSED_BARRIER)
        for title in _TASKS_FOLLOW.finditer(text)
    ]
    if tasks := (*heading, *(WorkLine("task", (int(task),)) for task in _TASK.findall(text))):
        return tasks
    for why, pattern in _ABSENT.items():
        if absent := pattern.search(text):
            ranks, writer = _parse_numbers(absent.group(absent.lastindex or 0)), absent.groupdict().get("writer")
            return (WorkLine("absent", ranks, operation=why, writer=int(writer) if writer else None),)
    if setup := _SETUP.search(text):
        member, size, communicator, end = setup.groups()
        done = int(end == "COMPLETE")
        return (WorkLine("setup", (int(member),), communicator or "", "", done, enqueued=int(size), completed=done),)
    if started := _STARTED.match(text):
        return (WorkLine("started", _parse_numbers(started.group(1)), operation=started.group(2)),)
    return ()


def is_collective(operation: str) -> bool:
    """True for an operation that all ranks of a group count in the same way.

    False for a transfer between two ranks, which NCCL counts separately.
    """
    return bool(operation) and not any(word in operation for word in ("SEND", "RECV", "COALESCED", "UNKNOWN"))


def _parse_work(text: str, counts: re.Match[str]) -> tuple[WorkLine, ...]:
    enqueued, completed = int(counts.group(1)), int(counts.group(2))
    timed_out, group, signal = _TIMED_OUT.search(text), _GROUP.search(text), _SIGNAL.search(text)
    if group is None or enqueued > _HIGHEST:
        return ()
    key, description, rank = group.groups()
    key = DEFAULT_GROUP if key == "0" else key
    return (
        WorkLine(
            "work",
            (int(rank),),
            writer=int(rank) if key == DEFAULT_GROUP else None,
            group=key,
            name=key if key == DEFAULT_GROUP else f"{description} ({key})" if description else f"group {key}",
            timed_out=int(timed_out.group(1)) if timed_out else None,
            enqueued=enqueued,
            completed=completed if completed <= _HIGHEST else None,
            is_answer=signal is not None and not signal.group(1),
            is_own_timeout=signal is not None and bool(signal.group(1)),
        ),
    )


def _describe_elements(number_in: int, number_out: int) -> str:
    return f"{number_in:,} elements" if number_in == number_out else f"{number_in:,} elements in, {number_out:,} out"


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
