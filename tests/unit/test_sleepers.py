"""Sleeping ranks have an unknown motion until they wake; ranks that poll without a result are frozen."""

import pytest
from msgspec.structs import replace

from hangwatch.detector import sleepers
from hangwatch.detector.sleepers import Sleeper
from hangwatch.model import (
    Capture,
    EnqueuedOperation,
    Group,
    Grouping,
    GroupRecords,
    JobState,
    Member,
    Motion,
    RankId,
    RecorderFacts,
    RecorderState,
    Signature,
    Sleep,
    StackFacts,
    Verdict,
)
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.words import describe_sleep
from tests.unit.test_progress import RULES, Life, quiet

RANK = RankId(node="n1", rank=0)
UNIX = 1e9


def slept(*sights: tuple[float, float], place: str = "here") -> Sleeper | None:
    """Return the sleeper after some captures. Each is given as (its time, the latest end of the sleep), in seconds."""
    known: dict[RankId, Sleeper] = {}
    for now, until in sights:
        sleep = Sleep(until_unix_seconds=UNIX + until, seconds=until - now, place=place)
        known = sleepers.follow_sleeps(known, {RANK: sleep}, now, UNIX + now)
    return known.get(RANK)


def test_one_sleep_is_counted_once_and_ends_when_it_was_first_said_to() -> None:
    assert slept((0, 600), (30, 600)) == Sleeper("here", 0, 600, 600)
    relative = (0, 600), (30, 630), (90, 690)
    assert slept(*relative) == Sleeper("here", 0, 600, 600), "of pselect6 only the length is known"
    assert slept(*relative, (601, 1201)) == Sleeper("here", 0, 1201, 600, sleeps=2)


def test_sleep_at_another_place_begins_again() -> None:
    known = {RANK: Sleeper("there", 0, 30, 30, sleeps=7)}
    sleep = Sleep(until_unix_seconds=UNIX + 90, seconds=30, place="here")
    assert sleepers.follow_sleeps(known, {RANK: sleep}, 60, UNIX + 60) == {RANK: Sleeper("here", 60, 90, 30)}
    assert sleepers.follow_sleeps(known, {}, 60, UNIX + 60) == {}


def grouping(
    sleep: Sleep, waits_for: str = "ranks", motion: Motion = Motion.FROZEN, polls: Signature = Signature.BLOCKED
) -> Grouping:
    asleep = Member(id=RANK, signature=polls, motion=polls.motion, stack=StackFacts(sleep=sleep))
    other = Member(id=RankId(node="n1", rank=1), signature=Signature.BLOCKED, motion=motion)
    return Grouping(
        (
            Group(key="sleeps", activity="unknown", members=(asleep,)),
            Group(key="waits", activity="collective_wait", waits_for=waits_for, members=(other,)),
        ),
        world_size=2,
    )


SLEEP = Sleep(until_unix_seconds=UNIX, seconds=30.0, place="here")


@pytest.mark.parametrize(
    ("sleeper", "now", "seen", "is_polling"),
    [
        (Sleeper("here", 0, 130, 30, sleeps=4), 120, grouping(SLEEP), True),
        (Sleeper("here", 0, 130, 30, sleeps=4), 119, grouping(SLEEP), False),
        (Sleeper("here", 0, 200, 100, sleeps=2), 120, grouping(SLEEP), False),
        (Sleeper("here", 0, 200, 100, sleeps=1), 999, grouping(SLEEP), False),
        (Sleeper("here", 0, 130, 30, sleeps=4), 120, grouping(SLEEP, waits_for="lock"), False),
        (Sleeper("here", 0, 130, 30, sleeps=4), 120, grouping(SLEEP, motion=Motion.MOVING), False),
    ],
    ids=["polls", "below the hold", "below two sleeps", "one sleep", "not awaited", "another rank moves"],
)
def test_rank_polls_for_nothing(sleeper: Sleeper, now: float, seen: Grouping, is_polling: bool) -> None:
    assert sleepers.find_polling({RANK: sleeper}, seen, now, 120.0) == ({RANK} if is_polling else set())


