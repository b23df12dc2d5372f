"""Crashed ranks: their crash artifacts, the rank that died first, and the cause. A normal exit makes no incident.

`collect_artifacts` reads the machine, `judge` decides. The kernel log can be trusted. Error files and cores belong to
the owner of the job and can only affect the verdict on that job. A rank with an error file that blames other ranks died
after one.
"""

from hangwatch.crash.artifacts import CrashArtifacts, Exit
from hangwatch.crash.collection import collect_artifacts
from hangwatch.crash.first_death import judge, make_incident

__all__ = ["CrashArtifacts", "Exit", "collect_artifacts", "judge", "make_incident"]
