"""The arrival order of a job as /status shows it: which rank is late, by how much, and a sentence about it. Pure."""

from __future__ import annotations

from hangwatch import words
from hangwatch.collectives.arrival import FEWEST_RECORDS, ArrivalOrder, Place
from hangwatch.model import Job, ProcessId, Rank, Value

_SHOWS = {
    "gloo": "With gloo this is all that the rank does in a step: loader, forward and backward pass.",
    "nccl": (
        "With NCCL this is only the CPU: loader, Python, CPU contention. A slow GPU does not show here: see"
        " `hangwatch check gpu_speed`."
    ),
}


class RankLateness(Value, frozen=True):
    """The median time in seconds by which a rank enqueues a collective behind the median of the other ranks."""

    rank: int | None
    local_rank: int | None
    pid: int
    lateness_seconds: float


class ArrivalStatus(Value, frozen=True, kw_only=True):
    """The arrival order of the ranks of one job on this node, at the place where the latest rank is latest.

    `is_named`: the first of `ranks`, which are latest first, is late. Otherwise `reason` tells why no rank is named:
    "NoRecords", "TooFewRecords", "NoneLate" or "LateByRole". `message` says it as a sentence. `lateness_ratio` (of the
    step), `standard_errors` (above the next rank) and `last_ratio` (of the collectives) are those of the latest rank.
    `ready_in_seconds` is the time until there are enough records, null if unknown. `differences` are sentences: how the
    process or GPU of the named rank differs from those of all other ranks.
    """

    is_named: bool
    reason: str
    message: str
    ranks: tuple[RankLateness, ...]
    library: str
    group: str
    operation: str
    position: int
    records: int
    step_seconds: float
    lateness_ratio: float
    standard_errors: float
    last_ratio: float
    ready_in_seconds: float | None
    differences: tuple[str, ...] = ()


def build_arrival_status(order: ArrivalOrder, job: Job) -> ArrivalStatus:
    """Return the arrival order of a job for /status."""
    by_id, place = {rank.id: rank for rank in job.ranks}, order.place
    ordered = sorted(order.lateness_seconds.items(), key=lambda item: -item[1])
    return ArrivalStatus(
        is_named=order.named is not None,
        reason=order.reason,
        message=_describe(order, by_id),
        ranks=tuple(
            RankLateness(
                rank=by_id[process].rank,
                local_rank=by_id[process].local_rank,
                pid=process.pid,
                lateness_seconds=seconds,
            )
            for process, seconds in ordered
            if process in by_id
        ),
        library=place.library if place else "",
        group=place.group if place else "",
        operation=place.operation if place else "",
        position=place.position if place else 0,
        records=order.records,
        step_seconds=order.step_seconds,
        lateness_ratio=order.lateness_ratio,
        standard_errors=order.standard_errors,
        last_ratio=order.last_ratio,
        ready_in_seconds=order.ready_in_seconds,
        differences=order.differences,
    )


def _describe(order: ArrivalOrder, by_id: dict[ProcessId, Rank]) -> str:
    """Return the verdict as a sentence: which rank is late, by how much, where, and what the library can show."""
    if order.reason == "NoRecords":
        return "No rank can be compared: no collectives of two ranks have been read yet."
    if order.reason == "TooFewRecords":
        ready = order.ready_in_seconds
        wait = "the time is known after the next reading" if ready is None else f"enough in {words.duration(ready)}"
        return f"Too few records: {order.records} of at least {FEWEST_RECORDS} at one place; {wait}."
    assert order.latest is not None
    assert order.place is not None
    latest, seconds = by_id.get(order.latest), order.lateness_seconds[order.latest]
    name = f"rank {latest.rank}" if latest is not None and latest.rank is not None else "a rank"
    name = f"{name} (pid {order.latest.pid})"
    amount = f"{_describe_time(seconds)} ({order.lateness_ratio:.1%} of a step of {_describe_time(order.step_seconds)})"
    if order.reason == "NoneLate":
        return f"No rank is late. The latest is {name}, by {amount}."
    if order.reason == "LateByRole":
        return f"No rank is named: {name} is late by {amount}, but only in a part of the job: this may be its role."
    others = words.count(len(order.lateness_seconds) - 1, "other rank")
    return (
        f"{name[0].upper()}{name[1:]} is late by {amount}: it enqueues {_describe_place(order.place)} after the"
        f" {others}, last in {order.last_ratio:.0%} of {order.records} steps. {_SHOWS[order.place.library]}"
    )


def _describe_place(place: Place) -> str:
    operation = words.printable(f"{place.operation} of group {place.group}")
    return f"{operation} (number {place.position + 1} in the step)" if place.position else operation


def _describe_time(seconds: float) -> str:
    return words.duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
