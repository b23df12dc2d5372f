"""Simulation of a node in virtual time: a script drives the real detector, grouping and verdict.

The script says what each rank does, second by second. Power, stacks and counters follow from it. This module makes
no decisions. `hangwatch.state.steps` gets the same data as from the daemon: a GPU sample each second, a scan every
ten seconds, a capture of three rounds five seconds apart.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from hangwatch.config import Detector, Settings
from hangwatch.detector import TakeCapture, Transition
from hangwatch.detector.power_level import gpu_levels
from hangwatch.model import (
    AsksRank,
    Awaited,
    Capture,
    Fault,
    Frame,
    GpuSample,
    GpuSweep,
    Job,
    JobState,
    KernelCall,
    ProcessDump,
    ProcessId,
    Rank,
    RankDump,
    RankId,
    SamplerStatus,
    SystemCall,
    Thread,
    ThreadCounters,
    Verdict,
    Waiting,
    spans,
)
from hangwatch.model.flight_records import ProgressCounter, RankRecords
from hangwatch.stacks import activity
from hangwatch.state import steps
from hangwatch.state.board import Snapshot
from hangwatch.state.steps import Action
from hangwatch.verdict.diagnosis import Diagnosis, diagnose
from tests.samples import change_parts

NODE = "node-1"
SETTINGS = Settings(detector=Detector(confirming_captures=1))
UNIX_START = 1_700_000_000.0
LAUNCHER = ProcessId(pid=900, start_ticks=90)
MAIN_PTHREAD_ID = 7
AT_ONCE = 8  # captures: `beats` has this many threads for them


@dataclass(frozen=True)
class Doing:
    """A kind of activity of a rank: its stacks (innermost frame first), and the readings of its GPU and process.

    The rounds of a capture see the stacks in turn. `main_cpu_ratio` and `switches_per_second` are those of the main
    thread; a spinning thread hardly switches. A rank is in `call` in every round, and a capture reads `kernel_call` of
    it; a process of its job behind that call uses `behind_cpu_ratio`. A rank in a write sends `device_bytes_per_second` to the device. A rank that reads mapped
    memory has page faults for `faulted_bytes_per_second`. A rank that `serves` waits on a listening socket. A rank that
    `enqueues` adds a collective to its counter each second. `threads` are the stacks of its other threads.
    """

    stacks: tuple[tuple[str, ...], ...]
    watts: float
    utilization_ratio: float = 1.0
    cpu_ratio: float = 0.0
    io_bytes_per_second: float = 0.0
    state: str = "S"
    main_cpu_ratio: float | None = None
    switches_per_second: float = 0.0
    socket_bytes_per_second: float = 0.0
    device_bytes_per_second: float | None = None
    faulted_bytes_per_second: float = 0.0
    nvlink_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    awaited: Awaited | None = None
    asks_rank: AsksRank | None = None
    peers: int = 1
    call: SystemCall | None = None
    kernel_call: KernelCall | None = None
    behind_cpu_ratio: float | None = None
    serves: bool = False
    owns_gil: bool | None = None
    enqueues: bool = False
    threads: tuple[tuple[str, ...], ...] = ()

    def frames(self, round_number: int) -> tuple[Frame, ...]:
        """Return the stack in one round of a capture."""
        return tuple(_frame(text) for text in self.stacks[round_number % len(self.stacks)])


def _frame(text: str) -> Frame:
    function, _, place = text.partition(" ")
    file, _, line = place.strip("()").partition(":")
    return Frame(function=function, file=file, line=int(line or 1))


@dataclass(frozen=True)
class Node:
    """A simulated node. `doing(gpu, t)` is the activity at second `t`, or None if the GPU has no process.

    `jobs` are job ids with their GPUs. Each job has `elsewhere` ranks on nodes that are not monitored.
    `limit_watts(t)` is the power limit. `lost(gpu, t)` is true if the driver cannot read a GPU, `silent(t)` if no
    sample arrives. `generation(t)` increases when a launcher restarts its ranks, `daemon(t)` when hangwatch is
    restarted. `noise_ratio` is the noise of the power, relative to it.

    `counter(gpu, t, collectives)` is the counter that a rank shows, if it does not show its number of collectives.
    `recorders(gpu, t)` are its flight recorders.

    A job without GPUs is a launcher without ranks. `waiting` is the socket data of its wait; GPU -1 has its
    activity.
    """

    doing: Callable[[int, float], Doing | None]
    jobs: tuple[tuple[str, range], ...] = (("job", range(8)),)
    limit_watts: Callable[[float], float] = lambda _t: 700.0
    idle_watts: float = 70.0
    lost: Callable[[int, float], bool] = lambda _gpu, _t: False
    silent: Callable[[float], bool] = lambda _t: False
    generation: Callable[[float], int] = lambda _t: 0
    daemon: Callable[[float], int] = lambda _t: 0
    waiting: Waiting | None = None
    elsewhere: int = 0
    noise_ratio: float = 0.03
    counter: Callable[[int, float, int], ProgressCounter | Fault] = lambda _gpu, _t, total: ProgressCounter(total=total)
    recorders: Callable[[int, float], tuple[RankRecords, ...]] = lambda _gpu, _t: ()

    @property
    def gpus(self) -> range:
        """Return the indexes of all GPUs."""
        return range(max(gpus.stop for _, gpus in self.jobs))

    def sweep(self, t: float, noise: random.Random) -> GpuSweep:
        """Return the driver's readings of all GPUs at second `t`."""
        lost = [gpu for gpu in self.gpus if self.lost(gpu, t)]
        return GpuSweep(
            taken_monotonic_seconds=t,
            taken_unix_seconds=UNIX_START + t,
            gpus=tuple(self._sample(gpu, t, noise) for gpu in self.gpus if gpu not in lost),
            faults=tuple(Fault(subject=f"gpu {gpu}", reason="GpuIsLost", detail="GPU is lost") for gpu in lost),
        )

    def _sample(self, gpu: int, t: float, noise: random.Random) -> GpuSample:
        doing = self.doing(gpu, t)
        watts = self.idle_watts if doing is None else doing.watts
        return GpuSample(
            index=gpu,
            uuid=f"GPU-{gpu}",
            power_watts=watts * noise.uniform(1 - self.noise_ratio, 1 + self.noise_ratio),
            power_limit_watts=self.limit_watts(t),
            utilization_ratio=0.0 if doing is None else doing.utilization_ratio,
            pids=() if doing is None else (self.process(gpu, t).pid,),
        )

    def process(self, gpu: int, t: float) -> ProcessId:
        """Return the process of the rank on this GPU at second `t`."""
        generation = self.generation(t)
        began = 0 if generation == 0 else _began(self.generation, generation)
        return ProcessId(pid=1000 * (generation + 1) + gpu, start_ticks=100 * began)

    def found_jobs(self, t: float) -> Iterator[Job]:
        """Yield the jobs that a scan of /proc would find at second `t`."""
        for job_id, gpus in self.jobs:
            if not gpus:
                yield Job(job_id=job_id, launcher="torchrun", launcher_id=LAUNCHER, ranks=(), waiting=self.waiting)
            present = [gpu for gpu in gpus if self.doing(gpu, t) is not None]
            if not present:
                continue
            yield Job(
                job_id=job_id,
                launcher="torchrun",
                launcher_id=LAUNCHER,
                ranks=tuple(
                    Rank(
                        id=self.process(gpu, t),
                        rank=gpu - gpus.start,
                        local_rank=gpu - gpus.start,
                        gpu_uuids=(f"GPU-{gpu}",),
                    )
                    for gpu in present
                ),
                world_size=len(gpus) + self.elsewhere,
                local_world_size=len(gpus),
                absent_local_ranks=spans(
                    range(gpu - gpus.start, gpu - gpus.start + 1) for gpu in gpus if gpu not in present
                ),
            )


