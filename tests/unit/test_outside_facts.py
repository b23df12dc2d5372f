"""The table of outside facts is whole: what uses a fact and what would notice its change exist."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.outside_facts import PAGE, ROOT, Fact, load, page_lines
from tests.unit.test_faults import function_names

TABLE = load()


@pytest.mark.parametrize("fact", TABLE.facts, ids=lambda fact: f"{fact.tool}-{fact.noticed.rpartition('/')[2]}")
def test_fact_names_code_that_uses_it_and_a_test_that_notices_a_change(fact: Fact) -> None:
    assert fact.tool in TABLE.tools and "|" not in fact.fact
    assert fact.text in (ROOT / fact.used).read_text()
    path, _, test = fact.noticed.partition("::")
    assert (ROOT / path).exists()
    assert not test or test in function_names(ROOT / path)


def test_there_are_sixty_facts_and_most_tools_have_run() -> None:
    assert len({fact.fact for fact in TABLE.facts}) == len(TABLE.facts) >= 60
    assert sum(bool(tool.version) for tool in TABLE.tools.values()) >= len(TABLE.tools) - 2


@pytest.mark.golden
def test_the_page_prints_the_table(golden_part: Callable[[Path, str, Iterable[str]], None]) -> None:
    golden_part(PAGE, "facts", page_lines(TABLE))
