"""A GPU that stops working while all others of its job work on: a warning, never a page."""

import pytest

from hangwatch import detector
from hangwatch.detector.job_watch import JobWatch
from hangwatch.model import JobState
from hangwatch.state.board import JobEntry, Snapshot
from tests import samples
from tests.unit.test_detector import DEFAULTS, Series, job

WORKS, IDLE = 600.0, 84.0
HALF_AN_HOUR, AN_HOUR = 1800, 3600
ONE_IDLE: list[float | None] = [WORKS, WORKS, WORKS, IDLE]


class Workers(Series):
    """A simulated job of four ranks, with the step for idle workers after each sample."""

    def __init__(self) -> None:
        super().__init__(ranks=4)

    def _take(self, watch: JobWatch, actions: tuple[detector.Action, ...]) -> None:
        watch, warned = detector.warn_of_idle_worker(watch, job(4), self.now, self.rules)
        super()._take(watch, (*actions, *warned))


def worked(seconds: int) -> Series:
    """Return a job that has trained for this long."""
    return Workers().feed(WORKS, seconds)


def count_warnings(series: Series) -> int:
    """Return the number of warnings. The first state of a job is its first work."""
    assert set(series.states) <= {JobState.TRAINING} and not series.pages
    return len(series.states) - 1


def test_gpu_of_an_idle_worker_is_reported_once_an_hour() -> None:
    series = worked(HALF_AN_HOUR + 60).feed(ONE_IDLE, int(DEFAULTS.stalled_hold_seconds) - 60)
    assert count_warnings(series) == 0
    assert count_warnings(series.feed(ONE_IDLE, 120)) == 1
    assert series.watch.message == (
        "rank 3 (pid 103) may be stuck: its GPU has drawn little power for 15 min 00 s, "
        "and the 3 other GPUs of the job work"
    )
    assert count_warnings(series.feed(ONE_IDLE, AN_HOUR - 300)) == 1
    assert count_warnings(series.feed(ONE_IDLE, 600)) == 2


def test_idle_worker_is_exported_while_it_is_idle() -> None:
    series = worked(HALF_AN_HOUR + 60)

    def exported() -> list[tuple[str, float]]:
        board = Snapshot(jobs={"k": JobEntry(job=job(4), watch=series.watch)})
        families = samples.metric_families(board, series.now)
        idle = next(family for family in families if family.name == "hangwatch_job_idle_worker_seconds")
        return [(sample.labels["rank"], sample.value) for sample in idle.samples]

    assert exported() == []
    series.feed(ONE_IDLE, int(DEFAULTS.stalled_hold_seconds) + 60)
    ((rank, seconds),) = exported()
    assert rank == "3" and DEFAULTS.stalled_hold_seconds <= seconds <= DEFAULTS.stalled_hold_seconds + 60
    series.feed(WORKS, 60)
    assert exported() == []


@pytest.mark.parametrize(
    ("name", "history"),
    [
        ("it has worked for less than 30 minutes", [(WORKS, HALF_AN_HOUR - 300)]),
        ("it never worked", [(ONE_IDLE, HALF_AN_HOUR + 60)]),
        ("it paused for some minutes", [(WORKS, HALF_AN_HOUR), (ONE_IDLE, 600), (WORKS, 60)]),
        ("another GPU paused shortly before", [(WORKS, HALF_AN_HOUR), ([IDLE, *[WORKS] * 3], 600)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gpu_unlike_others_is_not_reported(name: str, history: list[tuple[float | list[float | None], int]]) -> None:
    series: Series = Workers()
    for powers, seconds in history:
        series = series.feed(powers, seconds)
    assert count_warnings(series.feed(ONE_IDLE, AN_HOUR)) == 0, name


def test_low_power_of_the_whole_job_is_no_idle_worker() -> None:
    series = worked(HALF_AN_HOUR + 60).feed(ONE_IDLE, 600).feed(IDLE, 60).feed(ONE_IDLE, 600)
    assert "may be stuck" not in series.watch.message
    assert "may be stuck" in series.feed(ONE_IDLE, 600).watch.message
