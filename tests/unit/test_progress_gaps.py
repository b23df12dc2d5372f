"""Gaps between collectives of a job: when it progresses, what is learned, and when a gap is unusual."""

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch.detector.progress_gaps import HOUR_SECONDS, ProgressRecord, follow_counters, skip_time
from hangwatch.model import ProcessId
from hangwatch.model.flight_records import ProgressCounter

RANKS = [ProcessId(pid=pid, start_ticks=1) for pid in range(8)]
Total = Callable[[int, int], int]


def steady(rank: int, second: int) -> int:
    return second


def play(
    total: Total, seconds: Iterable[int], record: ProgressRecord | None = None, learns: bool = True
) -> ProgressRecord:
    """Read the counters each second. `total` is the number of a rank at a second."""
    record = record or ProgressRecord()
    for second in seconds:
        counters = {rank: ProgressCounter(total=total(place, second)) for place, rank in enumerate(RANKS)}
        record = follow_counters(record, counters, RANKS, float(second), learns=learns)
    return record


def test_gaps_are_known_after_fifty_increases() -> None:
    assert play(steady, range(50)).unusual_seconds(10.0, 120.0) is None and play(steady, range(3)).per_second == 1.0
    known = play(steady, range(60))
    assert (known.usual_seconds, known.unusual_seconds(10.0, 120.0), known.gap_seconds(64.0)) == (1.0, 10.0, 5.0)


def test_unusual_gap_follows_the_quantile_and_the_longest_gap() -> None:
    slow = play(lambda _, second: second // 7, range(1000))
    assert slow.unusual_seconds(10.0, 120.0) == 3 * 7
    rarely_slow = play(lambda _, second: min(second, 900) + max(0, second - 930), range(1000))
    assert rarely_slow.longest_seconds == 31 and rarely_slow.usual_seconds == 1.0
    assert rarely_slow.unusual_seconds(10.0, 120.0) == 1.5 * 31
    assert rarely_slow.unusual_seconds(10.0, 40.0) == 40.0


def test_job_progresses_when_more_than_half_of_its_ranks_do() -> None:
    known = play(steady, range(100))
    half = play(lambda rank, second: second if rank < 4 else 99, range(100, 130), known)
    assert half.gap_seconds(129.0) == 30.0
    more = play(lambda rank, second: second if rank < 5 else 99, range(100, 130), known)
    assert more.gap_seconds(129.0) == 0.0


def test_job_with_few_readable_ranks_is_not_known() -> None:
    known = play(steady, range(100))
    few = {rank: ProgressCounter(total=100) for rank in RANKS[:4]}
    assert not follow_counters(known, few, RANKS, 100.0).is_known
    five = {rank: ProgressCounter(total=99) for rank in RANKS[:5]}
    assert follow_counters(known, five, RANKS, 100.0).gap_seconds(100.0) == 1.0


def test_rank_that_disappears_is_no_progress() -> None:
    """Two ranks increased last, one second after all others. Without one of them, the job still makes no progress."""
    stopped = play(lambda rank, second: min(second, 100 if rank < 4 else 101), range(130))
    left = {rank: stopped.ranks[rank].counter for rank in RANKS[1:]}
    one = left | {RANKS[7]: ProgressCounter(total=102)}
    for counters in (left, one):
        after = follow_counters(stopped, counters, RANKS[1:], 130.0)
        assert after.progressed_at == stopped.progressed_at


def test_falling_number_begins_the_gaps_anew() -> None:
    known = play(steady, range(100))
    counters = {rank: ProgressCounter(total=100, restarts=rank == RANKS[0]) for rank in RANKS}
    anew = follow_counters(known, counters, RANKS, 100.0)
    assert (anew.gaps, anew.hours, anew.gap_seconds(100.0)) == (0, (), 0.0)


def test_gap_that_must_not_be_learned_is_dropped() -> None:
    known = play(steady, range(100))
    learned = play(lambda _, second: second, [200], known)
    dropped = play(lambda _, second: second, [200], known, learns=False)
    assert learned.longest_seconds == 101 and dropped.longest_seconds == 1.0
    assert dropped.gap_seconds(200.0) == 0.0


def test_long_gap_is_forgotten_after_a_day() -> None:
    known = play(steady, [*range(100), 300, 301])
    day = int(25 * HOUR_SECONDS)
    later = replace(skip_time(known, day - 301.0), read_at=float(day))
    assert play(steady, range(day, day + 100), later).longest_seconds == 1.0


def test_time_without_readings_is_no_gap() -> None:
    known = skip_time(play(steady, range(100)), 500.0)
    assert known.gap_seconds(600.0) == 1.0
    assert play(steady, [600], known).longest_seconds == 1.0


@given(st.lists(st.integers(1, 400), min_size=50, max_size=300))
def test_usual_gap_is_reached_by_almost_all_gaps(lengths: list[int]) -> None:
    at, moments = 0, [0]
    for length in lengths:
        at += length
        moments.append(at)
    record = play(lambda _, second: second, moments)
    usual = record.usual_seconds
    assert usual is not None and sum(length <= usual for length in lengths) >= 0.99 * len(lengths)
    assert usual <= 1.1 * sorted(lengths)[-(len(lengths) // 100) - 1] + 1e-6
