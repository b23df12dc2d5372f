"""drawing.py supports every kind of panel and draws Prometheus' responses on screens of four widths."""

import re
import time

import pytest

from tests.deploy import promql
from tests.deploy.drawing import GRID_FROM_PIXELS, Source, _formatted, column_pixels, draw
from tests.deploy.pictures import SCREEN_PIXELS
from tests.deploy.promql import DASHBOARDS


@pytest.mark.parametrize("pixels", SCREEN_PIXELS)
@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_is_drawn_with_its_answers(name: str, pixels: int) -> None:
    labels = dict.fromkeys(
        ("job_id", "job_key", "instance", "gpu", "rank", "activity", "motion", "frame", "check"), "x"
    )
    now = time.time()
    source = Source(
        lambda _: [{"metric": labels, "value": [now, "3"]}],
        lambda *_: [{"metric": labels, "values": [[now - 60, "3"], [now, "3"]]}],
    )
    board = promql.dashboard(name)
    page, height = draw(board, source, {"node": "node-1", "job_key": "k1", "gpu": ".*"}, 120, pixels)
    kinds = [panel["type"] for panel in board["panels"]]
    assert page.count("<table ") == kinds.count("table")
    assert page.count("<svg ") == kinds.count("timeseries") + kinds.count("state-timeline")
    assert page.count("class=stat ") == kinds.count("stat")
    assert height > 500
    boxes = re.findall(r"style=\"left:(\d+)px;top:\d+px;width:(\d+)px", page)
    assert len(boxes) >= len(kinds)
    assert all(int(left) + int(width) <= pixels for left, width in boxes), "no sideways scroll"


@pytest.mark.parametrize(
    ("name", "pixels"),
    [("job", 375), ("job", 768), *((name, pixels) for name in DASHBOARDS for pixels in SCREEN_PIXELS[2:])],
)
def test_tables_fit_their_panels_and_on_a_phone_the_first(name: str, pixels: int) -> None:
    tables = [panel for panel in promql.dashboard(name)["panels"] if panel["type"] == "table"]
    for panel in tables[:1] if pixels == 375 else tables:
        columns = panel["gridPos"]["w"] if pixels >= GRID_FROM_PIXELS else 24
        width = pixels * columns // 24 - 10
        assert sum(column_pixels(panel, width).values()) <= width + 0.01, panel["title"]


def test_values_are_written_with_their_unit() -> None:
    assert _formatted(1234.0, "watt") == "1.23 kW"
    assert _formatted(0.25, "percentunit") == "25 %"
    assert _formatted(0.02, "s") == "20 ms"
    assert _formatted(5 * 2**30, "bytes") == "5 GiB"
