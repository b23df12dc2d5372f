"""Playback of a hang: the real daemon monitors a simulated node and must name the rank that gets stuck."""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hangwatch import config
from hangwatch.config import ActivityRule, Settings
from hangwatch.daemon import Daemon
from hangwatch.formats.incident_file import StoreError
from hangwatch.model import JobState, TimelineEntry
from hangwatch.probes.base.gpu_source import GpuSource
from hangwatch.state.board import JobEntry
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus
from hangwatch.tools.demo.simulated_node import START_DEADLINE_SECONDS, NodeError, SimulatedNode, wait_until

ANSWER_DEADLINE_SECONDS = 40.0
SAVE_DEADLINE_SECONDS = 10.0
TRAINING_SECONDS = 3.0  # enough for the busy level of each GPU

DEFAULT_DIRECTORY = Path("hangwatch-demo")
NewDaemon: TypeAlias = Callable[..., Daemon]


class Outcome(NamedTuple):
    """The result. `report` is the incident's folder; None without an incident."""

    right: bool
    report: Path | None


def settings(directory: Path) -> Settings:
    """Return the settings of the demo's daemon: shorter times, and a rule for the demo's own loader.

    A site adds rules for its own code in the same way. `next_batch` and `all_reduce` are in hangwatch's table already.
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
            rules=(
                ActivityRule(activity="data_loading", function="read_shard", file="*hangwatch/tools/demo/loader.py"),
            )
        ),
    )


def play(
    *, ranks: int = 8, seed: int = 0, say: Callable[[str], None] = print, directory: Path | None = None
) -> Outcome:
    """Block a rank of a simulated job and return the outcome. `say` is called with a line for every event.

    With the same `seed`, the fault is in the same rank. `directory` is for the incident and the daemon's log; the
    default is `hangwatch-demo` in the current directory. Every process is ended, even after an error. Raises
    NodeError if the simulated node fails, and StoreError if the directory cannot be used.
    """
    stuck = random.Random(seed).randrange(ranks)  # noqa: S311 - a die, no key
    directory = (directory or DEFAULT_DIRECTORY).absolute()
    with (
        SimulatedNode(ranks) as node,
        run_daemon(node, SimulatedGpus(node, seed=seed), settings(directory)) as daemon,
    ):
        say(f"started job {node.run_id} of {ranks} ranks")
        watcher = Watcher(daemon, node.run_id, say)
        watcher.await_training()
        say(f"now: rank {stuck} waits for a loader worker that reads from storage that does not respond")
        node.order(stuck, "loader")
        watcher.await_page()
        entry = watcher.look()
        incident = entry.incident if entry else None
        verdict = incident.verdict if incident else None
        report = find_report(daemon, node.run_id) if incident else None
    named = [rank.rank for rank in verdict.named] if verdict else []
    right = watcher.paged and named == [stuck]
    if verdict is not None:
        say(f"verdict: {verdict.message} (confidence: {verdict.confidence.value})")
    names = f"rank {', '.join(map(str, named))}" if named else "no rank"
    answer = f"paged and named {names}" if watcher.paged else "did not page"
    say(f"{'right' if right else 'WRONG'}: hangwatch {answer}; the demo blocked rank {stuck}")
    if report is not None:
        say(f"report: {report / 'report.html'}")
    return Outcome(right, report)


class Watcher:
    """Observer of one job on the daemon's board. It calls `say` for each change of the job's state."""

    def __init__(self, daemon: Daemon, job_id: str, say: Callable[[str], None]) -> None:
        self._daemon = daemon
        self._job_id = job_id
        self._say = say
        self._began = time.monotonic()
        self._seen: tuple[TimelineEntry, ...] = ()
        self.paged = False

    def look(self) -> JobEntry | None:
        """Report changes since the last call. Return the job's entry; None until the daemon has found the job."""
        jobs = self._daemon.board.snapshot.jobs
        entry = next((entry for entry in jobs.values() if entry.job.job_id == self._job_id), None)
        if entry is None:
            return None
        if entry.timeline[: len(self._seen)] != self._seen:  # a restarted job begins a new timeline
            self._seen = ()
        for change in entry.timeline[len(self._seen) :]:
            self.tell(change)
        self._seen = entry.timeline
        self.paged = self.paged or entry.page
        return entry

    def tell(self, change: TimelineEntry) -> None:
        """Call `say` for a change."""
        self._say(f"{time.monotonic() - self._began:5.1f} s  {change.state.value}: {change.message}")

    def follow(self, seconds: float) -> None:
        """Report changes for `seconds`."""
        wait_until(lambda: self.look() is None and False, seconds)

    def is_in(self, *states: JobState) -> bool:
        """True if the job is in one of these states now."""
        entry = self.look()
        return entry is not None and entry.watch.state in states

    def await_training(self) -> None:
        """Wait until the daemon knows the busy level of each GPU. Raises NodeError at the deadline."""
        if not wait_until(lambda: self.is_in(JobState.TRAINING), START_DEADLINE_SECONDS):
            raise NodeError(f"the daemon did not see the job training within {START_DEADLINE_SECONDS:g} s")
        self.follow(TRAINING_SECONDS)

    def await_page(self) -> None:
        """Wait until the daemon pages, or the deadline."""
        wait_until(lambda: self.look() is not None and self.paged, ANSWER_DEADLINE_SECONDS)


def find_report(daemon: Daemon, job_id: str) -> Path | None:
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
