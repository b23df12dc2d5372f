"""Real daemons on simulated nodes, each with a scenario. The times are those of the demo, except the holds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest, GpuSources, NodePaths
from hangwatch.config import Jobs, Settings
from hangwatch.daemon import Daemon
from hangwatch.model import Fault, GpuSample, GpuSweep, Job, JobState, RecommendedAction, Verdict
from hangwatch.stacks import activity
from hangwatch.state.board import JobEntry
from hangwatch.tools.demo import playback
from hangwatch.tools.demo.playback import run_daemon
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from hangwatch.tools.demo.simulated_node import wait_until
from hangwatch.verdict import second_round
from hangwatch.verdict.diagnosis import Diagnosis
from tests.scenarios.external_servers import UnavailableError
from tests.scenarios.power import Expected, truth_of
from tests.simulated.node import SimulatedNode
from tests.simulated.scenarios import Watcher

DEADLINE_SECONDS = 120.0
TRAINING_SECONDS = 1.5  # enough for the busy level of each GPU
WORKER = "tests.scenarios.worker"
RANKS = 4
_CGROUPS = Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")


class Observed(NamedTuple):
    """The result of one job. `seconds` is the time from the fault to the page; `pages` is the number of pages.

    `action` is the action that the page recommends. A capture may recommend another one. `looks` are all captures of the job by the daemon. `unavailable` is the reason why this machine cannot run the
    job.
    """

    states: tuple[str, ...] = ()
    pages: int = 0
    named: tuple[int | None, ...] = ()
    action: RecommendedAction | None = None
    seconds: float | None = None
    is_known: bool = True
    looks: tuple[Diagnosis, ...] = ()
    unavailable: str = ""


def problems(expected: Expected, got: Observed) -> list[str]:
    """Return the differences from the expected result. The expected states are a regular expression."""
    found = []
    line = " → ".join(got.states)
    if not re.fullmatch(expected.states, line):
        found.append(f"states {line!r}, expected {expected.states!r}")
    if got.pages != expected.pages_before + expected.page:
        found.append(f"paged {got.pages} times")
    if expected.page and got.named != expected.named:
        said = [look.verdict.message for look in got.looks]
        found.append(f"named {got.named}, expected {expected.named}: {said}")
    if expected.page and (got.action is None or got.action.kind != expected.action):
        found.append(f"recommended {got.action}, expected {expected.action}")
    if expected.page and got.seconds is not None and got.seconds > expected.within_seconds:
        found.append(f"took {got.seconds:.1f} s, expected at most {expected.within_seconds:g} s")
    if not expected.states and got.is_known:
        found.append("took it for a job")
    return found


COMPARED: list[tuple[Verdict, Verdict]] = []
"""Pairs of verdicts on one job: by the daemon, and by `hangwatch dump`. See `LookingDaemon.dumps_too`."""


class LookingDaemon(Daemon):
    """A daemon that keeps the diagnosis of each capture for the tests."""

    dumps_too: ClassVar[bool] = False
    """True to dump the job like `hangwatch dump` after each capture that is not light."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.looks: list[Diagnosis] = []
        self._paths = NodePaths(proc_root=options["proc_root"])
        look_at = self.looking.capture_job

        def kept(job: Job, *given: Any, **options: Any) -> Diagnosis | None:
            look = look_at(job, *given, **options)
            if look is not None:
                self.looks.append(look)
                if self.dumps_too and options.get("may_pause", True):
                    COMPARED.append((look.verdict, self._dump(job)))
            return look

        self.looking.capture_job = kept

    def _dump(self, job: Job) -> Verdict:
        table = activity.load()
        request = CaptureRequest(
            node=self.node,
            settings=self.settings.capture,
            rounds=1,
            needs_second_round=partial(second_round.find_reason, table=table),
            all_processes=False,
            gpus=GpuSources(read_sweep=lambda: self.board.snapshot.sweep),
            paths=self._paths,
        )
        return diagnose_job(job, request, table).verdict

    def looks_at(self, job_id: str) -> tuple[Diagnosis, ...]:
        """Return the diagnoses of one job."""
        return tuple(look for look in self.looks if look.capture.job_id == job_id)


