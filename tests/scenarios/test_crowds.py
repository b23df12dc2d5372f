"""Many jobs at once on one node: hangs and healthy look-alikes."""

from pathlib import Path

import pytest

from tests.scenarios.crowds import CROWDS
from tests.scenarios.names import assert_names_do_not_matter
from tests.scenarios.stage import Crowd, problems, settings


@pytest.mark.parametrize("crowd", CROWDS, ids=lambda crowd: crowd.name)
def test_crowd(crowd: Crowd, tmp_path: Path) -> None:
    seen = list(zip(crowd.neighbours, crowd.run(tmp_path / "state"), strict=True))
    answers = [(one.name, problems(one.expected, observed)) for one, observed in seen if not observed.unavailable]
    assert [answer for answer in answers if answer[1]] == []
    for _, observed in seen:
        for look in observed.looks:
            assert_names_do_not_matter(look, settings(tmp_path))
    missing = {observed.unavailable for _, observed in seen if observed.unavailable}
    if missing:
        pytest.skip("; ".join(missing))
