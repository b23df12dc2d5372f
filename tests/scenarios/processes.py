"""Scenarios with real processes, the real daemon and real py-spy; only the GPUs are simulated, and time is not.

The demo's own scenarios are among them. Times are those of the demo: 3 s hold, rounds 1 s apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch.config import Settings
from hangwatch.daemon import Daemon
from hangwatch.demo import play
from hangwatch.demo.node import SimulatedNode, wait_until
from hangwatch.demo.play import Watcher, watching
from hangwatch.demo.power import SimulatedGpus
from hangwatch.demo.scenarios import SCENARIOS as DEMOS
from hangwatch.demo.scenarios import Answer
from hangwatch.model import Fault, GpuSweep, JobState
from tests.scenarios.power import Expected

DEADLINE_SECONDS = 40.0
WORKER = "tests.scenarios.worker"
RANKS = 4


class Observed(NamedTuple):
    """What became of one job; `seconds` run from the trouble to the page."""

    states: tuple[str, ...]
    paged: bool
    named: tuple[int | None, ...] = ()
    seconds: float | None = None
    found: bool = True


@dataclass(frozen=True)
class ProcessScenario:
    """One row. The expected states are a pattern: how often a slow machine looks twice is not what is tested."""

    name: str
    what: str
    truth: str
    run: Callable[[Path], tuple[Observed, ...]]
    expected: tuple[Expected, ...]


class LosingGpus(SimulatedGpus):
    """Simulated GPUs of which some fall off the bus."""

    lost: frozenset[int] = frozenset()

    def latest(self) -> GpuSweep:
        """As the driver answers: a fault in the place of each lost GPU."""
        sweep = super().latest()
        return replace(
            sweep,
            gpus=tuple(gpu for gpu in sweep.gpus if gpu.index not in self.lost),
            faults=tuple(
                Fault(subject=f"gpu {index}", reason="GpuIsLost", detail="GPU is lost") for index in self.lost
            ),
        )


@dataclass
class Stage:
    """One simulated node under the daemon, and what to wait for on it."""

    node: SimulatedNode
    gpus: LosingGpus
    daemon: Daemon
    watcher: Watcher
    began: float = field(default_factory=time.monotonic)

    def trouble(self, whom: int | str, order: str) -> None:
        """Give an order; from now on seconds are counted."""
        self.began = time.monotonic()
        self.node.order(whom, order)

    def until(self, *states: JobState) -> Stage:
        """Wait for one of these states; what comes instead is seen in the outcome."""
        wait_until(lambda: self.watcher.is_in(*states), DEADLINE_SECONDS)
        return self

    def until_page(self) -> Stage:
        """Wait for a page."""
        wait_until(lambda: self.watcher.look() is not None and self.watcher.paged, DEADLINE_SECONDS)
        return self

    def until_resumed(self) -> Stage:
        """Wait until all ranks train again, and the daemon has seen it."""
        wait_until(lambda: self.watcher.look() is None or self.node.has_said("resumed"), DEADLINE_SECONDS)
        return self.until(JobState.TRAINING, JobState.RECOVERED)

    def observed(self) -> Observed:
        """The outcome."""
        entry = self.watcher.look()
        incident = entry.incident if entry else None
        named = tuple(one.rank for one in incident.verdict.named) if incident and self.watcher.paged else ()
        return Observed(
            states=tuple(state.value for state in self.watcher.states),
            paged=self.watcher.paged,
            named=named,
            seconds=time.monotonic() - self.began if self.watcher.paged else None,
            found=self.watcher.saw_job,
        )


@contextlib.contextmanager
def staged(directory: Path, node: SimulatedNode, startup_hold_seconds: float = 60.0) -> Iterator[Stage]:
    """A node with the daemon over it."""
    chosen: Settings = play.settings(directory)
    chosen = replace(chosen, detector=replace(chosen.detector, startup_hold_seconds=startup_hold_seconds))
    with node:
        gpus = LosingGpus(node)
        with watching(node, gpus, chosen) as daemon:
            yield Stage(node, gpus, daemon, Watcher(daemon, node.run_id, print))


@contextlib.contextmanager
def training(directory: Path) -> Iterator[Stage]:
    """A job that has trained for some seconds."""
    with staged(directory, SimulatedNode(RANKS, worker=WORKER)) as stage:
        stage.until(JobState.TRAINING).watcher.follow(play.TRAINING_SECONDS)
        stage.began = time.monotonic()
        yield stage


def demo(name: str) -> Callable[[Path], tuple[Observed, ...]]:
    """A scenario of `hangwatch demo`."""

    def run(directory: Path) -> tuple[Observed, ...]:
        outcome = play.play(name, ranks=8, seed=1, directory=directory)
        named = tuple(one.rank for one in outcome.verdict.named) if outcome.verdict and outcome.paged else ()
        seconds = outcome.seconds if outcome.paged else None
        states = tuple(state.value for state in outcome.states)
        return (Observed(states, outcome.paged, named, seconds, found=name != "idle"),)

    return run


def evaluation_on_one(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "evaluate-on-one 8")
        return (stage.until_resumed().observed(),)


def suspended(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "stop-all")
        stage.until(JobState.SUSPENDED).watcher.follow(8.0)
        for pid in stage.node.pids:
            os.kill(pid, signal.SIGCONT)
        return (stage.until_resumed().observed(),)


def over(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "linger 60")
        stage.until(JobState.OVER).watcher.follow(8.0)
        return (stage.observed(),)


def starved_loader(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "starve 2")
        return (stage.until_resumed().observed(),)


def first_compile(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(RANKS, worker=WORKER, first_order="all compile 9")
    with staged(directory, node, startup_hold_seconds=3.0) as stage:
        stage.until(JobState.SUSPECTED)
        return (stage.until_resumed().observed(),)


def hang_at_start(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(RANKS, worker=WORKER, first_order="all join-late 3")
    with staged(directory, node, startup_hold_seconds=3.0) as stage:
        return (stage.until_page().observed(),)


def job_ends(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "exited")
        return (stage.until(JobState.ENDED).observed(),)


def elastic_restart(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        before = frozenset(stage.node.pids)
        stage.node.restart()

        def replaced() -> bool:
            entry = stage.watcher.look()
            return entry is not None and before.isdisjoint(rank.id.pid for rank in entry.job.ranks)

        wait_until(replaced, DEADLINE_SECONDS)
        return (stage.until(JobState.TRAINING).observed(),)


def lost_readings(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.gpus.lost = frozenset({2})
        stage.watcher.follow(6.0)
        return (stage.observed(),)


def lost_gpu_hangs(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.gpus.lost = frozenset({2})
        stage.trouble(2, "lock")
        return (stage.until_page().observed(),)


def two_jobs(directory: Path) -> tuple[Observed, ...]:
    with SimulatedNode(RANKS) as other, training_beside(directory, other) as (stage, beside):
        stage.trouble(1, "lock")
        stage.until_page()
        beside.look()
        healthy = Observed(tuple(state.value for state in beside.states), beside.paged)
        return (stage.observed(), healthy)


@contextlib.contextmanager
def training_beside(directory: Path, other: SimulatedNode) -> Iterator[tuple[Stage, Watcher]]:
    """Two jobs that train on one node."""
    node = SimulatedNode(RANKS, worker=WORKER)
    with node:
        for entry in other.proc_root.iterdir():
            if entry.name.isdigit():
                (node.proc_root / entry.name).symlink_to(f"/proc/{entry.name}")
        gpus = LosingGpus(node, other)
        with watching(node, gpus, play.settings(directory)) as daemon:
            stage = Stage(node, gpus, daemon, Watcher(daemon, node.run_id, print))
            beside = Watcher(daemon, other.run_id, print)
            wait_until(lambda: beside.is_in(JobState.TRAINING), DEADLINE_SECONDS)
            stage.until(JobState.TRAINING).watcher.follow(play.TRAINING_SECONDS)
            yield stage, beside


def victims_in_any_function(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "behind-gpu 3")
        return (stage.until_page().observed(),)


def victim_that_logs(directory: Path) -> tuple[Observed, ...]:
    with answering(3600.0) as port, training(directory) as stage:
        stage.trouble("all", f"log-behind-gpu 3 {port}")
        return (stage.until_page().observed(),)


def waits_for_server(directory: Path) -> tuple[Observed, ...]:
    with answering(9.0) as port, training(directory) as stage:
        stage.trouble("all", f"wait-for-server {port}")
        return (stage.until_resumed().observed(),)


def waits_for_child(directory: Path) -> tuple[Observed, ...]:
    with answering(9.0) as port, training(directory) as stage:
        stage.trouble("all", f"wait-for-child {port}")
        return (stage.until_resumed().observed(),)


def asks_again(directory: Path) -> tuple[Observed, ...]:
    with training(directory) as stage:
        stage.trouble("all", "ask-again 9")
        return (stage.until_resumed().observed(),)


@contextlib.contextmanager
def answering(after_seconds: float) -> Iterator[int]:
    """A server on loopback that answers one request after so long; its port. The server is no process of the job."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_SECONDS)

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as peer:
                over.wait(after_seconds)
                peer.sendall(b".")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join(DEADLINE_SECONDS)


