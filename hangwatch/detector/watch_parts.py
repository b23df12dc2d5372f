"""The parts of a `JobWatch`: one struct for each concern, and one for each state or phase that has values of its own.

All times are CLOCK_MONOTONIC seconds; None means not set.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from hangwatch.detector.known_pauses import EndedPause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.sleepers import Sleeper
from hangwatch.detector.standstill import Standstill
from hangwatch.model import JobState, ProcessId, RankId, Value

GLANCE_SECONDS = 300.0  # shortest time between two light captures because of power that fell and is flat


# --- in every state --------------------------------------------------------------------------------------------------


class JobIdentity(Value, frozen=True):
    """The identity of the job.

    * `generation`: the processes of its ranks; a restart begins a new watch. `began`: when the processes began.
    * `has_ranks`: false for a launcher without ranks, which draws no power and is judged by time only.
    * `is_elsewhere_too`: other nodes have ranks of the job.
    """

    job_id: str
    job_key: str
    generation: frozenset[ProcessId]
    began: float
    has_ranks: bool
    is_elsewhere_too: bool = False


class CollectiveTimeout(Value, frozen=True):
    """The collective timeout of the job in seconds: by its environment, and as the last capture found it recorded.

    `recorded_seconds` is cleared when a silence is over. None: no timeout, or not recorded.
    """

    environment_seconds: float | None = None
    recorded_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The recorded timeout, else that of the environment; None for no timeout."""
        return self.environment_seconds if self.recorded_seconds is None else self.recorded_seconds


class PowerRecord(Value, frozen=True):
    """The power of the job's GPUs, by uuid. `stuck_watts` of a GPU is set only in suspected and the open states.

    * `was_busy`: the job has been at work. `is_serving`: the last capture found an idle server; its power says nothing
      about work until it is busy.
    * `sampled_at`: the last sample. `read_at`: the last sample with a reading of a GPU of the job.
    * `gpu_errors_at`: when XIDs or link errors last occurred on this node.
    """

    gpus: dict[str, GpuPower] = field(default_factory=dict)
    was_busy: bool = False
    is_serving: bool = False
    sampled_at: float | None = None
    read_at: float | None = None
    gpu_errors_at: float | None = None


class CaptureRecord(Value, frozen=True):
    """The captures and light captures of the job, and what consecutive ones found.

    * `capturing`: a capture runs. It is set in suspected, and while a capture outlasts its suspicion. `captured_at`:
      when the last one ended.
    * `light_capture_since`: when the running light capture was asked for. `light_captured_at`: when the last one ended.
      `fall_captured_at`: when the last one because of fallen power was asked for. The next one of this kind is due
      `fall_pause_seconds` later; the pause grows after one without a result.
    * `low_since`: since when the job draws little without being quiet (by its learned baseline, or because it was never
      busy), or when its ranks were last seen progressing at that power. The next light capture is due
      `low_power_pause_seconds` later, or after the hold.
    * `standstills`: the ranks that the last captures found between the same few lines.
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


# --- in some states --------------------------------------------------------------------------------------------------


class Starting(Value, frozen=True):
    """Set in starting. `over_since`: since when the job draws more than the fixed threshold of the settings."""

    over_since: float | None = None


class Recovered(Value, frozen=True):
    """Set in recovered. `ended`: the pause that is learned when the state ends."""

    ended: EndedPause | None = None


class Unknown(Value, frozen=True):
    """Set in unknown. `before`: starting or training, to which the job returns with the next reading."""

    before: JobState


class Silence(Value, frozen=True):
    """Set in quiet, suspected and the open states. `gpus`: in quiet, the uuids of the GPUs quiet since then."""

    since: float
    gpus: frozenset[str] = frozenset()


class Suspicion(Value, frozen=True):
    """Set in suspected and the open states: what the captures have found since the suspicion began.

    * `fell`: the suspicion began with a fall of power, so it ends when power is over the threshold again.
    * `saw_stacks`: a capture found a stack or could judge a rank. `frozen_captures`: in how many consecutive captures
      no rank progressed.
    * `places`: where the captures found the awaited ranks, see `known_pauses`.
    * `moved_ranks`: the ranks that were seen progressing, of a job that was never busy: its power proves nothing.
    * `timeout_capture_at`: when the last capture before the collective timeout was asked for.
    * `sleepers`: the ranks that the last captures found asleep.
    """

    fell: bool = False
    saw_stacks: bool = False
    frozen_captures: int = 0
    places: frozenset[str] = frozenset()
    moved_ranks: frozenset[RankId] = frozenset()
    timeout_capture_at: float | None = None
    sleepers: Mapping[RankId, Sleeper] = field(default_factory=dict)


class OpenIncident(Value, frozen=True):
    """Set in the open states. `stalled_since` is set in all of them except hung.

    * `back_since`: since when power is back, but not yet for long enough.
    * `capture_wanted_at`: when the next capture is due; None while one runs. `capture_pause_seconds`: the pause before
      it.
    """

    stalled_since: float | None = None
    back_since: float | None = None
    capture_wanted_at: float | None = None
    capture_pause_seconds: float = 0.0
