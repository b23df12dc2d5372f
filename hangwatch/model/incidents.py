"""Incidents: the values that `daemon` makes for `store`, `report` and `metrics`."""

from hangwatch.model.dumps import Capture, RankId
from hangwatch.model.groups import Grouping
from hangwatch.model.jobs import Job
from hangwatch.model.states import JobState
from hangwatch.model.value import Value
from hangwatch.model.verdicts import ActionKind, Verdict

CRASHED = "Crashed"
"""The kind of a verdict on ranks that died. A user can cause any number of such incidents."""

PAGED = "the on-call is paged"
"""The line of a timeline at which the page of the incident began."""

# 2: Job.absent_local_ranks are ranges; 3: Member has parts; 4: dumps have parts
INCIDENT_VERSION = 4

LONGEST_CAUSE = 500
"""Characters of the cause in a feedback."""


class PowerSeries(Value, frozen=True):
    """Power of one GPU before and during an incident. `low_power_threshold_watts`: None without a busy level."""

    uuid: str
    index: int
    unix_seconds: tuple[float, ...]
    watts: tuple[float, ...]
    limit_watts: float | None = None
    busy_watts: float | None = None
    low_power_threshold_watts: float | None = None
    local_ranks: tuple[int, ...] = ()


class CollectiveSeries(Value, frozen=True):
    """Collectives before and during an incident. `totals`: the mean of all ranks since hangwatch counts them."""

    unix_seconds: tuple[float, ...]
    totals: tuple[float, ...]


class RankLateness(Value, frozen=True):
    """The median time in seconds by which a rank enqueues a collective behind the median of the other ranks."""

    rank: int | None
    local_rank: int | None
    pid: int
    lateness_seconds: float


class ArrivalStatus(Value, frozen=True, kw_only=True):
    """The arrival order of the ranks of one job on this node, at the place where the latest rank is latest.

    `is_named`: the first of `ranks`, which are latest first, is late. Otherwise `reason` tells why no rank is named:
    "NoRecords", "TooFewRecords", "NoneLate" or "LateByRole". `message` says it as a sentence. `lateness_ratio` (of the
    step), `standard_errors` (above the next rank) and `last_ratio` (of the collectives) are those of the latest rank.
    `ready_in_seconds` is the time until there are enough records, null if unknown. `differences` are sentences: how the
    process or GPU of the named rank differs from those of all other ranks.
    """

    is_named: bool
    reason: str
    message: str
    ranks: tuple[RankLateness, ...]
    library: str
    group: str
    operation: str
    position: int
    records: int
    step_seconds: float
    lateness_ratio: float
    standard_errors: float
    last_ratio: float
    ready_in_seconds: float | None
    differences: tuple[str, ...] = ()


class TimelineEntry(Value, frozen=True):
    """One line of a job's timeline: the new state, and the sentence that explains it."""

    unix_seconds: float
    state: JobState
    message: str


class Feedback(Value, frozen=True):
    """The answer of a person whether a verdict was right: the kind of that verdict, and the ranks that it named.

    `culprit` is the rank that blocked the job if the verdict was wrong, None if unknown. `cause` is printable and has
    at most `LONGEST_CAUSE` characters.
    """

    is_right: bool
    verdict: str
    named: tuple[RankId, ...]
    given_unix_seconds: float
    by_uid: int
    culprit: RankId | None = None
    cause: str = ""


class PastHang(Value, frozen=True):
    """An earlier hang or crash: its node, time and fingerprint, and the kind of action that was recommended.

    `fingerprint` is "" if the verdict had no suspects. `uid` is the job's user id, None if unknown.
    """

    incident_id: str = ""
    node: str = ""
    opened_unix_seconds: float = 0.0
    uid: int | None = None
    fingerprint: str = ""
    action: ActionKind = "investigate"


class Incident(Value, frozen=True):
    """A suspicion of a job on this node, from the last progress of the job to its end. `incident.json` is this value.

    `schema_version` rises when a field is removed or changes its meaning. `incident_file.load` reads all versions
    up to this one. `arrival`: the ranks that were late before it, None if they were not compared. `by_counters`: the
    progress counters of the job showed the hang, and decide when it is over.
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
    arrival: ArrivalStatus | None = None
    timeline: tuple[TimelineEntry, ...] = ()
    closed_unix_seconds: float | None = None
    host_facts: tuple[tuple[str, str], ...] = ()
    by_counters: bool = False
    hangwatch_version: str = ""
    schema_version: int = INCIDENT_VERSION

    @property
    def captured_unix_seconds(self) -> float:
        """The time of the first capture; that of the incident without a capture."""
        return self.captures[0].started_unix_seconds if self.captures else self.opened_unix_seconds

    @property
    def paged_unix_seconds(self) -> float | None:
        """The time of the page; None without one."""
        return next((line.unix_seconds for line in self.timeline if line.message == PAGED), None)
