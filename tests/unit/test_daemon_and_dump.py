"""The daemon and `hangwatch dump` give the same verdicts on the same captures.

`python -m tests.daemon_and_dump` compares them on all scenarios.
"""

import pytest

from tests.daemon_and_dump import main


@pytest.mark.parametrize("name", ["lightest job hangs", "victims that ask in Python", "evaluation on one rank"])
def test_dump_names_no_rank_that_the_daemon_does_not_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual", name]) == 0, capsys.readouterr().out
    assert not capsys.readouterr().out.startswith("0 comparisons")
