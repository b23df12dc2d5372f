"""Keep the daemon's own heap small with mallopt(3) and malloc_trim(3).

glibc gives each thread its own heap, and keeps freed memory that lies below a used block. Here all threads share one
heap, and large blocks, such as the tables of a scan, lie outside of it. Memory freed after imports and captures is
returned to the kernel. Other C libraries (musl) lack these calls.
"""

import ctypes

_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
_LARGE_BYTES = 64 << 10
_LIBC = ctypes.CDLL(None)


def share_heap() -> bool:
    """Make all threads started later use one heap. Return False if the C library has no such setting."""
    if not hasattr(_LIBC, "mallopt"):
        return False
    return bool(_LIBC.mallopt(_M_ARENA_MAX, 1) and _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def trim() -> bool:
    """Return freed memory to the kernel; takes a few milliseconds. Return False if no memory could be returned."""
    return hasattr(_LIBC, "malloc_trim") and bool(_LIBC.malloc_trim(ctypes.c_size_t(0)))
