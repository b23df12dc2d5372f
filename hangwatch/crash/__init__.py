"""Crashed ranks: their crash artifacts, the rank that died first, and the cause. A normal exit makes no incident.

`read` reads the machine, `judge` decides. The kernel log can be trusted. Error files and cores belong to the owner of
the job and can only affect the verdict on that job. A rank with an error file that blames other ranks died after one.
"""

from hangwatch.crash.artifacts import Exit, Left
from hangwatch.crash.collection import read
from hangwatch.crash.first_death import incident, judge

__all__ = ["Exit", "Left", "incident", "judge", "read"]
