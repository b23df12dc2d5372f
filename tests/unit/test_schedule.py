"""The daemon's schedule can be stopped at any moment."""

import random
import threading
from datetime import datetime, timedelta, tzinfo

import apscheduler.schedulers.base
import apscheduler.triggers.date
import apscheduler.triggers.interval
import pytest

from hangwatch.schedule import scheduler as schedule_module
from hangwatch.schedule.scheduler import Schedule
from tests.conftest import stopping, wait_for


def add_tasks(schedule: Schedule) -> None:
    for _ in range(200):
        schedule.run_once("slow", lambda: None)


def test_it_can_be_stopped_while_it_starts_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users would see a traceback of its thread after Ctrl-C."""
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    chance, calls = random.Random(0), [0]
    for _ in range(40):
        schedule = Schedule(lambda name: None)
        for _ in range(200):
            schedule.run_once("slow", lambda: calls.__setitem__(0, calls[0] + 1))
        before, some = calls[0], chance.randrange(150)
        adds = threading.Thread(target=add_tasks, args=(schedule,))
        schedule.start()
        adds.start()
        wait_for(lambda: calls[0] >= before + some, "some of the calls")  # noqa: B023 - asked at once
        schedule.stop()
        adds.join()
    assert not died, died[0].exc_value


def test_a_beat_can_be_made_to_come_sooner_and_never_later() -> None:
    turns: list[str] = []
    schedule = Schedule(lambda name: None)
    schedule.run_every(3600.0, "checks", "rare", turns.append, "rare")
    schedule.run_every(0.05, "checks", "often", turns.append, "often")
    schedule.run_within(0.0, "rare")  # no effect: the schedule has not begun
    schedule.start()
    with stopping(schedule):
        wait_for(lambda: turns.count("often") >= 2, "some turns")
        assert "rare" not in turns
        schedule.run_within(0.0, "rare")
        schedule.run_within(0.0, "unknown")
        schedule.run_within(3600.0, "often")
        wait_for(lambda: "rare" in turns, "the turn that was brought forward")
        before = turns.count("often")
        wait_for(lambda: turns.count("often") >= before + 2, "the other one to go on at its pace")
        assert turns.count("rare") == 1


class SteppedClock(datetime):
    """The wall clock, plus a step."""

    step = timedelta(0)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + cls.step


def test_clock_steps_of_a_day_and_of_decades_delay_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    triggers = (apscheduler.triggers.date, apscheduler.triggers.interval)
    for module in (apscheduler.schedulers.base, *triggers, schedule_module):
        monkeypatch.setattr(module, "datetime", SteppedClock)
    turns: list[str] = []
    schedule = Schedule(lambda name: None)
    schedule.run_every(0.05, "checks", "often", turns.append, "often")
    schedule.start()
    with stopping(schedule):
        for days in (-1, 1, 20_000):
            monkeypatch.setattr(SteppedClock, "step", timedelta(days=days))
            before = turns.count("often")
            wait_for(lambda: turns.count("often") >= before + 3, f"turns after a step by {days} days", 20)  # noqa: B023
            schedule.run_once("checks", turns.append, str(days))
            wait_for(lambda: str(days) in turns, "a task that runs once")  # noqa: B023
