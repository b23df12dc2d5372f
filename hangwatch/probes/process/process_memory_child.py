"""Reads the memory of other processes for a parent that must never wait for it. Runs by itself.

Started as `python -I -S memory_child.py`; takes lines of JSON, [path of a file of /proc/PID, [[address, bytes]...]],
and answers each with the error number of open(2), the length of each piece (4 bytes each), and the pieces. It ends when
its parent is gone, or has asked nothing for a while.
"""

import json
import os
import select
import struct
import sys

IDLE_SECONDS = 30.0


def answer(path: str, places: list[tuple[int, int]]) -> tuple[int, list[bytes]]:
    """What stands at each place, as far as it is to be read; blocks for as long as a page of it does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return error.errno or -1, [b""] * len(places)
    try:
        return 0, [piece(descriptor, address, count) for address, count in places]
    finally:
        os.close(descriptor)


def piece(descriptor: int, address: int, count: int) -> bytes:
    """So many bytes, or those before what cannot be read; /proc/PID/maps comes in parts of a page."""
    parts: list[bytes] = []
    try:
        while count > 0 and (part := os.pread(descriptor, count, address)):
            parts.append(part)
            address, count = address + len(part), count - len(part)
    except (OSError, OverflowError):
        pass
    return b"".join(parts)


def serve() -> None:
    """Answer one question after the other."""
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):  # the parent has ended, perhaps in the middle of a question
            return
        number, pieces = answer(*json.loads(line))
        lengths = struct.pack(f"=i{len(pieces)}I", number, *map(len, pieces))
        try:
            sys.stdout.buffer.write(lengths + b"".join(pieces))
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # it has ended before our answer
            os._exit(0)  # Python's own end would try to write again, and complain


if __name__ == "__main__":
    serve()
