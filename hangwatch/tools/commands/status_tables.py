"""Tables of what the daemon on this node monitors, printed by `hangwatch status`."""

import time
from collections import Counter

import click

from hangwatch import words
from hangwatch.cli.text_tables import engine_text, print_table
from hangwatch.model import JobName, JobState
from hangwatch.state.status import JobStatus, Status
from hangwatch.tools.commands.job_descriptions import (
    describe_silence,
    describe_state,
    describe_straggler,
    describe_timeout,
    shown_seconds,
)


def print_status(seen: Status) -> None:
    """Print the status as tables."""
    unix_now = time.time()
    click.echo(f"{seen.node}  GPU sampler: {seen.sampler}  incidents: {seen.store}")
    same_id = Counter(job.job_id for job in seen.jobs)

    def name(job: JobStatus | JobName) -> str:
        """Return the id of a job, with its key if several jobs have the same id."""
        return f"{job.job_id} {job.job_key}" if same_id[job.job_id] > 1 else job.job_id

    gpus = [
        (
            str(gpu.index),
            gpu.name or "",
            _shown(gpu.power_watts, "{:.0f} W"),
            _shown(gpu.power_limit_watts, "{:.0f} W"),
            _shown(gpu.utilization_ratio, "{:.0%}"),
            ", ".join(map(name, gpu.jobs)),
            gpu.fault or "",
        )
        for gpu in seen.gpus
    ]
    jobs = [
        (
            name(job),
            job.owner,
            job.launcher,
            job.user if job.user and job.user != job.owner else "",
            describe_state(job),
            f"{shown_seconds(job):.0f} s",
            str(job.ranks) + (f" ({absent} absent)" if absent else ""),
            _shown(job.collectives_per_second, "{:.3g}/s"),
            _what(job, unix_now),
        )
        for job in seen.jobs
        for absent in [sum(last - first + 1 for first, last in job.absent_local_ranks)]
    ]
    checks = [
        (check.check, check.status, words.ago(unix_now - check.ran_unix_seconds), check.message)
        for check in seen.checks
    ]
    print_table(("GPU", "name", "power", "limit", "utilisation", "job", "fault"), gpus, "no GPUs")
    print_table(("job", "owner", "launcher", "user", "state", "for", "ranks", "collectives", "what"), jobs, "no jobs")
    for engine in seen.engines:
        click.echo(engine_text(engine))
    print_table(("check", "status", "ran", "what"), checks, "no checks yet")
    monitored = [job for job in seen.jobs if job.state is not JobState.ENDED]
    if seen.sampler != "ok" and any(job.collectives_per_second is None for job in monitored):
        click.echo(
            "Without GPU readings and flight recorders the daemon detects no hang: use `hangwatch dump --rounds 3` to"
            " check by hand."
        )
    for unseen in seen.unseen:
        about = f"no {unseen.source} of {words.count(unseen.ranks, 'rank')} of job {name(unseen.job)}"
        click.echo(f"{about}: {unseen.detail} ({unseen.reason})")
    for left_out in seen.left_out:
        click.echo(f"not monitored {left_out}: exceeds a limit in [jobs], see `hangwatch config --sample`")


def _what(job: JobStatus, unix_now: float) -> str:
    """Return the verdict on a job, else the detector's message.

    Add its last progress, the known pause for which its page waits, its timeout, its late rank and its silence.
    """
    message, quiet = job.verdict or job.message, job.quiet_seconds
    began = "" if quiet is None else f"no progress since {words.utc(unix_now - quiet, '%H:%M:%S UTC')}"
    pause = job.message.partition("; ")[2] if job.state is JobState.HUNG and job.verdict and not job.page else ""
    tails = (began, pause, describe_timeout(job, unix_now), describe_straggler(job), describe_silence(job))
    for more in filter(None, tails):
        message = f"{message.removesuffix('.')}; {more}"
    return message


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
