"""Pauses that ended by themselves: the place of a pause, its learned length, and the later page at this place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.detector import known_pauses
from hangwatch.detector.known_pauses import FORGOTTEN_SECONDS, MOST_PAUSES, MOST_PLACES, NOWHERE, EndedPause, Pause
from hangwatch.model import Fault, Frame, Group, Grouping, Member, Motion, RankId, Signature

STACK = (Frame(function="f", file="a.py"),)
seconds = st.floats(min_value=0, max_value=1e7)
names = st.sampled_from([f"place {i}" for i in range(6)])
endings = st.lists(st.tuples(st.frozensets(names, max_size=3), seconds, st.integers(0, 86400)))


def group(key: str, *ranks: int, waits_for: str = "unknown", signature: Signature = Signature.BLOCKED) -> Group:
    members = tuple(
        Member(id=RankId(node="n1", rank=rank), motion=signature.motion, signature=signature) for rank in ranks
    )
    return Group(key=key, activity="unknown", members=members, waits_for=waits_for, frames=STACK)


def places(*groups: Group, named: tuple[int, ...] = ()) -> frozenset[str]:
    return known_pauses.find_places(Grouping(groups=groups), [RankId(node="n1", rank=rank) for rank in named])


VICTIMS = group("v", 1, 2, 3, waits_for="ranks")


def test_the_place_is_where_the_awaited_ranks_stand() -> None:
    assert places(VICTIMS, group("a", 0)) == {"a unknown"}
    assert places(VICTIMS, group("a", 0), group("b", 4)) == {"a unknown", "b unknown"}
    assert places(VICTIMS, group("a", 0), group("b", 4), named=(4,)) == {"b unknown"}


def test_rank_waiting_for_its_gpu_is_no_place_of_a_pause() -> None:
    victims = group("v", 1, 2, signature=Signature.BEHIND_GPU)
    assert places(victims, group("a", 0)) == {"a unknown"}
    assert places(victims) == {NOWHERE}


@pytest.mark.parametrize("waits_for", ["ranks", "gpu"])
def test_where_every_rank_waits_there_is_no_place_even_if_one_is_named(waits_for: str) -> None:
    assert places(VICTIMS, group("a", 0, waits_for=waits_for)) == {NOWHERE}
    assert places(VICTIMS, group("a", 0, waits_for=waits_for), named=(0,)) == {NOWHERE}


def test_awaited_rank_without_a_stack_has_no_place() -> None:
    member = Member(id=RankId(node="n1", rank=0), motion=Motion.FROZEN)
    fault = Fault(subject="rank 0", reason="Timeout", detail="no answer")
    assert places(VICTIMS, Group(key="a", activity="unknown", members=(member,), fault=fault)) == {NOWHERE}
    assert places(VICTIMS, Group(key="gone", activity="unknown", members=(member,), gone=True)) == {NOWHERE}


def test_a_rank_that_moves_does_not_pause() -> None:
    assert places(VICTIMS, group("a", 0, signature=Signature.COMPUTES)) == frozenset()


def test_too_many_places_are_none() -> None:
    scattered = [group(f"k{i}", i) for i in range(MOST_PLACES + 1)]
    assert places(*scattered) == {NOWHERE}
    assert len(places(*scattered[1:])) == MOST_PLACES
    seen = frozenset[str]()
    for i in range(10 * MOST_PLACES):
        seen = known_pauses.add_places(seen, frozenset({f"k{i}"}))
    assert NOWHERE in seen
    assert len(seen) <= MOST_PLACES + 1


@given(endings)
def test_longest_pause_of_each_place_is_known_for_a_day(
    ended: list[tuple[frozenset[str], float, float]],
) -> None:
    known: tuple[Pause, ...] = ()
    longest: dict[str, tuple[float, float]] = {}
    now = 0.0
    for where, length, gap in ended:
        now += gap
        known = known_pauses.add_pause(known, EndedPause(places=where, began=now - length, seconds=length), now)
        for place in where:
            before, at = longest.get(place, (0.0, now))
            longest[place] = max(before if now - at < FORGOTTEN_SECONDS else 0.0, length), now
    assert len({pause.place for pause in known}) == len(known)
    for place, (length, at) in longest.items():
        expected = length if now - at < FORGOTTEN_SECONDS else None
        assert known_pauses.longest_seconds(known, {place}, now) == expected
        assert known_pauses.longest_seconds(known, {place}, at + FORGOTTEN_SECONDS) is None


def test_new_places_at_will_keep_memory_bounded_and_the_last_ones() -> None:
    known: tuple[Pause, ...] = ()
    for i in range(5 * MOST_PAUSES):
        known = known_pauses.add_pause(
            known, EndedPause(places=frozenset({"kept", f"p{i}"}), began=i, seconds=9.0), now=i
        )
    assert len(known) == MOST_PAUSES
    assert known_pauses.longest_seconds(known, {"kept", f"p{i}"}, i) == 9.0
    assert known_pauses.longest_seconds(known, {"p0"}, i) is None


def test_pause_without_a_place_is_not_learned() -> None:
    assert known_pauses.add_pause((), EndedPause(places=frozenset({"a", NOWHERE}), began=0.0, seconds=9.0), 9.0) == ()


def test_every_place_of_a_look_must_be_known() -> None:
    known = (
        Pause(place="a", longest_seconds=240.0, seen_at=0.0),
        Pause(place="b", longest_seconds=60.0, seen_at=0.0),
    )
    assert known_pauses.longest_seconds(known, {"a", "b"}, 1.0) == 60.0
    assert known_pauses.longest_seconds(known, {"a", "c"}, 1.0) is None
    assert known_pauses.longest_seconds(known, frozenset(), 1.0) is None


@given(st.none() | seconds, seconds, st.none() | seconds)
def test_hang_pages_no_later_than_its_bounds(longest: float | None, stalled: float, collective: float | None) -> None:
    hold = known_pauses.hold_seconds(longest, stalled, collective)
    assert 0 <= hold <= stalled
    assert hold <= 2 * (longest or 0.0)
    assert collective is None or hold <= max(0.0, collective - 120)
    if longest is not None and 2 * longest <= stalled and (collective is None or 2 * longest <= collective - 120):
        assert hold == 2 * longest
