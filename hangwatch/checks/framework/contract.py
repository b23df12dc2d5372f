"""What a check is. One file in this folder = one check: it ends in `CHECK = Check(...)`, and nothing else lists it.

    observe(node, settings)  -> a Sample, None (this node has none of it), or a Fault (it should answer and did not)
    points(sample)           -> the exported numbers, each made by a `Metric` of the check
    judge(window, settings)  -> a CheckVerdict over the last samples, newest last; never called with an empty window
    table(sample)            -> optional rows for `hangwatch check --verbose`, header first

`observe` is the one function that touches the machine, and only through `hangwatch.probes`; the others are pure.
Timing, exceptions, deadlines, faults and "not present" are the runner's: a check never catches for their sake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from msgspec import Meta

from hangwatch import config
from hangwatch.model import CheckStatus, CheckVerdict, Fault, Job, JobName, Point, Rank, Value
from hangwatch.probes.node.machine import Node

NOT_BASE_UNITS = re.compile(
    r"(?<!_per)_(ms|us|ns|millis|micros|minutes|hours|percent|kb|mb|gb|kib|mib|gib|bits|mhz|ghz|mw|kw|milliwatts|second|byte|watt)"
    r"(_total)?$"
)
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*")
JOB = JobName.__struct_fields__
"""The labels of a number about a job: `METRIC.point(value, **job.name.labels)`."""

RANK = (*JOB, "rank", "local_rank")
"""The labels of a number about a rank: `METRIC.point(value, **RankName.of(job, rank).labels)`."""

ABSENT = "NotPresent"
"""The reason of the verdict where a check has nothing to look at."""

OWNED_ELSEWHERE = (
    "job_",
    "check_",
    "incident_",
    "captures_",
    "dump_failures",
    "rank_activity",
    "rank_collective_",
    "build_",
)


class Sample(Value, frozen=True, kw_only=True):
    """Base of what one `observe` returns. `faults` are the parts that should have answered and did not."""

    faults: tuple[Fault, ...] = ()


class Settings(config.Section, frozen=True):
    """Base of every check's section `[checks.<name>]`."""

    enabled: Annotated[bool, Meta(description="false: runs only where `hangwatch check` names it")] = True


class Metric(Value, frozen=True):
    """One exported number: `name` without `hangwatch_`, in a base unit; a counter's name ends in `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"

    def point(self, value: float, **labels: str) -> Point:
        """The number with its labels. Raises TypeError when the labels are not those declared."""
        if set(labels) != set(self.labels):
            raise TypeError(f"{self.name} has the labels {self.labels}, got {tuple(labels)}")
        ordered = tuple((label, labels[label]) for label in self.labels)
        return Point(name=self.name, value=float(value), help=self.help, labels=ordered, kind=self.kind)


class RankName(Value, frozen=True):
    """Which rank is meant. `local_rank` is else the global one, or "unknown"; containers may each have a 0."""

    job: JobName
    rank: str
    local_rank: str

    @classmethod
    def of(cls, job: Job, rank: Rank) -> RankName:
        """The name of a rank of this job."""
        number = "" if rank.rank is None else str(rank.rank)
        local = (number or "unknown") if rank.local_rank is None else str(rank.local_rank)
        return cls(job=job.name, rank=number, local_rank=local)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of a series about it."""
        return {**self.job.labels, "rank": self.rank, "local_rank": self.local_rank}

    def __str__(self) -> str:
        return f"local rank {self.local_rank} of job {self.job}"


SampleT = TypeVar("SampleT", bound=Sample)
SettingsT = TypeVar("SettingsT", bound=Settings)
KeyT = TypeVar("KeyT")
Rows: TypeAlias = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Check(Generic[SampleT, SettingsT]):
    """A check as a value. `name` is the file's name; `absent` is the sentence for a node that has none of it.

    `window` is how many samples `judge` sees at most.
    """

    name: str
    every_seconds: float
    settings: type[SettingsT]
    observe: Callable[[Node, SettingsT], SampleT | Fault | None]
    points: Callable[[SampleT], Iterable[Point]]
    judge: Callable[[Sequence[SampleT], SettingsT], CheckVerdict]
    metrics: tuple[Metric, ...] = ()
    absent: str = "this node has nothing that this check looks at"
    table: Callable[[SampleT], Rows] | None = None
    window: int = 2


AnyCheck: TypeAlias = Check[Any, Any]


