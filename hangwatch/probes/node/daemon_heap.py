"""The daemon's own heap, mallopt(3) and malloc_trim(3): what starting and captures used and freed goes back to the
kernel.

glibc gives each thread a heap of its own and keeps what lies under a block that is still in use. A C library without
these calls (musl) is left as it is.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
_LIBC = ctypes.CDLL(None)


def share() -> bool:
    """Let all threads that begin from now on use one heap; false where the C library has no such setting."""
    return hasattr(_LIBC, "mallopt") and bool(_LIBC.mallopt(_M_ARENA_MAX, 1))


def give_back() -> bool:
    """Give freed memory back to the kernel, which takes some milliseconds; whether there was any."""
    return hasattr(_LIBC, "malloc_trim") and bool(_LIBC.malloc_trim(ctypes.c_size_t(0)))
