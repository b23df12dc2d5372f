"""The second trigger: limits of its captures, restarts of the daemon, and counters that lie."""

import itertools
from collections.abc import Callable
from dataclasses import replace as changed
from functools import cache

import pytest
from msgspec.structs import replace

from hangwatch.config import Progress, Settings
from hangwatch.model import Fault
from hangwatch.model.flight_records import ProgressCounter
from tests.scenarios.power import LOCKED, SAVES, STOPPED, TRAINING, TRAINS, WAITS, between
from tests.scenarios.progress import BEHIND_FULL_GPU, WAITS_AT_FULL_POWER, after, without_power
from tests.scenarios.simulation import SETTINGS, UNIX_START, Doing, Node, Played, play

BEGIN = 600.0
TWO_JOBS = (("first", range(4)), ("second", range(4, 8)))
WORKS_ALONE = changed(TRAINS, enqueues=False)


def run(node: Node, seconds: float, settings: Settings | None = None) -> dict[str, Played]:
    return play(node, seconds, settings or SETTINGS, has_counters=True)


def pausing(*pauses: tuple[float, float], blocked: Doing = LOCKED) -> Node:
    """Return a node on which rank 0 waits for a lock in some times, given as (begin, seconds)."""
    node = TRAINING
    for begin, seconds in pauses:
        node = between(begin, begin + seconds, 0, blocked, WAITS, node)
    return node


@pytest.mark.parametrize(("limit", "captures"), [(6, 2), (1, 1), (0, 0)])
def test_captures_before_the_hold_are_limited(limit: int, captures: int) -> None:
    settings = replace(SETTINGS, progress=Progress(captures_per_hour=limit))
    job = run(pausing((BEGIN, 40), (BEGIN + 300, 80)), BEGIN + 600, settings)["job"]
    assert job.glances == captures and not job.pages


def test_hang_is_found_at_the_hold_without_earlier_captures() -> None:
    settings = replace(SETTINGS, progress=Progress(captures_per_hour=0))
    job = run(pausing((BEGIN, 1000)), BEGIN + 300, settings)["job"]
    assert (job.glances, job.states[-1], len(job.pages)) == (0, "hung", 1)
    assert job.pages[0] - BEGIN <= 135


def test_job_that_works_without_collectives_is_captured_at_twice_the_gap() -> None:
    node = Node(lambda _gpu, t: WORKS_ALONE if t >= BEGIN else TRAINS)
    job = run(node, BEGIN + 2000)["job"]
    began = [look.capture.started_unix_seconds for look in job.looks]
    assert not job.pages and 4 <= len(began) <= 9
    gaps = [second - first for first, second in itertools.pairwise(began)]
    assert gaps == sorted(gaps)


def test_longer_gap_than_any_before_is_usual_from_then_on() -> None:
    job = run(pausing((BEGIN, 60), (BEGIN + 300, 60), (BEGIN + 600, 60)), BEGIN + 900)["job"]
    assert job.glances == 1 and job.states.count("suspected") == 1


def test_new_collective_ends_a_suspicion_without_power_readings() -> None:
    job = run(without_power(pausing((BEGIN, 60))), BEGIN + 300)["job"]
    assert job.states[-3:] == ["training", "suspected", "training"] and not job.pages


def test_job_without_power_and_counters_is_unknown() -> None:
    node = without_power(Node(lambda _gpu, _t: WORKS_ALONE))
    assert run(node, 600)["job"].states[-1] == "unknown"


@pytest.mark.parametrize(("stuck", "pages"), [(LOCKED, 1), (WORKS_ALONE, 0)])
def test_hang_in_the_first_minute_without_power_pages(stuck: Doing, pages: int) -> None:
    node = Node(lambda gpu, t: TRAINS if t < 30 else WAITS if gpu else stuck)
    job = run(without_power(node), 900)["job"]
    assert len(job.pages) == pages and all(300 <= page - 30 <= 320 for page in job.pages)


@pytest.mark.parametrize("restarted_after", [100, 300, 1000])
def test_restart_of_the_daemon_in_a_hang_at_full_power_keeps_the_incident(restarted_after: int) -> None:
    node = after(3, changed(LOCKED, watts=600.0), WAITS_AT_FULL_POWER)
    node = changed(node, daemon=lambda t: int(t >= 3600 + restarted_after))
    job = play(node, 3600 + 2200, Settings(), begin=2600, has_counters=True)["job"]
    if restarted_after < 120:  # the gap is not known to the new daemon, and power does not show it
        assert not job.pages
    else:
        assert job.states[-1] in ("stalled", "hung") and len(job.pages) == 1 and "recovered" not in job.states


@pytest.mark.parametrize("seconds", [113, 117, 118])
def test_job_that_continues_just_before_the_hold_does_not_page(seconds: int) -> None:
    job = run(pausing((BEGIN, seconds)), BEGIN + 400)["job"]
    assert not job.pages and job.states[-1] == "training"