class CountingWatcher(Watcher):
    """A watcher of a job that also counts the pages."""

    pages = 0
    _pages_now = False

    def look(self) -> JobEntry | None:
        """Return the job's entry as the watcher does, and count a new page."""
        entry = super().look()
        pages = entry is not None and entry.page
        self.pages += pages and not self._pages_now
        self._pages_now = pages
        return entry


ShowGpu = Callable[[GpuSample], GpuSample]


def as_simulated(gpu: GpuSample) -> GpuSample:
    return gpu


def of_light_job(gpu: GpuSample) -> GpuSample:
    """Return the GPU reading of a light job, with about 250 W of 700 W at work and 140 W in the hang."""
    watts = gpu.power_watts
    if watts is None or watts < 80:
        return gpu
    return replace(gpu, power_watts=250 + (watts - 600) / 10 if watts > 300 else 140 + (watts - 100) / 20)


def at_zero_in_a_hang(gpu: GpuSample) -> GpuSample:
    """Return the GPU reading of a driver that shows 0 % utilization during a hang."""
    return gpu if gpu.power_watts is None or gpu.power_watts > 300 else replace(gpu, utilization_ratio=0.0)


class StagedGpus(SimulatedGpus):
    """Simulated GPUs. Some are lost. The scenario of a job gives the readings of the others."""

    lost: frozenset[int] = frozenset()

    def __init__(self, *nodes: SimulatedNode, shown: Sequence[ShowGpu] = ()) -> None:
        super().__init__(*nodes)
        every = shown or [as_simulated for _ in nodes]
        self._shown = [show for node, show in zip(nodes, every, strict=True) for _ in range(node.ranks)]

    def latest(self) -> GpuSweep:
        """Return the readings as the driver would, with a fault for each lost GPU."""
        sweep = super().latest()
        return replace(
            sweep,
            gpus=tuple(self._shown[gpu.index](gpu) for gpu in sweep.gpus if gpu.index not in self.lost),
            faults=tuple(
                Fault(subject=f"gpu {index}", reason="GpuIsLost", detail="GPU is lost") for index in self.lost
            ),
        )


@dataclass
class Stage:
    """One job on a simulated node with a daemon, and methods that wait for its states."""

    node: SimulatedNode
    gpus: StagedGpus
    daemon: LookingDaemon
    watcher: CountingWatcher
    began: float = field(default_factory=time.monotonic)

    def trouble(self, rank: int | str, order: str) -> None:
        """Send `order` to `rank`, which causes the fault. The time to the page begins."""
        self.began = time.monotonic()
        self.node.order(rank, order)

    def until(self, *states: JobState) -> Stage:
        """Wait until the job is in one of these states. Earlier states of the job are in the result, too."""
        wait_until(lambda: self.watcher.is_in(*states), DEADLINE_SECONDS)
        return self

    def until_page(self) -> Stage:
        wait_until(lambda: self.watcher.look() is not None and self.watcher.paged, DEADLINE_SECONDS)
        return self

    def until_resumed(self) -> Stage:
        """Wait until all ranks train again and the daemon has seen this."""
        wait_until(lambda: self.watcher.look() is None or self.node.has_said("resumed"), DEADLINE_SECONDS)
        return self.until(JobState.TRAINING, JobState.RECOVERED)

    def observed(self) -> Observed:
        """Return the result of the job so far."""
        entry = self.watcher.look()
        incident = entry.incident if entry else None
        paged = incident.verdict if incident and self.watcher.paged else None
        return Observed(
            states=tuple(state.value for state in self.watcher.states),
            pages=self.watcher.pages,
            named=tuple(one.rank for one in paged.named) if paged else (),
            action=paged.action if paged else None,
            seconds=time.monotonic() - self.began if self.watcher.paged else None,
            is_known=self.watcher.saw_job,
            looks=self.daemon.looks_at(self.node.run_id),
        )


def settings(
    directory: Path, startup_hold_seconds: float = 60.0, stalled_hold_seconds: float = 4.5, hold_seconds: float = 1.5
) -> Settings:
    """Return the settings of the demo, with this store directory and these holds."""
    chosen = playback.settings(directory)
    detector = replace(
        chosen.detector,
        hold_seconds=hold_seconds,
        startup_hold_seconds=startup_hold_seconds,
        stalled_hold_seconds=stalled_hold_seconds,
    )
    return replace(chosen, detector=detector, jobs=Jobs(discover_seconds=0.5))


