"""Ranks that stay between the same few lines over several captures."""

from hangwatch.detector import sleepers
from hangwatch.detector.sleepers import Standstill
from hangwatch.model import CodeRegion, RankId

RANK = RankId(rank=0)


def stay(*places: str, within: str = "loop") -> CodeRegion:
    return CodeRegion(within=within, places=places)


def after(*looks: CodeRegion | None, seconds: float = 100.0) -> Standstill | None:
    """Return the standstill of a rank after captures that are `seconds` apart.

    None instead of a region means that the rank was not between the same few lines.
    """
    known: dict[RankId, Standstill] = {}
    for number, one in enumerate(looks):
        known = sleepers.follow_stays(known, {} if one is None else {RANK: one}, seconds * number)
    return known.get(RANK)


def test_same_lines_in_each_capture_are_one_standstill() -> None:
    known = after(stay("1"), stay("2"), stay("1", "3"))
    assert known == Standstill(stay=stay("1", "2", "3"), since=0.0, captures=3)


def test_it_begins_anew_elsewhere() -> None:
    for elsewhere in (stay("1", within="other"), stay("2", "3", "4")):
        assert after(stay("1"), elsewhere) == Standstill(stay=elsewhere, since=100.0)
    assert after(stay("1"), None, stay("1")) == Standstill(stay=stay("1"), since=200.0)
    assert after(stay("1"), None) is None


def test_a_rank_is_settled_after_several_looks_and_so_much_time() -> None:
    known = {RANK: Standstill(stay=stay("1"), since=0.0, captures=2)}
    assert list(sleepers.find_settled(known, 240.0, 240.0, 900.0)) == [RANK]
    assert not list(sleepers.find_settled(known, 239.0, 240.0, 900.0))
    assert not list(sleepers.find_settled({RANK: Standstill(stay=stay("1"), since=0.0)}, 999.0, 240.0, 900.0))


def test_a_rank_with_bytes_is_settled_later() -> None:
    carrying = CodeRegion(within="loop", places=("1",), carries=True)
    known = after(stay("1"), carrying, stay("1"))
    assert known.stay.carries
    assert not list(sleepers.find_settled({RANK: known}, 899.0, 240.0, 900.0))
    assert list(sleepers.find_settled({RANK: known}, 900.0, 240.0, 900.0)) == [RANK]
