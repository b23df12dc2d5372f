"""Detection: where a job stands (hang.detector -> daemon), and what a rank does by measurement (hang.motion)."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """Where a job stands; see docs/architecture.md for the transitions."""

    STARTING = "starting"
    UNKNOWN = "unknown"
    TRAINING = "training"
    QUIET = "quiet"
    SUSPECTED = "suspected"
    HUNG = "hung"
    STALLED = "stalled"
    WAITS_ELSEWHERE = "waits_elsewhere"
    SUSPENDED = "suspended"
    OVER = "over"
    RECOVERED = "recovered"
    ENDED = "ended"


OPEN_STATES = frozenset({JobState.HUNG, JobState.STALLED, JobState.WAITS_ELSEWHERE, JobState.SUSPENDED, JobState.OVER})
"""The states in which an incident is open."""

RESTING_STATES = frozenset({JobState.SUSPENDED, JobState.OVER})
"""The states of a job that stands still for a reason that is no hang of this node."""


class Motion(str, Enum):
    """Whether a rank made progress between the rounds of a capture; unknown after a single round."""

    FROZEN = "frozen"
    MOVING = "moving"
    UNKNOWN = "unknown"


class Signature(str, Enum):
    """What a rank does by measurement, whatever its functions are called; see docs/verdicts.md."""

    GONE = "gone"
    STOPPED = "stopped"
    COMPUTES = "computes"
    TRANSFERS = "transfers"
    GPU_WORKS = "gpu_works"
    BEHIND_GPU = "behind_gpu"
    SPINS = "spins"
    POLLS = "polls"
    BLOCKED = "blocked"
    AWAITS_OUTSIDE = "awaits_outside"
    UNKNOWN = "unknown"

    @property
    def motion(self) -> Motion:
        """What that means for progress."""
        return _MOTIONS.get(self, Motion.UNKNOWN)


_MOTIONS = {
    Signature.GONE: Motion.FROZEN,
    Signature.STOPPED: Motion.FROZEN,
    Signature.COMPUTES: Motion.MOVING,
    Signature.TRANSFERS: Motion.MOVING,
    Signature.GPU_WORKS: Motion.MOVING,
    Signature.BEHIND_GPU: Motion.FROZEN,
    Signature.BLOCKED: Motion.FROZEN,
}
