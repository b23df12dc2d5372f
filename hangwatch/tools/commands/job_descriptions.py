"""Short descriptions of a job in `status` and `top`: its state, silence, straggler and collective timeout. Pure."""

from hangwatch import words
from hangwatch.state.status import JobStatus


def describe_state(job: JobStatus) -> str:
    """Return the state of a job as text: `hung (page)`, `hung (silenced)`."""
    label = " (page)" if job.page else "" if job.silenced_until_unix_seconds is None else " (silenced)"
    return job.state.value + label


def shown_seconds(job: JobStatus) -> float:
    """Return the time since the last progress of a job that is quiet, hung or stalled; else that in its state."""
    return job.seconds_in_state if job.quiet_seconds is None else job.quiet_seconds


def describe_silence(job: JobStatus) -> str:
    """Return the silence of a job as text: `silenced until 16:30:00 UTC: I debug it`; "" if it is not silenced."""
    if job.silenced_until_unix_seconds is None:
        return ""
    until = f"silenced until {words.utc(job.silenced_until_unix_seconds)}"
    return f"{until}: {job.silence_reason}" if job.silence_reason else until


def describe_straggler(job: JobStatus) -> str:
    """Return the rank that is late as text: `rank 3 is late by 12% of each step`; "" if no rank is named."""
    if job.arrival is None or not job.arrival.is_named:
        return ""
    latest = job.arrival.ranks[0]
    rank = f"pid {latest.pid}" if latest.rank is None else f"rank {latest.rank}"
    return f"{rank} is late by {job.arrival.lateness_ratio:.0%} of each step"


def describe_timeout(job: JobStatus, unix_now: float) -> str:
    """Return a hung job's collective timeout as text: `times out in 7 min 40 s, at 03:22:40 UTC`; "" if not known."""
    at = job.ends_itself_unix_seconds
    if at is None:
        return ""
    if at <= unix_now:
        return f"its collective timeout passed at {words.utc(at, '%H:%M:%S UTC')}"
    return f"times out in {words.duration(at - unix_now)}, at {words.utc(at, '%H:%M:%S UTC')}"
