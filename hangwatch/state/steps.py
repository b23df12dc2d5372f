"""The steps that change the board. Each takes a snapshot, and returns the new snapshot and the actions that follow.

The daemon carries out the actions. Incidents are opened, changed and closed only here.
"""

from hangwatch.state.actions import Action, ReadCrashArtifacts, SaveIncident
from hangwatch.state.hang_history import restore_hangs
from hangwatch.state.incident_timeline import record_note
from hangwatch.state.job_silences import drop_ended_silences, end_silence, record_silence, restore_silences
from hangwatch.state.on_counters import record_arrival_orders, record_counters
from hangwatch.state.on_crash import count_unread_crash, record_crash
from hangwatch.state.on_diagnosis import count_motion, record_capture
from hangwatch.state.on_sample import record_check, record_missing_sample, record_sample
from hangwatch.state.on_scan import record_scan
from hangwatch.state.restored_incidents import restore_incidents
