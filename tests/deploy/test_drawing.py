"""drawing.py supports every kind of panel and draws Prometheus' responses."""

import time

import pytest

from tests.deploy import promql
from tests.deploy.drawing import Source, _formatted, draw
from tests.deploy.promql import DASHBOARDS


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_is_drawn_with_its_answers(name: str) -> None:
    labels = dict.fromkeys(
        ("job_id", "job_key", "instance", "gpu", "rank", "activity", "motion", "frame", "check"), "x"
    )
    now = time.time()
    source = Source(
        lambda _: [{"metric": labels, "value": [now, "3"]}],
        lambda *_: [{"metric": labels, "values": [[now - 60, "3"], [now, "3"]]}],
    )
    board = promql.dashboard(name)
    page, height = draw(board, source, {"node": "node-1", "job_key": "k1", "gpu": ".*"}, 120)
    kinds = [panel["type"] for panel in board["panels"]]
    assert page.count("<table>") == kinds.count("table")
    assert page.count("<svg ") == kinds.count("timeseries") + kinds.count("state-timeline")
    assert page.count("class=stat ") == kinds.count("stat")
    assert height > 500


def test_values_are_written_with_their_unit() -> None:
    assert _formatted(1234.0, "watt") == "1.23 kW"
    assert _formatted(0.25, "percentunit") == "25 %"
    assert _formatted(0.02, "s") == "20 ms"
    assert _formatted(5 * 2**30, "bytes") == "5 GiB"
