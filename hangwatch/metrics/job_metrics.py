"""Metrics of jobs: states, ranks with their collectives and lateness, open incidents with activities, and crashes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from hangwatch import words
from hangwatch.checks.framework.contract import JOB, Labels, Metric, Metrics
from hangwatch.detector.idle_workers import find_idle_worker
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.metrics.view import (
    LABEL_LENGTH,
    RANK,
    IncidentView,
    JobView,
    RankView,
    View,
    list_incidents,
    list_ranks,
    number_text,
    ranks_label,
    sentence_label,
)
from hangwatch.model import STOPPED_STATES, Group, Incident, JobName, JobState, Member, Signature
from hangwatch.model.jobs import PageSilence
from hangwatch.state.on_crash import CRASH_SHOWN_SECONDS
from hangwatch.verdict.timeout_forecast import forecast_timeout
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import next_step
from hangwatch.verdict.wording.short_paths import shorten_paths

_PLACE = ("activity", "waits_for", "motion", "frame", "stack")


class _ActivityView(NamedTuple):
    """The activities of the ranks of a job: the values of the labels `_PLACE`, of those of the rank, and a text."""

    job: JobName
    activities: Sequence[tuple[str, ...]]


def _describe_job(each: JobView) -> dict[tuple[str, ...], int]:
    job = each.entry.job
    labels = (job.launcher, job.user or "", job.owner, number_text(job.world_size), job.job_name, job.program)
    return {(*labels, words.describe_job(job)): 1}


def _list_gpus(each: JobView) -> dict[tuple[str, ...], int]:
    sweep = each.view.snapshot.sweep
    index = {gpu.uuid: str(gpu.index) for gpu in (sweep.gpus if sweep else ())}
    ranks = () if each.entry.watch.state is JobState.ENDED else each.entry.job.ranks
    return {
        (index.get(uuid, ""), uuid, number_text(rank.rank), number_text(rank.local_rank)): 1
        for rank in ranks
        for uuid in rank.gpu_uuids
    }


def _find_idle_seconds(each: JobView) -> dict[str, float]:
    """Return the time since the GPU of one rank stopped working while all other GPUs of its job work on."""
    worker = find_idle_worker(each.entry.watch, each.view.now, each.view.settings)
    if worker is None:
        return {}
    rank = next((rank.rank for rank in each.entry.job.ranks if worker[0] in rank.gpu_uuids), None)
    return {number_text(rank): each.view.now - worker[1]}


def _find_gap_seconds(each: JobView) -> float | None:
    record = each.entry.watch.progress
    return None if record.progressed_at is None else record.gap_seconds(each.view.now)


def _describe_suspected(each: JobView) -> dict[tuple[str, ...], int]:
    look = each.entry.suspected
    if look is None or each.entry.watch.state is not JobState.SUSPECTED:
        return {}
    verdict, node = look.verdict, look.capture.node
    ranks = ranks_label(verdict.named, node), ranks_label(verdict.check_first, node)
    summary = sentence_label(shorten_paths(verdict.message, look.grouping))
    return {(verdict.kind, verdict.confidence.value, *ranks, summary): 1}


def _list_activities(view: View) -> Iterator[_ActivityView]:
    """Yield the activities of the ranks of each open incident, except of ranks that only wait."""
    for each in list_incidents(view):
        activities: list[tuple[str, ...]] = []
        for group in each.incident.grouping.groups:
            does = each.shorten(group_text.describe_rank(group)) if group.frames else ""
            does = words.elided(does, LABEL_LENGTH)
            for member in (member for member in group.members if not member.waiting):
                rank = number_text(member.id.rank), number_text(member.id.local_rank)
                place = (*_activity(group, member, each.incident), member.motion.value, _frame(group), group.key)
                activities.append((*place, *rank, does))
        yield _ActivityView(each.job, activities)


def _activity(group: Group, member: Member, incident: Incident) -> tuple[str, str]:
    """Return the activity of a rank, and for what it waits, as labels.

    It waits for "nothing" if it is gone or stopped, if its job is over, or if it is a named rank in code that no
    rule matches. For a rank without a dump this is "unknown", and for one that ended after the named rank had ended.
    """
    if group.gone:
        return "gone", "unknown" if _ended_later(member, incident) else "nothing"
    if member.signature is Signature.STOPPED or member.kernel.state in STOPPED_STATES:
        return "stopped", "nothing"
    if incident.state is JobState.OVER:
        return "over", "nothing"
    if group.fault:
        return "undumpable", "unknown"
    is_named = group.waits_for == "unknown" and member.id in incident.verdict.named
    return group.activity, "nothing" if is_named else group.waits_for


def _ended_later(member: Member, incident: Incident) -> bool:
    """True if the verdict names another ended rank, and not this one: it died first."""
    named = incident.verdict.named
    ended = (one.id for group in incident.grouping.groups if group.gone for one in group.members)
    return member.id not in named and any(rank in named for rank in ended)


def _frame(group: Group) -> str:
    if not group.frames:
        return group.fault.reason if group.fault else ""
    frame = group.frames[0]
    return f"{frame.function} ({frame.file})"[:LABEL_LENGTH]


def _find_timeout(each: IncidentView) -> dict[str, float | None]:
    forecast = forecast_timeout(each.incident)
    return {} if forecast is None else {forecast.source: forecast.at_unix_seconds}


def _list_crashes(view: View) -> Iterator[IncidentView]:
    for crash in view.snapshot.crashes:
        if view.now - crash.found_monotonic_seconds <= CRASH_SHOWN_SECONDS:
            yield IncidentView(crash.incident.job.name, crash.incident, view.external_url)


_INCIDENT: Labels = {**JOB, "incident": attrgetter("incident.incident_id")}
_CRASH: Labels = {
    **_INCIDENT,
    "confidence": attrgetter("incident.verdict.confidence.value"),
    "named": lambda each: ranks_label(each.incident.verdict.named, each.incident.node),
    "summary": lambda each: sentence_label(each.incident.verdict.message),
    "url": attrgetter("url"),
}
_OPEN: Labels = {
    **_CRASH,
    "verdict": attrgetter("incident.verdict.kind"),
    "check_first": lambda each: ranks_label(each.incident.verdict.check_first, each.incident.node),
    "summary": lambda each: sentence_label(each.shorten(each.incident.verdict.message)),
    "stuck_on": lambda each: words.cut_middle(each.shorten(each.incident.verdict.stuck_on), LABEL_LENGTH),
    "next_step": lambda each: words.cut_middle(each.shorten(next_step(each.incident.verdict)), LABEL_LENGTH),
    "action": attrgetter("incident.verdict.action.kind"),
    "fingerprint": attrgetter("fingerprint"),
}

METRICS: tuple[Metrics[View, Any], ...] = (
    Metrics[View, JobView](
        Metric(
            "job_info",
            "Jobs on this node; `title` is the name of the job in a page",
            _describe_job,
            by=("launcher", "user", "owner", "world_size", "name", "program", "title"),
        ),
        Metric(
            "job_state",
            "1 for the current state of the job, and no other series",
            lambda each: {each.entry.watch.state.value: 1},
            by=("state",),
        ),
        Metric(
            "job_ranks",
            "Ranks of the job that run on this node",
            lambda each: 0 if each.entry.watch.state is JobState.ENDED else len(each.entry.job.ranks),
        ),
        Metric(
            "job_absent_ranks",
            "Ranks of the job that should run on this node but do not",
            lambda each: sum(map(len, each.entry.job.absent)),
        ),
        Metric(
            "job_quiet_seconds",
            "Time since the job became quiet",
            lambda each: quiet_seconds(each.entry.watch, each.view.now),
        ),
        Metric(
            "job_page",
            "1 while the on-call should be paged for this job, by its state",
            lambda each: {each.entry.watch.state.value: each.view.snapshot.pages(each.entry)},
            by=("state",),
        ),
        Metric("job_gpu_info", "The GPUs that each rank uses", _list_gpus, by=("gpu", "uuid", "rank", "local_rank")),
        subjects=lambda view: (JobView(entry.job.name, entry, view) for entry in view.snapshot.jobs.values()),
        labels=JOB,
    ),
    Metrics[View, JobView](
        Metric(
            "job_idle_worker_seconds",
            "Time since the GPU of this rank stopped working, while all other GPUs of the job work",
            _find_idle_seconds,
            by=("rank",),
        ),
        Metric("job_progress_gap_seconds", "Time since the ranks of the job enqueued a collective", _find_gap_seconds),
        Metric(
            "job_usual_gap_seconds",
            "Length that 99 % of the job's gaps between collectives do not exceed",
            lambda each: each.entry.watch.progress.usual_seconds,
        ),
        Metric(
            "job_suspected_info",
            "The verdict on a job that is suspected and does not page yet",
            _describe_suspected,
            by=("verdict", "confidence", "named", "check_first", "summary"),
        ),
        Metric(
            "job_step_seconds",
            "Median time between two collectives at the place where ranks are compared",
            lambda each: (each.entry.arrival_order.step_seconds or None) if each.entry.arrival_order else None,
        ),
        subjects=lambda view: (JobView(entry.job.name, entry, view) for entry in view.snapshot.living),
        labels=JOB,
    ),
    Metrics[View, PageSilence](
        Metric(
            "job_silence_end_timestamp_seconds",
            "Jobs that do not page until this time, because `hangwatch silence` asked for it",
            lambda silence: {silence.reason: silence.until_unix_seconds},
            by=("reason",),
        ),
        subjects=lambda view: view.snapshot.silences.values(),
        labels={"job_id": attrgetter("job_id"), "job_key": attrgetter("job_key")},
    ),
    Metrics[View, RankView](
        Metric(
            "rank_collectives_total",
            "Collectives that the rank has enqueued since hangwatch follows it, by PyTorch's flight recorder",
            lambda each: each.progress.counter.total if each.progress else None,
        ),
        Metric(
            "rank_lateness_seconds",
            "Median time by which the rank enqueues a collective behind the median of the other ranks of the node",
            lambda each: each.order.lateness_seconds.get(each.rank.id) if each.order else None,
        ),
        Metric(
            "job_straggler_lateness_ratio",
            "Lateness of the named rank as a ratio of the step; only while a rank is named",
            lambda each: each.order.lateness_ratio if each.order and each.rank.id == each.order.named else None,
        ),
        subjects=list_ranks,
        labels=RANK,
    ),
    Metrics[View, IncidentView](
        Metric(
            "incident_info",
            "Open incidents: the verdict as a sentence, the named ranks, the ranks to check first, and what to do",
            lambda _: 1,
        ),
        subjects=list_incidents,
        labels=_OPEN,
    ),
    Metrics[View, IncidentView](
        Metric(
            "incident_opened_timestamp_seconds",
            "Time of the first capture of the incident",
            lambda each: each.incident.captured_unix_seconds,
        ),
        Metric(
            "incident_timeout_timestamp_seconds",
            "Time at which the collective timeout ends the job, if it is known; `source` says how",
            _find_timeout,
            by=("source",),
        ),
        subjects=list_incidents,
        labels=_INCIDENT,
    ),
    Metrics[View, _ActivityView](
        Metric(
            "rank_activity",
            "Activity of each rank of a job with an open incident",
            lambda each: dict.fromkeys(each.activities, 1),
            by=(*_PLACE, "rank", "local_rank", "does"),
        ),
        Metric(
            "job_activity_ranks",
            "Ranks on this node with this activity, of a job with an open incident",
            lambda each: Counter(activity[: len(_PLACE)] for activity in each.activities),
            by=_PLACE,
        ),
        subjects=_list_activities,
        labels=JOB,
    ),
    Metrics[View, IncidentView](
        Metric(
            "job_crash_info",
            "Jobs with ranks that crashed in the last 15 minutes: the rank that died first, and the cause",
            lambda _: 1,
        ),
        subjects=_list_crashes,
        labels=_CRASH,
    ),
    Metrics[View, View](
        Metric(
            "job_crashes_total",
            "Crashes of jobs on this node; each crash of a restarted job counts",
            lambda view: view.snapshot.crash_count,
        ),
        Metric(
            "job_remains_unread_total",
            "Crashes with unread artifacts, because too many crashes of the same owner were waiting",
            lambda view: view.snapshot.unread_crash_count,
        ),
    ),
)
