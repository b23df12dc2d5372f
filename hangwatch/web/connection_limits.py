"""How many connections a caller may open at once, and in a second. A caller is a user or an address."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

Caller: TypeAlias = int | str
"""A user id by this kernel's word, or an address: of IPv6 the first 64 bits, which one host may have as a whole."""

MOST_CALLERS = 4096  # remembered; the one that was seen longest ago is forgotten
MOST_LOGGED = 64
_ALL_AT_ONCE, _ALL_PER_SECOND = 2000.0, 200.0
_RESERVE_RATIO = 0.25  # of what all may open: that much more, for quiet callers while others flood
QUIET_SECONDS = 5.0  # a caller that has not tried for so long is no flooder; who scrapes does it less often

log = logging.getLogger(__name__)


class Rate(NamedTuple):
    """So many connections at once, and so many a second from then on."""

    at_once: float
    per_second: float


class _Bucket(NamedTuple):
    left: float
    as_of: float


class ConnectionLimits:
    """What each caller of one listener, and all together, have opened; a caller over its limit is logged once.

    Where all together are over their limit, a caller that was quiet before draws on a reserve.
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
        """Count one connection of this caller at a CLOCK_MONOTONIC time; one too many is not counted: False."""
        known = self._buckets.get(caller)
        is_quiet = known is None or now - known.as_of >= QUIET_SECONDS
        own = _filled(known, self._of_caller, now)
        everybody = _filled(self._everybody, self._all, now)
        reserve = _filled(self._reserve, self._of_reserve, now)
        is_allowed = own.left >= 1.0
        if is_allowed and everybody.left >= 1.0:
            everybody = everybody._replace(left=everybody.left - 1.0)
        elif is_allowed and is_quiet and reserve.left >= 1.0:
            reserve = reserve._replace(left=reserve.left - 1.0)
        else:
            is_allowed = False
        if is_allowed:
            own = own._replace(left=own.left - 1.0)
        self._buckets[caller] = own
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        self._everybody, self._reserve = everybody, reserve
        return is_allowed

    def log_refused(self, caller: Caller, why: str) -> None:
        """Say of each caller once, and of so many callers, that it is refused."""
        if caller in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(caller)
        who = f"user {caller}" if isinstance(caller, int) else caller
        last = "; further callers are refused without a line" if len(self._logged) == MOST_LOGGED else ""
        log.warning("%s: connections of %s are refused: %s%s", self._listener, who, why, last)


def caller_at(address: str) -> Caller:
    """The caller behind the address of a connection; an IPv4 address that is mapped into IPv6 is one of IPv4."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else f"{ipaddress.IPv6Address(int(found) >> 64 << 64)}/64"


def _filled(bucket: _Bucket | None, rate: Rate, now: float) -> _Bucket:
    if bucket is None:
        return _Bucket(rate.at_once, now)
    return _Bucket(min(rate.at_once, bucket.left + rate.per_second * (now - bucket.as_of)), now)