@pytest.mark.parametrize(
    ("blocked", "seconds", "states", "paged"),
    [
        (STOPPED, 300, ["suspected", "hung"], 60),
        (LOCKED, 300, ["suspected", "hung"], 130),
        (LOCKED, 60, ["suspected", "training"], None),
        (SAVES, 60, ["training"], None),
    ],
    ids=["stopped", "locked", "pause", "works"],
)
def test_low_power_without_counters_is_suspected_before_the_hold(
    blocked: Doing, seconds: float, states: list[str], paged: float | None
) -> None:
    node = pausing((BEGIN, seconds), blocked=changed(blocked, watts=80.0))
    job = play(node, BEGIN + 300, SETTINGS)["job"]
    assert job.states[job.states.index("quiet") + 1 :] == states
    assert job.glances and job.looks[0].capture.started_unix_seconds - UNIX_START - BEGIN <= 25
    assert bool(job.pages) == (paged is not None) and all(page - BEGIN <= (paged or 0) for page in job.pages)


@pytest.mark.parametrize(
    "unread", [{"lost": lambda _gpu, t: t > BEGIN + 40}, {"silent": lambda t: t > BEGIN + 40}], ids=["GPUs", "samples"]
)
def test_suspicion_by_power_ends_as_unknown_without_readings(unread: dict[str, Callable[..., bool]]) -> None:
    job = play(changed(pausing((BEGIN, 1000)), **unread), BEGIN + 600, SETTINGS)["job"]
    assert job.states[-2:] == ["suspected", "unknown"] and not job.pages


@pytest.mark.parametrize("hidden", [without_power, lambda node: node], ids=["counters", "power"])
def test_single_step_of_a_hung_job_neither_resolves_its_page_nor_teaches(hidden: Callable[[Node], Node]) -> None:
    job = run(hidden(pausing((BEGIN, 299), (BEGIN + 300, 300))), BEGIN + 900)["job"]
    assert len(job.pages) == 1 and job.states.count("recovered") == 1


def test_hang_soon_after_a_recovery_is_found_by_counters() -> None:
    job = run(without_power(pausing((BEGIN, 150), (BEGIN + 180, 1000))), BEGIN + 700)["job"]
    assert len(job.pages) == 2 and job.pages[1] - (BEGIN + 180) <= 310


def test_pause_at_a_place_pages_after_twice_its_length() -> None:
    job = run(pausing((BEGIN, 200), (BEGIN + 1000, 1000)), BEGIN + 1900)["job"]
    first, second = job.pages
    assert first - BEGIN <= 135
    assert 399 <= second - (BEGIN + 1000) <= 420


@pytest.mark.parametrize(("has_counters", "seconds"), [(False, 150), (True, 60)])
def test_stop_that_a_person_ends_is_no_known_pause(has_counters: bool, seconds: float) -> None:
    node = pausing((BEGIN, 200), (BEGIN + 1000, 1000), blocked=STOPPED)
    job = play(node, BEGIN + 1900, SETTINGS, has_counters=has_counters)["job"]
    assert len(job.pages) == 2 and job.pages[1] - (BEGIN + 1000) <= seconds


JUMPING: dict[str, Callable[[int, float, int], ProgressCounter | Fault]] = {
    "jumps": lambda _gpu, t, _total: ProgressCounter(total=int(t) * 10**17),
    "falls": lambda _gpu, t, total: ProgressCounter(total=total, restarts=int(t)),
    "stands still": lambda _gpu, _t, _total: ProgressCounter(total=7),
    "10^18 and back": lambda _gpu, t, _total: ProgressCounter(total=10**18 if int(t) % 2 else 0),
    "stops when it likes": lambda _gpu, t, total: ProgressCounter(total=min(total, 100) if t > BEGIN else total),
    "torn": lambda _gpu, _t, _total: Fault(subject="pid 1", reason="ChangedWhileRead", detail="it moved"),
}


def hang_of_second_job(gpu: int, t: float) -> Doing:
    return TRAINS if gpu < 4 or not BEGIN <= t < BEGIN + 60 else WAITS if gpu > 4 else LOCKED


@cache
def with_honest_counters() -> Played:
    return run(Node(hang_of_second_job, jobs=TWO_JOBS), BEGIN + 600)["second"]


@pytest.mark.parametrize("name", JUMPING)
def test_counters_that_lie_change_nothing_of_other_jobs_and_page_no_job_that_works(name: str) -> None:
    def shown(gpu: int, t: float, total: int) -> ProgressCounter | Fault:
        return JUMPING[name](gpu, t, total) if gpu < 4 else ProgressCounter(total=total)

    lying = run(Node(hang_of_second_job, jobs=TWO_JOBS, counter=shown), BEGIN + 600)
    assert lying["second"].states == with_honest_counters().states
    assert lying["second"].suspected_at == with_honest_counters().suspected_at
    assert not lying["first"].pages and lying["first"].states[-1] == "training"


def test_rank_behind_a_working_gpu_is_not_judged_as_hung() -> None:
    node = Node(lambda gpu, t: TRAINS if t < BEGIN else WAITS if gpu > 3 else BEHIND_FULL_GPU)
    job = run(node, BEGIN + 400)["job"]
    assert job.states[-1] == "stalled" and not job.pages
