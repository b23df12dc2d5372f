"""The board: one frozen `Snapshot` behind one lock, the only shared mutable state of the daemon.

Writers replace the snapshot in one step, see `Board.change`. Readers (a scrape, a status page) take a reference to the
snapshot and never wait.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from msgspec import field
from msgspec.structs import replace

from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.config import Detector
from hangwatch.detector import power_level
from hangwatch.detector.job_watch import JobWatch
from hangwatch.model import (
    CheckResult,
    CollectiveSeries,
    Fault,
    GpuSweep,
    Incident,
    Job,
    JobState,
    NotMonitored,
    PageSilence,
    PastHang,
    PowerSeries,
    SamplerStatus,
    TimelineEntry,
    Value,
)

if TYPE_CHECKING:
    from hangwatch.verdict.diagnosis import Diagnosis

P = ParamSpec("P")
T = TypeVar("T")

DUMP_BUCKETS_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HISTORY_SECONDS = 900.0
SERIES_POINTS = 450
_Columns: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


class JobEntry(Value, frozen=True):
    """One job on the board: its processes, the state of its detector, and its last incident.

    `held_gpu` is true once the driver has listed one of its ranks on a GPU. `suspected` is the diagnosis of a job that
    is suspected because of its counters; it becomes the first capture of the incident. `counter_faults` are the reasons
    why ranks have no counters. `arrival_order` tells if one of its ranks is late.
    """

    job: Job
    watch: JobWatch
    held_gpu: bool = False
    page: bool = False
    incident: Incident | None = None
    timeline: tuple[TimelineEntry, ...] = ()
    suspected: Diagnosis | None = None
    counter_faults: tuple[Fault, ...] = ()
    arrival_order: ArrivalOrder | None = None

    @property
    def open_incident(self) -> Incident | None:
        """The job's incident if it is open, else None."""
        return self.incident if self.incident is not None and self.incident.closed_unix_seconds is None else None


class Crash(Value, frozen=True):
    """An incident of a job with crashed ranks, and the time at which it was found (CLOCK_MONOTONIC, seconds)."""

    incident: Incident
    found_monotonic_seconds: float


class DumpHistogram(Value, frozen=True):
    """A histogram of dump durations in seconds: `counts` of each bucket, which the export makes cumulative."""

    counts: tuple[int, ...] = (0,) * (len(DUMP_BUCKETS_SECONDS) + 1)
    sum_seconds: float = 0.0

    def add(self, seconds: float) -> DumpHistogram:
        """Return the histogram with one more dump."""
        index = bisect_left(DUMP_BUCKETS_SECONDS, seconds)
        counts = tuple(count + (i == index) for i, count in enumerate(self.counts))
        return DumpHistogram(counts=counts, sum_seconds=self.sum_seconds + seconds)


