"""Print what a shorter hold costs: `python -m tests.scenarios.hold_cost [--write]`.

Every healthy look-alike with progress counters is played with several holds. The pages are counted. `--write` renews
the table of docs/benchmarks.md.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from msgspec.structs import replace

from benchmarks import results
from hangwatch.config import Detector, Settings
from tests.scenarios.progress import LOOK_ALIKES
from tests.scenarios.simulation import play

HOLDS_SECONDS = (20.0, 45.0, 60.0, 120.0)
MOST_NAMES = 1
JOBS = {one.name: one for one in LOOK_ALIKES}


def count_pages(name: str) -> tuple[int, ...]:
    """Return the number of pages of one job with each hold."""
    job = JOBS[name]
    return tuple(
        len(play(job.node, job.seconds, _settings(hold), begin=job.begin, has_counters=True)["job"].pages)
        for hold in HOLDS_SECONDS
    )


def _list_names(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return "; ".join((*names[:MOST_NAMES], *more))


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
    rows = [(_list_names(names), *counts) for counts, names in alike.items()]
    totals = (f"all {len(pages)}", *(str(sum(counts)) for counts in zip(*pages.values(), strict=True)))
    table = results.Table(heads, (*rows, totals))
    command = "python -m tests.scenarios.hold_cost"
    results.report("hold", [table], command=command, is_kept="--write" in sys.argv[1:])


if __name__ == "__main__":
    main()
