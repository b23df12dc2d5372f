"""Pure: does a job stand still for a reason that is no hang? By measurement, whatever its functions are called."""

from __future__ import annotations

from hangwatch.model import Grouping, JobState, Signature


def resting_state(grouping: Grouping) -> JobState | None:
    """Suspended where every rank was stopped or frozen in every round; None for a job that is judged as others are."""
    members = grouping.members
    if members and all(member.signature is Signature.STOPPED for member in members):
        return JobState.SUSPENDED
    return None
