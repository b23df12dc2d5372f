"""Whether PyTorch's flight recorder is there in each job, and what to set where it is not: a hint, never a finding.

Out of it hangwatch reads who has not come to which collective. A rank of a job is asked until it has told, once; what
any other look has read of it meanwhile counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, ok
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Point, Value
from hangwatch.model.flight_records import Library, RankRecords
from hangwatch.probes.node.machine import Node

MOST_ASKED_OF_AN_OWNER = 8
EVERY_SECONDS = 300

CAPACITY = Metric(
    name="flight_recorder_capacity", help="operations that PyTorch's flight recorder has room for; 0 where it is off",
    labels=contract.JOB,
)  # fmt: skip

State = Literal["there", "unused", "off", "unread"]


class Settings(contract.Settings, frozen=True):
    """Nothing to set but whether it runs."""


class Presence(Value, frozen=True):
    """The recorder of one job: `capacity` is None where it is not known; `detail` why, or what to set."""

    job: JobName
    state: State
    libraries: tuple[Library, ...] = ()
    capacity: int | None = None
    detail: str = ""


class Sample(contract.Sample, frozen=True):
    """The jobs whose ranks use PyTorch, and how many jobs have not been asked yet."""

    jobs: tuple[Presence, ...]
    not_asked: int = 0


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """What a rank of each job has told, or tells now; of one owner a few are asked at a time, in turns."""
    told, open_jobs = [], []
    for job in node.jobs:
        if job.ranks:
            known = node.recorders.lasting(job.ranks[0].id)
            told.extend([_presence(job, known)] if known else [])
            open_jobs.extend([] if known else [job])
    asked = list(_in_turns(open_jobs, int(node.clock.unix() // EVERY_SECONDS)))
    told += [_presence(job, node.recorders.read(job.ranks[0].id, job.share, 1)) for job in asked]
    found = tuple(one for one in told if one is not None)
    not_asked = len(open_jobs) - len(asked)
    return Sample(jobs=found, not_asked=not_asked) if found or not_asked else None


def _in_turns(jobs: Sequence[Job], turn: int) -> Iterator[Job]:
    """Of each owner's jobs a few, others in each turn."""
    of_owner: dict[str, list[Job]] = {}
    for job in jobs:
        of_owner.setdefault(job.share, []).append(job)
    for theirs in of_owner.values():
        first = turn * MOST_ASKED_OF_AN_OWNER % len(theirs)
        yield from (theirs[first:] + theirs[:first])[:MOST_ASKED_OF_AN_OWNER]


def _presence(job: Job, told: Sequence[RankRecords | Fault]) -> Presence | None:
    """None where its rank has no torch, or is gone."""
    recorders = [one for one in told if isinstance(one, RankRecords)]
    faults = [one for one in told if isinstance(one, Fault)]
    with_room = [one for one in recorders if one.capacity]
    if with_room:
        libraries = tuple(sorted({one.library for one in with_room}))
        capacity = max(one.capacity for one in with_room)
        return Presence(job=job.name, state="there", libraries=libraries, capacity=capacity)
    if off := next((one for one in faults if one.reason == "RecorderOff"), None):
        return Presence(job=job.name, state="off", capacity=0, detail=off.remedy)
    if recorders:
        return Presence(job=job.name, state="unused")
    fault = next((one for one in faults if one.reason not in ("NoTorch", "ProcessGone")), None)
    return Presence(job=job.name, state="unread", detail=f"{fault.reason}, {fault.detail}") if fault else None


def points(sample: Sample) -> Iterable[Point]:
    """The room of each job's recorder, where it is known."""
    for one in sample.jobs:
        if one.capacity is not None:
            yield CAPACITY.point(one.capacity, **one.job.labels)


def judge(window: Sequence[Sample], _: Settings) -> CheckVerdict:
    """Never a finding; the jobs without one are said first, with what to set."""
    sample = window[-1]
    told = Counter(one.state for one in sample.jobs)
    say = [f"a flight recorder in {told['there']} of {words.count(len(sample.jobs), 'job')} with PyTorch"]
    say += [_sentence(one) for state in ("off", "unread", "unused") for one in sample.jobs if one.state == state][:3]
    if (more := len(sample.jobs) - told["there"] - len(say) + 1) > 0:
        say.append(f"{more} more without one")
    if sample.not_asked:
        say.append(f"{words.count(sample.not_asked, 'job')} not asked yet")
    return ok("Hint" if told["off"] else "Told", "; ".join(say))


def _sentence(one: Presence) -> str:
    if one.state == "unused":
        return f"job {one.job} has made no collective yet"
    why = "has it off" if one.state == "off" else "does not show it"
    return f"job {one.job} {why}: {one.detail}"


def table(sample: Sample) -> contract.Rows:
    """One row a job."""
    header = ("job", "recorder", "of", "room for", "why, or what to set")
    return [header, *(_row(one) for one in sample.jobs)]


def _row(one: Presence) -> tuple[str, ...]:
    capacity = "" if one.capacity is None else f"{one.capacity:,}"
    return str(one.job), one.state, " ".join(one.libraries), capacity, one.detail


CHECK = Check(
    name="flight_recorder",
    every_seconds=EVERY_SECONDS,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(CAPACITY,),
    absent="no job here has loaded PyTorch",
    table=table,
)
