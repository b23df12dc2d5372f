"""The parts of a `JobWatch`: one struct for each topic, and one for each group of states with its own values.

All times are CLOCK_MONOTONIC seconds. None means not set.
"""

from collections.abc import Mapping

from msgspec import field

from hangwatch.detector.known_pauses import EndedPause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.sleepers import Sleeper, Standstill
from hangwatch.model import JobName, JobState, ProcessId, RankId, Value

# Shortest time between two light captures that are due to fallen, flat power
GLANCE_SECONDS = 300.0


# --- in every state --------------------------------------------------------------------------------------------------


class JobIdentity(Value, frozen=True):
    """The name and the processes of the job.

    * `generation`: the processes of its ranks, see `job_watch.is_restart`. `began`: the start time of these
      processes.
    * `has_ranks`: false for a launcher without ranks. It draws no power and is judged by time only.
    * `has_ranks_on_other_nodes`: other nodes have ranks of the job.
    """

    name: JobName
    generation: frozenset[ProcessId]
    began: float
    has_ranks: bool
    has_ranks_on_other_nodes: bool = False


class CollectiveTimeout(Value, frozen=True):
    """The collective timeout of the job in seconds: from its environment, and from its flight recorders.

    The last capture sets `recorded_seconds`. The end of a silence clears it. None: there is no timeout, or it is
    not recorded.
    """

    environment_seconds: float | None = None
    recorded_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The recorded timeout, else the timeout from the environment; None if there is no timeout."""
        return self.environment_seconds if self.recorded_seconds is None else self.recorded_seconds


class PowerRecord(Value, frozen=True):
    """The power of the job's GPUs, by uuid.

    * `was_busy`: the job has been at work. `is_serving`: the last capture found an idle inference server. Its power
      proves nothing about work until it is busy.
    * `sampled_at`: time of the last sample. `read_at`: time of the last sample with a reading of a GPU of the job.
    * `gpu_errors_at`: time of the last XID or link error on this node.
    * `idle_worker_at`: time of the last warning about a GPU that stopped working while all others work.
    * `stuck_watts` of a GPU is set only in suspected and the open states.
    """

    gpus: dict[str, GpuPower] = field(default_factory=dict)
    was_busy: bool = False
    is_serving: bool = False
    sampled_at: float | None = None
    read_at: float | None = None
    gpu_errors_at: float | None = None
    idle_worker_at: float | None = None


class CaptureRecord(Value, frozen=True):
    """The captures and light captures of the job, and the ranks that consecutive ones found between the same lines.

    * `capturing`: a capture runs. `captured_at`: end of the last capture.
    * `light_capture_since`: time when the light capture that runs now was requested. `light_captured_at`: end of
      the last light capture.
    * `fall_captured_at`: time of the last request for a light capture because power fell. The next one of this kind
      is due `fall_pause_seconds` later. The pause doubles after a light capture without a result.
    * `low_since`: time since which the job draws little power without being quiet, because it has a learned
      baseline or was never busy. A capture in which its ranks progress sets it again. The next light capture is due
      `low_power_pause_seconds` later, and not before the hold.
    * `standstills`: the ranks that the last captures found between the same few lines of code.
    * `gap_capture_since`: time when the light capture of a gap, or of low power before the hold, was requested that
      runs now. `gap_captures`: the times of these requests in the last hour. If such a capture found progress, the next
      one is due when the gap has lasted `next_gap_seconds`. `gap_in_progress` is the number of advances at that
      capture.
    """

    capturing: bool = False
    captured_at: float | None = None
    light_capture_since: float | None = None
    light_captured_at: float | None = None
    fall_captured_at: float | None = None
    fall_pause_seconds: float = GLANCE_SECONDS
    low_since: float | None = None
    low_power_pause_seconds: float = 0.0
    standstills: Mapping[RankId, Standstill] = field(default_factory=dict)
    gap_capture_since: float | None = None
    gap_captures: tuple[float, ...] = ()
    next_gap_seconds: float = 0.0
    gap_in_progress: int | None = None


# --- in some states --------------------------------------------------------------------------------------------------


class Starting(Value, frozen=True):
    """The part of the state starting.

    * `over_since`: time since which the job draws more than the fixed threshold.
    * `frozen_captures`: number of consecutive light captures in which no rank progressed.
    * `capture_pause_seconds`: the pause before the next light capture. It doubles after one in which a rank progressed.
    """

    over_since: float | None = None
    frozen_captures: int = 0
    capture_pause_seconds: float = 0.0


class Recovered(Value, frozen=True):
    """The part of the state recovered.

    * `ended`: the pause to learn when this state ends, if power is back by then.
    * `is_back`: power is back, or the job's counters show that the pause is over.
    """

    ended: EndedPause | None
    is_back: bool


class Unknown(Value, frozen=True):
    """The part of the state unknown. `before`: the state to which the next reading returns: starting or training."""

    before: JobState


class Silence(Value, frozen=True):
    """The part of quiet, suspected and the open states. `gpus`: the uuids of the GPUs quiet since `since`."""

    since: float
    gpus: frozenset[str] = frozenset()


class GapSuspicion(Value, frozen=True):
    """The part of a suspicion that began before the hold. Its captures do not pause a process.

    * `by_power`: it began because of low power, and power ends it, since the counters of the job are not known.
      Otherwise it began because of a gap between collectives, and the counters decide.
    * `advances`: the number of times that the job had progressed; a higher number ends the suspicion.
    * `asked_at`: the start of the last capture. `is_at_hold`: this capture ends at the hold, or later.
    * `permanent`: the ranks in a state that cannot end by itself, by the last capture. `pages_at_once`: two captures
      have found them.
    """

    advances: int
    asked_at: float
    is_at_hold: bool = False
    permanent: frozenset[RankId] = frozenset()
    pages_at_once: bool = False
    by_power: bool = False


class Suspicion(Value, frozen=True):
    """The part of suspected and the open states: the findings of the captures since the suspicion began.

    * `fell`: the job was no longer starting when the suspicion began, so high power ends the suspicion.
    * `saw_stacks`: a capture found a stack or could judge a rank. `frozen_captures`: number of consecutive captures
      in which all ranks were frozen.
    * `places`: the places of the awaited ranks, see `known_pauses`.
    * `moved_ranks`: the ranks that a capture has seen progressing. They matter for a job that was never busy,
      because the power of such a job proves nothing.
    * `is_in_rendezvous`: the last capture found all ranks in a rendezvous.
    * `timeout_capture_at`: time of the request for a capture before the collective timeout.
    * `sleepers`: the ranks that the last captures found asleep.
    * `gap`: set if the suspicion began before the hold.
    """

    fell: bool = False
    saw_stacks: bool = False
    frozen_captures: int = 0
    places: frozenset[str] = frozenset()
    moved_ranks: frozenset[RankId] = frozenset()
    is_in_rendezvous: bool = False
    timeout_capture_at: float | None = None
    sleepers: Mapping[RankId, Sleeper] = field(default_factory=dict)
    gap: GapSuspicion | None = None


class OpenIncident(Value, frozen=True):
    """The part of the open states. `stalled_since` is set in all of them except hung.

    * `back_since`: time since which power is back. After `recover_seconds` the job is recovered.
    * `capture_wanted_at`: time of the next capture; None while one runs. `capture_pause_seconds`: the pause before
      it.
    """

    stalled_since: float | None = None
    back_since: float | None = None
    capture_wanted_at: float | None = None
    capture_pause_seconds: float = 0.0
