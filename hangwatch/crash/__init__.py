"""A rank that died: what it left, who died first, and why. Orderly ends leave nothing, and make no incident.

`read` asks the machine, `judge` decides. The kernel's log is its own word; error files and cores are the owner's, who
can lie about his own job, and about no other. Whoever complains of others in its error file followed somebody.
"""

from hangwatch.crash.artifacts import Exit, Left
from hangwatch.crash.collection import read
from hangwatch.crash.first_death import incident, judge

__all__ = ["Exit", "Left", "incident", "judge", "read"]
