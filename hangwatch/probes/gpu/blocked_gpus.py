"""Pure: which GPUs made the driver block, and when each is asked again."""

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


class WedgedGpus:
    """The GPUs that are left out since a call about them did not return, with growing pauses between tries.

    A pause begins at `first_pause_seconds` and doubles with each try that gets no answer, also where the GPU answered
    meanwhile for less than the longest pause. Times are CLOCK_MONOTONIC seconds.
    """

    def __init__(self, first_pause_seconds: float = FIRST_PAUSE_SECONDS) -> None:
        self._first_pause_seconds = first_pause_seconds
        self._wedges: dict[int, _Wedge] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # when, and the pause before it

    @property
    def faults(self) -> Mapping[int, Fault]:
        """The GPUs that are left out, each with the fault that stands in place of its readings."""
        return {index: wedge.fault for index, wedge in self._wedges.items()}

    def leave_out(self, index: int, purpose: str, deadline_seconds: float, now: float) -> None:
        """A call about this GPU has not returned in time."""
        answered_at, pause = self._answered.pop(index, (now, 0.0))
        grown = 2 * pause if now - answered_at < LONGEST_PAUSE_SECONDS else 0.0
        fault = Fault(
            subject=f"gpu {index}",
            reason=REASON,
            detail=f"the driver did not answer about this GPU within {deadline_seconds:g} s ({purpose}); "
            "it is left out until another process gets an answer",
            remedy=NO_ANSWER,
            about="target",
        )
        self._begin_pause(index, fault, max(grown, self._first_pause_seconds), now)

    def due(self, now: float, still_asked: Collection[int | None]) -> tuple[int, ...]:
        """The GPUs to be tried now. While a process hangs in a call about one, another would only hang beside it."""
        return tuple(
            index for index, wedge in self._wedges.items() if now >= wedge.retry_at and index not in still_asked
        )

    def silent(self, index: int, now: float) -> None:
        """A try got no answer."""
        wedge = self._wedges.get(index)
        if wedge is not None:
            self._begin_pause(index, wedge.fault, 2 * wedge.pause_seconds, now)

    def answered(self, index: int, now: float) -> None:
        """A try got an answer: the GPU is asked as all others again."""
        wedge = self._wedges.pop(index, None)
        if wedge is not None:
            self._answered[index] = now, wedge.pause_seconds

    def _begin_pause(self, index: int, fault: Fault, pause_seconds: float, now: float) -> None:
        pause = min(pause_seconds, LONGEST_PAUSE_SECONDS)
        self._wedges[index] = _Wedge(fault, now + pause, pause)
