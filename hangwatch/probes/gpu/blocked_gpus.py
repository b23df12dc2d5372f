"""Pure: the GPUs about which the driver blocked, and the time of the next retry of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from hangwatch.model import Fault

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 600.0
REASON = "NoAnswer"
NO_ANSWER = "dmesg | grep -i -e nvrm -e xid; if `nvidia-smi` does not return either, drain and reboot the node"


class _Wedge(NamedTuple):
    fault: Fault
    retry_at: float
    pause_seconds: float


class BlockedGpus:
    """The GPUs that are not read because a driver call about them did not return.

    The first pause before a retry is `first_pause_seconds`. Each failed retry doubles it. The pause also doubles if the
    GPU blocks again within the longest pause. Times are CLOCK_MONOTONIC seconds.
    """

    def __init__(self, first_pause_seconds: float = FIRST_PAUSE_SECONDS) -> None:
        self._first_pause_seconds = first_pause_seconds
        self._wedges: dict[int, _Wedge] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # time of the last success, and the pause before it

    @property
    def faults(self) -> Mapping[int, Fault]:
        """The GPUs that are not read, each with the fault that is reported instead of its readings."""
        return {index: wedge.fault for index, wedge in self._wedges.items()}

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
        """Return the GPUs to retry now, by index.

        A GPU in `hanging` is omitted: a process still hangs in a call about it.
        """
        return tuple(index for index, wedge in self._wedges.items() if now >= wedge.retry_at and index not in hanging)

    def retry_failed(self, index: int, now: float) -> None:
        """Record a failed retry: the next pause is twice as long."""
        wedge = self._wedges.get(index)
        if wedge is not None:
            self._begin_pause(index, wedge.fault, 2 * wedge.pause_seconds, now)

    def retry_succeeded(self, index: int, now: float) -> None:
        """Record a successful retry: the GPU is read normally again."""
        wedge = self._wedges.pop(index, None)
        if wedge is not None:
            self._answered[index] = now, wedge.pause_seconds

    def _begin_pause(self, index: int, fault: Fault, pause_seconds: float, now: float) -> None:
        pause = min(pause_seconds, LONGEST_PAUSE_SECONDS)
        self._wedges[index] = _Wedge(fault, now + pause, pause)
