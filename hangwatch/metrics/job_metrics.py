"""Metrics of jobs: states, ranks with their collectives and lateness, open incidents with activities, and crashes."""

import itertools
from collections import Counter

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.detector.idle_workers import find_idle_worker
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.metrics.series import (
    LABEL_LENGTH,
    Series,
    name_labels,
    number_text,
    rank_labels,
    ranks_label,
    sentence_label,
)
from hangwatch.model import STOPPED_STATES, Group, Incident, JobState, Member, Signature
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.on_crash import CRASH_SHOWN_SECONDS
from hangwatch.verdict.timeout_forecast import forecast_timeout
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import next_step
from hangwatch.verdict.wording.short_paths import shorten_paths

MOST_FINGERPRINTS = 20


def add_states(series: Series, snapshot: Snapshot, now: float) -> None:
    """Add the identity, state, ranks and GPUs of the jobs on this node, and 1 for each job that should page."""
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for entry in snapshot.jobs.values():
        job, name = entry.job, name_labels(entry.job.name)
        labels = (job.launcher, job.user or "", job.owner, number_text(job.world_size), job.job_name, job.program)
        series.add("job_info", (*name, *labels, words.describe_job(job)), 1)
        series.add("job_state", (*name, entry.watch.state.value), 1)
        alive = 0 if entry.watch.state is JobState.ENDED else len(job.ranks)
        series.add("job_ranks", name, alive)
        series.add("job_absent_ranks", name, sum(map(len, job.absent)))
        series.add("job_quiet_seconds", name, quiet_seconds(entry.watch, now))
        series.add("job_page", (*name, entry.watch.state.value), float(snapshot.pages(entry)))
        for rank in job.ranks if alive else ():
            for uuid in rank.gpu_uuids:
                series.add("job_gpu_info", (*name, index.get(uuid, ""), uuid, *rank_labels(rank)), 1)


def add_idle_workers(series: Series, snapshot: Snapshot, now: float, settings: Detector) -> None:
    """Add the time since the GPU of one rank stopped working while all other GPUs of its job work on."""
    for entry in snapshot.living:
        worker = find_idle_worker(entry.watch, now, settings)
        if worker is not None:
            rank = next((rank.rank for rank in entry.job.ranks if worker[0] in rank.gpu_uuids), None)
            series.add("job_idle_worker_seconds", (*name_labels(entry.job.name), number_text(rank)), now - worker[1])


def add_silences(series: Series, snapshot: Snapshot) -> None:
    """Add the end of each silence, also if its job is not on the board after a restart of the daemon."""
    for silence in snapshot.silences.values():
        labels = (*name_labels(silence), silence.reason)
        series.add("job_silence_end_timestamp_seconds", labels, silence.until_unix_seconds)


def add_incidents(series: Series, snapshot: Snapshot, external_url: str) -> None:
    """Add the open incidents, and the times at which collective timeouts end their jobs."""
    # At most `MOST_FINGERPRINTS`: a user can make many.
    open_incidents = (entry.open_incident for entry in snapshot.jobs.values())
    unique = dict.fromkeys(each.verdict.fingerprint for each in open_incidents if each is not None)
    fingerprints = frozenset(itertools.islice(unique, MOST_FINGERPRINTS))
    for entry in snapshot.jobs.values():
        incident = entry.open_incident
        if incident is None:
            continue
        name, verdict = (*name_labels(entry.job.name), incident.incident_id), incident.verdict
        labels = (
            verdict.kind,
            verdict.confidence.value,
            ranks_label(verdict.named, incident.node),
            ranks_label(verdict.check_first, incident.node),
            sentence_label(shorten_paths(verdict.message, incident.grouping)),
            _page(incident, external_url),
            words.cut_middle(shorten_paths(verdict.stuck_on, incident.grouping), LABEL_LENGTH),
            words.cut_middle(shorten_paths(next_step(verdict), incident.grouping), LABEL_LENGTH),
            verdict.action.kind,
            verdict.fingerprint if verdict.fingerprint in fingerprints else "",
        )
        series.add("incident_info", (*name, *labels), 1)
        series.add("incident_opened_timestamp_seconds", name, incident.captured_unix_seconds)
        forecast = forecast_timeout(incident)
        if forecast is not None and forecast.at_unix_seconds is not None:
            series.add("incident_timeout_timestamp_seconds", (*name, forecast.source), forecast.at_unix_seconds)


