"""The daemon's schedule can be stopped at any moment."""

from __future__ import annotations

import random
import threading
import time

import pytest

from hangwatch.schedule import Schedule
from tests.conftest import wait_for


def test_it_can_be_stopped_while_it_starts_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the schedule while its thread starts due tasks.

    The thread must not fail: users would see its traceback after Ctrl-C.
    """
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    chance, calls = random.Random(0), [0]
    for _ in range(40):
        schedule = Schedule(lambda name: None)
        for task in range(200):
            schedule.run_every(0.001, "slow", str(task), lambda: calls.__setitem__(0, calls[0] + 1))
        before, some = calls[0], chance.randrange(150)
        schedule.start()
        wait_for(lambda: calls[0] >= before + some, "some of the calls")  # noqa: B023 - asked at once
        schedule.stop()
    assert not died, died[0].exc_value


def test_a_beat_can_be_made_to_come_sooner_and_never_later() -> None:
    turns: list[str] = []
    schedule = Schedule(lambda name: None)
    schedule.run_every(3600.0, "checks", "rare", turns.append, "rare")
    schedule.run_every(0.05, "checks", "often", turns.append, "often")
    schedule.run_within(0.0, "rare")  # no effect: the schedule has not begun
    schedule.start()
    try:
        wait_for(lambda: turns.count("often") >= 2, "some turns")
        assert "rare" not in turns
        schedule.run_within(0.0, "rare")
        schedule.run_within(0.0, "unknown")
        schedule.run_within(3600.0, "often")
        wait_for(lambda: "rare" in turns, "the turn that was brought forward")
        before = turns.count("often")
        wait_for(lambda: turns.count("often") >= before + 2, "the other one to go on at its pace")
        assert turns.count("rare") == 1
    finally:
        schedule.stop()


def test_clock_steps_of_a_day_and_of_decades_delay_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock, step_seconds = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall_clock() + step_seconds[0])
    turns: list[str] = []
    schedule = Schedule(lambda name: None)
    schedule.run_every(0.05, "checks", "often", turns.append, "often")
    schedule.start()
    try:
        for days in (-1, 1, 20_000):
            step_seconds[0] = days * 86400.0
            before = turns.count("often")
            wait_for(lambda: turns.count("often") >= before + 3, f"turns after a step by {days} days", 20)  # noqa: B023
            schedule.run_once("checks", turns.append, str(days))
            wait_for(lambda: str(days) in turns, "a task that runs once")  # noqa: B023
    finally:
        schedule.stop()


def test_task_that_still_runs_when_it_is_due_is_missed_and_not_run_twice() -> None:
    missed: list[str] = []
    gate, runs = threading.Event(), []

    def run() -> None:
        runs.append("slow")
        gate.wait(60)

    schedule = Schedule(missed.append)
    schedule.run_every(0.02, "checks", "slow", run)
    schedule.start()
    try:
        wait_for(lambda: len(missed) >= 3, "missed ticks")
        assert (set(missed), runs) == ({"slow"}, ["slow"])
        gate.set()
        wait_for(lambda: len(runs) >= 3, "further runs")
    finally:
        gate.set()
        schedule.stop()


def test_task_that_fails_is_logged_and_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[str] = []

    def fail() -> None:
        turns.append("turn")
        raise ValueError("broken on purpose")

    schedule = Schedule(lambda name: None)
    schedule.run_every(0.02, "checks", "often", fail)
    schedule.start()
    try:
        wait_for(lambda: len(turns) >= 3, "turns after a failure")
    finally:
        schedule.stop()
    assert "often failed; please report this" in caplog.text
    assert "broken on purpose" in caplog.text
