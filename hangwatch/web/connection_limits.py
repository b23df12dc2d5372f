"""Limits on the connections that a caller opens, at the same time and per second. A caller is a user or an address."""

import ipaddress
import logging
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

Caller: TypeAlias = int | str
"""A uid as the kernel reports it, or an address. IPv6 addresses with the same first 64 bits are one caller."""

MOST_CALLERS = 4096  # in memory; the least recent caller is dropped
MOST_LOGGED = 64
_ALL_AT_ONCE, _ALL_PER_SECOND = 2000.0, 200.0
_RESERVE_RATIO = 0.25  # reserve for quiet callers during a flood, as a ratio of the limit of all callers together
QUIET_SECONDS = 5.0  # a caller without an attempt for this time is quiet; Prometheus scrapes less often

log = logging.getLogger(__name__)


class Rate(NamedTuple):
    """A limit: connections at the same time, and additional connections per second."""

    at_once: float
    per_second: float


class _Bucket(NamedTuple):
    """A token bucket: the number of its tokens at the time `as_of`, in seconds of CLOCK_MONOTONIC."""

    tokens: float
    as_of: float


class ConnectionLimits:
    """The token buckets of one listener: one for each caller, and one for all callers together.

    If all callers together exceed their limit, a caller without an attempt in the last `QUIET_SECONDS` may use a
    reserve.
    """

    def __init__(self, listener: str, of_caller: Rate) -> None:
        self._listener, self._of_caller = listener, of_caller
        self._all = Rate(max(_ALL_AT_ONCE, of_caller.at_once), max(_ALL_PER_SECOND, of_caller.per_second))
        self._buckets: OrderedDict[Caller, _Bucket] = OrderedDict()
        self._of_reserve = Rate(self._all.at_once * _RESERVE_RATIO, self._all.per_second * _RESERVE_RATIO)
        self._everybody: _Bucket | None = None
        self._reserve: _Bucket | None = None
        self._logged: set[Caller] = set()

    def begin(self, caller: Caller, now: float) -> bool:
        """Count a connection of this caller and return True. At a limit, count nothing and return False.

        `now` is in seconds of CLOCK_MONOTONIC.
        """
        previous = self._buckets.get(caller)
        is_quiet = previous is None or now - previous.as_of >= QUIET_SECONDS
        bucket = _filled(previous, self._of_caller, now)
        self._everybody = _filled(self._everybody, self._all, now)
        self._reserve = _filled(self._reserve, self._of_reserve, now)
        is_allowed = bucket.tokens >= 1.0
        if is_allowed and self._everybody.tokens >= 1.0:
            self._everybody = self._everybody._replace(tokens=self._everybody.tokens - 1.0)
        elif is_allowed and is_quiet and self._reserve.tokens >= 1.0:
            self._reserve = self._reserve._replace(tokens=self._reserve.tokens - 1.0)
        else:
            is_allowed = False
        self._buckets[caller] = bucket._replace(tokens=bucket.tokens - 1.0) if is_allowed else bucket
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return is_allowed

    def log_refused(self, caller: Caller, why: str) -> None:
        """Log that a caller is refused: once for each caller, and for at most `MOST_LOGGED` callers."""
        if caller in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(caller)
        name = f"user {caller}" if isinstance(caller, int) else caller
        last = "; further refused callers are not logged" if len(self._logged) == MOST_LOGGED else ""
        log.warning("%s: connections of %s are refused: %s%s", self._listener, name, why, last)


def caller_at(address: str) -> Caller:
    """Return the caller behind an address. An IPv4 address that is mapped into IPv6 counts as IPv4."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else f"{ipaddress.IPv6Address(int(parsed) >> 64 << 64)}/64"


def _filled(bucket: _Bucket | None, rate: Rate, now: float) -> _Bucket:
    if bucket is None:
        return _Bucket(rate.at_once, now)
    return _Bucket(min(rate.at_once, bucket.tokens + rate.per_second * (now - bucket.as_of)), now)
