"""Actions that a step of the board requests: write an incident, read crash artifacts, or actions of the detector."""

from typing import TypeAlias

from hangwatch import detector
from hangwatch.model import Incident, Job, JobState, Value


class SaveIncident(Value, frozen=True):
    """Request to write an incident to disk.

    With `is_watched`, the newest power series of its job is added. `moved_to` is the new state of its job; None if
    only the content of the incident has changed.
    """

    incident: Incident
    is_watched: bool = True
    moved_to: JobState | None = None


class ReadCrashArtifacts(Value, frozen=True):
    """Request to read the crash artifacts of the ranks in `job.ended`, because some of them have just ended.

    `was_open`: the job had an open incident when they ended.
    """

    job: Job
    was_open: bool = False


Action: TypeAlias = detector.Action | SaveIncident | ReadCrashArtifacts
"""An action for the daemon: an action of the detector, an incident to write, or crash artifacts to read."""