class Snapshot(Value, frozen=True):
    """The data of the board at one moment. A snapshot is never changed, only replaced.

    `jobs` is by `Job.key`. `engines` are inference engines, which have no watch. `hook_runs` is by event and outcome.
    `running` has the start of each running scan and capture, `gpu_errors_at` is the time of the newest XIDs or link
    errors (both CLOCK_MONOTONIC, seconds). `late_tasks` counts the overruns of each scheduled task.
    `crashes` has the newest crash of each job. `unread_crash_count` counts the jobs with dead ranks that were not
    read, because too many jobs of their owner were queued. `unresumed_incidents` are open incidents of an earlier
    daemon. Their processes live, but no scan has found the job yet. `silences` is by `Job.key`.
    `past_hangs` are the newest hangs on this node, see `hang_history`.
    """

    sweep: GpuSweep | None = None
    sampler: SamplerStatus = SamplerStatus()
    idle_watts: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, JobEntry] = field(default_factory=dict)
    checks: dict[str, CheckResult] = field(default_factory=dict)
    captures: dict[str, int] = field(default_factory=dict)
    dump_failures: dict[str, int] = field(default_factory=dict)
    dumps: DumpHistogram = DumpHistogram()
    hook_runs: dict[tuple[str, str], int] = field(default_factory=dict)
    left_out: tuple[NotMonitored, ...] = ()
    engines: tuple[Job, ...] = ()
    running: dict[str, tuple[float, ...]] = field(default_factory=dict)
    late_tasks: dict[str, int] = field(default_factory=dict)
    scan_seconds: float | None = None
    dumpers_stuck: int = 0
    gpu_errors_at: float | None = None
    crashes: tuple[Crash, ...] = ()
    crash_count: int = 0
    unread_crash_count: int = 0
    unresumed_incidents: tuple[Incident, ...] = ()
    silences: dict[str, PageSilence] = field(default_factory=dict)
    past_hangs: tuple[PastHang, ...] = ()
    store_problem: str | None = "the store is not open yet"

    @property
    def living(self) -> tuple[JobEntry, ...]:
        """The jobs that have not ended."""
        return tuple(entry for entry in self.jobs.values() if entry.watch.state is not JobState.ENDED)

    def pages(self, entry: JobEntry) -> bool:
        """True if the job should page now: its detector asks for it, and the job is not silenced."""
        return entry.page and entry.job.key not in self.silences

    @property
    def living_keys(self) -> frozenset[str]:
        """The keys of the jobs that have not ended."""
        return frozenset(entry.job.key for entry in self.living)

    def with_job(self, entry: JobEntry) -> Snapshot:
        """Return the snapshot with this job added or replaced."""
        return replace(self, jobs={**self.jobs, entry.job.key: entry})

    def without_job(self, key: str) -> Snapshot:
        """Return the snapshot without this job."""
        return replace(self, jobs={other: entry for other, entry in self.jobs.items() if other != key})

    def with_check(self, result: CheckResult) -> Snapshot:
        """Return the snapshot with the newest result of one check."""
        return replace(self, checks={**self.checks, result.check: result})

    def with_running(self, task: str, began: float) -> Snapshot:
        """Return the snapshot with one more running scan or capture (`task`). `began` is CLOCK_MONOTONIC in seconds."""
        return replace(self, running={**self.running, task: (*self.running.get(task, ()), began)})

    def without_running(self, task: str, began: float) -> Snapshot:
        """Return the snapshot without the scan or capture (`task`) that began at `began` (CLOCK_MONOTONIC, seconds)."""
        left = list(self.running.get(task, ()))
        left.remove(began)
        return replace(self, running={**self.running, task: tuple(left)})

    def running_seconds(self, task: str, now: float) -> float:
        """Return the seconds for which the oldest running scan or capture (`task`) has been running; 0 if none is."""
        return max((now - began for began in self.running.get(task, ())), default=0.0)

    def with_dump(self, seconds: float, fault: Fault | None) -> Snapshot:
        """Return the snapshot with one more dump: its duration in seconds, and its fault if it failed."""
        counted = replace(self, dumps=self.dumps.add(seconds))
        return counted if fault is None else counted.count("dump_failures", fault.reason)

    def with_series(self, incident: Incident) -> Snapshot:
        """Return the snapshot with the series of this incident, if its job still has this incident."""
        entry = self.jobs.get(incident.job.key)
        if entry is None or entry.incident is None or entry.incident.incident_id != incident.incident_id:
            return self
        series = {"power": incident.power, "collectives": incident.collectives, "arrival": incident.arrival}
        return self.with_job(replace(entry, incident=replace(entry.incident, **series)))

    def count(self, name: str, key: str | tuple[str, str]) -> Snapshot:
        """Return the snapshot with a count increased by one: the count for `key` in the field `name`.

        The field is `captures`, `dump_failures`, `hook_runs` or `late_tasks`.
        """
        counter: dict[str | tuple[str, str], int] = getattr(self, name)
        return replace(self, **{name: {**counter, key: counter.get(key, 0) + 1}})


