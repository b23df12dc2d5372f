"""Jobs: their states and ranks, their open incidents with what each rank does, and their crashes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from hangwatch import words
from hangwatch.detector.job_watch import quiet_seconds
from hangwatch.metrics.series import JOB, LABEL_LENGTH, counter, folded, gauge, number_text, sentence
from hangwatch.model import Group, Incident, JobState, Member, Signature
from hangwatch.state.board import Snapshot
from hangwatch.state.on_crash import CRASH_SHOWN_SECONDS
from hangwatch.verdict.wording import group_text


def states(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """The jobs of the node: who they are, their state, ranks and GPUs, and whether to page."""
    told = ("launcher", "user", "owner", "world_size", "name", "program", "title")
    info = gauge("job_info", "The jobs on this node; `title` is what a page calls one", (*JOB, *told))
    state = gauge("job_state", "1 for the state that the job is in", (*JOB, "state"))
    ranks = gauge("job_ranks", "Ranks of the job that run on this node", JOB)
    absent = gauge("job_absent_ranks", "Ranks of the job that should run on this node and do not", JOB)
    quiet = gauge("job_quiet_seconds", "For how long the job has been quiet", JOB)
    page = gauge("job_page", "1 while the on-call should be paged for this job", JOB)
    gpus = gauge("job_gpu_info", "Which rank holds which GPU", (*JOB, "gpu", "uuid", "rank", "local_rank"))
    index = {gpu.uuid: str(gpu.index) for gpu in (snapshot.sweep.gpus if snapshot.sweep else ())}
    for entry in snapshot.jobs.values():
        job = entry.job
        name = tuple(job.name.labels.values())
        labels = [job.launcher, job.user or "", job.owner, number_text(job.world_size), job.job_name, job.program]
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
                gpus.add_metric(
                    [*name, index.get(uuid, ""), uuid, number_text(rank.rank), number_text(rank.local_rank)], 1
                )
    yield from (info, state, ranks, absent, quiet, page, gpus)


def incidents(snapshot: Snapshot, external_url: str) -> Iterator[Metric]:
    """Open incidents, and what each rank of their jobs is doing."""
    labels = (*JOB, "incident", "verdict", "confidence", "named", "first_look", "summary", "url")
    told = "Open incidents: the verdict in one sentence, who is named, or at whom to look first"
    info = gauge("incident_info", told, labels)
    opened = gauge("incident_opened_timestamp_seconds", "When the incident was opened", (*JOB, "incident"))
    activity = gauge(
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
                folded(verdict.named, incident.node),
                folded(verdict.first_look, incident.node),
                sentence(verdict.message),
                _page(incident, external_url),
            ],
            1,
        )
        opened.add_metric([*name, incident.incident_id], incident.opened_unix_seconds)
        for group in incident.grouping.groups:
            does = words.elided(group_text.describe_rank(group), LABEL_LENGTH) if group.frames else ""
            for member in (one for one in group.members if not one.waiting):
                activity.add_metric(
                    [
                        *name,
                        number_text(member.id.rank),
                        number_text(member.id.local_rank),
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


def crashes(snapshot: Snapshot, now: float, external_url: str) -> Iterator[Metric]:
    """Jobs whose ranks crashed lately, and how many since the start."""
    labels = (*JOB, "incident", "confidence", "named", "summary", "url")
    info = gauge("job_crash_info", "Jobs whose ranks crashed in the last 15 minutes: who died first, and why", labels)
    for one in snapshot.crashes:
        if now - one.found_monotonic_seconds <= CRASH_SHOWN_SECONDS:
            incident, verdict = one.incident, one.incident.verdict
            named = folded(verdict.named, incident.node)
            name = incident.job.name.labels.values()
            summary = sentence(verdict.message)
            page = _page(incident, external_url)
            info.add_metric([*name, incident.incident_id, verdict.confidence.value, named, summary, page], 1)
    yield info
    yield counter("job_crashes", "Jobs on this node whose ranks crashed, restarts included", snapshot.crash_count)
    what = "Jobs whose dead ranks were not looked after, since too many of their owner waited"
    yield counter("job_remains_unread", what, snapshot.unread_crash_count)


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
