"""Scenarios on one simulated node, each with its right verdict. A new one also needs an order in `worker.ORDERS`."""

import random
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from hangwatch.daemon import Daemon
from hangwatch.model import PAGED, JobState, TimelineEntry, Verdict
from hangwatch.state.board import JobEntry
from hangwatch.tools.demo.playback import (
    ANSWER_DEADLINE_SECONDS,
    TRAINING_SECONDS,
    NewDaemon,
    find_report,
    run_daemon,
    settings,
)
from hangwatch.tools.demo.playback import Watcher as DemoWatcher
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from hangwatch.tools.demo.simulated_node import wait_until
from tests.simulated.node import SimulatedNode

IDLE_SECONDS = 6.0  # twice the hold time: the detector would have suspected a job by then


class Answer(Enum):
    """The right verdict on a scenario."""

    NAMES_PLANTED = "a page that names the blocked rank"
    NAMES_NOBODY = "a page that names no rank: all ranks on this node wait"
    NO_PAGE = "no page, and the job is training again"
    NO_JOB = "no page, and no job either"


class Scenario(NamedTuple):
    """A scenario. `order` is sent to `target`: `one` random rank, `all`, or the `peers` elsewhere."""

    name: str
    what: str
    order: str
    right_answer: Answer
    target: str = "one"
    nodes: int = 1
    program: str = "tests.simulated.launcher"

    def planted_rank(self, ranks: int, seed: int) -> int | None:
        """Return the rank that gets stuck; None if no rank of this node gets stuck."""
        return random.Random(seed).randrange(ranks) if self.target == "one" else None


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
            program="tests.simulated.notebook",
        ),
    )
}


class Watcher(DemoWatcher):
    """A watcher that also keeps the states of the job, and if the daemon has seen any job."""

    saw_job = False

    def __init__(self, daemon: Daemon, job_id: str, say: Callable[[str], None]) -> None:
        super().__init__(daemon, job_id, say)
        self.states: list[JobState] = []

    def look(self) -> JobEntry | None:
        """Report changes since the last call. Return the job's entry; None until the daemon has found the job."""
        entry = super().look()
        self.saw_job |= entry is not None or bool(self._daemon.board.snapshot.jobs)
        return entry

    def tell(self, change: TimelineEntry) -> None:
        """Call `say` for a change and keep its state."""
        self.states += [] if change.message == PAGED else [change.state]  # a restart repeats a state
        super().tell(change)


class Outcome(NamedTuple):
    """The result of a scenario. `seconds` is the time from the fault to the verdict.

    `report` is the incident's folder; None without an incident. `planted` is the rank with the fault; None if no
    rank of this node has one.
    """

    scenario: str
    right: bool
    sentence: str
    planted: int | None
    seconds: float
    states: tuple[JobState, ...] = ()
    paged: bool = False
    verdict: Verdict | None = None
    report: Path | None = None


def play(
    name: str,
    *,
    directory: Path,
    new_daemon: NewDaemon,
    ranks: int = 8,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Play the scenario `name` and return its outcome. `say` is called with a line for every event."""
    scenario = SCENARIOS[name]
    planted = scenario.planted_rank(ranks, seed)
    is_job = scenario.right_answer is not Answer.NO_JOB
    ranks = ranks if is_job else 1
    with (
        SimulatedNode(ranks, scenario.nodes, scenario.program) as node,
        run_daemon(node, SimulatedGpus(node, seed=seed), settings(directory), new_daemon) as daemon,
    ):
        watcher = Watcher(daemon, node.run_id, say)
        if is_job:
            watcher.await_training()
        else:
            watcher.follow(TRAINING_SECONDS)
        say(f"now: {scenario.what}" if planted is None else f"now: rank {planted} {scenario.what}")
        began = time.monotonic()
        node.order(scenario.target if planted is None else planted, scenario.order)
        _await_answer(scenario, node, watcher)
        return _judge(scenario, planted, time.monotonic() - began, watcher, daemon)


def _await_answer(scenario: Scenario, node: SimulatedNode, watcher: Watcher) -> None:
    """Wait until the daemon pages for the hang. In a healthy scenario, wait until the job is training again."""
    if scenario.right_answer is Answer.NO_JOB:
        watcher.follow(IDLE_SECONDS)
        return
    if scenario.right_answer is not Answer.NO_PAGE:
        watcher.await_page()
        return
    resumed = False

    def over() -> bool:
        nonlocal resumed
        resumed = resumed or node.has_said("resumed")
        return resumed and watcher.is_in(JobState.TRAINING, JobState.RECOVERED)

    wait_until(over, ANSWER_DEADLINE_SECONDS)


def _judge(scenario: Scenario, planted: int | None, seconds: float, watcher: Watcher, daemon: Daemon) -> Outcome:
    entry = watcher.look()
    incident = entry.incident if entry else None
    verdict = incident.verdict if incident else None
    right, sentence = answer(scenario.right_answer, planted, watcher, verdict)
    return Outcome(
        scenario=scenario.name,
        right=right,
        sentence=sentence,
        planted=planted,
        seconds=seconds,
        states=tuple(watcher.states),
        paged=watcher.paged,
        verdict=verdict,
        report=find_report(daemon, incident.job.job_id) if incident else None,
    )


def answer(right: Answer, planted: int | None, watcher: Watcher, verdict: Verdict | None) -> tuple[bool, str]:
    """Return True if the daemon's verdict was right, and a sentence that compares it with the scenario."""
    named = [rank.rank for rank in verdict.named] if verdict else []
    names = f"rank {', '.join(map(str, named))}" if named else "no rank"
    paged = f"paged and named {names}" if watcher.paged else "did not page"
    if right is Answer.NAMES_PLANTED:
        return watcher.paged and named == [planted], f"hangwatch {paged}; the demo blocked rank {planted}"
    if right is Answer.NAMES_NOBODY:
        kind = verdict.kind if verdict else "no verdict"
        good = watcher.paged and not named and kind == "AllWaiting"
        return good, f"hangwatch {paged} ({kind}); the culprit is on another node"
    if right is Answer.NO_JOB:
        seen = "listed it as a job" if watcher.saw_job else "did not list it as a job"
        return not watcher.paged and not watcher.saw_job, f"hangwatch {paged} and {seen}; nothing was wrong"
    last = watcher.states[-1] if watcher.states else None
    good = not watcher.paged and last in (JobState.TRAINING, JobState.RECOVERED)
    return good, f"hangwatch {paged}, and the job is {last.value if last else 'unknown'}; nothing was wrong"
