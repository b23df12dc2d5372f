"""The scenarios of the demo, each with its right verdict. A new one also needs an order in `worker.ORDERS`."""

import random
from enum import Enum
from typing import NamedTuple


class Answer(Enum):
    """The right verdict on a scenario."""

    NAMES_PLANTED = "a page that names the blocked rank"
    NAMES_NOBODY = "a page that names no rank: all ranks on this node wait"
    NO_PAGE = "no page, and the job is training again"
    NO_JOB = "no page, and no job either"


class Scenario(NamedTuple):
    """A scenario of the demo. `order` is sent to `target`: `one` random rank, `all`, or the `peers` elsewhere."""

    name: str
    what: str
    order: str
    right_answer: Answer
    target: str = "one"
    nodes: int = 1
    program: str = "hangwatch.tools.demo.launcher"

    def planted_rank(self, ranks: int, seed: int) -> int | None:
        """Return the rank that gets stuck; None if no rank of this node gets stuck."""
        return random.Random(seed).randrange(ranks) if self.target == "one" else None  # noqa: S311 - a die, no key


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "loader",
            "waits for a loader worker that reads from storage that does not respond",
            "loader",
            Answer.NAMES_PLANTED,
        ),
        Scenario("lock", "waits for a lock that another thread never releases", "lock", Answer.NAMES_PLANTED),
        Scenario("spin", "loops in Python forever", "spin", Answer.NAMES_PLANTED),
        Scenario("stopped", "was stopped by a signal", "stopped", Answer.NAMES_PLANTED),
        Scenario("exited", "has ended, and the other ranks wait for it", "exited", Answer.NAMES_PLANTED),
        Scenario(
            "all-waiting",
            "the ranks of another node do not join the next all_reduce",
            "stay-away",
            Answer.NAMES_NOBODY,
            target="peers",
            nodes=2,
        ),
        Scenario(
            "checkpoint",
            "rank 0 writes a checkpoint for 8 s and the other ranks wait (healthy)",
            "checkpoint 8",
            Answer.NO_PAGE,
            target="all",
        ),
        Scenario(
            "evaluation",
            "all ranks evaluate for 8 s at low GPU power (healthy)",
            "evaluation 8",
            Answer.NO_PAGE,
            target="all",
        ),
        Scenario(
            "idle",
            "a notebook holds a GPU but no longer runs a cell (healthy)",
            "idle",
            Answer.NO_JOB,
            target="all",
            program="hangwatch.tools.demo.notebook",
        ),
    )
}
