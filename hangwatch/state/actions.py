"""What is to be done after a step: incidents to keep, dead ranks to look after, and what the detector asks for."""

from __future__ import annotations

from typing import TypeAlias

from hangwatch import detector
from hangwatch.model import Incident, Job, JobState, Value


class SaveIncident(Value, frozen=True):
    """Write this incident to disk; `is_watched`: with the power that its job has drawn meanwhile.

    `moved_to` is the state to which it has just moved, None where it is only told anew.
    """

    incident: Incident
    is_watched: bool = True
    moved_to: JobState | None = None


class ReadRemains(Value, frozen=True):
    """Read what the ranks in `job.ended` left, some of which have just been found gone."""

    job: Job


Action: TypeAlias = detector.Action | SaveIncident | ReadRemains
"""What is to be done about it: what the detector asks for, incidents to keep, and dead ranks to look after."""