@functools.lru_cache(maxsize=64)  # called for each process in each second
def _began(generation_at: Callable[[float], int], generation: int) -> int:
    return next(at for at in itertools.count() if generation_at(at) == generation)


@dataclass
class Played:
    """The result of one job: its states in order, the seconds of its pages, and a verdict.

    The verdict is that of the first page, or of the last capture if no page was sent. `glances` is the number of
    light captures. `requested_at` are the seconds at which a capture was requested because of a gap or of low power,
    `suspected_at` those at which a verdict was first shown.
    """

    states: list[str] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)
    pages_now: bool = False
    verdict: Verdict | None = None
    looks: list[Diagnosis] = field(default_factory=list)
    glances: int = 0
    requested_at: list[float] = field(default_factory=list)
    suspected_at: list[float] = field(default_factory=list)
    is_suspected: bool = False

    @property
    def paged_at(self) -> float | None:
        """Return the second of the first page, or None if no page was sent."""
        return self.pages[0] if self.pages else None


def play(
    node: Node,
    seconds: float,
    settings: Settings = SETTINGS,
    seed: int = 0,
    activities: activity.Table | None = None,
    begin: float = 0.0,
    *,
    has_counters: bool = False,
) -> dict[str, Played]:
    """Run the script from second `begin` to second `seconds`; return the results by job id.

    `activities` replace the table of the settings. With `has_counters` the daemon reads progress counters.
    """
    daemon = Simulation(node, settings, seed, has_counters=has_counters)
    if activities is not None:
        daemon.activities = activities
    for t in range(int(begin), int(seconds)):
        daemon.second(float(t))
    return daemon.played


