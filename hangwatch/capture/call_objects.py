"""Objects of system calls: the file, pipe, socket, lock or child that a main thread waits for.

Only objects that no other thread of the process serves count. A device file or an eventfd may be served by a GPU, too.
"""

from __future__ import annotations

from hangwatch.model import CallObject, SystemCall
from hangwatch.probes.process import system_calls

_OF_MEMORY_OR_DEVICE = ("/dev/", "/memfd:")


def find_object(call: SystemCall, link: str, *, is_own: bool) -> CallObject | None:
    """Return the kind of the object of a call; None if another thread or the GPU may end the call.

    `link` is that of the first descriptor in /proc/PID/fd. `is_own`: the process itself has the other end of it, or
    holds the lock.
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
