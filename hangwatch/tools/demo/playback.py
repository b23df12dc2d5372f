"""Playback of a scenario: the real daemon monitors a simulated node, and its verdict is compared with the right one."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from hangwatch import config
from hangwatch.config import ActivityRule, Settings
from hangwatch.daemon import Daemon
from hangwatch.formats.incident_file import StoreError
from hangwatch.model import PAGED, JobState, TimelineEntry, Value, Verdict
from hangwatch.probes.base.gpu_source import GpuSource
from hangwatch.state.board import JobEntry
from hangwatch.tools.demo.scenarios import SCENARIOS, Answer, Scenario
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from hangwatch.tools.demo.simulated_node import START_DEADLINE_SECONDS, NodeError, SimulatedNode, wait_until

ANSWER_DEADLINE_SECONDS = 40.0
SAVE_DEADLINE_SECONDS = 10.0
TRAINING_SECONDS = 3.0  # enough for the busy level of each GPU
IDLE_SECONDS = 6.0  # twice the hold time: the detector would have suspected a job by then

DEFAULT_DIRECTORY = Path("hangwatch-demo")
ACTIVITIES = (
    ("collective_wait", "all_reduce", "collectives.py"),
    ("collective_wait", "barrier", "collectives.py"),
    ("data_loading", "read_shard", "loader.py"),
)

NewDaemon: TypeAlias = Callable[..., Daemon]


class Outcome(Value, frozen=True):
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


def settings(directory: Path) -> Settings:
    """Return the settings of the demo's daemon: shorter times, and rules for the demo's own collectives and loader.

    A site adds rules for its own code in the same way. `next_batch` and `evaluate` are in hangwatch's table already.
    """
    return Settings(
        gpu=config.Gpu(sample_seconds=0.25),
        jobs=config.Jobs(discover_seconds=1.0),
        detector=config.Detector(
            hold_seconds=3.0,
            confirming_captures=1,
            startup_hold_seconds=60.0,
            stalled_hold_seconds=6.0,
            busy_window_seconds=60.0,
            recover_seconds=1.0,
            recapture_seconds=5.0,
            cooldown_seconds=1.0,
        ),
        capture=config.Capture(pause_seconds=1.0),
        store=config.Store(directory=str(directory), max_incidents=50),
        http=config.Http(listen="127.0.0.1", port=0),
        activities=config.Activities(
            rules=tuple(
                ActivityRule(activity=activity, function=function, file=f"*hangwatch/tools/demo/{file}")
                for activity, function, file in ACTIVITIES
            )
        ),
    )


def descriptions() -> dict[str, str]:
    """Return a description of each scenario, by name."""
    return {
        name: f"one rank {scenario.what}" if scenario.target == "one" else scenario.what
        for name, scenario in SCENARIOS.items()
    }


def play(
    name: str,
    *,
    ranks: int = 8,
    seed: int = 0,
    say: Callable[[str], None] = print,
    directory: Path | None = None,
    new_daemon: NewDaemon = Daemon,
) -> Outcome:
    """Play the scenario `name` and return its outcome. `say` is called with a line for every event.

    With the same `seed`, the fault is in the same rank. `directory` is for the incident and the daemon's log; the
    default is `hangwatch-demo` in the current directory. Every process is ended, even after an error. Raises
    NodeError if the simulated node fails, and StoreError if the directory cannot be used.
    """
    outcome = _play(
        SCENARIOS[name], ranks, seed, (directory or DEFAULT_DIRECTORY).absolute(), say, new_daemon=new_daemon
    )
    if outcome.verdict is not None:
        say(f"verdict: {outcome.verdict.message} (confidence: {outcome.verdict.confidence.value})")
    say(f"{'right' if outcome.right else 'WRONG'}: {outcome.sentence}")
    if outcome.report is not None:
        say(f"report: {outcome.report / 'report.html'}")
    return outcome


def _play(
    scenario: Scenario, ranks: int, seed: int, directory: Path, say: Callable[[str], None], *, new_daemon: NewDaemon
) -> Outcome:
    planted = scenario.planted_rank(ranks, seed)
    ranks = 1 if scenario.right_answer is Answer.NO_JOB else ranks
    with (
        SimulatedNode(ranks, scenario.nodes, scenario.program) as node,
        run_daemon(node, SimulatedGpus(node, seed=seed), settings(directory), new_daemon) as daemon,
    ):
        is_job = scenario.right_answer is not Answer.NO_JOB
        say(f"started {f'job {node.run_id} of {ranks} ranks' if is_job else 'a notebook'}")
        watcher = Watcher(daemon, node.run_id, say)
        _train(scenario, watcher)
        target = scenario.target if planted is None else planted
        say(f"now: {scenario.what}" if planted is None else f"now: rank {planted} {scenario.what}")
        began = time.monotonic()
        node.order(target, scenario.order)
        _await_answer(scenario, node, watcher)
        return _judge(scenario, planted, time.monotonic() - began, watcher, daemon)


class Watcher:
    """Observer of one job on the daemon's board. It calls `say` for each change of the job's state."""

    def __init__(self, daemon: Daemon, job_id: str, say: Callable[[str], None]) -> None:
        self._daemon = daemon
        self._job_id = job_id
        self._say = say
        self._began = time.monotonic()
        self._seen: tuple[TimelineEntry, ...] = ()
        self.states: list[JobState] = []
        self.paged = False
        self.saw_job = False

    def look(self) -> JobEntry | None:
        """Report changes since the last call. Return the job's entry; None until the daemon has found the job."""
        jobs = self._daemon.board.snapshot.jobs
        self.saw_job |= bool(jobs)
        entry = next((entry for entry in jobs.values() if entry.job.job_id == self._job_id), None)
        if entry is None:
            return None
        if entry.timeline[: len(self._seen)] != self._seen:  # a restarted job begins a new timeline
            self._seen = ()
        for change in entry.timeline[len(self._seen) :]:
            self.states += [] if change.message == PAGED else [change.state]  # a restart repeats a state
            self._say(f"{time.monotonic() - self._began:5.1f} s  {change.state.value}: {change.message}")
        self._seen = entry.timeline
        self.paged = self.paged or entry.page
        return entry

    def follow(self, seconds: float) -> None:
        """Report changes for `seconds`."""
        wait_until(lambda: self.look() is None and False, seconds)

    def is_in(self, *states: JobState) -> bool:
        """True if the job is in one of these states now."""
        entry = self.look()
        return entry is not None and entry.watch.state in states