def breaches(module_name: str, candidate: object) -> list[str]:
    """What is wrong with the CHECK of the module `module_name`, one sentence each; empty when it keeps the contract."""
    if not isinstance(candidate, Check):
        return ["has no CHECK = Check(...)"]
    wrong = []
    if candidate.name != module_name:
        wrong.append(f"CHECK.name is {candidate.name!r}; it must be the file's name, {module_name!r}")
    if not 1 <= candidate.every_seconds <= 3600:
        wrong.append(f"every_seconds is {candidate.every_seconds:g}; it must lie between 1 and 3600")
    if candidate.window < 1:
        wrong.append(f"window is {candidate.window}; judge needs at least one sample")
    if not (isinstance(candidate.settings, type) and issubclass(candidate.settings, Settings)):
        wrong.append("settings must be a class that extends contract.Settings")
    parts = {"observe": candidate.observe, "points": candidate.points, "judge": candidate.judge}
    wrong += [f"{part} is not callable" for part, function in parts.items() if not callable(function)]
    return wrong + [problem for metric in candidate.metrics for problem in _metric_breaches(metric)]


def _metric_breaches(metric: Metric) -> list[str]:
    wrong = []
    if not METRIC_NAME.fullmatch(metric.name) or metric.name.startswith("hangwatch_"):
        wrong.append(f"metric {metric.name!r} must be lower_case, without the prefix hangwatch_")
    if NOT_BASE_UNITS.search(metric.name):
        wrong.append(f"metric {metric.name!r} must end in a base unit: seconds, bytes, watts, hertz, celsius, ratio")
    if metric.name.startswith(OWNED_ELSEWHERE):
        wrong.append(f"metric {metric.name!r} takes a name that is not a check's: {', '.join(OWNED_ELSEWHERE)}")
    if set(metric.labels) & set(JOB) and not set(metric.labels) >= set(JOB):
        wrong.append(f"metric {metric.name!r} is about jobs: it has the labels of contract.JOB")
    if metric.kind not in ("gauge", "counter"):
        wrong.append(f"metric {metric.name!r} is a {metric.kind!r}; it must be a gauge or a counter")
    elif (metric.kind == "counter") != metric.name.endswith("_total"):
        wrong.append(f"metric {metric.name!r} is a {metric.kind}: a counter ends in _total, a gauge does not")
    return wrong


def listed(parts: Sequence[str], shown: int = 2) -> str:
    """The first parts as one text, and how many more there are."""
    more = f"; and {len(parts) - shown} more" if len(parts) > shown else ""
    return "; ".join(parts[:shown]) + more


def growth(readings: Sequence[Mapping[KeyT, int]]) -> dict[KeyT, int]:
    """How much each counter grew over the readings, oldest first; one that was reset or wrapped counts from 0 again."""
    grown: dict[KeyT, int] = {}
    last: dict[KeyT, int] = {}
    for reading in readings:
        for key, count in reading.items():
            before = last.get(key, count)
            grown[key] = grown.get(key, 0) + (count - before if count >= before else count)
        last |= reading
    return grown


def ok(reason: str, message: str) -> CheckVerdict:
    """All is well, and what that means in numbers."""
    return CheckVerdict(status=CheckStatus.OK, reason=reason, message=message)


def unknown(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """It could not be found out; neither well nor sick."""
    return CheckVerdict(status=CheckStatus.UNKNOWN, reason=reason, message=message, remedy=remedy)


def warning(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """Training can go on, somebody should look."""
    return CheckVerdict(status=CheckStatus.WARNING, reason=reason, message=message, remedy=remedy)


def critical(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """Training on this node fails or will."""
    return CheckVerdict(status=CheckStatus.CRITICAL, reason=reason, message=message, remedy=remedy)


def worst(findings: Iterable[CheckVerdict], healthy: CheckVerdict, shown: int = 3) -> CheckVerdict:
    """Many findings as one verdict: status and reason of the most severe, the first `shown` messages, their remedies.

    Returns `healthy` when there is no finding.
    """
    ranked = sorted(findings, key=lambda finding: -finding.status)
    if not ranked:
        return healthy
    message = listed(list(dict.fromkeys(finding.message for finding in ranked)), shown)
    remedy = "; ".join(dict.fromkeys(finding.remedy for finding in ranked[:shown] if finding.remedy))
    return CheckVerdict(status=ranked[0].status, reason=ranked[0].reason, message=message, remedy=remedy)
