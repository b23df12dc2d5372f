"""The GPUs for which a driver call did not return, and the time at which each GPU is retried. Pure."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from hangwatch.model import Fault

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 600.0
REASON = "NoAnswer"
NO_ANSWER = "dmesg | grep -i -e nvrm -e xid; if `nvidia-smi` does not return either, drain and reboot the node"


class _BlockedGpu(NamedTuple):
    fault: Fault
    retry_at: float
    pause_seconds: float


class BlockedGpus:
    """The GPUs that are not read because a driver call about them did not return.

    The first pause before a retry is `first_pause_seconds`. Each failed retry doubles the pause, up to
    `LONGEST_PAUSE_SECONDS`. It also doubles if the GPU blocks again within this time after a successful retry. Times
    are CLOCK_MONOTONIC seconds.
    """

    def __init__(self, first_pause_seconds: float = FIRST_PAUSE_SECONDS) -> None:
        self._first_pause_seconds = first_pause_seconds
        self._blocked: dict[int, _BlockedGpu] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # time of the last success, and the pause before it

    @property
    def faults(self) -> Mapping[int, Fault]:
        """The GPUs that are not read, each with the fault that is reported instead of its readings."""
        return {index: blocked.fault for index, blocked in self._blocked.items()}

    def block(self, index: int, purpose: str, deadline_seconds: float, now: float) -> None:
        """Stop reading this GPU: a driver call for `purpose` did not return within the deadline."""
        answered_at, pause = self._answered.pop(index, (now, 0.0))
        doubled = 2 * pause if now - answered_at < LONGEST_PAUSE_SECONDS else 0.0
        fault = Fault(
            subject=f"gpu {index}",
            reason=REASON,
            detail=f"the driver did not respond about this GPU within {deadline_seconds:g} s ({purpose}); "
            "the GPU is not read until a retry succeeds",
            remedy=NO_ANSWER,
            about="target",
        )
        self._begin_pause(index, fault, max(doubled, self._first_pause_seconds), now)

    def due_for_retry(self, now: float, hanging: Collection[int | None]) -> tuple[int, ...]:
        """Return the GPUs to retry now, by index, without those in `hanging`: a process still hangs in their calls."""
        return tuple(
            index for index, blocked in self._blocked.items() if now >= blocked.retry_at and index not in hanging
        )

    def retry_failed(self, index: int, now: float) -> None:
        """Record a failed retry: the next pause is twice as long."""
        blocked = self._blocked.get(index)
        if blocked is not None:
            self._begin_pause(index, blocked.fault, 2 * blocked.pause_seconds, now)

    def retry_succeeded(self, index: int, now: float) -> None:
        """Record a successful retry: the GPU is read normally again."""
        blocked = self._blocked.pop(index, None)
        if blocked is not None:
            self._answered[index] = now, blocked.pause_seconds

    def _begin_pause(self, index: int, fault: Fault, pause_seconds: float, now: float) -> None:
        pause = min(pause_seconds, LONGEST_PAUSE_SECONDS)
        self._blocked[index] = _BlockedGpu(fault, now + pause, pause)
