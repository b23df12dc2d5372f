"""Score hangwatch and the baselines on hangbench: compare.py FOLDER [--write].

A tool is scored on the kinds of cases with evidence that it reads. `--write` renews docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import baselines  # noqa: E402
import score  # noqa: E402

from benchmarks import results  # noqa: E402

SHOWN = (*baselines.RECORDERS, *baselines.STACKS)
"""The kinds of cases on the page. Of traces, the page shows the runs of benchmarks/detection.py."""


_ONE_AT_A_TIME = threading.Lock()  # torch's analyzer has global state


def answer(tool: baselines.Tool, case: Path) -> object:
    """Return the answer of a tool; None if it fails. hangwatch runs as a program, the others in this process."""
    with contextlib.suppress(Exception), contextlib.nullcontext() if tool.is_program else _ONE_AT_A_TIME:
        return tool.ask(case)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "answers.json").exists():
        parser.error(f"{options.folder}: no cases; write them with: make hangbench")
    cases = Counter(one["kind"] for one in score.load_answers(options.folder).values())
    outcomes = [outcome for outcome in score.POINTS if outcome != score.FAILED]
    rows, details, failed = [], [], 0
    for name, tool in baselines.TOOLS.items():
        by_kind = score.score(options.folder, partial(answer, tool), tool.kinds)
        points = {kind: f"{score.points(counts):g}" for kind, counts in by_kind.items()}
        details += [
            (name, kind, points[kind], *(str(counts[outcome]) for outcome in outcomes))
            for kind, counts in by_kind.items()
        ]
        failed += sum(counts[score.FAILED] for counts in by_kind.values())
        counts = sum((by_kind.get(kind, Counter()) for kind in SHOWN), Counter[str]())
        if counts:
            shown = "/".join(str(counts[outcome]) for outcome in outcomes)
            rows.append((name, *(points.get(kind, "") for kind in SHOWN), shown))
    columns = (f"{cases[kind]} {kind}" for kind in SHOWN)
    return results.report(
        "hangbench",
        [results.Table(("points", *columns, "/".join(outcomes)), tuple(rows))],
        {"failed answers": failed},
        details=[results.Table(("tool", "kind", "points", *outcomes), tuple(details))],
        command="make hangbench",
        is_kept=options.write,
    )


if __name__ == "__main__":
    sys.exit(main())
