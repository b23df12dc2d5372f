"""State of PyTorch's flight recorder in each job, and how to turn it on. A recorder of an unknown form is a warning.

A flight recorder shows which rank has not joined which collective. The check reads one rank of each job. After the
first success, by this check or by a capture, it does not read that rank again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, ok, warning
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Value, list_by_key
from hangwatch.model.flight_records import Library, RankRecords
from hangwatch.probes.node.machine import Node

MOST_JOBS_OF_AN_OWNER = 8
EVERY_SECONDS = 300


State = Literal["there", "unused", "off", "unread"]


class Presence(Value, frozen=True):
    """The state of the flight recorder of one job. `capacity` is its number of records; None if not known.

    `detail` is the error for a recorder that cannot be read, or the setting that turns the recorder on. `remedy`
    is set for a recorder of an unknown form.
    """

    job: JobName
    state: State
    libraries: tuple[Library, ...] = ()
    capacity: int | None = None
    detail: str = ""
    remedy: str = ""


class Sample(contract.Sample, frozen=True):
    """The recorders of the jobs that use PyTorch, and the number of jobs that have not been read yet."""

    jobs: tuple[Presence, ...]
    unread_jobs: int = 0


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the recorder of one rank of each job, or take the earlier result: a few new jobs of each owner a run."""
    presences, pending = [], []
    for job in node.jobs:
        if job.ranks and (answers := node.recorders.unchanging_part(job.ranks[0].id)):
            presences.append(_presence(job, answers))
        elif job.ranks:
            pending.append(job)
    selected = list(_select_in_turns(pending, int(node.clock.unix() // EVERY_SECONDS)))
    presences += [_presence(job, node.recorders.read(job.ranks[0].id, job.share, 1)) for job in selected]
    jobs = tuple(presence for presence in presences if presence is not None)
    unread_jobs = len(pending) - len(selected)
    return Sample(jobs=jobs, unread_jobs=unread_jobs) if jobs or unread_jobs else None


def _select_in_turns(jobs: Sequence[Job], turn: int) -> Iterator[Job]:
    """Yield a few jobs of each owner: the next ones in each `turn`, which is the number of the run."""
    for owned in list_by_key((job.share, job) for job in jobs).values():
        first = turn * MOST_JOBS_OF_AN_OWNER % len(owned)
        yield from (owned[first:] + owned[:first])[:MOST_JOBS_OF_AN_OWNER]


def _presence(job: Job, answers: Sequence[RankRecords | Fault]) -> Presence | None:
    """Return the state of a job's recorder; None if the rank does not use PyTorch or has ended."""
    recorders = [answer for answer in answers if isinstance(answer, RankRecords)]
    faults = [answer for answer in answers if isinstance(answer, Fault)]
    active = [recorder for recorder in recorders if recorder.capacity]
    if active:
        libraries = tuple(sorted({recorder.library for recorder in active}))
        capacity = max(recorder.capacity for recorder in active)
        return Presence(job=job.name, state="there", libraries=libraries, capacity=capacity)
    if off := next((fault for fault in faults if fault.reason == "RecorderOff"), None):
        return Presence(job=job.name, state="off", capacity=0, detail=off.remedy)
    fault = next((fault for fault in faults if fault.reason not in ("NoTorch", "ProcessGone")), None)
    if fault:
        remedy = fault.remedy if fault.reason == "RecorderUnread" else ""
        return Presence(job=job.name, state="unread", detail=f"{fault.reason}, {fault.detail}", remedy=remedy)
    return Presence(job=job.name, state="unused") if recorders else None


METRICS = (
    Metrics[Sample, Presence](
        Metric(
            "flight_recorder_capacity",
            "operations that PyTorch's flight recorder can hold; 0 if it is off",
            lambda presence: presence.capacity,
        ),
        subjects=lambda sample: sample.jobs,
        labels=contract.JOB,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Return the number of recorders that are on, and the jobs without one.

    For a job without a recorder, it names the setting that turns the recorder on. WARNING if the form of a recorder is
    unknown: then hangwatch is older than PyTorch.
    """
    sample = window[-1]
    counts = Counter(presence.state for presence in sample.jobs)
    sentences = [f"flight recorder on in {counts['there']} of {words.count(len(sample.jobs), 'job')} with PyTorch"]
    without = [job for state in ("off", "unread", "unused") for job in sample.jobs if job.state == state]
    sentences += [_sentence(presence) for presence in without[:3]]
    if len(without) > 3:
        sentences.append(f"{words.count(len(without) - 3, 'more job')} without a recorder")
    if any(job.state in ("off", "unread") for job in without):
        sentences.append("without it, hangs are found in minutes instead of seconds")
    if sample.unread_jobs:
        sentences.append(f"{words.count(sample.unread_jobs, 'job')} not read yet")
    message = "; ".join(sentences)
    if remedy := next((presence.remedy for presence in without if presence.remedy), ""):
        return warning("RecorderUnread", message, remedy)
    return ok("Hint" if counts["off"] else "RecordersRead", message)


def _sentence(presence: Presence) -> str:
    if presence.state == "unused":
        return f"job {presence.job} has not used a collective yet"
    problem = "it is off in" if presence.state == "off" else "it cannot be read in"
    return f"{problem} job {presence.job}: {presence.detail}"


def table(sample: Sample) -> contract.Rows:
    """Return one row per job."""
    yield "job", "recorder", "libraries", "capacity", "cause, or what to set"
    for presence in sample.jobs:
        capacity = None if presence.capacity is None else f"{presence.capacity:,}"
        yield presence.job, presence.state, " ".join(presence.libraries), capacity, presence.detail


CHECK = Check(
    observe, METRICS, judge, table, every_seconds=EVERY_SECONDS, absent="no job on this node has loaded PyTorch"
)
