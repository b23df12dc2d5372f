"""The arrival order of a job as /status and incidents show it, with a sentence about the late rank. Pure."""

from hangwatch import words
from hangwatch.collectives.arrival import FEWEST_RECORDS, ArrivalOrder
from hangwatch.model import ArrivalStatus, Job, ProcessId, Rank, RankLateness

_SHOWS_ON_CPU = "With gloo this is all that the rank does in a step: loader, forward and backward pass."
_SHOWS_ON_GPU = (
    "With NCCL this is only the CPU: loader, Python, CPU contention. A slow GPU does not show here: see"
    " `hangwatch check gpu_speed`."
)


def build_arrival_status(order: ArrivalOrder, job: Job) -> ArrivalStatus:
    """Return the arrival order of a job for /status and incidents."""
    by_id, place = {rank.id: rank for rank in job.ranks}, order.place
    return ArrivalStatus.copy_from(
        order,
        is_named=order.named is not None,
        message=_describe(order, by_id),
        ranks=tuple(
            RankLateness.copy_from(by_id[process], process, lateness_seconds=seconds)
            for process, seconds in sorted(order.lateness_seconds.items(), key=lambda item: -item[1])
            if process in by_id
        ),
        library=place.library if place else "",
        group=place.group if place else "",
        operation=place.operation if place else "",
        position=place.position if place else 0,
    )


def _describe(order: ArrivalOrder, by_id: dict[ProcessId, Rank]) -> str:
    """Return the verdict as a sentence: which rank is late, by how much, where, and what the library can show."""
    if order.reason == "NoRecords":
        return "No rank can be compared: no new collectives of two ranks have been read."
    if order.reason == "TooFewRecords":
        ready = order.ready_in_seconds
        wait = "the time is known after the next reading" if ready is None else f"enough in {words.duration(ready)}"
        if order.records >= FEWEST_RECORDS:
            return f"{words.count(order.records, 'record')} at one place, but of too short a time; {wait}."
        return f"Too few records: {order.records} of at least {FEWEST_RECORDS} at one place; {wait}."
    assert order.latest is not None
    assert order.place is not None
    latest, seconds = by_id.get(order.latest), order.lateness_seconds[order.latest]
    name = f"rank {latest.rank}" if latest is not None and latest.rank is not None else "a rank"
    name = f"{name} (pid {order.latest.pid})"
    step = words.short_duration(order.step_seconds)
    amount = f"{words.short_duration(seconds)} ({order.lateness_ratio:.1%} of a step of {step})"
    if order.reason == "NoneLate":
        return f"No rank is late. The latest is {name}, by {amount}."
    if order.reason == "LateByRole":
        return f"No rank is named: {name} is late by {amount}, but only in a part of the job: this may be its role."
    others = words.count(len(order.lateness_seconds) - 1, "other rank")
    shows = _SHOWS_ON_CPU if order.place.library == "gloo" else _SHOWS_ON_GPU
    at = words.printable(f"{order.place.operation} of group {order.place.group}")
    at += f" (number {order.place.position + 1} in the step)" if order.place.position else ""
    return (
        f"{name[0].upper()}{name[1:]} is late by {amount}: it enqueues {at} after the"
        f" {others}, last in {order.last_ratio:.0%} of {order.records} steps. {shows}"
    )
