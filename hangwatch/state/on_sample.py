"""Steps of the board for a power sample, and for a check that reports GPU errors."""

from msgspec.structs import replace

from hangwatch import detector
from hangwatch.checks import xid
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.capture_due import LOOK_SECONDS
from hangwatch.detector.power_level import update_idle_levels
from hangwatch.model import CheckResult, CheckStatus, GpuSweep, SamplerStatus, list_by_key
from hangwatch.state.actions import Action
from hangwatch.state.board import Snapshot
from hangwatch.state.incident_timeline import update_timeline
from hangwatch.state.unseen import find_shared_gpus


def record_sample(
    snapshot: Snapshot,
    sweep: GpuSweep,
    status: SamplerStatus,
    *,
    now: float,
    settings: Detector,
    gap_seconds: float,
    capture_seconds: float = LOOK_SECONDS,
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record one sweep, and apply it to the watch of every living job. `now` is CLOCK_MONOTONIC in seconds.

    A gap between samples of more than `gap_seconds` is not quiet time. `capture_seconds`: time of a usual capture.
    Counters alone judge a job with a shared GPU, if they show its progress.
    """
    before, held = snapshot, frozenset(uuid for entry in snapshot.living for uuid in entry.job.gpu_uuids)
    idle_watts = update_idle_levels(snapshot.idle_watts, sweep.gpus, held)
    snapshot = replace(snapshot, sweep=sweep, sampler=status, idle_watts=idle_watts)
    by_uuid, shared = {gpu.uuid: gpu for gpu in sweep.gpus}, find_shared_gpus(snapshot)
    actions: list[Action] = []
    for entry in snapshot.living:
        ignored = shared if entry.watch.progress.progressed_at is not None else {}
        judged = (uuid for uuid in entry.job.gpu_uuids if uuid not in ignored)
        watch, wanted = detector.apply_sample(
            entry.watch,
            {uuid: by_uuid[uuid] for uuid in judged if uuid in by_uuid},
            now,
            settings,
            idle=snapshot.idle_watts,
            gap_seconds=gap_seconds,
            gpu_errors_at=snapshot.gpu_errors_at,
            capture_seconds=capture_seconds,
        )
        watch, warned = detector.warn_of_idle_worker(watch, entry.job, now, settings)
        stepped = replace(entry, watch=watch, page=job_watch.should_page(watch, now, settings))
        stepped, more = update_timeline(stepped, (*wanted, *warned), sweep.taken_unix_seconds)
        snapshot, actions = snapshot.with_job(stepped), [*actions, *more]
    return _page_ray_jobs_once(before, snapshot), tuple(actions)


def record_missing_sample(
    snapshot: Snapshot, status: SamplerStatus, *, now: float, unix_now: float, settings: Detector
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record that there is no new sweep. `now` is CLOCK_MONOTONIC in seconds."""
    snapshot = replace(snapshot, sampler=status)
    actions: list[Action] = []
    for entry in snapshot.living:
        watch, wanted = detector.apply_missing_sample(entry.watch, now, settings)
        if wanted:
            stepped, more = update_timeline(replace(entry, watch=watch), wanted, unix_now)
            snapshot = snapshot.with_job(stepped)
            actions += more
    return snapshot, tuple(actions)


def record_check(snapshot: Snapshot, result: CheckResult, *, now: float) -> Snapshot:
    """Record a check result. New GPU errors in it get the time `now` (CLOCK_MONOTONIC, seconds)."""
    before = snapshot.checks.get(result.check)
    came = result.check == "nvlink_status" and result.verdict.status >= CheckStatus.WARNING
    if result.check == "xid" and before is not None:
        came = xid.count_errors(result.points) > xid.count_errors(before.points)
    return replace(snapshot.with_check(result), gpu_errors_at=now if came else snapshot.gpu_errors_at)


def _page_ray_jobs_once(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with at most one page for each Ray job: its worker groups are jobs that wait for each other.

    The group that already pages in the snapshot `before` pages, else one with a named rank, else the group that was
    hung first.
    """
    paging = {entry.job.key for entry in before.living if entry.page}
    of_ray = [entry for entry in snapshot.living if entry.page and entry.job.launcher == "ray" and entry.job.job_name]
    for entries in list_by_key(((entry.job.share, entry.job.job_name), entry) for entry in of_ray).values():
        named = {entry.job.key for entry in entries if entry.incident is not None and entry.incident.verdict.named}
        entries.sort(key=lambda entry: (entry.job.key not in paging, entry.job.key not in named, entry.watch.since))
        for other in entries[1:]:
            snapshot = snapshot.with_job(replace(other, page=False))
    return snapshot
