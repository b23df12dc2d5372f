"""Tables of what the daemon on this node monitors, for `hangwatch status` and `hangwatch top`."""

import time
from collections import Counter

from hangwatch import words
from hangwatch.cli.text_tables import engine_text, table_text
from hangwatch.model import JobName, JobState
from hangwatch.state.status import JobStatus, Status

_JOB_HEADER = ("job", "owner", "launcher", "user", "state", "for", "ranks", "power / quiet", "collectives", "what")
_ORDER = {state: place for place, state in enumerate((JobState.HUNG, JobState.STALLED, JobState.SUSPECTED))}


def status_text(seen: Status) -> str:
    """Return the status as tables. Jobs and checks that need an operator are first."""
    unix_now = time.time()
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
    urgent_first = sorted(seen.jobs, key=lambda job: _ORDER.get(job.state, len(_ORDER)))
    jobs = [_job_cells(job, name(job), unix_now) for job in urgent_first]
    checks = [
        (check.check, check.status, words.ago(unix_now - check.ran_unix_seconds), check.message)
        for check in sorted(seen.checks, key=lambda check: check.status == "OK")
    ]
    parts = [
        words.printable(f"{seen.node}  GPU sampler: {seen.sampler}  incidents: {seen.store}"),
        table_text(_JOB_HEADER, jobs, "no jobs"),
        *map(engine_text, seen.engines),
        table_text(("GPU", "name", "power", "limit", "utilisation", "job", "fault"), gpus, "no GPUs"),
        table_text(("check", "status", "ran", "what"), checks, "no checks yet"),
    ]
    monitored = [job for job in seen.jobs if job.state is not JobState.ENDED]
    if seen.sampler != "ok" and any(job.collectives_per_second is None for job in monitored):
        parts.append(
            "Without GPU readings and flight recorders the daemon detects no hang: use `hangwatch dump --rounds 3` to"
            " check by hand."
        )
    for unseen in seen.unseen:
        about = f"no {unseen.source} of {words.count(unseen.ranks, 'rank')} of job {name(unseen.job)}"
        parts.append(words.printable(f"{about}: {unseen.detail} ({unseen.reason})"))
    for left_out in seen.left_out:
        parts.append(
            words.printable(f"not monitored {left_out}: exceeds a limit in [jobs], see `hangwatch config --sample`")
        )
    return "\n".join(parts)


def _job_cells(job: JobStatus, name: str, unix_now: float) -> tuple[str, ...]:
    """Return the cells of a job under `_JOB_HEADER`."""
    absent = sum(last - first + 1 for first, last in job.absent_local_ranks)
    return (
        name if job.job_name in ("", job.job_id) else f"{job.job_name} ({name})",
        job.owner,
        job.launcher,
        job.user if job.user and job.user != job.owner else "",
        _describe_state(job),
        words.duration(round(_shown_seconds(job))),
        str(job.ranks) + (f" ({absent} absent)" if absent else ""),
        " / ".join(filter(None, (_shown(watts, "{:.0f} W") for watts in (job.power_watts, job.line_watts)))),
        _shown(job.collectives_per_second, "{:.3g}/s"),
        _what(job, unix_now),
    )


def _what(job: JobStatus, unix_now: float) -> str:
    """Return the verdict on a job, else the detector's message.

    Add its last progress, the known pause for which its page waits, its timeout, its late rank and its silence.
    """
    message, quiet = job.verdict or job.message, job.quiet_seconds
    began = "" if quiet is None else f"no progress since {words.utc(unix_now - quiet, '%H:%M:%S UTC')}"
    pause = job.message.partition("; ")[2] if job.state is JobState.HUNG and job.verdict and not job.page else ""
    tails = (began, pause, _describe_timeout(job, unix_now), _describe_straggler(job), _describe_silence(job))
    for more in filter(None, tails):
        message = f"{message.removesuffix('.')}; {more}"
    return message


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _describe_state(job: JobStatus) -> str:
    """Return the state of a job as text: `hung (page)`, `hung (silenced)`."""
    label = " (page)" if job.page else "" if job.silenced_until_unix_seconds is None else " (silenced)"
    return job.state.value + label


def _shown_seconds(job: JobStatus) -> float:
    """Return the time since the last progress of a job that is quiet, hung or stalled; else that in its state."""
    return job.seconds_in_state if job.quiet_seconds is None else job.quiet_seconds


def _describe_silence(job: JobStatus) -> str:
    """Return the silence of a job as text: `silenced until 16:30:00 UTC: I debug it`; "" if it is not silenced."""
    if job.silenced_until_unix_seconds is None:
        return ""
    until = f"silenced until {words.utc(job.silenced_until_unix_seconds)}"
    return f"{until}: {job.silence_reason}" if job.silence_reason else until


def _describe_straggler(job: JobStatus) -> str:
    """Return the rank that is late as text: `rank 3 is late by 12% of each step`; "" if no rank is named."""
    if job.arrival is None or not job.arrival.is_named:
        return ""
    latest = job.arrival.ranks[0]
    rank = f"pid {latest.pid}" if latest.rank is None else f"rank {latest.rank}"
    return f"{rank} is late by {job.arrival.lateness_ratio:.0%} of each step"


def _describe_timeout(job: JobStatus, unix_now: float) -> str:
    """Return a hung job's collective timeout as text: `times out in 7 min 40 s, at 03:22:40 UTC`; "" if not known."""
    at = job.ends_itself_unix_seconds
    if at is None:
        return ""
    if at <= unix_now:
        return f"its collective timeout passed at {words.utc(at, '%H:%M:%S UTC')}"
    return f"times out in {words.duration(at - unix_now)}, at {words.utc(at, '%H:%M:%S UTC')}"
