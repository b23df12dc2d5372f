"""Keeps the daemon's own heap small: mallopt(3) and malloc_trim(3).

glibc gives each thread a heap of its own, and keeps freed memory below a block that is in use. So all threads share one
heap, and memory used by imports and captures is given back. Other C libraries (musl) lack these calls.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
_LIBC = ctypes.CDLL(None)


def share_heap() -> bool:
    """Let all later threads use one heap; False if the C library has no such setting."""
    return hasattr(_LIBC, "mallopt") and bool(_LIBC.mallopt(_M_ARENA_MAX, 1))


def trim() -> bool:
    """Give freed memory back to the kernel, which takes some milliseconds. Return False if there was none."""
    return hasattr(_LIBC, "malloc_trim") and bool(_LIBC.malloc_trim(ctypes.c_size_t(0)))
