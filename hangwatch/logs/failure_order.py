"""The failures of all ranks by kind and time, and the kind that came first. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from hangwatch.formats.log_times import common_clock, seconds_until, time_on
from hangwatch.logs.failures import Failure, is_unanswered, without_numbers
from hangwatch.logs.merged_logs import RankLog
from hangwatch.model import RankId, list_by_key

_AT_ONCE_SECONDS = 10.0  # a launcher looks every 5 s whether a process has ended
_GOES_ON_SECONDS = 60.0


class FailureKind(NamedTuple):
    """The logs of the ranks that have the same kind of failure. The rank that failed first is first.

    `failure` is the failure of that rank. `order` is the reason why it is the first of several kinds, else "".
    """

    failure: Failure
    logs: tuple[RankLog, ...]
    order: str = ""

    @property
    def ids(self) -> tuple[RankId, ...]:
        """The ranks that failed, the first one first."""
        return tuple(log.id for log in self.logs)


def group_failures(logs: Sequence[RankLog]) -> list[FailureKind]:
    """Return the first failure of each rank by its text without numbers. Those that blame no rank come first."""
    first_failures = ((log.failures[0], log) for log in logs if log.failures)
    by_text = list_by_key(
        ((without_numbers(failure.text), failure.of_others), (failure, log)) for failure, log in first_failures
    )
    kinds = []
    for alike in by_text.values():
        clock = common_clock([failure.moment for failure, _ in alike])
        alike.sort(key=lambda entry: (*time_on(entry[0].moment, clock), entry[1].id.sort_key()))
        kinds.append(FailureKind(alike[0][0], tuple(log for _, log in alike)))
    clock = common_clock([kind.failure.moment for kind in kinds])
    return sorted(
        kinds,
        key=lambda kind: (kind.failure.of_others, time_on(kind.failure.moment, clock), kind.failure.text),
    )


def find_first_failure(kinds: Sequence[FailureKind], logs: Sequence[RankLog]) -> FailureKind | None:
    """Return the first kind of failure that does not blame other ranks.

    None if there is none, or if the order is unknown. A rank that fails alike, but later, follows the first one. A
    lost connection or a wait follows another failure, unless its time is long before that. Of several, one after which
    the program has run into another failure a minute later has not ended its rank.
    """
    own_failures = [
        kind._replace(
            logs=tuple(
                log
                for log in kind.logs
                if seconds_until(kind.failure.moment, log.failures[0].moment) <= _find_margin(kind, log)
            )
        )
        for kind in kinds
        if not kind.failure.of_others
    ]
    clear = [kind.failure.moment for kind in own_failures if not is_unanswered(kind.failure.text)]
    own_failures = [
        kind
        for kind in own_failures
        if (
            not clear
            or not is_unanswered(kind.failure.text)
            or all(seconds_until(kind.failure.moment, moment) > _AT_ONCE_SECONDS for moment in clear)
        )
        and not (
            len(own_failures) > 1
            and any(
                later.where and seconds_until(kind.failure.moment, later.moment) >= _GOES_ON_SECONDS
                for later in kind.logs[0].failures
            )
        )
    ]
    if len(own_failures) <= 1:
        return own_failures[0] if own_failures else None
    moments = [kind.failure.moment for kind in own_failures]
    clock = common_clock(moments)
    if all(moment is not None and moment.clock == clock for moment in moments):
        earliest, second = sorted(time_on(moment, clock) for moment in moments)[:2]
        return None if earliest == second else own_failures[0]._replace(order="by the clocks of the logs")
    if len({log.source for log in logs}) == 1:
        return min(own_failures, key=lambda kind: kind.failure.number)._replace(order="by the order of lines")
    reported = [kind for kind in own_failures if kind.logs[0].is_reported]
    return reported[0]._replace(order="by its launcher") if len(reported) == 1 else None


def _find_margin(kind: FailureKind, log: RankLog) -> float:
    """Return the seconds within which failures are alike: 0 if one launcher saw both processes end."""
    is_of_one_launcher = kind.failure.rank and log.failures[0].rank and kind.logs[0].source == log.source
    return 0.0 if is_of_one_launcher else _AT_ONCE_SECONDS
