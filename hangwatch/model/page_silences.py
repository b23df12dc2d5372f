"""Silences: jobs that do not page for some time, because a person asked for it."""

from hangwatch.model.jobs import JobName
from hangwatch.model.value import Value

LONGEST_SILENCE_SECONDS = 7 * 86400.0
SHORTEST_SILENCE_SECONDS = 60.0
LONGEST_REASON = 160  # characters; the reason is a label of a metric


class PageSilence(Value, frozen=True):
    """A job that does not page until `until_unix_seconds`. User `uid` asked for it. `reason` may be empty."""

    job_id: str
    job_key: str
    until_unix_seconds: float
    uid: int
    reason: str = ""

    @property
    def name(self) -> JobName:
        """Name and key of the job."""
        return JobName(job_id=self.job_id, job_key=self.job_key)


class SilenceAnswer(Value, frozen=True):
    """The daemon's answer about a silence. `problem` is the reason why a restart of the daemon ends the silence."""

    silence: PageSilence
    problem: str | None = None
