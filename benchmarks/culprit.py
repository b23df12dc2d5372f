"""Which rank blocks the job: hangwatch on all known cases, without each of its rules, and beside simpler methods.

    .venv/bin/python benchmarks/culprit.py [--write]

The cases are hangs and look-alikes of tests/data/hangs.toml and servers.toml, with their guilty ranks. "right" names
exactly the guilty ranks, "none guilty" names no rank where none is guilty. "check first" points only at guilty ranks,
"silent" names no rank though one is guilty. "wrong" names an innocent rank. "misleads" counts answers without a name
that point at an innocent rank; they are in the other columns, too.

The simpler methods take the same stacks. "smallest group" groups ranks with equal stacks and names the smallest
group; "the only odd rank" names a rank only if all others have equal stacks.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402
from hangwatch.model import RankDump, RankId  # noqa: E402
from hangwatch.stacks.grouping import group_ranks  # noqa: E402
from hangwatch.verdict import culprit_search, judge  # noqa: E402
from hangwatch.verdict.rules import RULES  # noqa: E402
from tests import robustness  # noqa: E402
from tests.hangs import SETTINGS, TABLE  # noqa: E402
from tests.robustness import Case, Place  # noqa: E402

RIGHT, NONE_GUILTY, CHECK_FIRST, SILENT, WRONG = OUTCOMES = ("right", "none guilty", "check first", "silent", "wrong")
MISLEADS = "misleads"
Answer = tuple[frozenset[Place], frozenset[Place]]
"""The named ranks, and the ranks to check first."""


def score(case: Case, answer: Answer) -> str:
    """Return the outcome of one answer."""
    named, first = answer
    if named:
        return RIGHT if named == case.guilty else WRONG if named - case.guilty else CHECK_FIRST
    if first and first <= case.guilty:
        return CHECK_FIRST
    return SILENT if case.guilty else NONE_GUILTY


def ask_hangwatch(case: Case) -> Answer:
    """Return the answer of hangwatch."""
    verdict = judge.judge(group_ranks(case.ranks, TABLE, SETTINGS, case.world_size))
    return case.named_places(verdict), frozenset(map(case.place, verdict.check_first))


def _stack(dump: RankDump) -> Hashable:
    last = dump.rounds[-1] if dump.rounds else None
    threads = () if last is None else last.threads
    main = next((thread for thread in threads if thread.is_main), threads[0] if threads else None)
    return None if main is None else tuple((frame.function, frame.file, frame.line) for frame in main.frames)


def _group_by_stack(case: Case) -> list[list[RankId]]:
    groups: dict[Hashable, list[RankId]] = {}
    for dump in case.ranks:
        groups.setdefault(_stack(dump), []).append(dump.id)
    return sorted(groups.values(), key=len)


def name_smallest_group(case: Case) -> Answer:
    """Name the smallest group of ranks with equal stacks, if one group is the smallest."""
    groups = _group_by_stack(case)
    is_alone = len(groups) > 1 and len(groups[0]) < len(groups[1])
    return frozenset(map(case.place, groups[0])) if is_alone else frozenset(), frozenset()


def name_only_odd_rank(case: Case) -> Answer:
    """Name a rank if all other ranks have equal stacks, and there are at least three ranks."""
    groups = _group_by_stack(case)
    is_odd = len(groups) == 2 and len(groups[0]) == 1 < len(groups[1])
    return frozenset(map(case.place, groups[0])) if is_odd else frozenset(), frozenset()


def count(cases: Sequence[Case], method: Callable[[Case], Answer]) -> Counter[str]:
    """Return how often each outcome occurs."""
    answers = [(case, method(case)) for case in cases]
    misleading = sum(not named and not first <= case.guilty for case, (named, first) in answers)
    return Counter(score(case, answer) for case, answer in answers) + Counter({MISLEADS: misleading})


def _row(name: str, counts: Counter[str]) -> tuple[str, ...]:
    return (name, *(str(counts[outcome]) for outcome in (*OUTCOMES, MISLEADS)))


def leave_out(cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each rule, in the order of docs/verdicts.md: what changes without it."""
    with_all = count(cases, ask_hangwatch)
    for index, rule in enumerate(RULES):
        culprit_search.RULES = (*RULES[:index], *RULES[index + 1 :])
        without = count(cases, ask_hangwatch)
        culprit_search.RULES = RULES
        changes = (f"{without[outcome] - with_all[outcome]:+d}".replace("+0", "0") for outcome in OUTCOMES)
        yield (f"{index + 1}. `{rule.kind}`", *changes)


def _methods(cases: Sequence[Case]) -> Iterable[tuple[str, ...]]:
    for name, method in (
        ("hangwatch", ask_hangwatch),
        ("smallest group of equal stacks", name_smallest_group),
        ("the only odd rank", name_only_odd_rank),
        ("no answer", lambda _case: (frozenset(), frozenset())),
    ):
        yield _row(name, count(cases, method))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cases = list(robustness.known_cases())
    counts = count(cases, ask_hangwatch)
    without = list(leave_out(cases))
    earned = [-int(row[1]) for row in without]
    summary = (
        f"Without one of the {len(RULES)} rules, from {-min(earned)} more to {max(earned)} fewer cases are right.",
    )
    hangwatch, smallest, *simpler = _methods(cases)
    return results.report(
        "culprit",
        [results.Table((f"{len(cases)} cases", *OUTCOMES, MISLEADS), (hangwatch, smallest))],
        {"guilty": len(cases) - counts[NONE_GUILTY], **{name: counts[name] for name in (*OUTCOMES, MISLEADS)}},
        summary=summary,
        details=[
            results.Table(("simpler method", *OUTCOMES, MISLEADS), tuple(simpler)),
            results.Table(("without the rule", *OUTCOMES), tuple(without)),
        ],
        is_kept=options.write,
    )


if __name__ == "__main__":
    sys.exit(main())