def add_activities(series: Series, snapshot: Snapshot) -> None:
    """Add the activity of each rank of a job with an open incident, and for each activity the number of ranks."""
    for entry in snapshot.jobs.values():
        incident = entry.open_incident
        if incident is None:
            continue
        name, counts = name_labels(entry.job.name), Counter[tuple[str, ...]]()
        for group in incident.grouping.groups:
            does = shorten_paths(group_text.describe_rank(group), incident.grouping) if group.frames else ""
            does = words.elided(does, LABEL_LENGTH)
            for member in (member for member in group.members if not member.waiting):
                labels = (*_activity(group, member, incident), member.motion.value, _frame(group), group.key)
                series.add("rank_activity", (*name, *rank_labels(member.id), *labels, does), 1)
                counts[labels] += 1
        for key, count in counts.items():
            series.add("job_activity_ranks", (*name, *key), count)


def _page(incident: Incident, external_url: str) -> str:
    """Return the URL of an incident's report; "" if [http] external_url is not set."""
    base = external_url.replace("{node}", incident.node).rstrip("/")
    return f"{base}/incidents/{incident.incident_id}" if base else ""


def add_crashes(series: Series, snapshot: Snapshot, now: float, external_url: str) -> None:
    """Add the recent crashes, and the number of crashes since the daemon started."""
    for crash in snapshot.crashes:
        if now - crash.found_monotonic_seconds <= CRASH_SHOWN_SECONDS:
            incident, verdict = crash.incident, crash.incident.verdict
            named = ranks_label(verdict.named, incident.node)
            texts = (named, sentence_label(verdict.message), _page(incident, external_url))
            name = (*name_labels(incident.job.name), incident.incident_id)
            series.add("job_crash_info", (*name, verdict.confidence.value, *texts), 1)
    series.add("job_crashes", (), snapshot.crash_count)
    series.add("job_remains_unread", (), snapshot.unread_crash_count)


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


def add_progress(series: Series, snapshot: Snapshot, now: float) -> None:
    """Add the counters of the ranks, the gaps of the jobs, the verdicts on suspected jobs, and the late ranks."""
    for entry in snapshot.living:
        name, record = name_labels(entry.job.name), entry.watch.progress
        for rank in entry.job.ranks:
            rank_progress = record.ranks.get(rank.id)
            if rank_progress is not None:
                series.add("rank_collectives", (*name, *rank_labels(rank)), rank_progress.counter.total)
        if record.progressed_at is not None:
            series.add("job_progress_gap_seconds", name, record.gap_seconds(now))
        if (usual_seconds := record.usual_seconds) is not None:
            series.add("job_usual_gap_seconds", name, usual_seconds)
        if entry.suspected is not None and entry.watch.state is JobState.SUSPECTED:
            verdict, node = entry.suspected.verdict, entry.suspected.capture.node
            ranks = ranks_label(verdict.named, node), ranks_label(verdict.check_first, node)
            summary = sentence_label(shorten_paths(verdict.message, entry.suspected.grouping))
            series.add("job_suspected_info", (*name, verdict.kind, verdict.confidence.value, *ranks, summary), 1)
        _add_lateness(series, entry)


def _add_lateness(series: Series, entry: JobEntry) -> None:
    """Add the lateness of each rank behind the others, the rank that is named as late, and the step time."""
    order, name = entry.arrival_order, name_labels(entry.job.name)
    if order is None:
        return
    if order.step_seconds > 0:
        series.add("job_step_seconds", name, order.step_seconds)
    for rank in entry.job.ranks:
        if (seconds := order.lateness_seconds.get(rank.id)) is not None:
            series.add("rank_lateness_seconds", (*name, *rank_labels(rank)), seconds)
        if rank.id == order.named:
            series.add("job_straggler_lateness_ratio", (*name, *rank_labels(rank)), order.lateness_ratio)
