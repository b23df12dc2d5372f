"""`hangwatch explain` on the texts of tests/data/logs.toml, and on altered texts, which must not make it fail."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch import words
from hangwatch.explain import traces
from hangwatch.explain.logs import enqueued_work, log_evidence
from hangwatch.explain.logs.rank_log import Log
from hangwatch.formats import work_lines
from hangwatch.model import RankId, Verdict
from hangwatch.verdict.supplements import complete
from tests.conftest import DATA
from tests.hangs import numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = tomllib.loads((DATA / "logs.toml").read_text())["case"]


def lines(text: str) -> list[str]:
    written = []
    for line in text.strip("\n").split("\n"):
        ranks, _, rest = line.partition("|")
        places = (
            (rank, rest.replace("{rank}", str(rank)).replace("{rank4}", str(rank - 4))) for rank in numbers(ranks)
        )
        written += [place for _, place in places]
    return written


def named(rank: RankId) -> int | str | None:
    return rank.rank if rank.rank is not None else words.name_ranks([rank])


def explained(case: dict[str, Any]) -> Verdict:
    found = traces.collect([(name, lines(text)) for name, text in case["files"].items()])
    return complete(None, log_evidence.supplement(found.logs, found.works, found.world_size, found.unranked))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_of_logs_toml_is_explained(case: dict[str, Any]) -> None:
    verdict = explained(case)
    assert [named(rank) for rank in verdict.check_first] == case.get("check", []), verdict
    assert verdict.named == ()
    texts = [verdict.message, *(one.message for one in verdict.evidence), *(rank.why for rank in verdict.check_first)]
    for text in case.get("mentions", ()):
        assert any(text.casefold() in shown.casefold() for shown in texts), texts


PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(sorted({line for case in CASES for text in case["files"].values() for line in lines(text)})),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "[rank1]: ", "[rank2]:", "3: "]), PIECES, PIECES), max_size=30))
def test_any_numbers_give_an_answer_that_names_no_rank(parts: list[tuple[str, str, str]]) -> None:
    text = [f"{prefix}{first[: len(first) // 2]}{second}" for prefix, first, second in parts]
    found = traces.collect([("job.log", text), ("rank9.log", text[::-1])])
    assert complete(None, log_evidence.supplement(found.logs, found.works, None, found.unranked)).named == ()


@given(st.text())
def test_any_line_is_searched_for_numbers(text: str) -> None:
    work_lines.parse(text)


def test_lines_with_numbers_are_bounded() -> None:
    log = Log()
    for number in range(3 * 4096):
        log.feed(f"[PG ID {number} PG GUID {number} Rank 0] last enqueued work: 1, last completed work: 1", number)
    assert len(log.works) == 4096
    assert len(list(enqueued_work.read_works("x", RankId(rank=1), log))) == 4096


@pytest.mark.parametrize("piece", ["[", "[1, ", "[PG ID ", "WorkNCCL(SeqNum=1, ", "last enqueued work: 1, "])
def test_a_long_line_is_searched_in_bounded_time(piece: str) -> None:
    log = Log()
    log.feed(f"collective enqueued {piece * 100_000}", 1)
