"""The steps that change the board. Each takes a snapshot, and returns the new snapshot and the actions that follow.

The daemon carries out the actions. Incidents open, change and close only here.
"""

from hangwatch.state.actions import Action, ReadRemains, SaveIncident
from hangwatch.state.incident_timeline import noted
from hangwatch.state.on_crash import crashed, left_unread
from hangwatch.state.on_diagnosis import captured, glanced, motion_count, unjudged
from hangwatch.state.on_sample import checked, sampled, unsampled
from hangwatch.state.on_scan import discovered
from hangwatch.state.restored_incidents import resumed

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
