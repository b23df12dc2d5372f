"""Print what a shorter hold costs: `python -m tests.scenarios.hold_cost [--write]`.

Every healthy look-alike with progress counters is played with several holds. The pages are counted. `--write` renews
the table of docs/measurements.md.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from msgspec.structs import replace

from hangwatch.config import Detector, Settings
from tests import measurements_page
from tests.scenarios.progress import LOOK_ALIKES
from tests.scenarios.simulation import play

HOLDS_SECONDS = (20.0, 45.0, 60.0, 120.0)
JOBS = {one.name: one for one in LOOK_ALIKES}


def count_pages(name: str) -> tuple[int, ...]:
    """Return the number of pages of one job with each hold."""
    job = JOBS[name]
    return tuple(
        len(play(job.node, job.seconds, _settings(hold), begin=job.begin, has_counters=True)["job"].pages)
        for hold in HOLDS_SECONDS
    )


def _settings(hold_seconds: float) -> Settings:
    return replace(Settings(), detector=Detector(hold_seconds=hold_seconds))


def main() -> None:
    """Play all look-alikes, and print the table."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pages = dict(zip(JOBS, pool.map(count_pages, JOBS), strict=True))
    heads = ("healthy job that pages", *(f"{hold:g} s" for hold in HOLDS_SECONDS))
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, counts in pages.items():
        if any(counts):
            alike.setdefault(tuple(map(str, counts)), []).append(name)
    rows = [(measurements_page.list_names(names), *counts) for counts, names in alike.items()]
    totals = (f"all {len(pages)}", *(str(sum(counts)) for counts in zip(*pages.values(), strict=True)))
    text = measurements_page.table(heads, [*rows, totals])
    if "--write" in sys.argv[1:]:
        measurements_page.write("hold", "python -m tests.scenarios.hold_cost --write", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
