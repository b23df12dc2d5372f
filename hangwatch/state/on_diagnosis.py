"""The step of the board after a capture, a light capture, or a failed capture."""

from collections.abc import Iterator

from msgspec.structs import replace

from hangwatch import detector, words
from hangwatch.config import Detector
from hangwatch.detector import TakeCapture, job_watch, sleepers
from hangwatch.detector.job_watch import JobWatch, MotionCount
from hangwatch.detector.known_pauses import NOWHERE, find_places
from hangwatch.model import Grouping, JobState, Motion, RankId
from hangwatch.stacks.activity_table import RENDEZVOUS
from hangwatch.stacks.idle_reasons import find_resting_state, has_no_task, is_serving
from hangwatch.state.actions import Action, SaveIncident
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.hang_history import find_history, remember_hang
from hangwatch.state.incident_timeline import add_capture, update_timeline
from hangwatch.verdict import timeout_forecast
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.verdict.permanence import find_permanent, find_waiting
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.remote_wait import waits_for_other_nodes


def record_capture(
    snapshot: Snapshot, wanted: TakeCapture, look: Diagnosis | None, *, now: float, unix_now: float, settings: Detector
) -> tuple[Snapshot, tuple[Action, ...]]:
    """Record the result of a capture, None if it failed, and the new state of its job.

    Return the snapshot and the actions to do. A light capture may begin a suspicion, but opens no incident. If another
    capture failed, its ranks count as not judged. A failed capture is repeated later.
    """
    entry = snapshot.jobs.get(wanted.job_key)
    if entry is None:
        return snapshot, ()
    seen = MotionCount(frozen=0, moving=0)
    if wanted.result == "low_power":
        seen = seen if look is None else count_motion(look.grouping)
        watch, moves = detector.apply_light_capture(entry.watch, seen, now, settings)
        entry = replace(entry, watch=watch)
    elif wanted.result == "gap":
        look = None if look is None else look.without_busy_gpus(settings.quiet_fraction)
        seen = seen if look is None else _count_gap_facts(look)
        watch, moves = detector.apply_gap_capture(entry.watch, seen, now, settings)
        entry = replace(entry, watch=watch, suspected=look or entry.suspected)
    elif look is None:
        seen = replace(seen, unknown=max(1, len(entry.job.ranks)))
        watch, moves = detector.apply_capture(entry.watch, seen, now, settings)
        entry = replace(entry, watch=watch, page=job_watch.should_page(watch, now, settings))
    else:
        look = replace(look, judged_unix_seconds=unix_now)
        entry, moves, seen = _apply_capture(snapshot, entry, look, now, settings)
    is_judged = wanted.result == "state" and look is not None
    entry, actions = update_timeline(entry, moves, unix_now)
    if is_judged and entry.open_incident and not any(isinstance(action, SaveIncident) for action in actions):
        actions = (*actions, SaveIncident(incident=entry.open_incident))
    if is_judged and entry.open_incident and entry.watch.state is JobState.HUNG:
        snapshot = remember_hang(snapshot, entry.open_incident)
    result = "failed" if look is None else _describe_result(seen)
    return snapshot.count("captures", result).with_job(entry), actions


