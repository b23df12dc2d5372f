"""The removal of incidents when there are too many: the oldest closed one of the owner with the most goes first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.probes.base.owner_turns import order_by_turns
from hangwatch.store.retention import Stored, surplus

BIG = 1 << 40


def make_incidents(owners: str, *, size_bytes: int = 1, is_open: str = "") -> list[Stored]:
    """Return one incident for each letter of `owners`, newest first. `is_open` has the letters of open incidents."""
    return [
        Stored(name=f"{owner}{len(owners) - place}", owner=owner, size_bytes=size_bytes, is_open=owner in is_open)
        for place, owner in enumerate(owners)
    ]


def test_a_single_owner_keeps_the_newest() -> None:
    assert surplus(make_incidents("aaaaa"), 3, BIG) == ("a2", "a1")
    assert surplus(make_incidents("aaaaa", size_bytes=10), 9, 30) == ("a2", "a1")
    assert surplus(make_incidents("aaa"), 3, BIG) == surplus(make_incidents("aaa", size_bytes=10), 9, 30) == ()


def test_owner_with_most_incidents_loses_its_oldest() -> None:
    assert surplus(make_incidents("aaaaabb"), 5, BIG) == ("a4", "a3")
    assert surplus(make_incidents("aaaaabb", size_bytes=10), 99, 50) == ("a4", "a3")
    assert surplus(make_incidents("abab"), 3, BIG) == ("b1",), "of two owners with equal shares, the oldest of all"


def test_newest_incident_stays_if_it_displaces_no_other_owner() -> None:
    big = [Stored("a2", "a", 100), Stored("a1", "a", 1)]
    assert surplus(big, 9, 50) == ("a1",)
    assert surplus(big[:1], 9, 50) == ()
    assert surplus([*big, Stored("b1", "b", 1)], 9, 50) == ("a2", "a1")
    assert surplus([Stored("a2", "a", 25), Stored("b2", "b", 20), Stored("b1", "b", 20)], 9, 50) == ("b1",)


def test_what_is_open_stays_and_takes_no_more_than_half_from_others() -> None:
    many = make_incidents("aaaaaaaabb", is_open="a")
    assert surplus(many, 4, BIG) == ()
    assert surplus(make_incidents("aaaaaaaabbb", is_open="a"), 4, BIG) == ("b1",)
    own = [*make_incidents("aaaa", is_open="a"), Stored("closed", "a", 1), Stored("other", "b", 1)]
    assert surplus(own, 4, BIG) == ("closed",), "it counts in full for its own owner"


STORED = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 20), st.booleans(), st.booleans()), max_size=30
).map(
    lambda rows: [
        Stored(f"{place:02}", owner, size, is_open, owner if is_crash else None)
        for place, (owner, size, is_open, is_crash) in enumerate(rows)
    ]
)


@given(stored=STORED, most=st.integers(1, 20), most_bytes=st.integers(1, 200))
def test_nothing_open_goes_and_the_bounds_hold_for_the_rest(stored: list[Stored], most: int, most_bytes: int) -> None:
    gone = surplus(stored, most, most_bytes)
    assert len(set(gone)) == len(gone)
    assert not {one.name for one in stored if one.is_open} & set(gone)
    kept = [one for one in stored if one.name not in gone]
    if not any(one.is_open for one in stored):
        assert len(kept) <= most
        assert len(kept) == min(1, len(stored)) or sum(one.size_bytes for one in kept) <= most_bytes


@given(owners=st.text("abcd", max_size=30), most=st.integers(1, 20))
def test_owner_with_fewer_incidents_loses_none(owners: str, most: int) -> None:
    stored = make_incidents(owners)
    gone = surplus(stored, most, BIG)
    kept = Counter(one.owner for one in stored if one.name not in gone)
    losers = {one.owner for one in stored if one.name in gone}
    assert all(kept[owner] <= kept[loser] + 1 for loser in losers for owner in kept)
    for owner in set(owners):
        assert [one.name in gone for one in stored if one.owner == owner] == sorted(
            one.name in gone for one in stored if one.owner == owner
        ), "the oldest of each"


@pytest.mark.parametrize(("owners", "places"), [("", []), ("aab", [0, 2, 1]), ("aaabcb", [0, 3, 4, 1, 5, 2])])
def test_owners_in_turn(owners: str, places: list[int]) -> None:
    assert [place for _, place in order_by_turns(zip(owners, range(len(owners)), strict=True))] == places
