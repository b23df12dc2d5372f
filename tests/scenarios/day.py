"""A day of everything, in virtual time with the default settings: `python -m tests.scenarios.day`.

Every healthy look-alike is played for 24 hours, and every hang until it pages. Ends with 1 where a healthy job paged (one
whose pauses have to be learnt: more than once), or a hang did not within the hold and fifteen seconds and is not one of
those that take longer by their nature.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.scenarios.power import (
    DAY,
    HANG_SCENARIOS,
    HEALTHY_SCENARIOS,
    PAUSE_SCENARIOS,
    PowerScenario,
)
from tests.scenarios.simulation import SETTINGS, play

SOON_SECONDS = SETTINGS.detector.hold_seconds + 15.0
_SCENARIOS = {scenario.name: scenario for scenario in (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)}


def healthy() -> list[PowerScenario]:
    """What must not page; the last ones may once, until their pauses are known."""
    learnt = [scenario for scenario in PAUSE_SCENARIOS if scenario.truth == "healthy"]
    return [*(scenario for scenario in HEALTHY_SCENARIOS if not scenario.weakness), *learnt]


def pages_of_a_day(name: str) -> int:
    """How often the jobs of a scenario page in 24 hours."""
    return sum(len(job.pages) for job in play(_SCENARIOS[name].node, DAY).values())


def seconds_to_page(name: str) -> float | None:
    """From the last progress to the first page of a hang; None where it never pages."""
    scenario = _SCENARIOS[name]
    at = [job.paged_at for job in play(scenario.node, scenario.seconds).values() if job.paged_at is not None]
    return min(at) - scenario.trouble_at if at else None


def main() -> int:
    """Play all, and say what went wrong."""
    wrong = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        quiet = healthy()
        pages = list(pool.map(pages_of_a_day, [scenario.name for scenario in quiet]))
        hangs = [scenario for scenario in HANG_SCENARIOS if not scenario.weakness]
        seconds = list(pool.map(seconds_to_page, [scenario.name for scenario in hangs]))
    for scenario, count in zip(quiet, pages, strict=True):
        is_wrong = count > int(scenario in PAUSE_SCENARIOS)
        wrong += is_wrong
        print(f"{'WRONG' if is_wrong else 'ok':5} {count} pages in 24 h: {scenario.name}")
    late = []
    for scenario, after in zip(hangs, seconds, strict=True):
        bound = max(expected.within_seconds for expected in scenario.expected)
        is_wrong = after is None or after > bound
        wrong += is_wrong
        late += [scenario.name] if after is not None and after > SOON_SECONDS else []
        print(f"{'WRONG' if is_wrong else 'ok':5} paged after {after} s: {scenario.name}")
    print(
        f"\n{len(quiet)} look-alikes, {sum(pages)} pages in 24 hours each; {len(hangs)} hangs, "
        f"{len(hangs) - len(late)} paged within {SOON_SECONDS:g} s, later: {', '.join(late) or 'none'}; {wrong} wrong"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