def _train(scenario: Scenario, watcher: Watcher) -> None:
    if scenario.right_answer is not Answer.NO_JOB and not wait_until(
        lambda: watcher.is_in(JobState.TRAINING), START_DEADLINE_SECONDS
    ):
        raise NodeError(f"the daemon did not see the job training within {START_DEADLINE_SECONDS:g} s")
    watcher.follow(TRAINING_SECONDS)


def _await_answer(scenario: Scenario, node: SimulatedNode, watcher: Watcher) -> None:
    """Wait until the daemon pages for the hang. In a healthy scenario, wait until the job is training again."""
    if scenario.right_answer is Answer.NO_JOB:
        watcher.follow(IDLE_SECONDS)
        return
    if scenario.right_answer is not Answer.NO_PAGE:
        wait_until(lambda: watcher.look() is not None and watcher.paged, ANSWER_DEADLINE_SECONDS)
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
        report=_report(daemon, incident.job.job_id) if incident else None,
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


def _report(daemon: Daemon, job_id: str) -> Path | None:
    """Return the folder of the job's incident; None if it is not written before the deadline."""

    def folder() -> Path | None:
        try:
            return daemon.store.find(job_id)
        except StoreError:
            return None

    return folder() if wait_until(lambda: folder() is not None, SAVE_DEADLINE_SECONDS) else None


@contextlib.contextmanager
def run_daemon(
    node: SimulatedNode, gpus: GpuSource, daemon_settings: Settings, new_daemon: NewDaemon = Daemon
) -> Iterator[Daemon]:
    """Run the real daemon for a simulated node within a `with` block. Its log is in its state directory."""
    state = Path(daemon_settings.store.directory)
    state.mkdir(parents=True, exist_ok=True)
    with _log_to(state / "daemon.log"):
        daemon = new_daemon(daemon_settings, gpus, proc_root=node.proc_root)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Write the log of the daemon and its libraries to a file within a `with` block, and not to the terminal."""
    log, everybody = logging.getLogger("hangwatch"), logging.getLogger()
    before = (log.level, log.propagate)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(file)
    everybody.addHandler(file)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.level, log.propagate = before
        log.removeHandler(file)
        everybody.removeHandler(file)
        file.close()
