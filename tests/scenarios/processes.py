"""Scenarios with real processes, the real daemon and real py-spy in real time. Only the GPUs are simulated.

The scenarios include those of `tests.simulated`. Low power is held for 1.5 s, and rounds are 1 s apart.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hangwatch.config import Capture
from hangwatch.model import Confidence, JobState
from hangwatch.tools.demo.simulated_node import wait_until
from tests.scenarios.external_servers import answering
from tests.scenarios.power import Expected, truth_of, with_names
from tests.scenarios.stage import (
    DEADLINE_SECONDS,
    RANKS,
    WORKER,
    LookingDaemon,
    Observed,
    Stage,
    settings,
    staged,
    training,
)
from tests.simulated.node import SimulatedNode
from tests.simulated.scenarios import SCENARIOS as DEMOS
from tests.simulated.scenarios import Answer, Scenario, play

HANG = "training → quiet → suspected → hung"
LOOK = "training → quiet → suspected → (training|stalled → recovered)"
Run = Callable[[Path], tuple[Observed, ...]]


@dataclass(frozen=True)
class ProcessScenario:
    """A row of the table. Slow machines capture more often and page later: times are long, states a regex."""

    run: Run
    expected: tuple[Expected, ...]
    name: str = ""

    @property
    def truth(self) -> str:
        return truth_of(self.expected)


def _hang(run: Run, named: tuple[int, ...] = (), states: str = HANG) -> ProcessScenario:
    return ProcessScenario(run, (Expected(states, True, named, 100.0),))


def _healthy(run: Run, states: str = LOOK) -> ProcessScenario:
    return ProcessScenario(run, (Expected(states),))


def demo(name: str) -> Run:
    """Return a function that runs the scenario `name` of `tests.simulated`."""

    def run(directory: Path) -> tuple[Observed, ...]:
        daemons: list[LookingDaemon] = []

        def new_daemon(*given: Any, **options: Any) -> LookingDaemon:
            daemons.append(LookingDaemon(*given, **options))
            return daemons[-1]

        outcome = play(name, ranks=8, seed=1, directory=directory, new_daemon=new_daemon)
        paged = outcome.verdict if outcome.paged else None
        named = tuple(one.rank for one in paged.named) if paged else ()
        seconds = outcome.seconds if outcome.paged else None
        states = tuple(state.value for state in outcome.states)
        looks = tuple(look for daemon in daemons for look in daemon.looks)
        action = paged.action if paged else None
        return (Observed(states, int(outcome.paged), named, action, seconds, is_known=name != "idle", looks=looks),)

    return run


def given(order: str, *, pages: bool = False, stalled_hold_seconds: float = 4.5) -> Run:
    """Return a function that gives `order` to all ranks. Then it waits for a page, or until they train again.

    In `order`, {fifo} is a FIFO without a writer. {port} is that of a server, which responds only if no page is expected.
    """

    def run(directory: Path) -> tuple[Observed, ...]:
        with contextlib.ExitStack() as stack:
            (stage,) = stack.enter_context(training(settings(directory, stalled_hold_seconds=stalled_hold_seconds)))
            fifo = stage.node.folder / "dead"
            os.mkfifo(fifo)
            port = stack.enter_context(answering(3600.0 if pages else 7.0)) if "{port}" in order else None
            stage.trouble("all", order.format(fifo=fifo, port=port))
            return ((stage.until_page() if pages else stage.until_resumed()).observed(),)

    return run


def suspended(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.trouble("all", "stop-all")
        stage.until(JobState.SUSPENDED).watcher.follow(6.0)
        for pid in stage.node.pids:
            os.kill(pid, signal.SIGCONT)
        return (stage.until_resumed().observed(),)


def _have_met(stage: Stage) -> bool:
    entry = stage.watcher.look()
    return entry is not None and all(rank.most_peers > 0 for rank in entry.job.ranks)


def over(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.trouble("all", "meet")
        assert wait_until(lambda: _have_met(stage), DEADLINE_SECONDS), "the daemon saw no connections"
        stage.trouble("all", "linger 60")
        stage.until(JobState.OVER).watcher.follow(6.0)
        return (stage.observed(),)


def first_compile(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(RANKS, worker=WORKER, first_order="all compile-model 7")
    with staged(settings(directory, startup_hold_seconds=3.0), node) as (stage,):
        stage.until(JobState.SUSPECTED)
        return (stage.until_resumed().observed(),)


def hang_at_start(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(RANKS, worker=WORKER, first_order="all join-late 3")
    with staged(settings(directory), node) as (stage,):  # two light captures end the start long before its hold
        return (stage.until_page().observed(),)


def job_ends(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.trouble("all", "exited")
        return (stage.until(JobState.ENDED).observed(),)


def elastic_restart(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        before = frozenset(stage.node.pids)
        stage.node.restart()

        def replaced() -> bool:
            entry = stage.watcher.look()
            return entry is not None and before.isdisjoint(rank.id.pid for rank in entry.job.ranks)

        wait_until(replaced, DEADLINE_SECONDS)
        return (stage.until(JobState.TRAINING).observed(),)


def lost_readings(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.gpus.lost = frozenset({2})
        stage.watcher.follow(4.0)
        return (stage.observed(),)


def lost_gpu_hangs(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.gpus.lost = frozenset({2})
        stage.trouble(2, "lock")
        return (stage.until_page().observed(),)


def two_jobs(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory), SimulatedNode(RANKS)) as (stage, beside):
        stage.trouble(1, "lock")
        stage.until_page()
        return (stage.observed(), beside.observed())


def gpu_hangs(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.trouble("all", "gpu-hangs 1 2")
        observed = stage.until_page().observed()
        confidences = {
            look.verdict.confidence for look in observed.looks if 2 in [one.rank for one in look.verdict.named]
        }
        assert confidences <= {Confidence.LOW}, "rank 2 may wait for rank 1"
        return (observed,)


def asks_again(directory: Path) -> tuple[Observed, ...]:
    with training(replace(settings(directory), capture=Capture(pause_seconds=2.5))) as (stage,):
        stage.trouble("all", "ask-again 10 2")
        return (stage.until_resumed().observed(),)


def polls_for_file(directory: Path) -> tuple[Observed, ...]:
    chosen = settings(directory, stalled_hold_seconds=600.0)
    with training(replace(chosen, detector=replace(chosen.detector, recapture_max_seconds=5.0))) as (stage,):
        stage.trouble("all", f"poll-for-file {directory / 'never'} 1")
        return (stage.until_page().observed(),)


def inference_server(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(2, program="tests.scenarios.vllm_server")
    with staged(settings(directory, startup_hold_seconds=2.0), node) as (stage,):
        stage.watcher.follow(6.0)
        return (stage.observed(),)


def own_server(directory: Path, ranks: int = 2, program: str = "own_server") -> tuple[Observed, ...]:
    node = SimulatedNode(ranks, program=f"tests.scenarios.{program}")
    with staged(settings(directory, startup_hold_seconds=2.0), node) as (stage,):
        stage.until(JobState.TRAINING, JobState.HUNG).watcher.follow(6.0)
        return (stage.observed(),)


def queue_server(directory: Path) -> tuple[Observed, ...]:
    return own_server(directory, 3, "queue_server")


def in_gdb(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,), tracing(stage.node.pids[1]):
        stage.until(JobState.SUSPENDED).watcher.follow(6.0)
        return (stage.observed(),)


@contextlib.contextmanager
def tracing(pid: int) -> Iterator[None]:
    """Stop a process with ptrace(2) until the end of `with`, as a debugger at its prompt does."""
    attach = f"import ctypes, sys\nassert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", attach], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None and tracer.stdout.readline()
        yield


def killed_after_hang(directory: Path) -> tuple[Observed, ...]:
    with training(settings(directory)) as (stage,):
        stage.trouble(2, "lock")
        stage.until_page()
        for pid in stage.node.pids:
            os.kill(pid, signal.SIGKILL)
        observed = stage.until(JobState.ENDED).observed()
        assert stage.daemon.board.snapshot.crashes == (), "its end is not a crash"
        return (observed,)


AWAITS = ("pool", "queue", "loop")

_DEMO_STATES = {
    "spin": "training → quiet → suspected → stalled",
    "checkpoint": LOOK,
    "evaluation": LOOK,
    "idle": "",
    "all-waiting": "training → quiet → suspected → waits_elsewhere",
}


def _demo(name: str, scenario: Scenario) -> ProcessScenario:
    """Return the row of a scenario of `tests.simulated`."""
    named = (scenario.planted_rank(8, 1),) if scenario.right_answer is Answer.NAMES_PLANTED else ()
    pages = scenario.right_answer in (Answer.NAMES_PLANTED, Answer.NAMES_NOBODY)
    expected = Expected(_DEMO_STATES.get(name, HANG), pages, named, 100.0)
    return ProcessScenario(demo(name), (expected,), f"demo: {name}")


DEMO_SCENARIOS = tuple(_demo(name, scenario) for name, scenario in DEMOS.items())

_ROWS = {
    # a rank of one job waits for a lock; the other job trains
    "two jobs, one hangs": ProcessScenario(two_jobs, (Expected(HANG, True, (1,), 100.0), Expected("training"))),
    # rank 3 waits for a lock before the first step
    "hang at start": _hang(hang_at_start, (3,), "suspected → hung"),
    # GPU 2 can no longer be read, and its rank gets stuck
    "GPU lost, and the job hangs on it": _hang(lost_gpu_hangs, (2,)),
    # rank 3 waits for a lock; the others spin in one C call without the GIL, their GPUs at 100 %
    "victims in a function of any name": _hang(given("behind-gpu 3", pages=True), (3,)),
    # rank 1 waits for its GPU, rank 2 asks every half second, the others wait in a barrier
    "a GPU hangs, and another rank asks for its result": _hang(
        gpu_hangs, (2,), "training → quiet → suspected → stalled"
    ),
    # rank 0 waits for its GPU in add_scalar; rank 3 asks a server that does not answer
    "a victim that logs": _hang(
        given("log-behind-gpu 3 {port}", pages=True), (3,), "training → quiet → suspected → stalled"
    ),
    # rank 0 waits 9 s for a server outside of the job, the others wait for rank 0
    "generation over HTTP": _healthy(given("wait-for-server {port}")),
    # a thread of rank 3 opens a FIFO without a writer, and rank 3 waits for it; the others wait for their GPUs
    **{
        f"a thread blocked in open, awaited by a {way}": _hang(given(f"open-in 3 {way} {{fifo}}", pages=True), (3,))
        for way in AWAITS
    },
    # a thread of rank 0 waits 9 s for a server outside of the job, the others wait for rank 0
    **{f"generation over HTTP, awaited by a {way}": _healthy(given(f"ask-in {way} {{port}}")) for way in AWAITS},
    # rank 0 waits 9 s for a child process under asyncio, the others wait for rank 0
    "a child awaited by an event loop": _healthy(given("await-child-in-loop 7")),
    # rank 0 waits 9 s for a child that is connected to another node, the others wait for rank 0
    "remote evaluation": _healthy(given("wait-for-child {port}")),
    # rank 0 sleeps for 2 s, again and again for 12 s, the others wait; rounds 2.5 s apart
    "asks every two seconds": _healthy(asks_again),
    # rank 0 sleeps once for 8 s, the others wait; the stalled hold is 6 s
    "sleeps until it wakes": _healthy(given("sleep-once 6")),
    # rank 0 sleeps for 1 s again and again, the others wait for it
    "polls for a file that never comes": _hang(polls_for_file, (0,), "training → quiet → suspected → stalled → hung"),
    # rank 3 opens a FIFO without a writer, the others wait for it; in each rank a thread writes 200 kB/s
    "a hang beside threads that write metrics": _hang(
        given("open-beside-metrics 3 {fifo}", pages=True, stalled_hold_seconds=600.0), (3,)
    ),
    # rank 0 waits 9 s for a thread that reads 500 kB/s, the others wait for rank 0
    "a thread reads for its rank": _healthy(given("await-reader 7")),
    # the driver can no longer read GPU 2; the job trains on
    "readings of one GPU lost": _healthy(lost_readings, "training"),
    # rank 0 evaluates for 8 s, the others wait in a barrier
    "evaluation on one rank": _healthy(given("evaluate-on-one 6")),
    # all ranks are stopped, as by scontrol suspend, and continued after more than the stalled hold
    "suspended for some seconds": _healthy(suspended, "training → quiet → suspected → suspended → recovered"),
    # the ranks close their connections and sleep; none ends
    "training over, all linger": _healthy(over, "training → quiet → suspected → over"),
    # ranks without a connection to each other all open a file that does not respond
    "independent workers read a dead file": _hang(given("read-dead-file {fifo}", pages=True)),
    # three ranks have ended; rank 2 opens a file that does not respond
    "the last worker reads a dead file": _hang(
        given("end-but-read {fifo} 2", pages=True), states="training → quiet( → training → quiet)? → suspected → hung"
    ),
    # two batches take 6 s each; the loaders read all the time
    "starved but moving loader": _healthy(given("starve 2"), "training → quiet → suspected → training(.*training)?"),
    # all ranks compile for 9 s before the first step
    "first-step compile": _healthy(first_compile, "suspected → (training|stalled → recovered)"),
    # all ranks exit
    "a job that ends": _healthy(job_ends, "training( → quiet)? → ended"),
    # the launcher replaces all ranks
    "elastic restart": _healthy(elastic_restart, "training( → quiet)?( → ended)? → training"),
    # spawned workers of a server hold GPUs and wait
    "inference server without requests": _healthy(inference_server, ""),
    # a parent accepts, two workers with RANK in their environment hold GPUs and read from a pipe of it
    "a server of one's own without requests": _healthy(own_server, "suspected → training"),
    # a parent accepts; two workers wait at one queue of it, one polls shared memory
    "a server with a queue, without requests": _healthy(queue_server, "suspected → training"),
    # a person has attached gdb to rank 1, the others wait for it
    "a rank in a debugger": _healthy(in_gdb, "training → quiet → suspected → suspended"),
    # rank 2 waits for a lock; after the page all ranks get SIGKILL
    "a hung job that is killed": _hang(killed_after_hang, (2,), f"{HANG} → ended"),
}
PROCESS_SCENARIOS: tuple[ProcessScenario, ...] = with_names(_ROWS)
