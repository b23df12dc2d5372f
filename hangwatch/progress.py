"""What a power sample, a scan of /proc and a finished capture do to the jobs on the board. Pure: Snapshot -> Snapshot.

Each function returns the new snapshot and what is to be done about it; the daemon does it. Incidents open, change and
close here, and nowhere else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from hangwatch import words
from hangwatch.board import Crash, JobEntry, Snapshot
from hangwatch.checks import nvlink_status, xid
from hangwatch.config import Detector
from hangwatch.hang import by_number, detector, stays, watched
from hangwatch.hang.elsewhere import waits_elsewhere
from hangwatch.hang.jobs import told_apart
from hangwatch.hang.pauses import places_of
from hangwatch.hang.power import idle_levels
from hangwatch.hang.rest import is_serving, resting_state
from hangwatch.hang.watched import JobWatch, MotionCount
from hangwatch.look import Look
from hangwatch.model import (
    CheckResult,
    CheckStatus,
    EndedProcess,
    GpuSweep,
    Grouping,
    Incident,
    Job,
    JobState,
    Motion,
    ProcessId,
    SamplerStatus,
    TimelineEntry,
    Value,
    gaps,
    spans,
)

ENDED_SHOWN_SECONDS = 120.0
ENDED_SHOWN_PER_SHARE = 64
TIMELINE_LENGTH = 60
STARTED_AGAIN = "hangwatch was started again: the processes are the same, the incident goes on"
WAITS_NO_MORE = "its launcher has ended, or has started what is no rank"
RANKS_CAME = "its ranks have come"
CRASH_SHOWN_SECONDS = 900.0
CRASHES_SHOWN = 64
CRASHES_SHOWN_PER_SHARE = 8
ENDED_RANKS_KEPT = 1024  # of a job, the newest: as many as can live at once, so who died first is among them
ENDED_WORKERS_KEPT = 64
CAPTURES_KEPT = 4  # the first, which shows how it began, and the last ones


class SaveIncident(Value, frozen=True):
    """Write this incident to disk; `is_watched`: with the power that its job has drawn meanwhile.

    `moved_to` is the state to which it has just moved, None where it is only told anew.
    """

    incident: Incident
    is_watched: bool = True
    moved_to: JobState | None = None


class ReadRemains(Value, frozen=True):
    """Read what the ranks in `job.ended` left, some of which have just been found gone."""

    job: Job


Action: TypeAlias = detector.Action | SaveIncident | ReadRemains
"""What is to be done about it: what the detector asks for, incidents to keep, and dead ranks to look after."""


def sampled(
    snapshot: Snapshot,
    sweep: GpuSweep,
    status: SamplerStatus,
    *,
    now: float,
    settings: Detector,
    gap_seconds: float,
    look_seconds: float = detector.LOOK_SECONDS,
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Feed one sweep to every job; `now` is CLOCK_MONOTONIC in seconds, and a look takes `look_seconds`."""
    held = frozenset(uuid for entry in _present(snapshot) for uuid in entry.job.gpu_uuids)
    snapshot = replace(
        snapshot, sweep=sweep, sampler=status, idle_watts=idle_levels(snapshot.idle_watts, sweep.gpus, held)
    )
    by_uuid = {gpu.uuid: gpu for gpu in sweep.gpus}
    actions: list[Action] = []
    for entry in _present(snapshot):
        samples = {uuid: by_uuid[uuid] for uuid in entry.job.gpu_uuids if uuid in by_uuid}
        watch, wanted = detector.step(
            entry.watch,
            samples,
            now,
            settings,
            idle=snapshot.idle_watts,
            gap_seconds=gap_seconds,
            gpu_errors_at=snapshot.gpu_errors_at,
            look_seconds=look_seconds,
        )
        stepped = replace(entry, watch=watch, page=watched.pages(watch, now, settings))
        stepped, more = _settle(stepped, wanted, sweep.taken_unix_seconds)
        snapshot = snapshot.with_job(stepped)
        actions += more
    return snapshot, tuple(actions)


