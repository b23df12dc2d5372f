"""Gaps between collectives of a job: how long it usually enqueues none, and how long it has enqueued none now. Pure.

A job progresses when more than half of its ranks have enqueued a collective since it last progressed. The time between
is a gap. From the gaps of the last 24 hours follows how long a gap must last before it is unusual.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping

from msgspec import field
from msgspec.structs import replace

from hangwatch.model import ProcessId, Value
from hangwatch.model.flight_records import ProgressCounter

FEWEST_GAPS = 50  # before them, the gaps of a job are not known
RATE_SECONDS = 30.0
HOUR_SECONDS, HOURS_KEPT = 3600.0, 24
USUAL_QUANTILE = 0.99
USUAL_FACTOR, LONGEST_FACTOR = 3.0, 1.5
_BUCKET_RATIO = 1.1  # each bucket of lengths ends at this multiple of the one before


class RankProgress(Value, frozen=True):
    """The last counter of one rank, and the time of its last increase (CLOCK_MONOTONIC, seconds)."""

    counter: ProgressCounter
    increased_at: float


class HourOfGaps(Value, frozen=True):
    """The gaps that ended in one hour: their number by bucket of length, and the longest one."""

    hour: int
    counts: Mapping[int, int] = field(default_factory=dict)
    longest_seconds: float = 0.0


class ProgressRecord(Value, frozen=True):
    """The progress of a job by the counters of its ranks. All times are CLOCK_MONOTONIC seconds.

    * `ranks`: the ranks with a counter. `read_at`: the time of the last reading.
    * `progressed_at`: the end of the last gap; None while at most half of the ranks have a counter. `lost_rank_at`: the
      time when a rank lost its counter. Increases before both prove nothing.
    * `total`: the collectives of a rank since the first reading, a mean of the ranks. `per_second`: the same in a
      second, over about half a minute, at first over less.
    * `advances`: number of times that the job progressed. `gaps`: number of gaps that were learned since the counters
      began or fell. `hours`: the gaps of the last 24 hours.
    """

    ranks: Mapping[ProcessId, RankProgress] = field(default_factory=dict)
    read_at: float | None = None
    progressed_at: float | None = None
    lost_rank_at: float = -math.inf
    total: float = 0.0
    per_second: float = 0.0
    advances: int = 0
    gaps: int = 0
    hours: tuple[HourOfGaps, ...] = ()

    @property
    def is_known(self) -> bool:
        """True if the counters show when the job progresses, and its gaps are known."""
        return self.progressed_at is not None and self.gaps >= FEWEST_GAPS

    def gap_seconds(self, now: float) -> float:
        """Return the seconds since the job progressed; 0 if unknown."""
        return 0.0 if self.progressed_at is None else max(0.0, now - self.progressed_at)

    @property
    def longest_seconds(self) -> float:
        """The longest gap of the last 24 hours that ended by itself, in seconds."""
        return max((hour.longest_seconds for hour in self.hours), default=0.0)

    @property
    def usual_seconds(self) -> float | None:
        """The length in seconds that 99 % of the gaps of the last 24 hours did not exceed; None if not yet known."""
        if not self.is_known:
            return None
        counts = sum((Counter(hour.counts) for hour in self.hours), Counter[int]())
        left = math.ceil(USUAL_QUANTILE * sum(counts.values()))
        for bucket in sorted(counts):
            left -= counts[bucket]
            if left <= 0:
                return float(min(_BUCKET_RATIO**bucket, self.longest_seconds))
        return self.longest_seconds

    def unusual_seconds(self, shortest_seconds: float, hold_seconds: float) -> float | None:
        """Return the seconds after which a gap is unusual, between these two; None if the gaps are not known."""
        usual = self.usual_seconds
        if usual is None:
            return None
        unusual = max(shortest_seconds, USUAL_FACTOR * usual, LONGEST_FACTOR * self.longest_seconds)
        return min(hold_seconds, unusual)


def follow_counters(
    record: ProgressRecord,
    counters: Mapping[ProcessId, ProgressCounter],
    ranks: Collection[ProcessId],
    now: float,
    *,
    learns: bool = True,
) -> ProgressRecord:
    """Return the record after one more reading of the counters of a job with these ranks.

    Without `learns`, a gap that ends now is not kept. If a number fell, the gaps begin anew.
    """
    before = record.ranks
    by_rank = {
        process: _follow_rank(before.get(process), counters[process], now) for process in ranks if process in counters
    }
    lost_at = record.lost_rank_at if by_rank.keys() >= before.keys() else now
    record = replace(_with_increase(record, by_rank, now), ranks=by_rank, read_at=now, lost_rank_at=lost_at)
    if 2 * len(by_rank) <= len(ranks):
        return replace(record, progressed_at=None)
    if any(
        process in before and rank.counter.restarts != before[process].counter.restarts
        for process, rank in by_rank.items()
    ):
        return replace(record, progressed_at=now, advances=record.advances + 1, gaps=0, hours=())
    last = record.progressed_at
    if last is None:
        return replace(record, progressed_at=now)
    if 2 * sum(rank.increased_at > max(last, lost_at) for rank in by_rank.values()) <= len(by_rank):
        return record
    record = replace(record, progressed_at=now, advances=record.advances + 1)
    return _with_gap(record, now - last, now) if learns else record


def skip_time(record: ProgressRecord, seconds: float) -> ProgressRecord:
    """Return the record with all times moved, because the counters were not read for `seconds`."""
    ranks = {process: replace(rank, increased_at=rank.increased_at + seconds) for process, rank in record.ranks.items()}
    at = record.progressed_at
    return replace(record, ranks=ranks, progressed_at=None if at is None else at + seconds)


def _follow_rank(before: RankProgress | None, counter: ProgressCounter, now: float) -> RankProgress:
    if before is not None and before.counter == counter:
        return before
    # The time of the last increase before the first reading is not known: the rank has not progressed yet.
    return RankProgress(counter=counter, increased_at=-math.inf if before is None else now)


def _with_increase(record: ProgressRecord, ranks: Mapping[ProcessId, RankProgress], now: float) -> ProgressRecord:
    before = record.ranks
    news = [rank.counter.total - before[process].counter.total for process, rank in ranks.items() if process in before]
    seconds = 0.0 if record.read_at is None else now - record.read_at
    if not news or seconds <= 0:
        return record
    newest = sum(news) / len(news)
    weight = min(1.0, seconds / RATE_SECONDS) if record.total else 1.0
    faster = weight * (newest / seconds - record.per_second)
    return replace(record, total=record.total + newest, per_second=record.per_second + faster)


def _with_gap(record: ProgressRecord, seconds: float, now: float) -> ProgressRecord:
    hour = int(now // HOUR_SECONDS)
    kept = [one for one in record.hours if hour - HOURS_KEPT < one.hour <= hour]
    last = kept.pop() if kept and kept[-1].hour == hour else HourOfGaps(hour=hour)
    bucket = math.ceil(math.log(max(1.0, seconds), _BUCKET_RATIO))
    counts = {**last.counts, bucket: last.counts.get(bucket, 0) + 1}
    last = replace(last, counts=counts, longest_seconds=max(last.longest_seconds, seconds))
    return replace(record, gaps=record.gaps + 1, hours=(*kept, last))
