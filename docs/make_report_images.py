"""Draw docs/img/report-*.png: screenshots of reports in headless Chromium. `make screenshots` runs it.

The report of 8 ranks comes from a demo: real processes under py-spy, simulated power. The report of 16,384 ranks is
made of synthetic dumps that go through the real grouping and verdict.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hangwatch import config
from hangwatch.model import Frame, ProcessDump, RankDump, RankId, Thread
from hangwatch.report import html
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.verdict import judge

IMAGES = Path(__file__).parent / "img"
LIGHT, DARK = "1", "0"  # Chromium's preferredColorScheme
RANKS, RANKS_PER_NODE = 16_384, 8
ODD_RANK, SILENT_NODE = 9731, 77


def main() -> int:
    """Write the HTML pages, then a picture of each. Return 0, or 1 if Chromium is missing."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.stderr.write("no chromium on PATH, and the pictures need one: apt-get install chromium fonts-dejavu-core\n")
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        small, large = demo_page(Path(place)), Path(place) / "fleet.html"
        large.write_text(fleet_page())
        draw(browser, small, "report-8-ranks.png", LIGHT, 2080)
        draw(browser, small, "report-8-ranks-dark.png", DARK, 2080)
        draw(browser, large, "report-16384-ranks.png", LIGHT, 1250)
    return 0


def demo_page(place: Path) -> Path:
    """Run the demo of a rank that waits for a stuck loader, with its files in `place`.

    Return the path of its report.
    """
    hangwatch = Path(sys.executable).with_name("hangwatch")
    command = [str(hangwatch), "demo", "--seed", "7", "--keep", str(place / "demo")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(place.rglob("report.html"))


def fleet_page() -> str:
    """Return the page of 16,384 ranks on 2,048 nodes: one rank waits for its loader, one node did not respond."""
    grouping = group_ranks(fleet(), activity.load(()), config.Capture(), world_size=RANKS)
    return html.render_grouping(grouping, judge.judge(grouping))


def fleet() -> Iterator[RankDump]:
    """Yield one dump of each rank, except on the node that did not respond."""
    for rank in range(RANKS):
        node, local_rank = divmod(rank, RANKS_PER_NODE)
        if node != SILENT_NODE:
            who = RankId(node=f"gpu-{node:04}", rank=rank, local_rank=local_rank, pid=41_200 + local_rank)
            thread = Thread(name="MainThread", thread_id=str(who.pid), frames=stack(rank), is_main=True)
            yield RankDump(id=who, rounds=(ProcessDump(taken_monotonic_seconds=0.0, threads=(thread,)),))


def stack(rank: int) -> tuple[Frame, ...]:
    """Return the stack of a rank. Rank ODD_RANK is in its data loader, the others are in an all_reduce."""
    outer = [("main", "train.py", 214), ("<module>", "train.py", 231)]
    if rank == ODD_RANK:
        loader = "torch/utils/data/dataloader.py"
        inner = [
            ("wait", "multiprocessing/connection.py", 948),
            ("_try_get_data", loader, 1131),
            ("_get_data", loader, 1284),
            ("__next__", loader, 701),
            ("fit", "trainer/loop.py", 91),
        ]
    else:
        caller, line = ("_sync_metrics", 203) if rank >= 16_000 else ("_reduce_loss", 181)
        inner = [
            ("all_reduce", "torch/distributed/distributed_c10d.py", 2940),
            ("wrapper", "torch/distributed/c10d_logger.py", 83),
            (caller, "trainer/loop.py", line),
            ("training_step", "trainer/loop.py", 166),
            ("fit", "trainer/loop.py", 98),
        ]
    return tuple(Frame(function=function, file=file, line=line) for function, file, line in inner + outer)


def draw(browser: str, page: Path, name: str, scheme: str, height: int) -> None:
    """Save a screenshot of the top of `page` as docs/img/`name`: 1,150 pixels wide and `height` pixels high."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            *(f"--blink-settings=preferredColorScheme={scheme}", f"--window-size=1150,{height}"),
            *(f"--screenshot={IMAGES / name}", page.as_uri()),
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=120)
    sys.stdout.write(f"docs/img/{name}\n")


if __name__ == "__main__":
    sys.exit(main())