def unsampled(
    snapshot: Snapshot, status: SamplerStatus, *, now: float, unix_now: float, settings: Detector
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take it that no new sweep has come; `now` is CLOCK_MONOTONIC in seconds."""
    snapshot = replace(snapshot, sampler=status)
    actions: list[Action] = []
    for entry in _present(snapshot):
        watch, wanted = detector.unsampled(entry.watch, now, settings)
        if wanted:
            stepped, more = _settle(replace(entry, watch=watch), wanted, unix_now)
            snapshot = snapshot.with_job(stepped)
            actions += more
    return snapshot, tuple(actions)


def checked(snapshot: Snapshot, result: CheckResult, *, now: float) -> Snapshot:
    """Take the newest result of one check; `now` is CLOCK_MONOTONIC in seconds. XIDs and link errors are timed."""
    before = snapshot.checks.get(result.check)
    came = result.check == nvlink_status.CHECK.name and result.verdict.status >= CheckStatus.WARNING
    if result.check == xid.CHECK.name and before is not None:
        came = xid.errors_told(result.points) > xid.errors_told(before.points)
    return replace(snapshot.with_check(result), gpu_errors_at=now if came else snapshot.gpu_errors_at)


def discovered(
    snapshot: Snapshot, jobs: Iterable[Job], now: float, unix_now: float, ticks_per_second: float = 100.0
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take the jobs that a scan found: begin, restart and end watches; start_ticks are `ticks_per_second`."""
    actions: list[Action] = []
    before = _ranks_of_launchers(snapshot)
    jobs = [job for job in jobs if not _has_just_lost_its_ranks(job, before, now)]
    found = _with_kept_names(_matched(snapshot, jobs))
    followed = {entry.job.key for match in found.values() for entry in match.entries}
    free = {key: entry for key, entry in snapshot.jobs.items() if key not in followed}
    for key in followed - found.keys():
        snapshot = snapshot.without_job(key)
    for key, (job, entries) in found.items():
        for other in entries[1:]:
            ended, more = _end(other, f"its ranks are ranks of job {job.job_id}", now, unix_now)
            actions += more
            snapshot = snapshot if other.job.key in found else snapshot.with_job(ended)
        entry = _as_one(entries) if entries else free.get(key)
        if entry is not None and watched.is_restart(entry.watch, job):
            reason = RANKS_CAME if entry.job.waiting else "its ranks were replaced by new ones"
            actions += _remains(entry.job, _with_ended(entry.job, replace(entry.job, ranks=()), unix_now))
            entry, more = _end(entry, reason, now, unix_now)
            actions += more
        if entry is None or entry.watch.state is JobState.ENDED:
            started = min((process.start_ticks for process in job.processes), default=0) / ticks_per_second
            if job.waiting and job.launcher_id in before:
                started = max(started, before[job.launcher_id].since)
            # Pods of uid 0 may have one key between them: what one was taught is not the other's.
            is_same = entry is not None and entry.job.share == job.share
            watch = watched.begin(job, now, started, entry.watch if entry is not None and is_same else None)
            entry = JobEntry(job=job, watch=watch, held_gpu=job.holds_gpu)
        else:
            held_gpu = entry.held_gpu or job.holds_gpu
            watch = watched.joined(entry.watch, job)
            known = _with_ended(entry.job, _with_known_absent(entry, job), unix_now)
            actions += _remains(entry.job, known)
            entry = replace(entry, job=known, watch=watch, held_gpu=held_gpu)
        snapshot = snapshot.with_job(entry)
    led = {launcher for match in found.values() if match.job.ranks for launcher in match.job.launcher_ids}
    for missing in [entry for key, entry in snapshot.jobs.items() if key not in found]:
        if missing.watch.state is not JobState.ENDED:
            has_come = missing.job.waiting is not None and missing.job.launcher_id in led
            reason = WAITS_NO_MORE if missing.job.waiting else "all its ranks on this node have ended"
            without = _with_ended(missing.job, replace(missing.job, ranks=()), unix_now)
            actions += _remains(missing.job, without)
            ended, more = _end(missing, RANKS_CAME if has_come else reason, now, unix_now)
            actions += more
            # The job goes on with its ranks, which may know it by another name: it is not shown twice.
            snapshot = snapshot.without_job(missing.job.key) if has_come else snapshot.with_job(ended)
        elif now - missing.watch.since > ENDED_SHOWN_SECONDS:
            snapshot = snapshot.without_job(missing.job.key)
    return _without_old_ends(snapshot), tuple(actions)


def _ranks_of_launchers(snapshot: Snapshot) -> dict[ProcessId, JobWatch]:
    """By launcher, the watch of the ranks that it has or had."""
    entries = [entry for entry in snapshot.jobs.values() if entry.job.ranks]
    return {launcher: entry.watch for entry in entries for launcher in entry.job.launcher_ids}


def _has_just_lost_its_ranks(job: Job, before: Mapping[ProcessId, JobWatch], now: float) -> bool:
    """Whether it is a launcher at the end of a job that was watched, or between two starts of its ranks.

    That job ends, and its ranks may come again; only who is still without any when its end is no longer shown waits.
    """
    watch = before.get(job.launcher_id) if job.waiting and job.launcher_id else None
    return watch is not None and (watch.state is not JobState.ENDED or now - watch.since <= ENDED_SHOWN_SECONDS)


def resumed(
    snapshot: Snapshot,
    incidents: Iterable[Incident],
    living: frozenset[ProcessId],
    *,
    now: float,
    unix_now: float,
    settings: Detector,
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take up the open incidents that an earlier daemon left, newest first; `living` are the processes that live.

    Where the same processes are found the incident goes on. Where none lives, or other ranks are in their place, it is
    closed with that reason. Where no scan has found them yet it waits in `left_open`.
    """
    actions: list[Action] = []
    waiting: list[Incident] = []
    for incident in incidents:
        ranks = watched.generation(incident.job)
        entry = next((one for one in _present(snapshot) if ranks & {*one.job.processes, *one.job.launcher_ids}), None)
        reason = _closed_meanwhile(entry, ranks, living)
        if reason is not None:
            line = TimelineEntry(unix_seconds=unix_now, state=JobState.ENDED, message=reason)
            closed = replace(
                incident,
                state=JobState.ENDED,
                closed_unix_seconds=unix_now,
                timeline=(*incident.timeline, line),
            )
            actions.append(SaveIncident(incident=closed, is_watched=False, moved_to=JobState.ENDED))
        elif entry is None:
            waiting.append(incident)
        else:
            snapshot = snapshot.without_job(entry.job.key)
            entry = _resumed(entry, incident, now, unix_now, settings)
            snapshot = snapshot.with_job(entry)
            if entry.incident is not None:
                actions.append(SaveIncident(incident=entry.incident))
    return replace(snapshot, left_open=tuple(waiting)), tuple(actions)


def _closed_meanwhile(entry: JobEntry | None, ranks: frozenset[ProcessId], living: frozenset[ProcessId]) -> str | None:
    """Why an incident that was left open does not go on; None where it does, or may."""
    if not ranks & living:
        return "its processes were gone when hangwatch was started again"
    if entry is None:
        return None
    present = watched.generation(entry.job)
    if present - ranks and ranks - present:
        return "its ranks had been replaced by new ones when hangwatch was started again"
    if entry.watch.is_open:
        return "a later incident of the same processes goes on"
    if entry.watch.state in (JobState.TRAINING, JobState.RECOVERED):
        return "the job was at work when hangwatch had read this again"
    return None


def _resumed(entry: JobEntry, incident: Incident, now: float, unix_now: float, settings: Detector) -> JobEntry:
    """The job under the name that it had, with its incident, looked at at once."""
    job = _with_known_absent(replace(entry, job=incident.job), entry.job)
    job = replace(job, job_id=incident.job.job_id, job_key=incident.job.key)
    timeline = incident.timeline
    if timeline and timeline[-1].message == STARTED_AGAIN:
        timeline = timeline[:-1]  # a daemon that is started again and again
    timeline = (*timeline, TimelineEntry(unix_seconds=unix_now, state=incident.state, message=STARTED_AGAIN))
    incident = replace(incident, job=job, timeline=timeline)
    watch = watched.resumed(entry.watch, incident, now, unix_now, settings)
    return replace(
        entry,
        job=job,
        watch=watch,
        page=watched.pages(watch, now, settings),
        incident=incident,
        timeline=timeline[-TIMELINE_LENGTH:],
    )


def _without_old_ends(snapshot: Snapshot) -> Snapshot:
    """Of a user or pod the last jobs that ended: processes that come and go by the hundred fill no board."""
    ended = [entry for entry in snapshot.jobs.values() if entry.watch.state is JobState.ENDED]
    seen = Counter[str]()
    for entry in sorted(ended, key=lambda entry: -entry.watch.since):
        seen[entry.job.share] += 1
        if seen[entry.job.share] > ENDED_SHOWN_PER_SHARE:
            snapshot = snapshot.without_job(entry.job.key)
    return snapshot


def captured(snapshot: Snapshot, look: Look, *, now: float, settings: Detector) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take what a capture showed: the job is hung, stalled, at rest, or honestly at work."""
    entry = snapshot.jobs.get(look.capture.job_key)
    if entry is None:
        return snapshot, ()
    looked_at = {dump.id.pid for dump in look.capture.ranks}
    came = sum(rank.id.pid not in looked_at for rank in entry.job.ranks)
    look = look.without_motion_of(detector.settled(entry.watch, stays.of(look.grouping), now, settings))
    seen = replace(
        motion_count(look.grouping),
        came=came,
        places=places_of(look.grouping, look.verdict.named),
        waits_elsewhere=waits_elsewhere(look.grouping, look.verdict, is_elsewhere_too=entry.job.is_elsewhere_too),
    )
    watch, wanted = detector.captured(_with_timeout(entry.watch, look), seen, now, settings)
    entry = replace(entry, watch=watch, page=watched.pages(watch, now, settings))
    if watch.is_open:
        entry = replace(entry, incident=_seen(entry, look))
    entry, actions = _settle(entry, wanted, look.judged_unix_seconds)
    if watch.is_open and entry.incident is not None and not any(isinstance(action, SaveIncident) for action in actions):
        actions = (*actions, SaveIncident(incident=entry.incident))
    return snapshot.count("captures", _result(seen)).with_job(entry), actions


def _with_timeout(watch: JobWatch, look: Look) -> JobWatch:
    """The time-out that the open operations have recorded stands above what the environment lets assume."""
    told = by_number.timeout_seconds(look.grouping)
    return watch if told is None else replace(watch, recorded_seconds=told)


def glanced(
    snapshot: Snapshot, job_key: str, seen: MotionCount, *, now: float, unix_now: float, settings: Detector
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take what a glance showed, which pauses nothing: it opens no incident, but may begin a suspicion."""
    entry = snapshot.jobs.get(job_key)
    if entry is None:
        return snapshot, ()
    watch, wanted = detector.glanced(entry.watch, seen, now, settings)
    entry, actions = _settle(replace(entry, watch=watch), wanted, unix_now)
    return snapshot.count("captures", _result(seen)).with_job(entry), actions


def unjudged(
    snapshot: Snapshot, job_key: str, *, now: float, unix_now: float, settings: Detector
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take it that a capture failed as a whole: nothing is known of the ranks, and it is tried again later."""
    entry = snapshot.jobs.get(job_key)
    if entry is None:
        return snapshot, ()
    seen = MotionCount(frozen=0, moving=0, unknown=max(1, len(entry.job.ranks)))
    watch, wanted = detector.captured(entry.watch, seen, now, settings)
    entry, actions = _settle(replace(entry, watch=watch, page=watched.pages(watch, now, settings)), wanted, unix_now)
    return snapshot.count("captures", "failed").with_job(entry), actions


def noted(
    snapshot: Snapshot, incident: Incident, message: str, *, unix_now: float
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Put a line into the timeline of an incident, where it still is its job's: what a hook came to."""
    entry = snapshot.jobs.get(incident.job.key)
    if entry is None or entry.incident is None or entry.incident.incident_id != incident.incident_id:
        return snapshot, ()
    line = TimelineEntry(unix_seconds=unix_now, state=entry.incident.state, message=message)
    told = replace(entry.incident, timeline=(*entry.incident.timeline, line))
    return snapshot.with_job(replace(entry, incident=told)), (SaveIncident(incident=told),)


def motion_count(grouping: Grouping) -> MotionCount:
    """How many ranks of a capture are frozen, moving or unjudged. A rank that is gone makes no progress: frozen.

    A job of which nothing is left is unjudged.
    """
    ended = all(group.gone for group in grouping.groups)
    frozen = moving = unknown = 0
    who = []
    for group in grouping.groups:
        movers = [member for member in group.members if member.motion is Motion.MOVING]
        for member in group.members:
            if member.motion is Motion.MOVING:
                moving += 1
            elif (member.motion is Motion.FROZEN or group.gone) and not ended:
                frozen += 1
            else:
                unknown += 1
        if movers:
            doing = group.activity.replace("_", " ") if group.activity != "unknown" else "its own code"
            who.append(f"{words.who([member.id for member in movers])} in {doing}")
    stacked = sum(group.size for group in grouping.groups if group.frames)
    return MotionCount(
        frozen=frozen,
        moving=moving,
        unknown=unknown,
        stacked=stacked,
        absent=0 if ended else sum(group.size for group in grouping.groups if group.gone),
        who="; ".join(who),
        resting=resting_state(grouping),
        serves=is_serving(grouping),
        movers=frozenset(member.id for member in grouping.members if member.motion is Motion.MOVING),
        stays=stays.of(grouping),
    )


def _present(snapshot: Snapshot) -> list[JobEntry]:
    return [entry for entry in snapshot.jobs.values() if entry.watch.state is not JobState.ENDED]


class _Match(NamedTuple):
    """A job as a scan found it, and the watches of its processes; the first is the one that goes on."""

    job: Job
    entries: tuple[JobEntry, ...]


def _matched(snapshot: Snapshot, jobs: Iterable[Job]) -> list[_Match]:
    """A watch follows its processes, whatever the scan calls them; where a job fell apart, the part with most ranks."""
    holders = {process: entry for entry in _present(snapshot) for process in entry.watch.generation}
    matches: list[_Match] = []
    followed: set[str] = set()
    for job in sorted(jobs, key=lambda job: -sum(process in holders for process in job.processes)):
        found = {holders[process].job.key: holders[process] for process in job.processes if process in holders}
        free = [entry for key, entry in found.items() if key not in followed]
        followed.update(found)
        free.sort(key=lambda entry: (_progress(entry), entry.job.key != job.key, entry.watch.began))
        matches.append(_Match(job, tuple(free)))
    return matches


def _progress(entry: JobEntry) -> int:
    """The order in which watches that become one are preferred: whose incident is open comes first."""
    if entry.watch.is_open:
        return 0
    return 1 if _is_pinned(entry) else 3 if entry.watch.is_starting else 2


def _is_pinned(entry: JobEntry) -> bool:
    """Whether a capture that is under way or an incident goes by its key."""
    return entry.watch.is_open or entry.watch.capturing or entry.incident is not None


def _with_kept_names(matches: Sequence[_Match]) -> dict[str, _Match]:
    """The jobs by key. A job is its processes: while they live it keeps the name and the key that it had.

    What a scan would call it may change: by a second job in the same Slurm allocation, by a launcher that was killed,
    by a stranger who says that he is this job. Whoever comes later is told apart, whatever his claim. Before the job
    was at work its name may change, too, but not by a stranger.

    Who came first and never held a GPU by the driver's list gives the key to whom the scan gives it and who holds one:
    else who copies a job's variables before it starts would be that job on all nodes. Nobody loses his key while a
    capture or an incident goes by it.
    """
    found: dict[str, _Match] = {}
    for match in sorted(matches, key=_precedence):
        named = _wanted(match)
        if named.key in found and match.entries:
            named = match.entries[0].job
        if named.key in found:
            named = match.job
        while named.key in found:
            named = told_apart(named)
        found[named.key] = match._replace(job=replace(match.job, job_id=named.job_id, job_key=named.key))
    return found


def _wanted(match: _Match) -> Job:
    """The job by whose name and key this one goes, where they are free."""
    job, entry = match.job, next(iter(match.entries), None)
    if entry is None:
        return job
    was_told_apart = entry.job.job_id.startswith(f"{job.job_id}-p")
    is_told_apart = job.job_id.startswith(f"{entry.job.job_id}-p")
    may_change = was_told_apart or (entry.watch.is_starting and not is_told_apart)
    return job if may_change and not _is_pinned(entry) else entry.job


def _precedence(match: _Match) -> tuple[bool, bool, bool, bool]:
    """Of jobs that want one key: whom it is pinned to, who was seen on a GPU, who has it, who is known."""
    entry = next(iter(match.entries), None)
    if entry is None:
        return True, not match.job.holds_gpu, True, True
    held_gpu = entry.held_gpu or match.job.holds_gpu
    return not _is_pinned(entry), not held_gpu, _wanted(match).key != entry.job.key, False


def _as_one(entries: Sequence[JobEntry]) -> JobEntry:
    """The first of these, with what the others know of their processes and GPUs."""
    first, *others = entries
    watch = functools.reduce(watched.merged, [other.watch for other in others], first.watch)
    return replace(first, watch=watch, held_gpu=any(entry.held_gpu for entry in entries))


def _end(entry: JobEntry, message: str, now: float, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    watch, wanted = detector.end(entry.watch, message, now)
    return _settle(replace(entry, watch=watch, page=False), wanted, unix_now)


def _with_known_absent(entry: JobEntry, job: Job) -> Job:
    """Local ranks that were there and went are absent, also where no environment says how many there should be."""
    here = sorted({rank.local_rank for rank in job.ranks if rank.local_rank is not None})
    before = [range(rank.local_rank, rank.local_rank + 1) for rank in entry.job.ranks if rank.local_rank is not None]
    known = (*before, *entry.job.absent, *job.absent)
    absent = spans(gap for first, last in spans(known) for gap in gaps(here, last + 1, first))
    return job if absent == job.absent_local_ranks else replace(job, absent_local_ranks=absent)


def _with_ended(before: Job, job: Job, unix_now: float) -> Job:
    """The job with those of its processes that were there before and are gone: by them the kernel's log is read."""
    present = {process for process, *_ in _processes(job)}
    gone = [
        EndedProcess(id=process, rank=rank, local_rank=local, gone_unix_seconds=unix_now, is_worker=is_worker)
        for process, rank, local, is_worker in _processes(before)
        if process not in present
    ]
    ranks, workers = ([one for one in (*before.ended, *gone) if one.is_worker is kind] for kind in (False, True))
    ended = (*ranks[-ENDED_RANKS_KEPT:], *workers[-ENDED_WORKERS_KEPT:])
    return job if ended == job.ended else replace(job, ended=ended)


def _remains(before: Job, after: Job) -> tuple[ReadRemains, ...]:
    """What is to be read where a rank is gone that was there before."""
    known = {one.id for one in before.ended}
    new = any(not one.is_worker and one.id not in known for one in after.ended)
    return (ReadRemains(job=after),) if new else ()


def crashed(snapshot: Snapshot, incident: Incident, *, now: float) -> tuple[Snapshot, tuple[Action, ...]]:
    """Take it that ranks of a job have crashed; of the same processes the incident that is there is told anew.

    Of a job that goes on without them it is known from now on why they died.
    """
    snapshot = _with_died(snapshot, incident.job)
    processes = _gone_ranks(incident)
    kept = [one for one in snapshot.crashes if now - one.found_monotonic_seconds <= CRASH_SHOWN_SECONDS]
    same = [one for one in kept if one.incident.job.key == incident.job.key]
    before = next((one for one in same if _gone_ranks(one.incident) & processes), None)
    if before is not None:
        incident = replace(
            incident,
            incident_id=before.incident.incident_id,
            opened_unix_seconds=before.incident.opened_unix_seconds,
        )
    if before is None and not incident.verdict.named and any(one.incident.verdict.named for one in same):
        return replace(snapshot, crash_count=snapshot.crash_count + 1), ()  # those who followed, or the next attempt's
    crash = Crash(incident=incident, found_monotonic_seconds=before.found_monotonic_seconds if before else now)
    others = [one for one in kept if one not in same]
    of_share = [one for one in others if one.incident.job.share == incident.job.share]
    for one in of_share[: max(0, len(of_share) + 1 - CRASHES_SHOWN_PER_SHARE)]:
        others.remove(one)
    snapshot = replace(
        snapshot,
        crashes=(*others, crash)[-CRASHES_SHOWN:],
        crash_count=snapshot.crash_count + (before is None),
    )
    if before is None and len(of_share) >= CRASHES_SHOWN_PER_SHARE:
        return snapshot, ()  # any user can make ranks that die, and the store is everybody's
    moved_to = JobState.ENDED if before is None else None
    return snapshot, (SaveIncident(incident=incident, is_watched=False, moved_to=moved_to),)


def left_unread(snapshot: Snapshot) -> tuple[Snapshot, int]:
    """Count a job with dead ranks that is not looked after; and how many there have been."""
    count = snapshot.unread_crash_count + 1
    return replace(snapshot, unread_crash_count=count), count


def _with_died(snapshot: Snapshot, dead: Job) -> Snapshot:
    entry, died = snapshot.jobs.get(dead.key), {one.id: one.died for one in dead.ended}
    if entry is None:
        return snapshot
    ended = tuple(replace(one, died=died.get(one.id, one.died)) for one in entry.job.ended)
    return snapshot.with_job(replace(entry, job=replace(entry.job, ended=ended)))


def _gone_ranks(incident: Incident) -> set[ProcessId]:
    return {one.id for one in incident.job.ended if not one.is_worker}


def _processes(job: Job) -> Iterator[tuple[ProcessId, int | None, int | None, bool]]:
    for rank in job.ranks:
        yield rank.id, rank.rank, rank.local_rank, False
        yield from ((worker.id, rank.rank, rank.local_rank, True) for worker in rank.workers)


def _settle(
    entry: JobEntry, wanted: tuple[detector.Action, ...], unix_now: float
) -> tuple[JobEntry, tuple[Action, ...]]:
    """Note the transitions, and the looks that are worth it, in the job's timeline and carry them into its incident."""
    actions: list[Action] = list(wanted)
    for move in wanted:
        if isinstance(move, detector.TakeCapture):
            if move.is_told:
                entry, saved = _told(entry, move.reason, unix_now)
                actions += saved
            continue
        line = TimelineEntry(unix_seconds=unix_now, state=move.state, message=move.message)
        entry = replace(entry, timeline=(*entry.timeline, line)[-TIMELINE_LENGTH:])
        incident = entry.incident
        if incident is None:
            continue
        if incident.closed_unix_seconds is not None:
            entry = replace(entry, incident=None if move.state is JobState.TRAINING else incident)
            continue
        closed = unix_now if move.state in (JobState.RECOVERED, JobState.ENDED, JobState.TRAINING) else None
        incident = replace(incident, state=move.state, timeline=(*incident.timeline, line), closed_unix_seconds=closed)
        entry = replace(entry, incident=incident)
        actions.append(SaveIncident(incident=incident, moved_to=move.state))
    return entry, tuple(actions)


def _told(entry: JobEntry, message: str, unix_now: float) -> tuple[JobEntry, tuple[Action, ...]]:
    """Put a line into the timeline of a job whose state is what it was, and into that of its open incident."""
    line = TimelineEntry(unix_seconds=unix_now, state=entry.watch.state, message=message)
    entry = replace(entry, timeline=(*entry.timeline, line)[-TIMELINE_LENGTH:])
    if entry.open_incident is None:
        return entry, ()
    incident = replace(entry.open_incident, timeline=(*entry.open_incident.timeline, line))
    return replace(entry, incident=incident), (SaveIncident(incident=incident),)


def _seen(entry: JobEntry, look: Look) -> Incident:
    """The job's open incident with one more capture, or a new one."""
    incident = entry.incident
    if incident is None or incident.closed_unix_seconds is not None:
        return look.incident(entry.job, entry.watch.state, entry.timeline)
    captures = (*incident.captures, look.capture)
    if len(captures) > CAPTURES_KEPT:
        captures = (captures[0], *captures[-(CAPTURES_KEPT - 1) :])
    job = look.read_by_owner(entry.job)
    return replace(
        incident,
        state=entry.watch.state,
        job=replace(job, uid=None) if incident.job.uid is None else job,
        verdict=look.verdict,
        grouping=look.grouping,
        captures=captures,
    )


def _result(seen: MotionCount) -> str:
    if not seen.total:
        return "empty"
    if seen.serves:
        return "serving"
    if seen.resting is not None:
        return seen.resting.value
    if seen.frozen == seen.total:
        return "waits_elsewhere" if seen.waits_elsewhere else "frozen"
    if seen.moving:
        return "moving"
    return "unjudged"
