"""The support matrix: its page is the output of `make support`, and its commands exist."""

import re

from tests import support


def test_page_is_the_output_of_the_command() -> None:
    assert support.PAGE.read_text() == support.render(support.read_rows(), support.read_results())


def test_rows_are_unique_and_name_files_that_exist() -> None:
    rows = support.read_rows()
    assert len({row.part for row in rows}) == len(rows)
    for row in rows:
        assert bool(row.version) == bool(row.command), row.part
        for file in re.findall(r"tests/\S+\.py", row.command):
            assert (support.ROOT / file).exists(), row.part
    assert set(support.read_results()) <= {row.part for row in rows}


def test_part_that_is_not_here_keeps_its_result_and_one_that_fails_raises() -> None:
    assert support.run(support.Row(part="x", version="false", command="true")) is None
    assert support.run(support.Row(part="x", version="echo v2.3", command="echo 1 passed")).version == "2.3"
    try:
        support.run(support.Row(part="x", version="echo 2", command="echo 5 skipped"))
    except AssertionError:
        return
    raise AssertionError("a run in which no test passed is not a result")
