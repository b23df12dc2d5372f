"""The collective timeout of each job, compared with the time that hangwatch needs to take stacks.

torch.distributed ends a process when a collective times out, and its stacks are lost. The check reads the timeout from
the flight recorder of the ranks, or else from environment variables and PyTorch's defaults. The message names the
source.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, ok, warning, worst
from hangwatch.jobs.collective_timeout import VARIABLES, TimeoutSettings, read_timeouts
from hangwatch.model import CheckVerdict, Fault, Job
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

RECORDED = "from its flight recorder"

MARGIN_SECONDS = 30.0  # least time between the end of a capture and the collective timeout


class Sample(contract.Sample, frozen=True):
    """The timeouts of every job, and `dump_after_seconds`: the seconds from a hang until hangwatch has the stacks.

    `dump_after_seconds` is None if no daemon runs.
    """

    jobs: tuple[TimeoutSettings, ...]
    dump_after_seconds: float | None


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the timeouts of each job from the environment of its first readable rank, and from its flight recorder."""
    if not node.jobs:
        return None
    patiences, faults = [], []
    for job in node.jobs:
        answers = [proc_pid.variables(node.proc_root, rank.id.pid, VARIABLES) for rank in job.ranks]
        environ = next((answer for answer in answers if isinstance(answer, dict)), None)
        if environ is None:
            faults += [answer for answer in answers if isinstance(answer, Fault)][:1]
        else:
            patiences.append(_with_recorded(read_timeouts(job, environ), job, node))
    return Sample(jobs=tuple(patiences), dump_after_seconds=node.dump_after_seconds, faults=tuple(faults))


def _with_recorded(derived: TimeoutSettings, job: Job, node: Node) -> TimeoutSettings:
    """Replace the collective timeout with the shortest one that the first rank has recorded for its operations."""
    if derived.collective_seconds is None:
        return derived
    newest = {
        (recorder.library, record.group_id): record.timeout_ms
        for recorder in node.recorders.read(job.ranks[0].id, job.share, 1)
        if not isinstance(recorder, Fault)
        for record in recorder.records
    }
    seconds = min((milliseconds / 1e3 for milliseconds in newest.values() if milliseconds > 0), default=None)
    return derived if seconds is None else replace(derived, collective_seconds=seconds, source=RECORDED)


METRICS = (
    Metrics[Sample, Sample](
        Metric(
            "collective_dump_after_seconds",
            "seconds from a hang until hangwatch has the stacks",
            lambda sample: sample.dump_after_seconds,
        ),
    ),
    Metrics[Sample, TimeoutSettings](
        Metric(
            "collective_timeout_seconds",
            "timeout of the job's collectives, after which the job ends",
            lambda job: job.collective_seconds,
        ),
        Metric(
            "collective_heartbeat_timeout_seconds",
            "timeout of PyTorch's monitor for a stuck NCCL watchdog",
            lambda job: job.heartbeat_seconds,
        ),
        subjects=lambda sample: sample.jobs,
        labels=contract.JOB,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Find jobs that a timeout would end before hangwatch has their stacks."""
    sample = window[-1]
    dump_after = sample.dump_after_seconds
    summary = contract.join_first([_sentence(job) for job in sample.jobs])
    if dump_after is None:
        return ok("DaemonNotRunning", f"{summary}; no hangwatch daemon is running to compare with")
    findings = [finding for job in sample.jobs if (finding := _judge_job(job, dump_after))]
    return worst(findings, ok("StacksComeFirst", f"{summary}; hangwatch takes stacks after {dump_after:.0f} s"))


def _judge_job(job: TimeoutSettings, dump_after_seconds: float) -> CheckVerdict | None:
    limit = dump_after_seconds + MARGIN_SECONDS
    timeouts = (
        (
            job.collective_seconds,
            f"collective timeout, {job.source}",
            f"pass timeout=timedelta(seconds={limit:.0f}) to init_process_group",
        ),
        (
            job.heartbeat_seconds,
            "heartbeat timeout, applies if the NCCL watchdog is stuck",
            f"export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={limit:.0f} in the job",
        ),
    )
    too_short = [
        (seconds, source, setting) for seconds, source, setting in timeouts if seconds is not None and seconds < limit
    ]
    if not too_short:
        return None
    seconds, source, setting = min(too_short, key=lambda timeout: timeout[0])
    message = (
        f"a hang of job {job.job} ends after {seconds:.0f} s ({source}); "
        f"hangwatch takes stacks only after {dump_after_seconds:.0f} s"
    )
    return warning("EndsItselfFirst", message, f"{setting}, or reduce [detector] hold_seconds of hangwatch")


def _sentence(job: TimeoutSettings) -> str:
    assumed = "" if job.source == RECORDED else ", unless its code sets another timeout"
    if job.collective_seconds is None:
        timeout = f"has no collective timeout ({job.source})"
    else:
        timeout = f"has a collective timeout of {job.collective_seconds:.0f} s ({job.source}{assumed})"
    verb = "is" if len(job.ignored) == 1 else "are"
    ignored = f"; {' and '.join(job.ignored)} {verb} set but ignored by PyTorch" if job.ignored else ""
    return f"job {job.job} {timeout}{ignored}"


CHECK = Check(observe, METRICS, judge, absent="no training job runs on this node")
