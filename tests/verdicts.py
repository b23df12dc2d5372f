"""Print one line for each known verdict, to compare two commits with `diff`.

usage: python -m tests.verdicts [FOLDER...]

Each line has: case, form, kind, confidence, named ranks, ranks to check first, action. The cases are those of
tests/data/hangs.toml and of each FOLDER (see tests/robustness.py), in every form. Then every capture of every
scenario in virtual time follows. The texts of verdicts are omitted, because a text may change while its verdict
stays the same.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hangwatch.model import RankId, Verdict
from tests import robustness
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.simulation import play


def lines(folders: Iterable[Path]) -> Iterator[str]:
    """Yield the line of each verdict, in a fixed order."""
    cases = [*robustness.known_cases(), *(case for folder in folders for case in robustness.cases_of(folder))]
    for case in cases:
        for judged in robustness.vary(case):
            yield _line(case.name, judged.variation, judged.after)
    for scenario in (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS):
        for job_id, job in sorted(play(scenario.node, scenario.seconds, scenario.settings).items()):
            yield f"{scenario.name} | {job_id} | states {' '.join(job.states)} | pages {len(job.pages)}"
            for number, look in enumerate(job.looks):
                yield _line(scenario.name, f"{job_id}, capture {number}", look.verdict)


def _line(case: str, form: str, verdict: Verdict) -> str:
    named, check_first = (_ranks(ranks) for ranks in (verdict.named, verdict.check_first))
    answer = f"{verdict.kind} | {verdict.confidence.value} | named {named} | check first {check_first}"
    return f"{case} | {form} | {answer} | {verdict.action.kind}"


def _ranks(ranks: Sequence[RankId]) -> str:
    return ",".join(sorted(f"{rank.node}/{rank.rank}/{rank.pid}" for rank in ranks)) or "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts", description="Print one line for each verdict.")
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="further cases, as of tests/robustness.py"
    )
    for line in lines(parser.parse_args().folders):
        print(line)
