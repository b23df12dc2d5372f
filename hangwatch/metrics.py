"""Board -> Prometheus families. A scrape reads the snapshot and never touches the machine.

Every name is `hangwatch_` + subject + base unit. There is no host label (Prometheus adds `instance`) and no pid label.
"""

from __future__ import annotations

import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hangwatch import __version__, words
from hangwatch.board import DUMP_BUCKETS_SECONDS, Board, JobEntry, Snapshot
from hangwatch.config import Detector
from hangwatch.hang import power, reached, wording
from hangwatch.hang.power import GpuPower
from hangwatch.hang.watched import quiet_seconds
from hangwatch.model import CheckStatus, Group, Incident, JobName, JobState, Member, Point, RankId, Signature
from hangwatch.progress.crashes import CRASH_SHOWN_SECONDS

log = logging.getLogger(__name__)

JOB = JobName.__struct_fields__  # of every series of a job
LABEL_LENGTH = 200
NAMED_RANKS_SHOWN = 16
COLLECTIVES_OF_A_JOB = 2048  # ranks times groups, each of two series at most
COLLECTIVES_OF_AN_OWNER = 4096
COLLECTIVES_OF_A_NODE = 16384


def families(snapshot: Snapshot, now: float, settings: Detector, external_url: str = "") -> Iterator[Metric]:
    """All families of one snapshot; `now` is CLOCK_MONOTONIC in seconds, `external_url` that of [http]."""
    yield _info()
    yield from _sampler(snapshot, now)
    yield from _gpus(snapshot, settings)
    yield from _jobs(snapshot, now)
    yield from _incidents(snapshot, external_url)
    yield from _crashes(snapshot, now, external_url)
    yield from _collectives(snapshot)
    yield from _captures(snapshot)
    yield _hooks(snapshot)
    yield from _beats(snapshot, now)
    yield _store(snapshot)
    yield from _checks(snapshot)
    yield from _points(point for result in snapshot.checks.values() for point in result.points)


class BoardCollector(Collector):
    """Gives prometheus_client the families of the present snapshot; an error costs the rest of one scrape, loudly."""

    def __init__(
        self,
        board: Board,
        clock: Callable[[], float],
        settings: Detector,
        unix_clock: Callable[[], float] = time.time,
        external_url: str = "",
    ) -> None:
        self._board, self._clock, self._settings, self._unix_clock = board, clock, settings, unix_clock
        self._external_url = external_url
        self.errors = 0

    def collect(self) -> Iterator[Metric]:
        """The families; prometheus_client itself would let one exception fail the whole scrape."""
        # First of all: a rule over all nodes compares it with the time at which the scrape began.
        yield _single("time_seconds", "The wall clock of this node, as unix time", self._unix_clock())
        try:
            found = families(self._board.snapshot, self._clock(), self._settings, self._external_url)
            yield from map(_shown, found)
        except Exception:
            self.errors += 1
            log.exception("a metric could not be exported; please report this")
        yield _counter("export_errors", "Scrapes that lost families to an error inside hangwatch", self.errors)


def _shown(family: Metric) -> Metric:
    """The family with nothing in its labels that a terminal acts on: much of them is what a job's owner wrote.

    Two series that are the same after that are one: Prometheus refuses a scrape in which a series comes twice.
    """
    foreign = [sample for sample in family.samples if not all(map(str.isprintable, sample.labels.values()))]
    if foreign:
        shown: dict[tuple[object, ...], Sample] = {}
        for sample in family.samples:
            labels = {
                name: value if value.isprintable() else words.printable(value)[: max(LABEL_LENGTH, len(value))]
                for name, value in sample.labels.items()
            }
            shown.setdefault((sample.name, *sorted(labels.items())), sample._replace(labels=labels))
        family.samples = list(shown.values())
    return family


class GuardedProcessCollector(Collector):
    """CPU, memory and fds of the daemon itself; a row of /proc that surprises the library costs only these."""

    def __init__(self) -> None:
        self._inner = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterable[Metric]:
        """The process_* families, or none."""
        try:
            return list(self._inner.collect())
        except (ValueError, OSError) as error:
            log.warning("process metrics are missing from this scrape: %s", error)
            return []


def registry(board: Board, clock: Callable[[], float], settings: Detector, external_url: str = "") -> CollectorRegistry:
    """A registry of its own, so that two daemons in one process (tests, demo) do not meet."""
    own = CollectorRegistry()
    own.register(BoardCollector(board, clock, settings, external_url=external_url))
    own.register(GuardedProcessCollector())
    return own