@contextlib.contextmanager
def staged(chosen: Settings, *nodes: SimulatedNode, shown: Sequence[ShowGpu] = ()) -> Iterator[tuple[Stage, ...]]:
    """Run several simulated nodes under one daemon, which sees their processes as one node. Yield a stage for each."""
    first, *others = nodes
    for other in others:
        shutil.rmtree(other.proc_root)
        other.proc_root.symlink_to(first.proc_root)
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node)
        gpus = StagedGpus(*nodes, shown=shown)
        daemon = stack.enter_context(run_daemon(first, gpus, chosen, LookingDaemon))
        assert isinstance(daemon, LookingDaemon)
        yield tuple(Stage(node, gpus, daemon, CountingWatcher(daemon, node.run_id, print)) for node in nodes)


@contextlib.contextmanager
def training(chosen: Settings, *others: SimulatedNode) -> Iterator[tuple[Stage, ...]]:
    """Start a job, and the other jobs next to it. Yield their stages after some seconds of training."""
    with staged(chosen, SimulatedNode(RANKS, worker=WORKER), *others) as stages:
        for stage in stages:
            stage.until(JobState.TRAINING)
        stages[0].watcher.follow(TRAINING_SECONDS)
        yield stages


@dataclass(frozen=True)
class Neighbour:
    """One job of a crowd.

    `play` runs in a thread when all jobs have begun. `shown` sets the readings of the job's GPUs. With `is_apart`
    the job has another owner, because it is in its own control group.
    """

    play: Callable[[Stage], Observed]
    expected: Expected
    name: str = ""
    ranks: int = 2
    nodes: int = 1
    program: str = "tests.simulated.launcher"
    shown: ShowGpu = as_simulated
    is_apart: bool = False
    begins: JobState = JobState.TRAINING

    @property
    def truth(self) -> str:
        return truth_of((self.expected,))

    def node(self) -> SimulatedNode:
        """Return a simulated node with the processes of this job. It is not started yet."""
        return SimulatedNode(self.ranks, self.nodes, self.program, "tests.scenarios.calm_worker")

    def observed(self, stage: Stage) -> Observed:
        """Run the job on this stage. Return its result."""
        try:
            return self.play(stage)
        except UnavailableError as reason:
            return Observed(unavailable=str(reason))


@dataclass(frozen=True)
class Crowd:
    """Jobs that run at the same time on one node, under one daemon."""

    name: str
    neighbours: tuple[Neighbour, ...]
    startup_hold_seconds: float = 60.0
    stalled_hold_seconds: float = 6.0

    def run(self, directory: Path) -> tuple[Observed, ...]:
        """Run all jobs. Return the result of each."""
        chosen = settings(directory, self.startup_hold_seconds, self.stalled_hold_seconds, hold_seconds=3.0)
        nodes = [one.node() for one in self.neighbours]
        shown = [one.shown for one in self.neighbours]
        with contextlib.ExitStack() as stack:
            stages = stack.enter_context(staged(chosen, *nodes, shown=shown))
            for one, node in zip(self.neighbours, nodes, strict=True):
                if one.is_apart:
                    stack.enter_context(apart(node))
            for one, stage in zip(self.neighbours, stages, strict=True):
                stage.until(one.begins)
            stages[0].watcher.follow(playback.TRAINING_SECONDS)
            with ThreadPoolExecutor(len(stages)) as threads:
                return tuple(threads.map(Neighbour.observed, self.neighbours, stages))


@contextlib.contextmanager
def apart(node: SimulatedNode) -> Iterator[None]:
    """Put all processes of a node into a new control group: for the daemon, another owner."""
    for root in _CGROUPS:
        try:
            group = Path(tempfile.mkdtemp(prefix="hangwatch-test-", dir=root))
        except OSError:
            continue
        break
    else:
        raise UnavailableError("needs a writable control group")
    ours = [one.name for one in node.proc_root.iterdir() if one.name.isdigit() and _is_of(one, node)]
    try:
        for pid in ours:
            (group / "cgroup.procs").write_text(pid)
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (root / "cgroup.procs").write_text(pid)
        group.rmdir()


def _is_of(process: Path, node: SimulatedNode) -> bool:
    try:
        said = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    except OSError:
        return False
    return os.fsencode(node.run_id) in said