class Simulation:
    """The scheduled tasks of the daemon, without its threads."""

    def __init__(self, node: Node, settings: Settings, seed: int, *, has_counters: bool = False) -> None:
        # Power, stacks and counters each ask for the activity of a second.
        self.node = replace(node, doing=functools.lru_cache(maxsize=256)(node.doing))
        self.settings = settings
        self.played = {job_id: Played() for job_id, _ in node.jobs}
        self.snapshot = Snapshot()
        self._noise = random.Random(seed)
        self.activities = activity.load(settings.activities.rules)
        self._wanted: list[TakeCapture] = []
        self._under_way: list[_Taking] = []
        self._places = (*node.gpus, -1) if node.waiting is not None else (*node.gpus,)
        self._has_counters = has_counters
        self._collectives = dict.fromkeys(self._places, 0)
        self._cpu_seconds = dict.fromkeys(self._places, 0.0)
        self._main_cpu_seconds = dict.fromkeys(self._places, 0.0)
        self._switches = dict.fromkeys(self._places, 0.0)
        self._io_bytes = dict.fromkeys(self._places, 0.0)
        self._socket_bytes = dict.fromkeys(self._places, 0.0)
        self._device_bytes = dict.fromkeys(self._places, 0.0)
        self._faulted_bytes = dict.fromkeys(self._places, 0.0)

    def second(self, t: float) -> None:
        self._count(t)
        if t and self.node.daemon(t) != self.node.daemon(t - 1):
            self._start_again(t)
        if t % self.settings.jobs.discover_seconds == 0:
            self._discover(t)
        self._read_counters(t)
        if not self.node.silent(t):
            self.snapshot, actions = steps.record_sample(
                self.snapshot,
                self.node.sweep(t, self._noise),
                SamplerStatus(alive=True),
                now=t,
                settings=self.settings.detector,
                gap_seconds=10.0,
            )
        else:
            self.snapshot, actions = steps.record_missing_sample(
                self.snapshot,
                SamplerStatus(alive=False),
                now=t,
                unix_now=UNIX_START + t,
                settings=self.settings.detector,
            )
        self._note(actions, t)
        self._capture(t)

    def _read_counters(self, t: float) -> None:
        counters = {
            self.node.process(gpu, t): self.node.counter(gpu, t, self._collectives[gpu])
            for gpu in self.node.gpus
            if self._has_counters and self.node.doing(gpu, t) is not None
        }
        self.snapshot, actions = steps.record_counters(
            self.snapshot,
            counters,
            now=t,
            unix_now=UNIX_START + t,
            settings=self.settings.detector,
            progress=self.settings.progress,
            capture_seconds=self.settings.capture.usual_seconds,
            gap_seconds=10.0,
        )
        self._note(actions, t)

    def _count(self, t: float) -> None:
        for gpu in self._places:
            doing = self.node.doing(gpu, t)
            if doing is not None:
                self._collectives[gpu] += doing.enqueues
                self._cpu_seconds[gpu] += doing.cpu_ratio
                self._main_cpu_seconds[gpu] += doing.cpu_ratio if doing.main_cpu_ratio is None else doing.main_cpu_ratio
                self._switches[gpu] += doing.switches_per_second
                self._io_bytes[gpu] += doing.io_bytes_per_second
                self._socket_bytes[gpu] += doing.socket_bytes_per_second
                self._device_bytes[gpu] += doing.device_bytes_per_second or 0.0
                self._faulted_bytes[gpu] += doing.faulted_bytes_per_second

    def _discover(self, t: float) -> None:
        self.snapshot, actions = steps.record_scan(self.snapshot, self.node.found_jobs(t), t, UNIX_START + t)
        self._note(actions, t)

    def _start_again(self, t: float) -> None:
        """Restart the daemon. The new one has only the saved incidents that are still open."""
        incidents = [entry.incident for entry in self.snapshot.jobs.values() if entry.incident is not None]
        self._wanted, self._under_way = [], []
        self.snapshot, _ = steps.record_scan(Snapshot(), self.node.found_jobs(t), t, UNIX_START + t)
        living = frozenset(process for entry in self.snapshot.jobs.values() for process in entry.job.processes)
        self.snapshot, actions = steps.restore_incidents(
            self.snapshot,
            [incident for incident in incidents if incident.closed_unix_seconds is None],
            living,
            now=t,
            unix_now=UNIX_START + t,
            settings=self.settings.detector,
        )
        self._note(actions, t)
        for job_id, entry in self.snapshot.jobs.items():
            if self.played[job_id].states[-1:] != [entry.watch.state.value]:
                self.played[job_id].states.append(entry.watch.state.value)

    def _capture(self, t: float) -> None:
        if self._wanted and len(self._under_way) < AT_ONCE:
            self._discover(t)
        while self._wanted and len(self._under_way) < AT_ONCE:
            wanted = self._wanted.pop(0)
            self._under_way.append(_Taking(wanted, wanted.job_key, t))
        for taking in tuple(self._under_way):
            if (t - taking.began) % self.settings.capture.pause_seconds == 0:
                self._take_round(taking, t)

    def _take_round(self, taking: _Taking, t: float) -> None:
        taking.rounds.append({gpu: self._dump(gpu, t, len(taking.rounds)) for gpu in self._places})
        if len(taking.rounds) < self.settings.capture.rounds:
            return
        self._under_way.remove(taking)
        look = self._look(taking, t)
        self.played[taking.job_id].looks.append(look)
        if taking.wanted.result != "state":
            self.played[taking.job_id].glances += 1
        self.snapshot, actions = steps.record_capture(
            self.snapshot, taking.wanted, look, now=t, unix_now=UNIX_START + t, settings=self.settings.detector
        )
        self._note(actions, t)

    def _dump(self, gpu: int, t: float, round_number: int) -> ProcessDump:
        doing = self.node.doing(gpu, t)
        if doing is None:
            return ProcessDump(taken_monotonic_seconds=t)
        main = Thread(
            name="MainThread",
            thread_id=str(1000 + gpu),
            frames=doing.frames(round_number),
            owns_gil=doing.owns_gil,
            is_main=True,
            pthread_id=MAIN_PTHREAD_ID,
        )
        others = (Thread(name=None, thread_id="9", frames=tuple(map(_frame, stack))) for stack in doing.threads)
        counters = ThreadCounters(
            read_monotonic_seconds=t,
            cpu_seconds=self._main_cpu_seconds[gpu],
            voluntary_switches=int(self._switches[gpu]),
            faulted_bytes=int(self._faulted_bytes[gpu]),
        )
        return change_parts(
            ProcessDump(taken_monotonic_seconds=t, threads=(main, *others)),
            recorders=self.node.recorders(gpu, t),
            state=doing.state,
            state_after=doing.state,
            cpu_seconds=self._cpu_seconds[gpu],
            io_bytes=int(self._io_bytes[gpu]),
            before=counters,
            after=counters,
            socket_bytes=int(self._socket_bytes[gpu]),
            rank_bytes=int(self._socket_bytes[gpu]),
            awaited=doing.awaited,
            asks_rank=doing.asks_rank,
            call=doing.call,
            file_lock=None if doing.kernel_call is None else doing.kernel_call.file_lock,
            children_cpu_seconds=None if doing.behind_cpu_ratio is None else t * doing.behind_cpu_ratio,
            peers=doing.peers,
            active_peers=doing.peers,
            server=self.node.process(gpu, t).pid if doing.serves else None,
            device_bytes=None if doing.device_bytes_per_second is None else int(self._device_bytes[gpu]),
        )

    def _look(self, taking: _Taking, t: float) -> Diagnosis:
        gpus = dict(self.node.jobs)[taking.job_id]
        taken = Capture(
            job_id=taking.job_id,
            job_key=taking.job_id,
            node=NODE,
            started_unix_seconds=UNIX_START + taking.began,
            duration_seconds=t - taking.began,
            rounds=len(taking.rounds),
            ranks=tuple(self._rank_dump(gpu, gpu - gpus.start, taking, t) for gpu in gpus)
            or (self._launcher_dump(taking),),
            world_size=len(gpus) + self.node.elsewhere or None,
        )
        return diagnose(taken, self.settings.capture, self.activities, unix_now=UNIX_START + t)

    def _launcher_dump(self, taking: _Taking) -> RankDump:
        return RankDump(
            id=RankId(node=NODE, pid=LAUNCHER.pid),
            rounds=tuple(one[-1] for one in taking.rounds),
            waiting=self.node.waiting,
        )

    def _rank_dump(self, gpu: int, rank: int, taking: _Taking, t: float) -> RankDump:
        if self.node.doing(gpu, taking.began) is None:  # a process that starts later is not dumped
            return RankDump(id=RankId(node=NODE, rank=rank, local_rank=rank), gone=True)
        doing = self.node.doing(gpu, t)
        lost = doing is None or self.node.lost(gpu, t)
        watched = self.snapshot.jobs.get(taking.job_id)
        levels = gpu_levels(watched.watch.power.gpus, self.settings.detector) if watched else {}
        level = levels.get(f"GPU-{gpu}")
        return change_parts(
            RankDump(id=RankId(node=NODE, rank=rank, local_rank=rank, pid=self.node.process(gpu, t).pid)),
            rounds=() if doing is None else tuple(one[gpu] for one in taking.rounds),
            gone=doing is None,
            power_watts=None if lost else doing.watts,
            utilization_ratio=None if lost else doing.utilization_ratio,
            busy_power_ratio=None if lost or level is None else level.ratio(doing.watts),
            works_lightly=not lost and level is not None and level.is_light,
            nvlink_bytes_per_second=None if lost else doing.nvlink_bytes_per_second,
            pcie_bytes_per_second=None if lost else doing.pcie_bytes_per_second,
            most_peers=1,
            kernel_call=None if doing is None else doing.kernel_call,
        )

    def _note(self, actions: Iterable[Action], t: float) -> None:
        """Do the actions as the daemon does: take captures, and add states and pages to the results."""
        for action in actions:
            if isinstance(action, TakeCapture):
                self._wanted.append(action)
                if action.result != "low_power":
                    self.played[action.job_key].requested_at.append(t)
            elif isinstance(action, Transition):
                self.played[action.job.job_id].states.append(action.state.value)
        for job_id, entry in self.snapshot.jobs.items():
            played = self.played[job_id]
            if entry.watch.state is JobState.STARTING and played.states[-1:] != ["starting"]:
                played.states.append("starting")
            if entry.incident is not None and played.paged_at is None:
                played.verdict = entry.incident.verdict
            is_suspected = entry.suspected is not None or entry.open_incident is not None
            if is_suspected and not played.is_suspected:
                played.suspected_at.append(t)
            played.is_suspected = is_suspected
            if entry.page and not played.pages_now:
                played.pages.append(t)
            played.pages_now = entry.page


@dataclass
class _Taking:
    """A capture in progress, with its rounds so far."""

    wanted: TakeCapture
    job_id: str
    began: float
    rounds: list[dict[int, ProcessDump]] = field(default_factory=list)


def fold(states: list[str]) -> str:
    """Return the states in order as one line, repeated blocks once: `a ⇄ b` of two, `(a → b → c) x4` of more."""
    parts: list[str] = []
    index = 0
    while index < len(states):
        length, times = _repeated(states[index:])
        block = states[index : index + length]
        index += length * times
        if times == 1:
            parts.append(block[0])
        elif length == 2:
            parts.append(" ⇄ ".join(block))
            index += states[index : index + 1] == block[:1]  # the repetition ends with its first state
        else:
            parts.append(f"({' → '.join(block)}) x{times}")
    return " → ".join(parts)


def _repeated(states: list[str]) -> tuple[int, int]:
    """Return length and count of the shortest repeated block of states at the start, or (1, 1)."""
    for length in range(2, len(states) // 2 + 1):
        times = 1
        while states[length * times : length * (times + 1)] == states[:length]:
            times += 1
        if times > 1:
            return length, times
    return 1, 1