def _gauge(name: str, text: str, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hangwatch_{name}", text, labels=list(labels))


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hangwatch_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"hangwatch_{name}", text, value=value)


def _info() -> Metric:
    info = InfoMetricFamily("hangwatch_build", "Version of hangwatch and of the Python that runs it")
    info.add_metric([], {"version": __version__, "python": platform.python_version()})
    return info


def _sampler(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    health = snapshot.sampler
    yield _single("gpu_sampler_up", "1 while the GPU sampler answers", float(health.alive and not health.stalled))
    yield _counter("gpu_sampler_restarts", "GPU sampler processes that were replaced", health.restarts)
    yield _counter("gpu_sampler_abandoned", "GPU sampler processes that could not even be killed", health.abandoned)
    if snapshot.sweep is not None:
        age = now - snapshot.sweep.taken_monotonic_seconds
        yield _single("gpu_sample_age_seconds", "Age of the newest GPU sample", age)


def _gpus(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    if snapshot.sweep is None:
        return
    up = _gauge("gpu_up", "1 while the driver gives readings of this GPU, 0 while it gives none", ("gpu",))
    for index in sorted({*(gpu.index for gpu in snapshot.sweep.gpus), *snapshot.sweep.unread}):
        up.add_metric([str(index)], float(index not in snapshot.sweep.unread))
    yield up
    labels = ("gpu", "uuid")
    for field, text in (
        ("power_watts", "Power drawn, as NVML averages it over one second"),
        ("power_limit_watts", "Enforced power limit"),
        ("utilization_ratio", "Share of the last sample period in which a kernel ran; 1 also in a hang"),
        ("memory_used_bytes", "GPU memory in use"),
        ("memory_total_bytes", "GPU memory"),
        ("sm_clock_hertz", "Clock of the streaming multiprocessors"),
        ("temperature_celsius", "Temperature of the GPU die"),
    ):
        family = _gauge(f"gpu_{field}", text, labels)
        for gpu in snapshot.sweep.gpus:
            value = getattr(gpu, field)
            if value is not None:
                family.add_metric([str(gpu.index), gpu.uuid], float(value))
        yield family
    energy = CounterMetricFamily(
        "hangwatch_gpu_energy_joules", "Energy used since the driver was loaded", labels=labels
    )
    for gpu in snapshot.sweep.gpus:
        if gpu.energy_joules is not None:
            energy.add_metric([str(gpu.index), gpu.uuid], gpu.energy_joules)
    yield energy
    faults = _gauge("gpu_faults", "Readings that should have come and did not, by reason", ("gpu", "reason"))
    counted: dict[tuple[str, str], int] = {}
    for fault in (*snapshot.sweep.faults, *(f for gpu in snapshot.sweep.gpus for f in gpu.faults)):
        key = (fault.subject.removeprefix("gpu "), fault.reason)
        counted[key] = counted.get(key, 0) + 1
    for key, count in counted.items():
        faults.add_metric(key, count)
    yield faults
    yield from _levels(snapshot, settings)


def _levels(snapshot: Snapshot, settings: Detector) -> Iterator[Metric]:
    labels = ("gpu", "uuid")
    busy = _gauge("gpu_busy_power_watts", "Busy level: what this GPU draws while its job works", labels)
    line = _gauge("gpu_quiet_line_watts", "At or under this power the GPU is quiet", labels)
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for uuid, gpu in _hardest_working(snapshot).items():
        if uuid in index and gpu.busy_watts is not None:
            busy.add_metric([index[uuid], uuid], gpu.busy_watts)
            quiet_line = power.quiet_line_watts(gpu, settings)
            if quiet_line is not None:
                line.add_metric([index[uuid], uuid], quiet_line)
    yield busy
    yield line


def _hardest_working(snapshot: Snapshot) -> dict[str, GpuPower]:
    """The power of each GPU as the job sees it that drew most: two jobs may share one, no series may come twice."""
    found: dict[str, GpuPower] = {}
    for entry in snapshot.jobs.values():
        for uuid, gpu in entry.watch.gpus.items() if entry.watch.state is not JobState.ENDED else ():
            known = found.get(uuid)
            if known is None or (gpu.busy_watts or 0.0) > (known.busy_watts or 0.0):
                found[uuid] = gpu
    return found


def _jobs(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    told = ("launcher", "user", "owner", "world_size", "name", "program", "title")
    info = _gauge("job_info", "The jobs on this node; `title` is what a page calls one", (*JOB, *told))
    state = _gauge("job_state", "1 for the state that the job is in", (*JOB, "state"))
    ranks = _gauge("job_ranks", "Ranks of the job that run on this node", JOB)
    absent = _gauge("job_absent_ranks", "Ranks of the job that should run on this node and do not", JOB)
    quiet = _gauge("job_quiet_seconds", "For how long the job has been quiet", JOB)
    page = _gauge("job_page", "1 while the on-call should be paged for this job", JOB)
    gpus = _gauge("job_gpu_info", "Which rank holds which GPU", (*JOB, "gpu", "uuid", "rank", "local_rank"))
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for entry in snapshot.jobs.values():
        job = entry.job
        name = tuple(job.name.labels.values())
        labels = [job.launcher, job.user or "", job.owner, _text(job.world_size), job.job_name, job.program]
        info.add_metric([*name, *labels, words.which_job(job)], 1)
        for known in JobState:
            state.add_metric([*name, known.value], float(known is entry.watch.state))
        alive = 0 if entry.watch.state is JobState.ENDED else len(job.ranks)
        ranks.add_metric(name, alive)
        absent.add_metric(name, sum(map(len, job.absent)))
        quiet.add_metric(name, quiet_seconds(entry.watch, now))
        page.add_metric(name, float(entry.page))
        for rank in job.ranks if alive else ():
            for uuid in rank.gpu_uuids:
                gpus.add_metric([*name, index.get(uuid, ""), uuid, _text(rank.rank), _text(rank.local_rank)], 1)
    yield from (info, state, ranks, absent, quiet, page, gpus)


def _incidents(snapshot: Snapshot, external_url: str) -> Iterator[Metric]:
    labels = (*JOB, "incident", "verdict", "confidence", "named", "first_look", "summary", "url")
    told = "Open incidents: the verdict in one sentence, who is named, or at whom to look first"
    info = _gauge("incident_info", told, labels)
    opened = _gauge("incident_opened_timestamp_seconds", "When the incident was opened", (*JOB, "incident"))
    activity = _gauge(
        "rank_activity",
        "What each rank of a job with an open incident is doing",
        (*JOB, "rank", "local_rank", "activity", "waits_for", "motion", "frame", "stack", "does"),
    )
    for entry in snapshot.jobs.values():
        incident = entry.open_incident
        if incident is None:
            continue
        name, verdict = tuple(entry.job.name.labels.values()), incident.verdict
        info.add_metric(
            [
                *name,
                incident.incident_id,
                verdict.kind,
                verdict.confidence.value,
                _folded(verdict.named, incident.node),
                _folded(verdict.first_look, incident.node),
                verdict.message[:LABEL_LENGTH],
                _page(incident, external_url),
            ],
            1,
        )
        opened.add_metric([*name, incident.incident_id], incident.opened_unix_seconds)
        for group in incident.grouping.groups:
            does = words.elided(wording.one(group), LABEL_LENGTH) if group.frames else ""
            for member in (one for one in group.members if not one.waiting):
                activity.add_metric(
                    [
                        *name,
                        _text(member.id.rank),
                        _text(member.id.local_rank),
                        *_activity(group, member, incident),
                        member.motion.value,
                        _frame(group),
                        group.key,
                        does,
                    ],
                    1,
                )
    yield from (info, opened, activity)


def _page(incident: Incident, external_url: str) -> str:
    """Where a browser finds the report, empty where nobody said how it reaches this daemon."""
    where = external_url.replace("{node}", incident.node).rstrip("/")
    return f"{where}/incidents/{incident.incident_id}" if where else ""


def _crashes(snapshot: Snapshot, now: float, external_url: str) -> Iterator[Metric]:
    labels = (*JOB, "incident", "confidence", "named", "summary", "url")
    info = _gauge("job_crash_info", "Jobs whose ranks crashed in the last 15 minutes: who died first, and why", labels)
    for one in snapshot.crashes:
        if now - one.found_monotonic_seconds <= CRASH_SHOWN_SECONDS:
            incident, verdict = one.incident, one.incident.verdict
            named = _folded(verdict.named, incident.node)
            name = incident.job.name.labels.values()
            summary = verdict.message[:LABEL_LENGTH]
            page = _page(incident, external_url)
            info.add_metric([*name, incident.incident_id, verdict.confidence.value, named, summary, page], 1)
    yield info
    yield _counter("job_crashes", "Jobs on this node whose ranks crashed, restarts included", snapshot.crash_count)
    what = "Jobs whose dead ranks were not looked after, since too many of their owner waited"
    yield _counter("job_remains_unread", what, snapshot.unread_crash_count)


def _collectives(snapshot: Snapshot) -> Iterator[Metric]:
    """Sequence numbers of the ranks of open incidents, by which rules over all nodes tell who has not come."""
    of_rank = (*JOB, "rank", "group")
    stance = ("stance", "has_open")
    number = _gauge(
        "rank_collective_number",
        "Number of the newest collective that a rank of a job with an open incident has enqueued in a group",
        (*of_rank, *stance, "generation"),
    )
    waited = _gauge("rank_collective_waited_number", "Number of the collective that the rank waits in", of_rank)
    unseen = _gauge(
        "rank_collective_unseen_since_timestamp_seconds",
        "A rank without a record in the default group; since when it would show one, 0 for always",
        (*of_rank, *stance),
    )
    collective = _gauge(
        "job_collective_ranks",
        "Ranks on this node that wait in a collective, or whose newest one it is",
        (*JOB, "group", "description", "number", "operation", "waits"),
    )
    since = _gauge(
        "job_collective_waited_since_timestamp_seconds",
        "When the first rank on this node enqueued what it waits in, of each group",
        (*JOB, "group"),
    )
    left_out = _gauge("job_collective_left_out", "Ranks times groups that are over the bounds, and have no series", JOB)
    for entry, found in _reached(snapshot):
        name = tuple(entry.job.name.labels.values())
        for one in found.reached:
            rank = (*name, str(one.place.rank), one.group)
            number.add_metric([*rank, *_place(one.place), str(one.generation)], one.number)
            if one.waits_in is not None:
                waited.add_metric(rank, one.waits_in.number)
        for other in found.unseen:
            labels = [*name, str(other.place.rank), other.group, *_place(other.place)]
            unseen.add_metric(labels, other.since_unix_seconds)
        for met, count in reached.collectives(found.reached).items():
            labels = [*name, met.group, met.description, str(met.number), met.operation, _yes(met.waits)]
            collective.add_metric(labels, count)
        for group, unix_seconds in reached.waited_since(found.reached).items():
            since.add_metric([*name, group], unix_seconds)
        left_out.add_metric(name, found.left_out)
    yield from (number, waited, unseen, collective, since, left_out)


def _place(place: reached.Place) -> tuple[str, str]:
    return place.stance, _yes(place.has_open)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _reached(snapshot: Snapshot) -> Iterator[tuple[JobEntry, reached.Found]]:
    """Of each job with an open incident; owners share what one node may show, and each job what its owner may."""
    entries = [entry for entry in snapshot.jobs.values() if entry.open_incident is not None]
    jobs_of = Counter(entry.job.share for entry in entries)
    for entry in entries:
        of_owner = min(COLLECTIVES_OF_AN_OWNER, COLLECTIVES_OF_A_NODE // len(jobs_of))
        of_job = min(COLLECTIVES_OF_A_JOB, of_owner // jobs_of[entry.job.share])
        if entry.open_incident is not None:
            yield entry, reached.found(entry.open_incident.grouping, of_job)


def _folded(ranks: Sequence[RankId], node: str) -> str:
    names = [f"{who.node or node}:{_text(who.rank if who.rank is not None else who.local_rank)}" for who in ranks]
    more = len(names) - NAMED_RANKS_SHOWN
    return ",".join(names[:NAMED_RANKS_SHOWN]) + (f",+{more}" if more > 0 else "")


def _activity(group: Group, member: Member, incident: Incident) -> tuple[str, str]:
    """What a rank does and waits for. Who is gone, stopped or of a job that is over here waits for nothing.

    Nor does who is named by all evidence of this node, in code that no rule knows. Of the undumpable nobody knows.
    """
    if group.gone:
        return "gone", "nothing"
    if member.signature is Signature.STOPPED:
        return "stopped", "nothing"
    if incident.state is JobState.OVER:
        return "over", "nothing"
    if group.fault:
        return "undumpable", "unknown"
    is_named = group.waits_for == "unknown" and member.id in incident.verdict.named
    return group.activity, "nothing" if is_named else group.waits_for


def _frame(group: Group) -> str:
    if not group.frames:
        return group.fault.reason if group.fault else ""
    frame = group.frames[0]
    return f"{frame.function} ({frame.file})"[:LABEL_LENGTH]


def _store(snapshot: Snapshot) -> Metric:
    up = _gauge("store_up", "1 while incidents can be kept on disk; without it the watch goes on", ())
    up.add_metric([], float(snapshot.store_problem is None))
    return up


def _captures(snapshot: Snapshot) -> Iterator[Metric]:
    captures = CounterMetricFamily("hangwatch_captures", "Captures taken, by what they found", labels=["result"])
    for result, count in snapshot.captures.items():
        captures.add_metric([result], count)
    failures = CounterMetricFamily("hangwatch_dump_failures", "Dumps that gave no stack, by reason", labels=["reason"])
    for reason, count in snapshot.dump_failures.items():
        failures.add_metric([reason], count)
    buckets, total = [], 0
    for bound, count in zip((*DUMP_BUCKETS_SECONDS, "+Inf"), snapshot.dumps.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    yield from (captures, failures)
    yield _single("dumpers_stuck", "py-spys that hang in the kernel and cannot be ended", snapshot.dumpers_stuck)
    yield HistogramMetricFamily(
        "hangwatch_dump_seconds",
        "Duration of one dump of one process",
        buckets=buckets,
        sum_value=snapshot.dumps.sum_seconds,
    )


def _hooks(snapshot: Snapshot) -> Metric:
    told = "Hooks that were due, by what came of them; not_called: over the bounds, or without the folder they want"
    runs = CounterMetricFamily("hangwatch_hook_runs", told, labels=["event", "outcome"])
    for labels, count in snapshot.hook_runs.items():
        runs.add_metric(labels, count)
    return runs


def _beats(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    if snapshot.scan_seconds is not None:
        yield _single("scan_seconds", "How long the newest scan of /proc took", snapshot.scan_seconds)
    running = _gauge("running_seconds", "For how long a scan or a capture has been running; 0 when none is", ("beat",))
    for beat in ("scan", "capture"):
        running.add_metric([beat], snapshot.running_seconds(beat, now))
    yield running
    left_out = _gauge("left_out", "What is beyond the limits of [jobs] and not watched", ("owner", "what"))
    for one in snapshot.left_out:
        for what in ("jobs", "ranks", "processes"):
            left_out.add_metric([one.owner, what], getattr(one, what))
    yield left_out


def _checks(snapshot: Snapshot) -> Iterator[Metric]:
    status = _gauge("check_status", "0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL", ("check",))
    info = _gauge("check_info", "What the check says", ("check", "status", "reason", "message"))
    success = _gauge("check_success", "1 if the check itself ran", ("check",))
    duration = _gauge("check_duration_seconds", "How long the last run took", ("check",))
    ran = _gauge("check_last_run_timestamp_seconds", "When the check last ran", ("check",))
    faults = _gauge("check_faults", "What should have answered this check and did not", ("check",))
    for name, result in snapshot.checks.items():
        verdict = result.verdict
        status.add_metric([name], verdict.status.value)
        # A sentence with numbers in it is a new series at each run: only what is not well is worth that.
        message = "" if verdict.status is CheckStatus.OK else verdict.message[:LABEL_LENGTH]
        info.add_metric([name, verdict.status.name, verdict.reason, message], 1)
        success.add_metric([name], float(result.success))
        duration.add_metric([name], result.duration_seconds)
        ran.add_metric([name], result.ran_unix_seconds)
        faults.add_metric([name], len(result.faults))
    yield from (status, info, success, duration, ran, faults)


def _points(points: Iterable[Point]) -> Iterator[Metric]:
    grouped: dict[str, list[Point]] = {}
    for point in points:
        grouped.setdefault(point.name, []).append(point)
    for name, rows in grouped.items():
        labels = [key for key, _ in rows[0].labels]
        kind = CounterMetricFamily if rows[0].kind == "counter" else GaugeMetricFamily
        family = kind(f"hangwatch_{name}", rows[0].help, labels=labels)
        for row in rows:
            values = dict(row.labels)
            family.add_metric([values.get(label, "")[:LABEL_LENGTH] for label in labels], row.value)
        yield family


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
