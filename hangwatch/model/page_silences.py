"""Silences: jobs that do not page for some time, because a person asked for it."""

from hangwatch.model.jobs import JobName
from hangwatch.model.value import Value

LONGEST_SILENCE_SECONDS = 7 * 86400.0
SHORTEST_SILENCE_SECONDS = 60.0
LONGEST_REASON = 160  # characters; the reason is a label of a metric


class PageSilence(JobName, frozen=True):
    """A job that does not page until `until_unix_seconds`. User `uid` asked for it. `reason` may be empty."""

    until_unix_seconds: float
    uid: int
    reason: str = ""


class SilenceAnswer(Value, frozen=True):
    """The daemon's answer about a silence. `problem` is the reason why a restart of the daemon ends the silence."""

    silence: PageSilence
    problem: str | None = None
