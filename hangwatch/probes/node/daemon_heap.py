"""Keep the daemon's own heap small with mallopt(3) and malloc_trim(3).

glibc gives each thread its own heap, and keeps freed memory that lies below a used block. Here all threads share one
heap. Memory freed after imports and captures is returned to the kernel. Other C libraries (musl) lack these calls.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
_LIBC = ctypes.CDLL(None)


def share_heap() -> bool:
    """Make all threads started later use one heap. Return False if the C library has no such setting."""
    return hasattr(_LIBC, "mallopt") and bool(_LIBC.mallopt(_M_ARENA_MAX, 1))


def trim() -> bool:
    """Return freed memory to the kernel; takes a few milliseconds. Return False if no memory could be returned."""
    return hasattr(_LIBC, "malloc_trim") and bool(_LIBC.malloc_trim(ctypes.c_size_t(0)))
