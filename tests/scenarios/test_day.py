"""A day of all scenarios: its counts, and the conditions for a wrong result."""

from dataclasses import replace

import pytest

from tests.scenarios import day
from tests.scenarios.day import Outcome
from tests.scenarios.power import HOUR


def test_captures_light_captures_and_pages_are_counted_separately() -> None:
    light = day.outcome("very light fine-tuning", HOUR)
    assert (light.pages, light.looks, light.seconds) == (0, 1, None)
    # At the start 2, 6 and 14 minutes after it began. In the 44 minutes after the capture: 2, 4, 8 and 16 minutes apart.
    assert light.glances == 3 + 4
    hang = day.outcome("lock")
    assert (hang.pages, hang.glances, hang.is_wrong, hang.is_late) == (1, 1, False, False)
    assert 120 <= hang.seconds <= day.SOON_SECONDS


def outcome(name: str, pages: int, seconds: float | None = None) -> Outcome:
    return Outcome(name=name, pages=pages, looks=0, glances=0, seconds=seconds)


@pytest.mark.parametrize(
    ("play_outcome", "is_wrong"),
    [
        (outcome("long checkpoint", 0), False),
        (outcome("long checkpoint", 1), True),
        (outcome("a slow fsync, again and again", 1), False),
        (outcome("a slow fsync, again and again", 2), True),
        (outcome("lock", 1, 132.0), False),
        (outcome("lock", 1, 151.0), True),
        (outcome("lock", 2, 132.0), True),
        (outcome("lock", 0), True),
        (outcome("hang elsewhere", 2, 132.0), False),
        (outcome("eleven jobs, one dead file system", 11, 142.0), False),
        (outcome("eleven jobs, one dead file system", 12, 142.0), True),
    ],
)
def test_what_is_wrong(play_outcome: Outcome, is_wrong: bool) -> None:
    assert play_outcome.is_wrong is is_wrong
    assert (f"1 wrong: {play_outcome.name}." in "\n".join(day.summarize([play_outcome]))) is is_wrong


def test_summary_of_the_day_counts_late_pages() -> None:
    soon, late = outcome("lock", 1, 132.0), outcome("endless loop", 1, 1032.0)
    lines = list(day.summarize([soon, late]))
    assert "2 hangs: 1 paged within 135 s, 1 later." in lines
    assert day.count([soon, late, outcome("long checkpoint", 1)]) == {"hang": 2, "healthy": 1, "wrong": 1}
    assert "1 wrong: lock." in day.summarize([replace(soon, seconds=None)])
