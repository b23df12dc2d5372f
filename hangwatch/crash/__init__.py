"""Crashed ranks: their crash artifacts, the rank that died first, and the cause. A normal exit makes no incident.

`collect_artifacts` reads the machine, `judge` decides. The kernel log can be trusted. The owner of the job can change
error files and cores, which affects only the verdict on that job. A rank with an error file that blames other ranks
died after another rank.
"""

from hangwatch.crash.artifacts import CrashArtifacts, Exit
from hangwatch.crash.collection import collect_artifacts
from hangwatch.crash.first_death import judge, make_incident
