"""`hangwatch slow`: the rank of each job that enqueues its collectives later than the other ranks."""

import json
from pathlib import Path

import click

from hangwatch import words
from hangwatch.cli.config_choice import settings_from
from hangwatch.cli.options import config_option, url_option
from hangwatch.cli.text_tables import print_table
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import JobState
from hangwatch.state.status import LONG_GAP_SECONDS, JobStatus
from hangwatch.state.unseen import RECORDER, Unseen
from hangwatch.tools.commands.status_client import decode_status, fetch_status

GPU_CHECK = "gpu_speed"  # a slow GPU does not show in the times of collectives


@click.command(short_help="Show which rank of a job is late in each step.")
@config_option
@click.option("--job", "wanted", metavar="NAME", help="Only this job: a name or key from `hangwatch status`.")
@url_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print the JSON of /status with only these jobs, see docs/json.md."
)
def slow(config_path: Path | None, wanted: str | None, url: str | None, as_json: bool) -> int:
    """Show which rank of a job is late in each step, by at least 3 % of it, as PyTorch's flight recorders show.

    Exits 0 if a rank is named, else 1.
    """
    settings, source = settings_from(config_path)
    answer = fetch_status(settings, source, url)
    seen = decode_status(answer)
    jobs = _choose(wanted, seen.jobs)
    if as_json:
        keys = {job.job_key for job in jobs}
        answer["jobs"] = [job for job in answer["jobs"] if job["job_key"] in keys]
        click.echo(json.dumps(answer, indent=2))
    else:
        for job in jobs:
            click.echo(f"job {job.job_id} ({job.job_key}): {_describe(job, seen.unseen)}")
            for difference in () if job.arrival is None else job.arrival.differences:
                click.echo(f"  {difference}")
            if job.arrival is not None and job.arrival.ranks:
                print_table(
                    ("rank", "pid", "late by", "of the step"),
                    [
                        (
                            "" if rank.rank is None else str(rank.rank),
                            str(rank.pid),
                            words.short_duration(rank.lateness_seconds),
                            f"{rank.lateness_seconds / job.arrival.step_seconds:.1%}",
                        )
                        for rank in job.arrival.ranks
                    ],
                    "",
                )
        if not jobs:
            click.echo("no jobs")
        for check in seen.checks:
            if check.check == GPU_CHECK and check.status != "OK":
                click.echo(f"check {check.check}: {check.message}")
    return 0 if any(job.arrival is not None and job.arrival.is_named for job in jobs) else 1


def _choose(wanted: str | None, jobs: tuple[JobStatus, ...]) -> list[JobStatus]:
    """Return the jobs with this key, id or name; all jobs if it is not given. Raises InputError if there is none."""
    chosen = [job for job in jobs if wanted is None or wanted in (job.job_key, job.job_id, job.job_name)]
    if wanted is not None and not chosen:
        listed = "".join(f"\n    {job.job_id} ({job.job_key})" for job in jobs) or " none"
        raise InputError(f"--job {wanted}: the daemon monitors no such job\n  jobs here:{listed}")
    return chosen


def _describe(job: JobStatus, unseen: tuple[Unseen, ...]) -> str:
    is_known = job.state is JobState.ENDED or (job.arrival is not None and job.arrival.is_named)
    gap_seconds = job.progress_gap_seconds or job.quiet_seconds or 0.0
    if not is_known and gap_seconds > max(LONG_GAP_SECONDS, job.usual_gap_seconds or 0.0):
        return (
            f"no new collectives for {words.duration(gap_seconds)} ({job.state.value}): "
            f"`hangwatch status` shows why, `hangwatch dump --job {job.job_key}` looks now"
        )
    if job.arrival is not None and (job.arrival.ranks or job.state is not JobState.ENDED):
        return job.arrival.message
    if job.ranks < 2:
        return "it has only one rank here; slow GPUs of all nodes: hangwatch check gpu_speed --nodes NODES"
    reasons = (str(each) for each in unseen if each.job.job_key == job.job_key and each.source == RECORDER)
    return f"not known: {next(reasons, 'it has ended' if job.state is JobState.ENDED else 'compared once a minute')}"


COMMANDS = (slow,)