def inference_server(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(2, program="tests.scenarios.vllm_server")
    with staged(directory, node, startup_hold_seconds=2.0) as stage:
        stage.watcher.follow(6.0)
        return (stage.observed(),)


def own_server(directory: Path) -> tuple[Observed, ...]:
    node = SimulatedNode(2, program="tests.scenarios.own_server")
    with staged(directory, node, startup_hold_seconds=2.0) as stage:
        stage.until(JobState.TRAINING, JobState.HUNG).watcher.follow(8.0)
        return (stage.observed(),)


_HANG = "training → quiet → suspected → hung"
_LOOK = "training → quiet → suspected → (training|stalled → recovered)"

DEMO_SCENARIOS = tuple(
    ProcessScenario(
        f"demo: {name}",
        f"one rank {scenario.what}" if scenario.whom == "one" else scenario.what.removesuffix(" (healthy)"),
        "hang" if scenario.right in (Answer.NAMES_PLANTED, Answer.NAMES_NOBODY) else "healthy",
        demo(name),
        (
            Expected(
                states,
                page=scenario.right in (Answer.NAMES_PLANTED, Answer.NAMES_NOBODY),
                named=(scenario.planted_rank(8, 1),) if scenario.right is Answer.NAMES_PLANTED else (),
                within_seconds=20.0,
            ),
        ),
    )
    for name, scenario in DEMOS.items()
    for states in (
        {
            "spin": "training → quiet → suspected → stalled",
            "checkpoint": _LOOK,
            "evaluation": _LOOK,
            "idle": "",
        }.get(name, _HANG),
    )
)

PROCESS_SCENARIOS = (
    ProcessScenario(
        "two jobs, one hangs",
        "a rank of one job waits for a lock; the other job trains",
        "hang",
        two_jobs,
        (Expected(_HANG, True, (1,), 20.0), Expected("training")),
    ),
    ProcessScenario(
        "hang at start",
        "rank 3 waits for a lock before the first step",
        "hang",
        hang_at_start,
        (Expected("suspected → hung", True, (3,), 20.0),),
    ),
    ProcessScenario(
        "GPU lost, and the job hangs on it",
        "GPU 2 can no longer be read, and its rank gets stuck",
        "hang",
        lost_gpu_hangs,
        (Expected(_HANG, True, (2,), 20.0),),
    ),
    ProcessScenario(
        "victims in a function of any name",
        "rank 3 waits for a lock; the others spin in one C call without the GIL, their GPUs at 100 %",
        "hang",
        victims_in_any_function,
        (Expected(_HANG, True, (3,), 20.0),),
    ),
    ProcessScenario(
        "a victim that logs",
        "rank 0 stands behind its GPU in add_scalar; rank 3 asks a server that does not answer",
        "hang",
        victim_that_logs,
        (Expected("training → quiet → suspected → stalled", True, (3,), 20.0),),
    ),
    ProcessScenario(
        "generation over HTTP",
        "rank 0 waits 9 s for a server outside of the job, the others wait for rank 0",
        "healthy",
        waits_for_server,
        (Expected(_LOOK),),
    ),
    ProcessScenario(
        "remote evaluation",
        "rank 0 waits 9 s for a child that is connected to another node, the others wait for rank 0",
        "healthy",
        waits_for_child,
        (Expected(_LOOK),),
    ),
    ProcessScenario(
        "asks again and again",
        "rank 0 sleeps for 0.4 s, again and again for 9 s, the others wait",
        "healthy",
        asks_again,
        (Expected(_LOOK),),
    ),
    ProcessScenario(
        "readings of one GPU lost",
        "the driver can no longer read GPU 2; the job trains on",
        "healthy",
        lost_readings,
        (Expected("training"),),
    ),
    ProcessScenario(
        "evaluation on one rank",
        "rank 0 evaluates for 8 s, the others wait in a barrier",
        "healthy",
        evaluation_on_one,
        (Expected(_LOOK),),
    ),
    ProcessScenario(
        "suspended for some seconds",
        "all ranks are stopped, as by scontrol suspend, and continued after more than the stalled hold",
        "healthy",
        suspended,
        (Expected("training → quiet → suspected → suspended → recovered"),),
    ),
    ProcessScenario(
        "training over, all linger",
        "no rank waits for another one, and none ends",
        "healthy",
        over,
        (Expected("training → quiet → suspected → over"),),
    ),
    ProcessScenario(
        "starved but moving loader",
        "two batches take 6 s each; the loaders read all the time",
        "healthy",
        starved_loader,
        (Expected("training → quiet → suspected → training(.*training)?"),),
    ),
    ProcessScenario(
        "first-step compile",
        "all ranks compile for 9 s before the first step",
        "healthy",
        first_compile,
        (Expected("suspected → (training|stalled → recovered)"),),
    ),
    ProcessScenario(
        "a job that ends", "all ranks exit", "healthy", job_ends, (Expected("training( → quiet)? → ended"),)
    ),
    ProcessScenario(
        "elastic restart",
        "the launcher replaces all ranks",
        "healthy",
        elastic_restart,
        (Expected("training( → quiet)?( → ended)? → training"),),
    ),
    ProcessScenario(
        "inference server without requests",
        "spawned workers of a server hold GPUs and wait",
        "healthy",
        inference_server,
        (Expected(""),),
    ),
    ProcessScenario(
        "a server of one's own without requests",
        "a parent accepts, two workers with RANK in their environment hold GPUs and read from a pipe of it",
        "healthy",
        own_server,
        (Expected("suspected → training"),),
    ),
)


def problems(scenario: ProcessScenario, observed: tuple[Observed, ...]) -> list[str]:
    """What is not as expected; empty when all is."""
    found = []
    for want, got in zip(scenario.expected, observed, strict=True):
        line = " → ".join(got.states)
        if not re.fullmatch(want.states, line):
            found.append(f"states {line!r}, expected {want.states!r}")
        if got.paged != want.page:
            found.append("paged" if got.paged else "did not page")
        if want.page and got.named != want.named:
            found.append(f"named {got.named}, expected {want.named}")
        if got.seconds is not None and got.seconds > want.within_seconds:
            found.append(f"took {got.seconds:.1f} s, expected at most {want.within_seconds:g} s")
        if not want.states and got.found:
            found.append("took it for a job")
    return found
