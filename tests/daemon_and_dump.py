"""Compare the ranks that the daemon and `hangwatch dump` name, for every scenario that both can capture.

usage: python -m tests.daemon_and_dump [--virtual] [NAME...]

In scenarios with real processes, the job is dumped after each capture of the daemon, as `hangwatch dump` does it.
In scenarios in virtual time, a dump has no power history. It has only the last round of a capture, or the last two
rounds if one round may mislead. A dump may name fewer ranks than the daemon, but no other ranks.

For each scenario, print the first dump that names a rank which the daemon does not name. Then print the number of
comparisons. Exit with 1 if there is such a dump. NAME is the beginning of a scenario's name.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch import config
from hangwatch.model import Verdict
from hangwatch.stacks import activity
from hangwatch.verdict import second_round
from hangwatch.verdict.diagnosis import Diagnosis, diagnose
from tests.scenarios import stage
from tests.scenarios.crowds import CROWDS
from tests.scenarios.power import HANG_SCENARIOS, HEALTHY_SCENARIOS, PAUSE_SCENARIOS
from tests.scenarios.processes import DEMO_SCENARIOS, PROCESS_SCENARIOS
from tests.scenarios.simulation import play

Compared = tuple[str, Verdict, Verdict]


def real(names: Sequence[str]) -> Iterator[Compared]:
    """Run scenarios with real processes. Yield the verdicts of daemon and dump for each capture."""
    stage.LookingDaemon.dumps_too = True
    for scenario in (*DEMO_SCENARIOS, *PROCESS_SCENARIOS, *CROWDS):
        if scenario.name.startswith(tuple(names)):
            with tempfile.TemporaryDirectory() as directory:
                scenario.run(Path(directory) / "state")
            yield from ((scenario.name, *pair) for pair in stage.COMPARED)
            stage.COMPARED.clear()


def virtual(names: Sequence[str]) -> Iterator[Compared]:
    """Play scenarios in virtual time. For each capture, yield the verdict of the daemon and the verdict of a dump."""
    table = activity.load()
    for scenario in (*HANG_SCENARIOS, *HEALTHY_SCENARIOS, *PAUSE_SCENARIOS):
        if scenario.name.startswith(tuple(names)):
            for job in play(scenario.node, scenario.seconds, scenario.settings).values():
                for look in job.looks:
                    yield scenario.name, look.verdict, dumped(look, table, scenario.settings.capture)


def dumped(look: Diagnosis, table: activity.Table, settings: config.Capture) -> Verdict:
    """Return the verdict that `hangwatch dump` would give: it takes only the last rounds of the capture."""
    rounds = 1

    def shortened() -> Diagnosis:
        ranks = (
            replace(
                rank,
                rounds=rank.rounds[-rounds:],
                workers=tuple(replace(worker, rounds=worker.rounds[-rounds:]) for worker in rank.workers),
                gpu=replace(rank.gpu, busy_power_ratio=None, works_lightly=False),
            )
            for rank in look.capture.ranks
        )
        taken = replace(look.capture, ranks=tuple(ranks), rounds=rounds)
        return diagnose(taken, settings, table, unix_now=look.judged_unix_seconds, ranks_here=look.ranks_here)

    first = shortened()
    if not second_round.find_reason(first.capture.ranks, table):
        return first.verdict
    rounds = 2
    return shortened().verdict


def main(arguments: Sequence[str]) -> int:
    """Run the comparisons and print the result; return the exit code."""
    names = [name for name in arguments if name != "--virtual"] or [""]
    sources = (virtual,) if "--virtual" in arguments else (real, virtual)
    compared = 0
    differing: set[str] = set()
    for source in sources:
        for name, daemon, dump in source(names):
            compared += 1
            known = {rank.pid for rank in daemon.named}
            if name not in differing and any(rank.pid not in known for rank in dump.named):
                differing.add(name)
                print(f"{name}: daemon {daemon.kind}: {daemon.message}\n  dump {dump.kind}: {dump.message}", flush=True)
    print(f"{compared} comparisons, {len(differing)} scenarios with different names")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
