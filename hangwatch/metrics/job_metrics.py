"""Metrics of jobs: states, ranks with their collectives and lateness, open incidents with activities, and crashes."""

import itertools
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hangwatch import words
from hangwatch.config import Detector
from hangwatch.detector.idle_workers import find_idle_worker
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.metrics.series import JOB, LABEL_LENGTH, counter, gauge, number_text, ranks_label, sentence_label
from hangwatch.model import STOPPED_STATES, Group, Incident, JobState, Member, Signature
from hangwatch.state.board import Snapshot
from hangwatch.state.on_crash import CRASH_SHOWN_SECONDS
from hangwatch.verdict.timeout_forecast import forecast_timeout
from hangwatch.verdict.wording import group_text
from hangwatch.verdict.wording.next_steps import next_step
from hangwatch.verdict.wording.short_paths import shorten_paths

MOST_FINGERPRINTS = 20


def states(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the identity, state, ranks and GPUs of the jobs on this node, and 1 for each job that should page."""
    identity = ("launcher", "user", "owner", "world_size", "name", "program", "title")
    info = gauge("job_info", "Jobs on this node; `title` is the name of the job in a page", (*JOB, *identity))
    state = gauge("job_state", "1 for the current state of the job, and no other series", (*JOB, "state"))
    ranks = gauge("job_ranks", "Ranks of the job that run on this node", JOB)
    absent = gauge("job_absent_ranks", "Ranks of the job that should run on this node but do not", JOB)
    quiet = gauge("job_quiet_seconds", "Time since the job became quiet", JOB)
    page = gauge("job_page", "1 while the on-call should be paged for this job, by its state", (*JOB, "state"))
    gpus = gauge("job_gpu_info", "The GPUs that each rank uses", (*JOB, "gpu", "uuid", "rank", "local_rank"))
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for entry in snapshot.jobs.values():
        job = entry.job
        name = tuple(job.name.labels.values())
        labels = [job.launcher, job.user or "", job.owner, number_text(job.world_size), job.job_name, job.program]
        info.add_metric([*name, *labels, words.describe_job(job)], 1)
        state.add_metric([*name, entry.watch.state.value], 1)
        alive = 0 if entry.watch.state is JobState.ENDED else len(job.ranks)
        ranks.add_metric(name, alive)
        absent.add_metric(name, sum(map(len, job.absent)))
        quiet.add_metric(name, quiet_seconds(entry.watch, now))
        page.add_metric([*name, entry.watch.state.value], float(snapshot.pages(entry)))
        for rank in job.ranks if alive else ():
            for uuid in rank.gpu_uuids:
                gpus.add_metric(
                    [*name, index.get(uuid, ""), uuid, number_text(rank.rank), number_text(rank.local_rank)], 1
                )
    yield from (info, state, ranks, absent, quiet, page, gpus)


def idle_workers(snapshot: Snapshot, now: float, settings: Detector) -> Iterator[Metric]:
    """Yield the time since the GPU of one rank stopped working while all other GPUs of its job work on."""
    idle = gauge(
        "job_idle_worker_seconds",
        "Time since the GPU of this rank stopped working, while all other GPUs of the job work",
        (*JOB, "rank"),
    )
    for entry in snapshot.living:
        worker = find_idle_worker(entry.watch, now, settings)
        if worker is not None:
            ranks = [rank.rank for rank in entry.job.ranks if worker[0] in rank.gpu_uuids]
            idle.add_metric(
                [*entry.job.name.labels.values(), number_text(ranks[0] if ranks else None)], now - worker[1]
            )
    yield idle


def silences(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the end of each silence, also if its job is not on the board after a restart of the daemon."""
    ends = gauge(
        "job_silence_end_timestamp_seconds",
        "Jobs that do not page until this time, because `hangwatch silence` asked for it",
        (*JOB, "reason"),
    )
    for silence in snapshot.silences.values():
        ends.add_metric([*silence.name.labels.values(), silence.reason], silence.until_unix_seconds)
    yield ends


def incidents(snapshot: Snapshot, external_url: str) -> Iterator[Metric]:
    """Yield the open incidents, and the times at which collective timeouts end their jobs."""
    labels = (*JOB, "incident", "verdict", "confidence", "named", "check_first", "summary", "url")
    labels = (*labels, "stuck_on", "next_step", "action", "fingerprint")
    info = gauge(
        "incident_info",
        "Open incidents: the verdict as a sentence, the named ranks, the ranks to check first, and what to do",
        labels,
    )
    opened = gauge("incident_opened_timestamp_seconds", "Time of the first capture of the incident", (*JOB, "incident"))
    ends = gauge(
        "incident_timeout_timestamp_seconds",
        "Time at which the collective timeout ends the job, if it is known; `source` says how",
        (*JOB, "incident", "source"),
    )
    # At most `MOST_FINGERPRINTS`: a user can make many.
    open_incidents = (entry.open_incident for entry in snapshot.jobs.values())
    unique = dict.fromkeys(each.verdict.fingerprint for each in open_incidents if each is not None)
    fingerprints = frozenset(itertools.islice(unique, MOST_FINGERPRINTS))
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
                ranks_label(verdict.named, incident.node),
                ranks_label(verdict.check_first, incident.node),
                sentence_label(shorten_paths(verdict.message, incident.grouping)),
                _page(incident, external_url),
                words.cut_middle(shorten_paths(verdict.stuck_on, incident.grouping), LABEL_LENGTH),
                words.cut_middle(shorten_paths(next_step(verdict), incident.grouping), LABEL_LENGTH),
                verdict.action.kind,
                verdict.fingerprint if verdict.fingerprint in fingerprints else "",
            ],
            1,
        )
        opened.add_metric([*name, incident.incident_id], incident.captured_unix_seconds)
        forecast = forecast_timeout(incident)
        if forecast is not None and forecast.at_unix_seconds is not None:
            ends.add_metric([*name, incident.incident_id, forecast.source], forecast.at_unix_seconds)
    yield from (info, opened, ends)


