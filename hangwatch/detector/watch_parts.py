"""The parts of a `JobWatch`: one struct for each concern, and one for each state or phase that has values of its own.

All times are CLOCK_MONOTONIC seconds, None where they mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from hangwatch.detector.known_pauses import EndedPause
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.standstill import Standstill
from hangwatch.model import JobState, ProcessId, RankId, Value

GLANCE_SECONDS = 300.0  # least time between two glances at power that fell and is flat


# --- in every state --------------------------------------------------------------------------------------------------


class JobIdentity(Value, frozen=True):
    """Which job it is. `generation` are the ranks' processes: a restart begins a new watch.

    `began`: when its processes did. `has_ranks` is false for a launcher that has none: it draws no power, and only time
    tells. `is_elsewhere_too`: other nodes have ranks of it.
    """

    job_id: str
    job_key: str
    generation: frozenset[ProcessId]
    began: float
    has_ranks: bool
    is_elsewhere_too: bool = False


class CollectiveTimeout(Value, frozen=True):
    """How long a collective of the job waits in seconds: by its environment, and as the last look found it recorded.

    `recorded_seconds` is forgotten where a silence is over. None: for ever, or not recorded.
    """

    environment_seconds: float | None = None
    recorded_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The recorded time-out, which stands above that of the environment; None for ever."""
        return self.environment_seconds if self.recorded_seconds is None else self.recorded_seconds


class PowerRecord(Value, frozen=True):
    """The power of the job's GPUs, by uuid; a `stuck_watts` is set in suspected and the open states only.

    `was_busy`: it has been at work. `serves`: as the last look found it; its power is no measure of work until it is
    busy. `sampled_at`: the last sample; `read_at`: the last one with a reading of a GPU of the job, so it is not later.
    `gpu_errors_at`: when XIDs or link errors last came on this node.
    """

    gpus: dict[str, GpuPower] = field(default_factory=dict)
    was_busy: bool = False
    serves: bool = False
    sampled_at: float | None = None
    read_at: float | None = None
    gpu_errors_at: float | None = None


class LookRecord(Value, frozen=True):
    """The captures and glances of the job, and what they found in a row.

    * `capturing`: a capture is under way. It is set in suspected, and where a capture goes on after its suspicion.
      `captured_at`: the last one ended.
    * `glancing_since`: a glance is under way; `glanced_at`: the last one ended. `fall_glanced_at`: the last one at
      power that had fallen was asked for; `glance_pause_seconds` lie before the next, more after one that showed
      nothing.
    * `low_since`: since when the job draws little without being quiet (it was taught that level, or has never worked
      hard), and was last seen moving; `relook_pause_seconds` later, or after the hold, it is glanced at again.
    * `standstills` are the ranks that the last looks found between the same few lines.
    """

    capturing: bool = False
    captured_at: float | None = None
    glancing_since: float | None = None
    glanced_at: float | None = None
    fall_glanced_at: float | None = None
    glance_pause_seconds: float = GLANCE_SECONDS
    low_since: float | None = None
    relook_pause_seconds: float = 0.0
    standstills: Mapping[RankId, Standstill] = field(default_factory=dict)


# --- in some states --------------------------------------------------------------------------------------------------


class Starting(Value, frozen=True):
    """Starting only. `over_since`: since when the job draws more than the plain line of the settings."""

    over_since: float | None = None


class Recovered(Value, frozen=True):
    """Recovered only. `ended`: the pause that is learnt from there."""

    ended: EndedPause | None = None


class Unknown(Value, frozen=True):
    """Unknown only. `before`: starting or training, which the job returns to with the next reading."""

    before: JobState


class Silence(Value, frozen=True):
    """Quiet, suspected and the open states. `gpus`: in quiet, those that have been quiet since then, by uuid."""

    since: float
    gpus: frozenset[str] = frozenset()


class Suspicion(Value, frozen=True):
    """Suspected and the open states: what the looks have found since the suspicion began.

    `fell`: it began with a fall of power, so power that is over the line again ends it. `saw_stacks`: a look found any
    stack. `frozen_captures` in a row found every rank frozen. `places` are where the looks found the awaited ranks, see
    `known_pauses`. `moved` are the ranks that were seen moving, of a job that never worked hard: its power proves
    nothing. `last_look_at`: the look that was asked for since the job is going to end itself.
    """

    fell: bool = False
    saw_stacks: bool = False
    frozen_captures: int = 0
    places: frozenset[str] = frozenset()
    moved: frozenset[RankId] = frozenset()
    last_look_at: float | None = None


class OpenIncident(Value, frozen=True):
    """The open states only. `stalled_since` is set in all of them except hung.

    `back_since`: power is back and not yet for long enough. `capture_wanted_at`: when the next look is due, None while
    one is under way; `capture_pause_seconds` lie before it.
    """

    stalled_since: float | None = None
    back_since: float | None = None
    capture_wanted_at: float | None = None
    capture_pause_seconds: float = 0.0
