"""Find the object of a system call: the file, pipe, socket, lock or child for which a main thread waits.

An object does not count if another thread of the process can end the call. Device files and eventfds do not count
either, because a GPU may end a call on them.
"""

from hangwatch.model import CallObject, SystemCall
from hangwatch.probes.process import system_calls

_OF_MEMORY_OR_DEVICE = ("/dev/", "/memfd:")


def find_object(call: SystemCall, link: str, *, is_own: bool) -> CallObject | None:
    """Return the kind of the object of a call; None if another thread or the GPU may end the call.

    `link` is the target of the call's first descriptor, as in /proc/PID/fd. `is_own` is true if the process itself
    has the other end of the object or holds the lock.
    """
    row = system_calls.calls_by_name().get(call.name)
    if row is None or is_own:
        return None
    if row.on == "child":
        return "child"
    if row.on in ("path", "path_at"):
        return "file"
    if row.on != "descriptor" or call.name == "ioctl" or link.startswith(_OF_MEMORY_OR_DEVICE):
        return None
    if call.kind == "locks":
        return "lock"
    if link.startswith("/"):
        return "file"
    return "pipe" if link.startswith("pipe:") else "socket" if link.startswith("socket:") else None
