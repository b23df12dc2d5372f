"""The incidents of a node on disk, and who may read them."""

from hangwatch.store.folders import Store, open_writable
from hangwatch.store.lock import StoreTakenError
from hangwatch.store.sharing import overflow_uid

__all__ = ["Store", "StoreTakenError", "open_writable", "overflow_uid"]
