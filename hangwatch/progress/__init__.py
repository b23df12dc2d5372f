"""What the beats do to the jobs on the board, in pure steps: Snapshot -> Snapshot, and what is to be done about it.

Each step returns the new snapshot and the actions that follow; the daemon does them. Incidents open, change and close
here, and nowhere else.
"""

from hangwatch.progress.actions import Action, ReadRemains, SaveIncident
from hangwatch.progress.crashes import crashed, left_unread
from hangwatch.progress.incidents import noted
from hangwatch.progress.left_open import resumed
from hangwatch.progress.looks import captured, glanced, motion_count, unjudged
from hangwatch.progress.samples import checked, sampled, unsampled
from hangwatch.progress.scan import discovered

__all__ = [
    "Action",
    "ReadRemains",
    "SaveIncident",
    "captured",
    "checked",
    "crashed",
    "discovered",
    "glanced",
    "left_unread",
    "motion_count",
    "noted",
    "resumed",
    "sampled",
    "unjudged",
    "unsampled",
]
