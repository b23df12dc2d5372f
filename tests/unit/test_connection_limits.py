"""Limits on the connections of one caller, in number and per second, and the log lines about them.

Callers below their limits still connect.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.web.connection_limits import MOST_CALLERS, MOST_LOGGED, ConnectionLimits, Rate, caller_at


def test_caller_over_its_rate_is_refused_until_time_has_passed() -> None:
    limits = ConnectionLimits("one", Rate(at_once=3.0, per_second=2.0))
    assert [limits.begin(1, 10.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limits.begin(2, 10.0), "others are not"
    assert [limits.begin(1, 11.0) for _ in range(3)] == [True, True, False]
    assert [limits.begin(1, 1000.0) for _ in range(4)] == [True] * 3 + [False], "never more than at once"


def test_callers_without_number_are_bounded_together() -> None:
    limits = ConnectionLimits("one", Rate(at_once=100.0, per_second=2.0))
    allowed = sum(limits.begin(f"10.0.{number >> 8}.{number & 255}", 0.0) for number in range(2 * MOST_CALLERS))
    assert allowed == 2000 + 500
    assert len(limits._buckets) == MOST_CALLERS
    assert sum(limits.begin(number, 1.0) for number in range(MOST_CALLERS)) == 200 + 50


@pytest.mark.parametrize("addresses", [5, 248, 2000])
def test_caller_that_has_not_flooded_passes_beside_many_addresses_that_do(addresses: int) -> None:
    limits = ConnectionLimits("one", Rate(at_once=500.0, per_second=50.0))
    opened, scrapes = 0, []
    for tick in range(40_000):  # 1,000 a second
        number = tick % addresses
        opened += limits.begin(f"10.0.{number >> 8}.{number & 255}", tick / 1000)
        if tick % 15_000 == 9_000:
            scrapes.append(limits.begin("10.9.9.9", tick / 1000))
    assert scrapes == [True] * 3 and opened <= 2500 + 250 * 40


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 2.0)), max_size=200))
def test_any_caller_gets_no_more_than_its_rate(request_times: list[tuple[int, float]]) -> None:
    limits, rate = ConnectionLimits("one", Rate(5.0, 1.0)), Rate(5.0, 1.0)
    now, allowed = 0.0, dict.fromkeys(range(4), 0)
    for caller, later in request_times:
        now += later
        allowed[caller] += limits.begin(caller, now)
    assert all(count <= rate.at_once + rate.per_second * now + 1e-6 for count in allowed.values())


def test_refused_caller_is_logged_once_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits("own-jobs", Rate(1.0, 1.0))
    for _ in range(3):
        limits.log_refused(1004, "too many")
        limits.log_refused("10.0.0.1", "too many")
    assert caplog.messages == [
        "own-jobs: connections of user 1004 are refused: too many",
        "own-jobs: connections of 10.0.0.1 are refused: too many",
    ]
    for uid in range(5000):
        limits.log_refused(uid, "too many")
    assert len(caplog.messages) == MOST_LOGGED
    assert caplog.messages[-1].endswith("further refused callers are not logged")


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("no:address", "no:address"),
    ],
)
def test_caller_of_an_address_is_its_host(address: str, caller: str) -> None:
    assert caller_at(address) == caller
