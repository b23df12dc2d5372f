"""States of a job, which `detector` sets, and measured behaviour of a rank, which `stacks.progress` finds."""

from enum import Enum


class JobState(str, Enum):
    """State of a job; see docs/architecture.md for the transitions."""

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
"""States in which a job does not progress for another reason than a hang of its ranks."""


class Motion(str, Enum):
    """Progress of a rank between the rounds of a capture. A single round gives UNKNOWN."""

    FROZEN = "frozen"
    MOVING = "moving"
    UNKNOWN = "unknown"


class Signature(str, Enum):
    """Measured behaviour of a rank, independent of the names of its functions; see docs/verdicts.md."""

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
        """The progress that this behaviour implies."""
        return _MOTIONS.get(self, Motion.UNKNOWN)


_MOTIONS = {
    **dict.fromkeys((Signature.COMPUTES, Signature.TRANSFERS, Signature.GPU_WORKS), Motion.MOVING),
    **dict.fromkeys((Signature.GONE, Signature.STOPPED, Signature.BEHIND_GPU, Signature.BLOCKED), Motion.FROZEN),
}
