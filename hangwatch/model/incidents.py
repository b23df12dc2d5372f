"""Incidents: the values that `daemon` makes for `store`, `report` and `metrics`."""

from __future__ import annotations

from hangwatch.model.dumps import Capture
from hangwatch.model.groups import Grouping
from hangwatch.model.jobs import Job
from hangwatch.model.states import JobState
from hangwatch.model.value import Value
from hangwatch.model.verdicts import Verdict

CRASHED = "Crashed"
"""The kind of a verdict on ranks that died. A user can cause any number of such incidents."""

INCIDENT_VERSION = 3  # 2: Job.absent_local_ranks are ranges; 3: Member has parts

MOST_RANKS = 1 << 24
"""The largest world size that is accepted, from any source."""


class PowerSeries(Value, frozen=True):
    """Power of one GPU before and during an incident; `quiet_line_watts` is None while the GPU has no busy level."""

    uuid: str
    index: int
    unix_seconds: tuple[float, ...]
    watts: tuple[float, ...]
    limit_watts: float | None = None
    busy_watts: float | None = None
    quiet_line_watts: float | None = None
    local_ranks: tuple[int, ...] = ()


class CollectiveSeries(Value, frozen=True):
    """Collectives that a rank enqueued before and during an incident.

    `totals` are the mean of all ranks, since hangwatch reads the counters of the job.
    """

    unix_seconds: tuple[float, ...]
    totals: tuple[float, ...]


class TimelineEntry(Value, frozen=True):
    """One line of a job's timeline: the new state, and the sentence that explains it."""

    unix_seconds: float
    state: JobState
    message: str


class Incident(Value, frozen=True):
    """One suspicion of one job on this node, from the first capture to its end. `incident.json` is this value.

    `schema_version` rises when a field is removed or changes its meaning. `incident_file.load` reads all versions
    up to this one. `by_counters`: the progress counters of the job showed the hang, and decide when it is over.
    """

    incident_id: str
    node: str
    job: Job
    opened_unix_seconds: float
    state: JobState
    verdict: Verdict
    grouping: Grouping
    captures: tuple[Capture, ...] = ()
    power: tuple[PowerSeries, ...] = ()
    collectives: CollectiveSeries | None = None
    timeline: tuple[TimelineEntry, ...] = ()
    closed_unix_seconds: float | None = None
    host_facts: tuple[tuple[str, str], ...] = ()
    by_counters: bool = False
    hangwatch_version: str = ""
    schema_version: int = INCIDENT_VERSION
