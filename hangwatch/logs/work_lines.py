"""The sequence numbers that PyTorch, its debugging wrapper and JAX write into logs at a timeout. Pure."""

import re
from typing import Literal, NamedTuple

from hangwatch import tables, words
from hangwatch.model import RankId

DEFAULT_GROUP = "default_pg"

_PATTERNS = tables.Patterns("work_lines.toml")
_MISSED_BARRIER = "did not reach a barrier of JAX"
_COMMUNICATOR, _PROCESS_GROUP = "a communicator of NCCL", "the process group of Lightning"
_SILENT = "sent no more heartbeats to the coordination service of JAX"
_ABSENT = tables.Patterns("absent_ranks.toml")
_WORDS = (
    *(" - Init ", "monitoredBarrier", "ncclUniqueId", "enqueued", "WorkNCCL(", "collective"),
    *("lagging ranks", " started ", "the barrier: ", "/task:", "unhealthy", "task names:", "[missing ranks: ", ": ["),
    *("[ready ranks: ", " MEMBER: ", "processes registered"),
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
    * "setup": a rank began to create a communicator of `enqueued` ranks; `completed` is 1 if it has finished, and
      `operation` is what creates it. Without `ranks`, all have finished. `name` is the PCI address of its GPU, as
      hexadecimal digits; "" if unknown.
    * "absent": `ranks` did not do what `operation` says, for example reach PyTorch's monitored barrier. If `completed`
      is 1, `ranks` are all that did it. `name` is the rest of the line.
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
    if counts := _PATTERNS["counts"].search(text):
        return _parse_work(text, counts)
    if work := _PATTERNS["work"].search(text):
        rank, elements, ran = (
            pattern.search(text) for pattern in (_PATTERNS["rank"], _PATTERNS["elements"], _PATTERNS["ran"])
        )
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
    if lagging := _PATTERNS["lagging"].search(text):
        number = int(lagging.group(2)) if lagging.group(2) else None
        return (WorkLine("lagging", _parse_numbers(lagging.group(1)), timed_out=number),)
    if runs := _PATTERNS["runs"].findall(text):
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
            if shape or rank == runs[0][0]  # else the other operation may be wrong, see findings/torch-mismatch-*.sh
        )
    if barrier := _PATTERNS["barrier"].search(text):
        return (WorkLine("barrier", (int(barrier.group(1)), int(barrier.group(2)))),)
    heading = [
        WorkLine("barrier", operation=_SILENT if title[1] else _MISSED_BARRIER)
        for title in _PATTERNS["tasks_follow"].finditer(text)
    ]
    if tasks := (*heading, *(WorkLine("task", (int(task),)) for task in _PATTERNS["task"].findall(text))):
        return tasks
    for why in _ABSENT.rows:
        if absent := _ABSENT[why].search(text):
            ranks, writer = _parse_numbers(absent.group(absent.lastindex or 0)), absent.groupdict().get("writer")
            line = WorkLine("absent", ranks, operation=why, writer=int(writer) if writer else None)
            return (line._replace(name=text[absent.end() :], completed=int(absent.lastgroup == "ready")),)
    if setup := _PATTERNS["setup"].search(text) or _PATTERNS["members"].search(text):
        return (_parse_setup(setup.groupdict()),)
    if started := _PATTERNS["started"].match(text):
        return (WorkLine("started", _parse_numbers(started.group(1)), operation=started.group(2)),)
    return ()


def is_collective(operation: str) -> bool:
    """True for an operation that all ranks of a group count in the same way.

    False for a transfer between two ranks, which NCCL counts separately.
    """
    return bool(operation) and not any(word in operation for word in ("SEND", "RECV", "COALESCED", "UNKNOWN"))


def _parse_work(text: str, counts: re.Match[str]) -> tuple[WorkLine, ...]:
    enqueued, completed = int(counts.group(1)), int(counts.group(2))
    timed_out, group, signal = (
        _PATTERNS["timed_out"].search(text),
        _PATTERNS["group"].search(text),
        _PATTERNS["signal"].search(text),
    )
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


def _parse_setup(parts: dict[str, str | None]) -> WorkLine:
    ranks, size = (int(parts["rank"]),) if parts["rank"] else (), int(parts["size"] or parts["joined"] or 0)
    done = int(not ranks or parts.get("end") == "COMPLETE")
    return WorkLine(
        "setup",
        ranks,
        group=parts.get("id") or "",
        name=parts.get("bus") or "",
        timed_out=done,
        operation=_COMMUNICATOR if parts.get("end") else _PROCESS_GROUP,
        enqueued=size,
        completed=done,
    )


def _describe_elements(number_in: int, number_out: int) -> str:
    return f"{number_in:,} elements" if number_in == number_out else f"{number_in:,} elements in, {number_out:,} out"


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
