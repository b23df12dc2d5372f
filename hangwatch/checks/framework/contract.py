"""The definition of a check. Each module in checks/ is one check and ends in `CHECK = Check(...)`.

    observe(node, settings)  -> a Sample, None (not present on this node), or a Fault (did not respond)
    METRICS                  -> the exported numbers, each with the function that reads it from a sample
    judge(window, settings)  -> a CheckVerdict over the last samples, newest last; the window is never empty
    table(sample)            -> optional rows for `check --verbose`, header first; else it shows METRICS

Only `observe` reads the machine, and only through `hangwatch.probes`. The other functions are pure.
The runner handles timing, exceptions, deadlines, faults and "not present". A check does not catch exceptions itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Meta

from hangwatch import config
from hangwatch.model import CheckStatus, CheckVerdict, Fault, GpuName, Job, JobName, Point, Rank, Value
from hangwatch.probes.node.machine import Node

Labels: TypeAlias = Mapping[str, Callable[[Any], str]]
"""The labels of a metric, each with the function that returns its value for a subject."""

JOB: Labels = {
    "job_id": lambda subject: subject.job.job_id if subject.job else "",
    "job_key": lambda subject: subject.job.job_key if subject.job else "",
}
"""The labels of a subject with a `job`; empty if it is None."""

RANK: Labels = {
    "job_id": attrgetter("rank.job.job_id"),
    "job_key": attrgetter("rank.job.job_key"),
    "rank": attrgetter("rank.rank"),
    "local_rank": attrgetter("rank.local_rank"),
}
"""The labels of a subject with a `rank` of type `RankName`."""

GPU: Labels = {"gpu": lambda gpu: str(gpu.index), "uuid": attrgetter("uuid")}
"""The labels of a subject that is a `GpuName`."""

ABSENT = "NotPresent"
"""The reason of a verdict if this node lacks the device, file or job that the check examines."""


class Sample(Value, frozen=True, kw_only=True):
    """Base class of the value that `observe` returns. `faults` are about the parts of the node that did not respond."""

    faults: tuple[Fault, ...] = ()


class Settings(config.Section, frozen=True):
    """No settings except `enabled`. A check with more, in `[checks.<name>]` of the configuration, extends this."""

    enabled: Annotated[bool, Meta(description="false: the check runs only if `hangwatch check` names it")] = True


class RankName(Value, frozen=True):
    """The name of a rank of a job. `local_rank` is the local rank, else the global rank, else "unknown".

    Local ranks are not unique on a node: each container of a job may have a local rank 0.
    """

    job: JobName
    rank: str
    local_rank: str

    @classmethod
    def of_rank(cls, job: Job, rank: Rank) -> RankName:
        """Return the name of `rank`, a rank of `job`."""
        number = "" if rank.rank is None else str(rank.rank)
        local = (number or "unknown") if rank.local_rank is None else str(rank.local_rank)
        return cls(job=job.name, rank=number, local_rank=local)

    def __str__(self) -> str:
        return f"local rank {self.local_rank} of job {self.job}"


class HasGpus(Protocol):
    """A sample with values about GPUs."""

    @property
    def gpus(self) -> Iterable[GpuName]: ...  # noqa: D102


SampleT = TypeVar("SampleT", bound=Sample)
SettingsT = TypeVar("SettingsT", bound=Settings)
SourceT = TypeVar("SourceT")
SubjectT = TypeVar("SubjectT")
KeyT = TypeVar("KeyT")
Rows: TypeAlias = Iterator[Sequence[object]]
"""The cells of a table, header first. The runner writes them as text: yes or no for a bool, nothing for None."""


@dataclass(frozen=True)
class Metric(Generic[SubjectT]):
    """A metric. `name` has no `hangwatch_` and ends in a base unit, that of a counter in `_total`.

    `read` returns its number for a subject; None if the device does not report it. If there are further labels, `by`,
    it returns the numbers by the values of these labels.
    """

    name: str
    help: str
    read: Callable[[SubjectT], float | Mapping[Any, float | None] | None]
    by: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The type of the metric: "counter" or "gauge"."""
        return "counter" if self.name.endswith("_total") else "gauge"


