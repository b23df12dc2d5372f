"""`hangwatch status`: what the daemon on this node sees."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import click

from hangwatch import words
from hangwatch.cli.config_choice import config_option, settings_from
from hangwatch.cli.incident_sources import http_config_option
from hangwatch.cli.status_answer import answer_of, status_of
from hangwatch.cli.text_tables import looked, print_table
from hangwatch.model import JobName
from hangwatch.state.status import JobStatus, Status


@click.command()
@config_option
@click.option("--url", help="Where the daemon serves; by default the port of the configuration on this host.")
@http_config_option("Where the daemon asks who you are")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the answer of /status as it is, see docs/json.md.")
@click.option("--watch", "is_watched", is_flag=True, help="As `hangwatch top`: every second, until q or Ctrl-C.")
def status(
    config_path: Path | None, url: str | None, http_config: Path | None, as_json: bool, is_watched: bool
) -> int | None:
    """What the daemon on this node sees: GPUs, jobs and their states, checks."""
    settings, source = settings_from(config_path)
    if is_watched:
        if as_json:
            raise click.UsageError("give either --watch or --json")
        from hangwatch.cli import top

        return top.watch(lambda: status_of(answer_of(settings, source, url, http_config)))
    answer = answer_of(settings, source, url, http_config)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        print_status(status_of(answer))
    return None


def print_status(seen: Status) -> None:
    """The status as tables."""
    unix_now = time.time()
    click.echo(f"{seen.node}  GPU sampler: {seen.sampler}  incidents: {seen.store}")
    shared = Counter(job.job_id for job in seen.jobs)

    def name(job: JobStatus | JobName) -> str:
        """With its key, where two have the name."""
        return f"{job.job_id} {job.job_key}" if shared[job.job_id] > 1 else job.job_id

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
            job.state.value + (" (page)" if job.page else ""),
            f"{job.seconds_in_state:.0f} s",
            str(job.ranks) + (f" ({_absent(job)} absent)" if job.absent_local_ranks else ""),
            _what(job, unix_now),
        )
        for job in seen.jobs
    ]
    checks = [
        (check.check, check.status, looked(check.ran_unix_seconds, unix_now), check.message) for check in seen.checks
    ]
    print_table(("GPU", "name", "power", "limit", "utilisation", "job", "fault"), gpus, "no GPUs")
    print_table(("job", "owner", "launcher", "user", "state", "for", "ranks", "what"), jobs, "no jobs")
    if jobs and seen.sampler != "ok":
        click.echo("Without readings of the GPUs no hang is noticed here: `hangwatch dump --rounds 3` looks by hand.")
    print_table(("check", "status", "looked", "what"), checks, "no checks yet")
    for left_out in seen.left_out:
        click.echo(f"left out {left_out}: see [jobs] in `hangwatch config --sample`")


def _what(job: JobStatus, unix_now: float) -> str:
    """The verdict, or what the detector says; and when the job ends itself, where that is known."""
    told, ends = job.verdict or job.message, ends_itself(job, unix_now)
    return f"{told.removesuffix('.')}; {ends}" if ends else told


def ends_itself(job: JobStatus, unix_now: float) -> str:
    """When a job that hangs ends itself: `ends itself in 7 min 40 s, at 03:22:40 UTC`; empty where nobody knows."""
    at = job.ends_itself_unix_seconds
    if at is None:
        return ""
    if at <= unix_now:
        return f"its collective time-out passed at {words.utc(at, '%H:%M:%S UTC')}"
    return f"ends itself in {words.duration(at - unix_now)}, at {words.utc(at, '%H:%M:%S UTC')}"


def _absent(job: JobStatus) -> int:
    return sum(last - first + 1 for first, last in job.absent_local_ranks)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


COMMANDS = (status,)