def test_next_capture_follows_the_waking_at_most_once_a_minute() -> None:
    def wanted_at(until: float, longest: float = 30.0, now: float = 10.0) -> float | None:
        return sleepers.next_capture_at({RANK: Sleeper("here", 0, until, longest)}, now, 900.0)

    assert wanted_at(until=200) == 201
    assert wanted_at(until=12) == 70
    assert wanted_at(until=2000, longest=2000) is None, "sleeps for longer than a stalled job may"
    assert wanted_at(until=912, now=901) is None
    assert sleepers.next_capture_at({}, 0.0, 900.0) is None


def captured(life: Life, left_seconds: float, polls: Signature = Signature.BLOCKED) -> None:
    sleep = Sleep(until_unix_seconds=life.unix + left_seconds, seconds=left_seconds, place="here")
    life.look(grouping(sleep, polls=polls))


def test_rank_that_sleeps_is_unknown_until_it_wakes_and_then_captured_again() -> None:
    life = quiet()
    captured(life, 65.0)
    watch, taken = life.snapshot.jobs["42"].watch, life.captures
    assert watch.state is JobState.STALLED
    assert "rank 0 (n1) sleeps until " in watch.message
    life.power(110, 29)
    assert life.captures == taken
    captured_at = life.now
    life.power(110, 1)
    assert life.captures == taken + 1, "the first pause between two captures has passed"
    captured(life, captured_at + 36.0 - life.now)
    life.power(110, 60)
    assert life.captures == taken + 2, "a second after it woke, and a minute after the last capture"


def test_sleep_that_outlasts_the_stalled_hold_is_a_hang() -> None:
    life = quiet()
    captured(life, RULES.stalled_hold_seconds + 1)
    assert life.state is JobState.HUNG


@pytest.mark.parametrize("polls", [Signature.BLOCKED, Signature.POLLS])
def test_rank_that_polls_for_nothing_is_frozen_after_the_hold(polls: Signature) -> None:
    life = quiet()
    for _ in range(3):
        assert life.state in (JobState.SUSPECTED, JobState.STALLED)
        captured(life, 10.0, polls)
        life.power(110, 15)
    captured(life, 10.0, polls)
    assert life.state is JobState.HUNG
    incident = life.snapshot.jobs["42"].incident
    (asleep,) = (one for one in incident.grouping.members if one.id == RANK)
    assert asleep.motion is Motion.FROZEN
    assert asleep.stack.sleep is not None
    assert describe_sleep(asleep.stack.sleep) == "polls every 10 s for something that does not happen"


def test_what_an_earlier_suspicion_saw_asleep_is_forgotten() -> None:
    life = quiet()
    captured(life, 10.0)
    life.power(600, 90)
    assert life.state is JobState.TRAINING
    life.power(110, 26)
    captured(life, 10.0)
    assert life.state is JobState.STALLED


def test_rank_asleep_with_an_open_operation_is_judged_by_that_operation() -> None:
    operation = EnqueuedOperation(number=7, operation="all_reduce", order=7, created_unix_seconds=1.0, stays_open=True)
    groups = (GroupRecords(library="gloo", name="0", description="", number=7, operations=(operation,)),)
    recorder = RecorderFacts(libraries=(RecorderState(library="gloo", groups=groups),))
    seen = grouping(SLEEP)
    (asleep,) = seen.groups[0].members
    with_records = replace(seen.groups[0], members=(replace(asleep, recorder=recorder),))
    for group, motion in ((seen.groups[0], Motion.UNKNOWN), (with_records, Motion.FROZEN)):
        judged = diagnosis(replace(seen, groups=(group, seen.groups[1]))).with_sleepers((), {RANK})
        assert [member.motion for member in judged.grouping.members] == [motion, Motion.FROZEN]


def diagnosis(seen: Grouping) -> Diagnosis:
    taken = Capture(
        job_id="42", node="n1", started_unix_seconds=UNIX, duration_seconds=1, rounds=3, ranks=(), world_size=2
    )
    return Diagnosis(
        capture=taken, grouping=seen, verdict=Verdict(kind="AllWaiting", message=""), judged_unix_seconds=UNIX
    )
