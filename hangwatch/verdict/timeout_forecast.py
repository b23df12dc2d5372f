"""Forecast when the collective timeout ends a hung job. A recorded timeout is preferred to a configured one. Pure."""

from hangwatch.jobs.collective_timeout import read_timeouts
from hangwatch.model import Grouping, Incident, JobState, Value

RECORDED = "as its ranks recorded"
"""The source of a timeout that flight recorders show. The rules of Prometheus prefer it to an assumed timeout."""


class TimeoutForecast(Value, frozen=True):
    """The time after which torch.distributed ends a waiting job. `source` says where `seconds` comes from.

    `at_unix_seconds` is `seconds` after the start of the recorded operation, else after the job became quiet. None if
    neither is known.
    """

    seconds: float
    source: str
    at_unix_seconds: float | None


def forecast_timeout(incident: Incident) -> TimeoutForecast | None:
    """Return the forecast for an incident. None if the incident is closed, no rank waits, or the timeout is unknown."""
    waits = incident.job.waiting is not None or any(
        group.waits_for in ("ranks", "gpu") for group in incident.grouping.groups
    )
    if incident.closed_unix_seconds is not None or not waits or not incident.captures:
        return None
    recorded = recorded_seconds(incident.grouping)
    assumed = read_timeouts(incident.job, incident.job.environ)
    seconds = assumed.collective_seconds if recorded is None else recorded
    if seconds is None:
        return None
    source = RECORDED if recorded is not None else f"{assumed.source}, unless its code sets another timeout"
    quiet = [step.unix_seconds for step in incident.timeline if step.state is JobState.QUIET]
    end = recorded_end(incident.grouping) or (quiet[-1] + seconds if quiet else None)
    return TimeoutForecast(seconds=seconds, source=source, at_unix_seconds=end)


def recorded_end(grouping: Grouping) -> float | None:
    """Return the earliest Unix time at which an open operation times out. None if no flight recorder shows it."""
    opened = [one for member in grouping.members for one in member.recorder.open_operations]
    ends = [one.created_unix_seconds + one.timeout_seconds for one in opened if one.timeout_seconds is not None]
    return min(ends, default=None)


def recorded_seconds(grouping: Grouping) -> float | None:
    """Return the shortest timeout in seconds that flight recorders show. None if they show none.

    It is that of the open operations, else of the newest operation of each group: a group has one timeout.
    """
    groups = (group for member in grouping.members for state in member.recorder.libraries for group in state.groups)
    opened = [one.timeout_seconds for member in grouping.members for one in member.recorder.open_operations]
    newest = [group.operations[-1].timeout_seconds for group in groups if group.operations]
    timeouts = ([seconds for seconds in found if seconds is not None] for found in (opened, newest))
    return next((min(seconds) for seconds in timeouts if seconds), None)
