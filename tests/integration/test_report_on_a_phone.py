"""An incident's page on a phone and wider screens in a real Chromium: nothing is wider than the screen."""

import html as escaping
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch.model import JobState, PowerSeries, TimelineEntry
from hangwatch.report import html
from tests import samples
from tests.commands import finished
from tests.servers import chromium

PHONE_PIXELS = 375
SCREEN_PIXELS = (PHONE_PIXELS, 768, 1280, 1920)
FOLD_PIXELS = 667
FELL = samples.OPENED - 120.0

# A frame has its own viewport. Chromium opens no window as narrow as a phone.
AROUND = """<body style="margin:0"><iframe src="page.html" style="width:%dpx;height:700px;border:0"></iframe><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const box = (one) => { const at = one.getBoundingClientRect(); return [at.left, at.right, at.top, at.bottom]; };
  const shown = (all) => [...page.querySelectorAll(all)].filter((one) => one.getBoundingClientRect().width);
  document.body.textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    empty: shown("section, dd, tbody").filter((one) => !one.textContent.trim()).map(box),
    first: shown("dt").filter((one) => /^(Stuck on|Do first)$/.test(one.textContent)).map((one) => box(one.parentElement)),
  });
};
</script>"""


def seen(tmp_path: Path, screen_pixels: int = PHONE_PIXELS) -> dict[str, list[list[float]]]:
    """Return positions in pixels by name."""
    incident = samples.loader_hang()
    times = tuple(FELL - 780 + 5 * number for number in range(192))
    power = tuple(
        PowerSeries(
            uuid=uuid, index=number, unix_seconds=times, watts=tuple(640.0 if at < FELL else 118.0 for at in times),
            limit_watts=700.0, busy_watts=650.0, low_power_threshold_watts=300.0, local_ranks=(number,),
        )
        for number, uuid in enumerate(incident.job.gpu_uuids)
    )  # fmt: skip
    steps = ((-780, JobState.TRAINING), (0, JobState.QUIET), (120, JobState.SUSPECTED), (135, JobState.HUNG))
    timeline = tuple(TimelineEntry(unix_seconds=FELL + at, state=state, message="") for at, state in steps)
    stuck = replace(incident.verdict, stuck_on='open("data/shard-3") in pid 161, data-loader worker of rank 3 (gpu-07)')
    shown = replace(incident, power=power, timeline=timeline, verdict=stuck)
    (tmp_path / "page.html").write_text(html.render(shown))
    (tmp_path / "around.html").write_text(AROUND % screen_pixels)
    page = (tmp_path / "around.html").as_uri()
    command = chromium(tmp_path, "--allow-file-access-from-files", "--dump-dom", page)
    done = finished(*command, check=True)
    found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    assert found, done.stdout
    return json.loads(escaping.unescape(found[0]))  # type: ignore[no-any-return]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("screen_pixels", SCREEN_PIXELS)
def test_page_fits_every_screen_and_has_no_empty_part(tmp_path: Path, screen_pixels: int) -> None:
    page = seen(tmp_path, screen_pixels)
    assert page["width"] == screen_pixels
    assert page["empty"] == []


@pytest.mark.timeout(180)
def test_what_to_do_first_is_in_sight_without_scrolling(tmp_path: Path) -> None:
    first = seen(tmp_path)["first"]
    assert len(first) == 2
    for left, right, _, bottom in first:
        assert 0 <= left < right <= PHONE_PIXELS
        assert bottom <= FOLD_PIXELS
