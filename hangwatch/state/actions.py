"""The actions that a step of the board asks for: write incidents, read crash artifacts, and what the detector wants."""

from __future__ import annotations

from typing import TypeAlias

from hangwatch import detector
from hangwatch.model import Incident, Job, JobState, Value


class SaveIncident(Value, frozen=True):
    """Write this incident to disk.

    With `is_watched`, the power that its job has drawn since is added. `moved_to` is the state that the incident just
    entered; None if only its content changed.
    """

    incident: Incident
    is_watched: bool = True
    moved_to: JobState | None = None


class ReadCrashArtifacts(Value, frozen=True):
    """Read the crash artifacts of the ranks in `job.ended`, of which some have just ended.

    `was_open`: an incident of the job was open then.
    """

    job: Job
    was_open: bool = False


Action: TypeAlias = detector.Action | SaveIncident | ReadCrashArtifacts
"""An action for the daemon: a request of the detector, an incident to write, or crash artifacts to read."""