class Board:
    """The current snapshot, and the last 15 minutes: the power of each GPU, the collectives of each job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = Snapshot()
        self._history: dict[str, deque[tuple[float, float]]] = {}

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot. It is immutable."""
        return self._snapshot

    def change(
        self, step: Callable[Concatenate[Snapshot, P], tuple[Snapshot, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Replace the snapshot by the first value that `step(snapshot, ...)` returns. Return the second value.

        `step` runs under the lock. It must be quick and must not read the machine.
        """
        with self._lock:
            self._snapshot, answer = step(self._snapshot, *args, **kwargs)
            return answer

    def put(self, step: Callable[Concatenate[Snapshot, P], Snapshot], *args: P.args, **kwargs: P.kwargs) -> None:
        """Replace the snapshot by the value of `step(snapshot, ...)`, which has the limits of `change`."""
        with self._lock:
            self._snapshot = step(self._snapshot, *args, **kwargs)

    def set(self, **changes: object) -> None:
        """Replace the given fields of the snapshot."""
        self.put(lambda snapshot: replace(snapshot, **changes))

    @contextmanager
    def running(self, task: str, began: float) -> Iterator[None]:
        """Show a scan or capture as running within a `with` block. `began` is its start (CLOCK_MONOTONIC, seconds)."""
        self.put(Snapshot.with_running, task, began)
        try:
            yield
        finally:
            self.put(Snapshot.without_running, task, began)

    def remember_power(self, sweep: GpuSweep) -> None:
        """Add the power of each GPU in a sweep to the history."""
        watts = {gpu.uuid: gpu.power_watts for gpu in sweep.gpus if gpu.power_watts is not None}
        self._remember(sweep.taken_unix_seconds, watts)

    def remember_collectives(self, unix_now: float) -> None:
        """Add the collectives of each job with progress counters to the history."""
        living = {entry.job.key: entry.watch.progress for entry in self._snapshot.living}
        self._remember(unix_now, {key: record.total for key, record in living.items() if record.ranks})

    def _remember(self, unix_now: float, values: Mapping[str, float]) -> None:
        """Add a value for each key to the history, and drop what is older than 15 minutes."""
        with self._lock:
            for key, value in values.items():
                self._history.setdefault(key, deque()).append((unix_now, value))
            for key in list(self._history):
                points = self._history[key]
                while points and points[0][0] < unix_now - HISTORY_SECONDS:
                    points.popleft()
                if not points:
                    del self._history[key]

    def collective_series(self, entry: JobEntry) -> CollectiveSeries | None:
        """Return the collectives of a job in the last 15 minutes, at most about 450 points; None without counters."""
        with self._lock:
            kept = thin(tuple(self._history.get(entry.job.key, ())), SERIES_POINTS)
        return CollectiveSeries(*_columns(kept)) if kept else None

    def power_series(self, entry: JobEntry, settings: Detector) -> tuple[PowerSeries, ...]:
        """Return the power of a job's GPUs in the last 15 minutes, at most about 450 points for each GPU."""
        with self._lock:
            history = {uuid: tuple(self._history.get(uuid, ())) for uuid in entry.job.gpu_uuids}
        index = {gpu.uuid: gpu.index for gpu in (self._snapshot.sweep.gpus if self._snapshot.sweep else ())}
        series: list[PowerSeries] = []
        for uuid, points in history.items():
            gpu = entry.watch.power.gpus.get(uuid, power_level.GpuPower())
            times, watts = _columns(thin(points, SERIES_POINTS))
            series.append(
                PowerSeries.copy_from(
                    gpu,
                    uuid=uuid,
                    index=index.get(uuid, len(series)),
                    unix_seconds=times,
                    watts=watts,
                    low_power_threshold_watts=power_level.low_power_threshold_watts(gpu, settings),
                    local_ranks=tuple(
                        rank.local_rank
                        for rank in entry.job.ranks
                        if uuid in rank.gpu_uuids and rank.local_rank is not None
                    ),
                )
            )
        return tuple(series)


def thin(points: Iterable[tuple[float, float]], most: int) -> tuple[tuple[float, float], ...]:
    """Return every n-th point and the last one, at most `most` + 1 points. n is chosen for that."""
    kept = tuple(points)
    thinned = kept[:: max(1, -(-len(kept) // most))]
    return thinned if not kept or thinned[-1] == kept[-1] else (*thinned, kept[-1])


def _columns(points: Iterable[tuple[float, float]]) -> _Columns:
    """Return the times and the values, rounded to a tenth."""
    kept = tuple(points)
    return tuple(round(at, 1) for at, _ in kept), tuple(round(value, 1) for _, value in kept)


def extend(old: tuple[PowerSeries, ...], new: tuple[PowerSeries, ...]) -> tuple[PowerSeries, ...]:
    """Return an incident's power series with the newer points of `new`, about 900 points for each GPU at most."""
    by_uuid = {series.uuid: series for series in new}
    extended = []
    for series in old:
        fresh = by_uuid.pop(series.uuid, series)
        times, watts = _join((series.unix_seconds, series.watts), (fresh.unix_seconds, fresh.watts))
        extended.append(replace(series, unix_seconds=times, watts=watts))
    return (*extended, *by_uuid.values())


def extend_collectives(old: CollectiveSeries | None, new: CollectiveSeries | None) -> CollectiveSeries | None:
    """Return the collectives of an incident with the points of `new` that are newer, at most about 900.

    If `new` has no point of the time of `old`, it counts from another start, for example after a restart.
    """
    if old is None or new is None:
        return old or new
    counted_before = old.totals[-1] - new.totals[0] if new.unix_seconds[0] > old.unix_seconds[-1] else 0.0
    totals = tuple(total + counted_before for total in new.totals)
    return CollectiveSeries(*_join((old.unix_seconds, old.totals), (new.unix_seconds, totals)))


def _join(old: _Columns, new: _Columns) -> _Columns:
    """Return the points of `old` and those of `new` that are newer. If there are too many, every n-th is kept."""
    last = old[0][-1] if old[0] else 0.0
    later = [point for point in zip(*new, strict=True) if point[0] > last]
    return _columns(thin((*zip(*old, strict=True), *later), 2 * SERIES_POINTS))
