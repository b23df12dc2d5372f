"""The daemon's heap, by the kernel's counters: all threads share one heap, and freed memory is returned."""

import subprocess
import sys

import pytest

# Blocks of 20 kB are in a heap, not in separate mappings (M_MMAP_THRESHOLD). The kept blocks are the last: the heap
# cannot shrink past them.
PROGRAM = """
import sys, threading
from hangwatch.probes.node import daemon_heap as heap

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

def reserved():  # the rest of an arena is mapped without any right, up to 64 MiB
    ends = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.split()[1] == "---p"]
    return sum(int(end, 16) - int(begin, 16) > 32 << 20 for begin, end in ends)

if "share" in sys.argv:
    assert heap.share_heap()
blocks = []
inside = threading.Barrier(9)
threads = [threading.Thread(target=lambda: (inside.wait(), blocks.extend(bytes(20_000) for _ in range(200)), inside.wait())) for _ in range(8)]
for thread in threads: thread.start()
inside.wait(); inside.wait()
arenas = reserved()
kept = blocks[::50]
blocks.clear()
before = kib("VmRSS")
if "give_back" in sys.argv:
    assert heap.trim()
print(arenas, before - kib("VmRSS"))
"""


def played(*arguments: str) -> tuple[int, int]:
    """Allocate 32 MB in 8 threads of a child, free 98 %. Return its extra heaps, and the KiB returned."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, timeout=60)
    arenas, given_back = map(int, done.stdout.split())
    return arenas, given_back


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_threads_share_one_heap_and_freed_memory_is_returned() -> None:
    assert played()[0] > 1, "without it every thread has its own"
    arenas, given_back = played("share", "give_back")
    assert arenas == 0
    assert given_back > 20 << 10
