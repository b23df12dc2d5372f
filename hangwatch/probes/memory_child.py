"""Reads the memory of other processes for a parent that must never wait for it. Runs by itself.

Started as `python -I -S memory_child.py`; takes lines of JSON, [path of /proc/PID/mem, address, bytes], and answers
each with a length (4 bytes) and what it read. It ends when its parent is gone, or has asked nothing for a while.
"""

import json
import os
import select
import struct
import sys

IDLE_SECONDS = 30.0


def answer(path: str, address: int, count: int) -> bytes:
    """What stands there, or nothing; blocks for as long as a page of it does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, count, address)
        finally:
            os.close(descriptor)
    except (OSError, OverflowError):
        return b""


def serve() -> None:
    """Answer one question after the other."""
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        raw = answer(*json.loads(line))
        os.write(1, struct.pack("=I", len(raw)) + raw)


if __name__ == "__main__":
    serve()
