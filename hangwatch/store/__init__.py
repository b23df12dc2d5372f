"""Incidents on disk: writing, reading, limits, and read access for job owners."""

from hangwatch.store.incident_folders import Store, open_writable
from hangwatch.store.sharing import overflow_uid
from hangwatch.store.store_lock import StoreTakenError