class Metrics(Generic[SourceT, SubjectT]):
    """The metrics about one kind of subject: the GPUs, ranks or mounts of a sample (`source`), or the sample itself.

    A subject that is None has no series.
    """

    def __init__(
        self,
        *metrics: Metric[SubjectT],
        subjects: Callable[[SourceT], Iterable[SubjectT | None]] | None = None,
        labels: Labels = MappingProxyType({}),
    ) -> None:
        self.metrics = metrics
        self.labels = labels
        self._subjects = subjects

    def read(self, source: SourceT) -> Iterator[tuple[Metric[SubjectT], dict[str, str], float]]:
        """Yield each metric with its labels and its value, for each subject that reports it."""
        subjects: Iterable[Any] = (source,) if self._subjects is None else self._subjects(source)
        for subject in (each for each in subjects if each is not None):
            labels = {name: value(subject) for name, value in self.labels.items()}
            for metric in self.metrics:
                numbers: Any = metric.read(subject)
                if metric.by:
                    for key, number in numbers.items():
                        if number is not None:
                            further = zip(metric.by, (key,) if isinstance(key, str) else key, strict=True)
                            yield metric, labels | dict(further), number
                elif numbers is not None:
                    yield metric, labels, numbers

    def points(self, source: SourceT) -> Iterator[Point]:
        """Yield what `read` yields, as values of a check's result."""
        for metric, labels, number in self.read(source):
            yield Point(
                name=metric.name, value=float(number), help=metric.help, labels=tuple(labels.items()), kind=metric.kind
            )


@dataclass(frozen=True)
class Check(Generic[SampleT, SettingsT]):
    """The definition of a check. The registry sets `name`, the name of its module.

    `absent` is the sentence for a node that lacks the device, file or job that the check examines. `judge` gets at
    most the last `window` samples. `parts` returns the names of the parts of the node that a sample shows, by a key.
    If a sample lacks a part of an earlier one, the result has at least the status `vanished`.
    """

    observe: Callable[[Node, SettingsT], SampleT | Fault | None]
    metrics: tuple[Metrics[SampleT, Any], ...]
    judge: Callable[[Sequence[SampleT], SettingsT], CheckVerdict]
    table: Callable[[SampleT], Rows] | None = None
    settings: type[SettingsT] = Settings  # type: ignore[assignment]
    every_seconds: float = 60.0
    absent: str = "this node has nothing that this check examines"
    window: int = 2
    parts: Callable[[SampleT], Mapping[str, str]] = lambda _: {}
    vanished: CheckStatus = CheckStatus.WARNING
    name: str = ""


AnyCheck: TypeAlias = Check[Any, Any]


def gpu_parts(sample: HasGpus) -> dict[str, str]:
    """Return the names of the GPUs of a sample by their uuids, for `Check.parts`."""
    return {gpu.uuid: f"GPU {gpu.index}" for gpu in sample.gpus}


def join_first(parts: Sequence[str], shown: int = 2) -> str:
    """Return the first `shown` parts, joined by semicolons, and the number of the remaining parts if there are any."""
    more = f"; and {len(parts) - shown} more" if len(parts) > shown else ""
    return "; ".join(parts[:shown]) + more


def counter_growth(readings: Sequence[Mapping[KeyT, int]]) -> dict[KeyT, int]:
    """Return the growth of each counter from the oldest to the newest of the readings. The oldest comes first.

    A counter that decreased was reset or wrapped: its new value counts as growth from 0.
    """
    growth: dict[KeyT, int] = {}
    last: dict[KeyT, int] = {}
    for reading in readings:
        for key, count in reading.items():
            before = last.get(key, count)
            growth[key] = growth.get(key, 0) + (count - before if count >= before else count)
        last |= reading
    return growth


def ok(reason: str, message: str) -> CheckVerdict:
    """Return a healthy verdict. The message should contain the measured numbers."""
    return CheckVerdict(status=CheckStatus.OK, reason=reason, message=message)


def unknown(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """Return a verdict for a state that the check could not determine."""
    return CheckVerdict(status=CheckStatus.UNKNOWN, reason=reason, message=message, remedy=remedy)


def warning(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """Return a verdict for a problem that training can survive."""
    return CheckVerdict(status=CheckStatus.WARNING, reason=reason, message=message, remedy=remedy)


def critical(reason: str, message: str, remedy: str = "") -> CheckVerdict:
    """Return a verdict for a problem that makes training on this node fail, now or soon."""
    return CheckVerdict(status=CheckStatus.CRITICAL, reason=reason, message=message, remedy=remedy)


def worst(findings: Iterable[CheckVerdict], healthy: CheckVerdict, shown: int = 3) -> CheckVerdict:
    """Join findings into one verdict. Without a finding, return `healthy`.

    Status and reason are those of the most severe finding. The messages and remedies of the `shown` most severe
    findings are kept.
    """
    ranked = sorted(findings, key=lambda finding: -finding.status)
    if not ranked:
        return healthy
    message = join_first(list(dict.fromkeys(finding.message for finding in ranked)), shown)
    remedy = "; ".join(dict.fromkeys(finding.remedy for finding in ranked[:shown] if finding.remedy))
    return CheckVerdict(status=ranked[0].status, reason=ranked[0].reason, message=message, remedy=remedy)
