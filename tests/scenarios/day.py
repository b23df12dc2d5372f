"""Run a day of all scenarios in virtual time, with the default settings: `python -m tests.scenarios.day [--write]`.

Every healthy look-alike runs for 24 simulated hours, every hang until it pages. Exit with 1 if a healthy job paged,
or if a hang did not page in time. A job with pauses that must be learned may page once. `--write` renews its part
of docs/benchmarks.md.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from benchmarks import results
from tests.scenarios.power import DAY, HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS, PowerScenario
from tests.scenarios.simulation import SETTINGS, play

SOON_SECONDS = SETTINGS.detector.hold_seconds + 15.0
SCENARIOS = {scenario.name: scenario for scenario in (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS)}


@dataclass(frozen=True)
class Outcome:
    """The result of one scenario: its pages, its captures, its light captures, and the time to page.

    `seconds` is the longest time from the fault of a job to its first page. It is None if a job that hangs never
    paged.
    """

    name: str
    pages: int
    looks: int
    glances: int
    seconds: float | None

    @property
    def scenario(self) -> PowerScenario:
        return SCENARIOS[self.name]

    @property
    def is_wrong(self) -> bool:
        """True if a healthy job paged more often than learning permits, or a hang paged too late or too often."""
        if self.scenario.truth == "healthy":
            return self.pages > int(self.scenario in PAUSE_SCENARIOS)
        bound = max(expected.within_seconds for expected in self.scenario.expected)
        most = sum(expected.pages_before + expected.page for expected in self.scenario.expected)
        return self.seconds is None or self.seconds > bound or self.pages > most

    @property
    def is_late(self) -> bool:
        return self.seconds is not None and self.seconds > SOON_SECONDS


def outcome(name: str, seconds: float | None = None) -> Outcome:
    """Return the result of a scenario. A healthy one runs for `seconds`, a hang for the length of its script."""
    scenario = SCENARIOS[name]
    length = (seconds or DAY) if scenario.truth == "healthy" else scenario.seconds
    played = play(scenario.node, length, scenario.settings).values()
    after = [
        next((at - scenario.trouble_at for at in job.pages if at >= scenario.trouble_at), None)
        for job, expected in zip(played, scenario.expected, strict=True)
        if expected.page
    ]
    return Outcome(
        name=name,
        pages=sum(len(job.pages) for job in played),
        looks=sum(len(job.looks) for job in played) - sum(job.glances for job in played),
        glances=sum(job.glances for job in played),
        seconds=None if None in after else max(filter(None, after), default=None),
    )


def summarize(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the results as lines of text."""
    healthy = [one for one in outcomes if one.scenario.truth == "healthy"]
    hangs = [one for one in outcomes if one.scenario.truth == "hang"]
    pausing = [one for one in healthy if one.scenario in PAUSE_SCENARIOS]
    late = [one for one in hangs if one.is_late]
    wrong = [one.name for one in outcomes if one.is_wrong]
    once = sum(one.pages for one in pausing)
    yield f"{len(healthy) - len(pausing)} healthy scenarios: {sum(one.pages for one in healthy) - once} pages."
    yield f"{len(pausing)} scenarios with pauses to learn: {once} pages; one each is allowed."
    yield f"{len(hangs)} hangs: {len(hangs) - len(late)} paged within {SOON_SECONDS:g} s, {len(late)} later."
    yield f"{len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}."


def count(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the numbers of healthy scenarios, of hangs and of wrong results."""
    return Counter(one.scenario.truth for one in outcomes) | {"wrong": sum(one.is_wrong for one in outcomes)}


def captures(outcomes: list[Outcome]) -> results.Table:
    """Return a table of the captures of each healthy job."""
    healthy = (one for one in outcomes if one.scenario.truth == "healthy")
    rows = ((one.name, str(one.pages), str(one.looks), str(one.glances)) for one in healthy)
    return results.Table(("healthy job, 24 hours", "pages", "captures", "light captures"), tuple(rows))


def main() -> int:
    """Run all scenarios. Print the wrong results and return the exit status."""
    done: dict[str, Outcome] = {}
    os.nice(10)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for future in as_completed([pool.submit(outcome, name) for name in SCENARIOS]):
            one = future.result()
            done[one.name] = one
            counts = f"{one.pages} pages, {one.looks} captures, {one.glances} light captures"
            print(
                f"{'WRONG' if one.is_wrong else 'ok':5} {one.name}: {counts}, {one.seconds} s after the trouble",
                file=sys.stderr,
                flush=True,
            )
    outcomes = [done[name] for name in SCENARIOS]
    return results.report(
        "day",
        figures=count(outcomes),
        summary=tuple(summarize(outcomes)),
        details=[captures(outcomes)],
        command="python -m tests.scenarios.day",
        is_kept="--write" in sys.argv[1:],
    )


if __name__ == "__main__":
    sys.exit(main())
