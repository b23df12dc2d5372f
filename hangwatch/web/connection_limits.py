"""Limits on the connections that a caller opens, at the same time and per second. A caller is a user or an address."""

import asyncio
import ipaddress
import logging
from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from tornado.iostream import IOStream

from hangwatch.web.protocol import AGAIN_SECONDS

Caller: TypeAlias = int | str
"""A uid as the kernel reports it, or an address. IPv6 addresses with the same first 64 bits are one caller."""

MOST_CALLERS = 4096  # in memory; the least recent caller is dropped
MOST_LOGGED = 64
_ALL_AT_ONCE, _ALL_PER_SECOND = 2000.0, 200.0
# Reserve for quiet callers during a flood, as a ratio of the limit of all callers together
_RESERVE_RATIO = 0.25
# A caller without an attempt for this time is quiet; Prometheus scrapes less often
QUIET_SECONDS = 5.0

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


class _OpenConnection(NamedTuple):
    """The caller of an open connection, and the timer that closes it. `has_asked`: its request has arrived."""

    caller: Caller
    timer: asyncio.TimerHandle
    has_asked: bool = False


class OpenConnections:
    """The open connections of one listener: at most `most`, and at most `most_of_user` of one user of a unix socket.

    A timer closes each of them. All methods run in the event loop.
    """

    def __init__(self, most: int, most_of_user: int | None) -> None:
        self._most, self._most_of_user = most, most_of_user
        self._open: dict[IOStream, _OpenConnection] = {}  # by the time of accept, else of the request: oldest first

    def add(self, stream: IOStream, caller: Caller, seconds: float) -> None:
        """Add a connection that was accepted. It is closed after `seconds`, unless its request has arrived by then."""
        self._open[stream] = _OpenConnection(caller, _close_after(stream, seconds))

    def begin_answer(self, stream: IOStream, seconds: float) -> None:
        """Note that the request of a connection has arrived. The connection is closed after `seconds`."""
        connection = self._open.pop(stream, None)
        if connection is not None:
            connection.timer.cancel()
            self._open[stream] = _OpenConnection(connection.caller, _close_after(stream, seconds), has_asked=True)

    def renew(self, stream: IOStream, seconds: float) -> None:
        """Restart the timer of a connection."""
        connection = self._open.get(stream)
        if connection is not None:
            connection.timer.cancel()
            self._open[stream] = connection._replace(timer=_close_after(stream, seconds))

    def forget(self, stream: IOStream) -> None:
        """Remove a connection, and stop its timer."""
        connection = self._open.pop(stream, None)
        if connection is not None:
            connection.timer.cancel()

    async def close_all(self) -> None:
        """Close all connections, and wait until the coroutine of each has called `forget`."""
        for stream in tuple(self._open):
            stream.close()
        while self._open:
            await asyncio.sleep(0)

    def close_oldest(self) -> None:
        """Close the oldest connection without a request, else the one with the oldest request."""
        oldest = min(self._open, key=lambda stream: self._open[stream].has_asked, default=None)
        if oldest is not None:
            self._close(oldest)

    def make_place(self, caller: Caller) -> str | None:
        """Make a place for a new connection of this caller. Return the reason to refuse it; None if there is a place.

        If no place is free, close the oldest silent connection (without a request) of the callers with the most
        connections, else one with a request. On a unix socket, refuse a user that would then have as many as they.
        """
        for stream in [stream for stream in self._open if stream.closed()]:
            self.forget(stream)  # its coroutine has not called `forget` yet
        counts = Counter(connection.caller for connection in self._open.values())
        if self._most_of_user and counts[caller] >= self._most_of_user:
            silent = self._find_silent({caller})
            if silent is None:
                return f"{self._most_of_user} requests of this user are being answered"
            self._close(silent)
        elif len(self._open) >= self._most:
            most = max(counts.values())
            callers = {each for each, count in counts.items() if count == most}
            silent = self._find_silent(callers)
            if self._most_of_user and most < counts[caller] + (2 if silent is None else 1):
                return f"all {self._most} connections are in use; try again in {AGAIN_SECONDS} s"
            streams = [stream for stream, connection in self._open.items() if connection.caller in callers]
            self._close(silent or streams[-1 if self._most_of_user else 0])
        return None

    def _find_silent(self, callers: Collection[Caller]) -> IOStream | None:
        """Return the oldest connection of these callers that has not sent its request; None if there is none."""
        of_callers = (each for each in self._open.items() if each[1].caller in callers)
        return next((stream for stream, connection in of_callers if not connection.has_asked), None)

    def _close(self, stream: IOStream) -> None:
        self.forget(stream)
        stream.close()


def _close_after(stream: IOStream, seconds: float) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, stream.close)


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