def _apply_capture(
    snapshot: Snapshot, entry: JobEntry, look: Diagnosis, now: float, settings: Detector
) -> tuple[JobEntry, tuple[detector.Action, ...], MotionCount]:
    """Apply a capture to the watch of its job, and to its incident if one is open. Return what the capture showed, too.

    The verdict is judged again by what earlier captures showed.
    """
    looked_at = {dump.id.pid for dump in look.capture.ranks}
    came = sum(rank.id.pid not in looked_at for rank in entry.job.ranks)
    look = look.without_motion_of(
        detector.find_settled_ranks(entry.watch, sleepers.find_stays(look.grouping), now, settings)
    )
    watch, look = _follow_sleepers(entry.watch, look, now, settings)
    if watch.is_counted:
        look = look.without_busy_gpus(settings.quiet_fraction)
    seen = replace(
        _count_gap_facts(look),
        started_since=came,
        is_in_rendezvous=all(group.activity == RENDEZVOUS for group in look.grouping.groups),
        waits_elsewhere=waits_for_other_nodes(
            look.grouping, look.verdict, has_ranks_on_other_nodes=entry.job.has_ranks_on_other_nodes
        ),
    )
    recorded_seconds = timeout_forecast.recorded_seconds(look.grouping)
    if recorded_seconds is not None:  # the timeout of the open operations overrides that from the environment
        watch = replace(watch, timeout=replace(watch.timeout, recorded_seconds=recorded_seconds))
    watch, moves = detector.apply_capture(watch, seen, now, settings)
    entry = replace(entry, watch=watch, page=job_watch.should_page(watch, now, settings))
    history = find_history(snapshot, entry.job, entry.open_incident, look.capture.node, look.judged_unix_seconds)
    is_known_pause = not entry.page and job_watch.longest_pause_seconds(watch, now) is not None
    look = replace(look, verdict=with_action(look.verdict, look.grouping, history, is_known_pause=is_known_pause))
    if watch.is_open:
        entry = replace(entry, incident=add_capture(entry, look, now), suspected=None)
    elif watch.gap is not None:
        entry = replace(entry, suspected=look)
    return entry, moves, seen


def _follow_sleepers(watch: JobWatch, look: Diagnosis, now: float, settings: Detector) -> tuple[JobWatch, Diagnosis]:
    """Return the watch with the ranks that this capture found asleep, and the diagnosis judged again with them."""
    if watch.suspicion is None:
        return watch, look
    asleep = sleepers.follow_sleeps(
        watch.suspicion.sleepers, sleepers.find_sleeps(look.grouping), now, look.judged_unix_seconds
    )
    polling = sleepers.find_polling(asleep, look.grouping, now, settings.hold_seconds)
    look = look.with_sleepers(polling, sleepers.find_asleep(asleep, settings.stalled_hold_seconds))
    return job_watch.with_suspicion(watch, sleepers=asleep), look


def _count_gap_facts(look: Diagnosis) -> MotionCount:
    permanent = find_permanent(look.grouping, look.verdict)
    return replace(
        count_motion(look.grouping),
        places=frozenset({NOWHERE}) if permanent else find_places(look.grouping, look.verdict.named),
        waiting=sum(1 for _ in find_waiting(look.grouping)),
        permanent=permanent,
        seconds=look.capture.duration_seconds,
    )


def count_motion(grouping: Grouping) -> MotionCount:
    """Count the ranks of a capture that are frozen, moving, or not judged.

    A rank that has ended is frozen, because it cannot progress. If all ranks have ended, they are not judged.
    """
    ended = all(group.gone for group in grouping.groups)
    movers, texts, frozen = list[RankId](), [], 0
    for group in grouping.groups:
        moving = [member.id for member in group.members if member.motion is Motion.MOVING]
        still = sum(member.motion is Motion.FROZEN for member in group.members)
        still = group.size - len(moving) if group.gone else still
        frozen += 0 if ended else still
        movers += moving
        if moving:
            doing = group.activity.replace("_", " ") if group.activity != "unknown" else "its own code"
            texts.append(f"{words.name_ranks(moving)} in {doing}")
    return MotionCount(
        frozen=frozen,
        moving=len(movers),
        unknown=len(grouping.members) - frozen - len(movers),
        with_stack=sum(group.size for group in grouping.groups if group.frames),
        absent=0 if ended else sum(group.size for group in grouping.groups if group.gone),
        movers_text="; ".join(texts),
        resting=find_resting_state(grouping),
        traced_text=words.traced_ranks(
            [(each.id, each.waits.tracer) for each in grouping.members if each.waits.tracer]
        ),
        serves=is_serving(grouping) or has_no_task(grouping),
        movers=frozenset(movers),
        stays=sleepers.find_stays(grouping),
        sleepers_text="; ".join(_describe_sleepers(grouping)),
    )


def _describe_sleepers(grouping: Grouping) -> Iterator[str]:
    """Yield a text for each rank that is not judged because it sleeps."""
    for member in grouping.members:
        sleep = member.stack.sleep
        if sleep is not None and member.motion is Motion.UNKNOWN and not sleep.is_polling:
            yield f"{words.name_ranks([member.id])} {words.describe_sleep(sleep)}"


def _describe_result(seen: MotionCount) -> str:
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
