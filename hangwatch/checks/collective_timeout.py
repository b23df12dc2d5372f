"""The collective timeout of each job, against the time that a capture needs before the job ends itself.

torch.distributed gives up on a collective after its timeout and ends the process, and the evidence with it. The timeout
is what the ranks have recorded, else it is derived in `jobs/collective_timeout`. The message says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, ok, warning, worst
from hangwatch.jobs.collective_timeout import VARIABLES, Patience, patience
from hangwatch.model import CheckVerdict, Fault, Job, Point
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

RECORDED = "by its flight recorder"

TIMEOUT = Metric(
    name="collective_timeout_seconds", help="what a collective of the job waits before the job ends itself",
    labels=contract.JOB,
)  # fmt: skip
HEARTBEAT = Metric(
    name="collective_heartbeat_timeout_seconds", help="what PyTorch's monitor waits for a stuck NCCL watchdog",
    labels=contract.JOB,
)  # fmt: skip
DUMP_AFTER = Metric(name="collective_dump_after_seconds", help="seconds from a hang until hangwatch has the stacks")


class Settings(contract.Settings, frozen=True):
    """How much earlier than the job's own end the stacks must have been taken."""

    margin_seconds: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="time that must be left between our stacks and the job's end")
    ] = 30.0


class Sample(contract.Sample, frozen=True):
    """Every job's patience, and ours: None where nobody watches."""

    jobs: tuple[Patience, ...]
    dump_after_seconds: float | None


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the time-out variables of the first rank of each job that can be read."""
    if not node.jobs:
        return None
    patiences, faults = [], []
    for job in node.jobs:
        answers = [proc_pid.variables(node.proc_root, rank.id.pid, VARIABLES) for rank in job.ranks]
        environ = next((answer for answer in answers if isinstance(answer, dict)), None)
        if environ is None:
            faults += [answer for answer in answers if isinstance(answer, Fault)][:1]
        else:
            patiences.append(_with_recorded(patience(job, environ), job, node))
    return Sample(jobs=tuple(patiences), dump_after_seconds=node.dump_after_seconds, faults=tuple(faults))


def _with_recorded(told: Patience, job: Job, node: Node) -> Patience:
    """What the operations of the first rank have recorded as their time-out stands above every assumption."""
    if told.collective_seconds is None:
        return told
    read = node.recorders.read(job.ranks[0].id, job.share, 1)
    newest = {
        (one.library, record.group_id): record.timeout_ms
        for one in read
        if not isinstance(one, Fault)
        for record in one.records
    }
    seconds = min((milliseconds / 1e3 for milliseconds in newest.values() if milliseconds > 0), default=None)
    return told if seconds is None else replace(told, collective_seconds=seconds, source=RECORDED)


def points(sample: Sample) -> Iterable[Point]:
    """Both time-outs of each job, and when our stacks are there."""
    if sample.dump_after_seconds is not None:
        yield DUMP_AFTER.point(sample.dump_after_seconds)
    for job in sample.jobs:
        if job.collective_seconds is not None:
            yield TIMEOUT.point(job.collective_seconds, **job.job.labels)
        if job.heartbeat_seconds is not None:
            yield HEARTBEAT.point(job.heartbeat_seconds, **job.job.labels)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Compare each job's end with our own time to the stacks."""
    sample = window[-1]
    ours = sample.dump_after_seconds
    findings = [finding for job in sample.jobs if ours is not None and (finding := _judge_job(job, ours, settings))]
    summary = contract.listed([_sentence(job) for job in sample.jobs])
    if ours is None:
        return worst(findings, ok("NobodyWatches", f"{summary}; no hangwatch daemon to compare that with"))
    return worst(findings, ok("StacksComeFirst", f"{summary}; hangwatch has the stacks after {ours:.0f} s"))


def _judge_job(job: Patience, ours: float, settings: Settings) -> CheckVerdict | None:
    limits = {"a collective's time-out": job.collective_seconds, "the heartbeat time-out": job.heartbeat_seconds}
    stated = {name: seconds for name, seconds in limits.items() if seconds is not None}
    name = min(stated, key=lambda name: stated[name], default=None)
    if name is None or stated[name] >= ours + settings.margin_seconds:
        return None
    wanted = ours + settings.margin_seconds
    why = "if its watchdog is stuck, too" if name == "the heartbeat time-out" else job.source
    message = (
        f"job {job.job} ends itself {stated[name]:.0f} s into a hang ({name}, {why}), "
        f"hangwatch has its stacks only after {ours:.0f} s"
    )
    if name == "the heartbeat time-out":
        setting = f"export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={wanted:.0f} in the job"
    else:
        setting = f"pass timeout=timedelta(seconds={wanted:.0f}) to init_process_group"
    return warning(
        "EndsItselfFirst", message, f"{setting}, or lower [detector] hold_seconds in hangwatch's configuration"
    )


def _sentence(job: Patience) -> str:
    assumed = "" if job.source == RECORDED else ", unless its code says otherwise"
    if job.collective_seconds is None:
        waits = f"waits for ever ({job.source})"
    else:
        waits = f"waits {job.collective_seconds:.0f} s ({job.source}{assumed})"
    myth = f"; {' and '.join(job.ignored)} is set, which nothing reads" if job.ignored else ""
    return f"job {job.job} {waits}{myth}"


CHECK = Check(
    name="collective_timeout",
    every_seconds=60,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(TIMEOUT, HEARTBEAT, DUMP_AFTER),
    absent="no training job runs on this node",
)