def activities(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the activity of each rank of a job with an open incident, and for each activity the number of ranks."""
    place = ("activity", "waits_for", "motion", "frame", "stack")
    activity = gauge(
        "rank_activity",
        "Activity of each rank of a job with an open incident",
        (*JOB, "rank", "local_rank", *place, "does"),
    )
    ranks = gauge(
        "job_activity_ranks", "Ranks on this node with this activity, of a job with an open incident", (*JOB, *place)
    )
    for entry in snapshot.jobs.values():
        incident = entry.open_incident
        if incident is None:
            continue
        name, counts = tuple(entry.job.name.labels.values()), Counter[tuple[str, ...]]()
        for group in incident.grouping.groups:
            does = shorten_paths(group_text.describe_rank(group), incident.grouping) if group.frames else ""
            does = words.elided(does, LABEL_LENGTH)
            for member in (member for member in group.members if not member.waiting):
                labels = (*_activity(group, member, incident), member.motion.value, _frame(group), group.key)
                activity.add_metric(
                    [*name, number_text(member.id.rank), number_text(member.id.local_rank), *labels, does], 1
                )
                counts[labels] += 1
        for key, count in counts.items():
            ranks.add_metric([*name, *key], count)
    yield from (activity, ranks)


def _page(incident: Incident, external_url: str) -> str:
    """Return the URL of an incident's report; "" if [http] external_url is not set."""
    base = external_url.replace("{node}", incident.node).rstrip("/")
    return f"{base}/incidents/{incident.incident_id}" if base else ""


def crashes(snapshot: Snapshot, now: float, external_url: str) -> Iterator[Metric]:
    """Yield the recent crashes, and the number of crashes since the daemon started."""
    labels = (*JOB, "incident", "confidence", "named", "summary", "url")
    info = gauge(
        "job_crash_info",
        "Jobs with ranks that crashed in the last 15 minutes: the rank that died first, and the cause",
        labels,
    )
    for crash in snapshot.crashes:
        if now - crash.found_monotonic_seconds <= CRASH_SHOWN_SECONDS:
            incident, verdict = crash.incident, crash.incident.verdict
            named = ranks_label(verdict.named, incident.node)
            name = incident.job.name.labels.values()
            texts = (named, sentence_label(verdict.message), _page(incident, external_url))
            info.add_metric([*name, incident.incident_id, verdict.confidence.value, *texts], 1)
    yield info
    yield counter(
        "job_crashes", "Crashes of jobs on this node; each crash of a restarted job counts", snapshot.crash_count
    )
    yield counter(
        "job_remains_unread",
        "Crashes with unread artifacts, because too many crashes of the same owner were waiting",
        snapshot.unread_crash_count,
    )


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


def progress(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """Yield the counters of the ranks, the gaps of the jobs, and the verdicts on suspected jobs."""
    counted = CounterMetricFamily(
        "hangwatch_rank_collectives",
        "Collectives that the rank has enqueued since hangwatch follows it, by PyTorch's flight recorder",
        labels=[*JOB, "rank", "local_rank"],
    )
    gap = gauge("job_progress_gap_seconds", "Time since the ranks of the job enqueued a collective", JOB)
    usual = gauge("job_usual_gap_seconds", "Length that 99 % of the job's gaps between collectives do not exceed", JOB)
    labels = (*JOB, "verdict", "confidence", "named", "check_first", "summary")
    info = gauge("job_suspected_info", "The verdict on a job that is suspected and does not page yet", labels)
    for entry in snapshot.living:
        name, record = tuple(entry.job.name.labels.values()), entry.watch.progress
        for rank in entry.job.ranks:
            rank_progress = record.ranks.get(rank.id)
            if rank_progress is not None:
                counted.add_metric(
                    [*name, number_text(rank.rank), number_text(rank.local_rank)], rank_progress.counter.total
                )
        if record.progressed_at is not None:
            gap.add_metric(name, record.gap_seconds(now))
        if (usual_seconds := record.usual_seconds) is not None:
            usual.add_metric(name, usual_seconds)
        if entry.suspected is not None and entry.watch.state is JobState.SUSPECTED:
            verdict, node = entry.suspected.verdict, entry.suspected.capture.node
            ranks = ranks_label(verdict.named, node), ranks_label(verdict.check_first, node)
            summary = sentence_label(shorten_paths(verdict.message, entry.suspected.grouping))
            info.add_metric([*name, verdict.kind, verdict.confidence.value, *ranks, summary], 1)
    yield from (counted, gap, usual, info)


def lateness(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the lateness of each rank behind the others, the ranks that are named as late, and the step time."""
    labels = (*JOB, "rank", "local_rank")
    late = gauge(
        "rank_lateness_seconds",
        "Median time by which the rank enqueues a collective behind the median of the other ranks of the node",
        labels,
    )
    named = gauge(
        "job_straggler_lateness_ratio",
        "Lateness of the named rank as a ratio of the step; only while a rank is named",
        labels,
    )
    step = gauge("job_step_seconds", "Median time between two collectives at the place where ranks are compared", JOB)
    for entry in snapshot.living:
        order = entry.arrival_order
        if order is not None and order.step_seconds > 0:
            step.add_metric(tuple(entry.job.name.labels.values()), order.step_seconds)
        for rank in entry.job.ranks if order is not None else ():
            values = [*entry.job.name.labels.values(), number_text(rank.rank), number_text(rank.local_rank)]
            if order is not None and (seconds := order.lateness_seconds.get(rank.id)) is not None:
                late.add_metric(values, seconds)
            if order is not None and rank.id == order.named:
                named.add_metric(values, order.lateness_ratio)
    yield from (late, named, step)
