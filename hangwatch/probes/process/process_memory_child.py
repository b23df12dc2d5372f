"""Read the memory of other processes for a parent that must never wait for it. A script.

Started as `python -I -S process_memory_child.py`. A question is a line of JSON: [path of a file of /proc/PID,
[[address, bytes]...]]. The answer is the errno of open(2), the length of each piece (4 bytes each), and the pieces. The
process ends when its parent is gone, or after 30 s without a question.
"""

import json
import os
import select
import struct
import sys

IDLE_SECONDS = 30.0


def answer(path: str, places: list[tuple[int, int]]) -> tuple[int, list[bytes]]:
    """Return the errno of open(2), 0 if it succeeded, and the readable content at each place.

    Blocks while a page does not respond.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return error.errno or -1, [b""] * len(places)
    try:
        return 0, [piece(descriptor, address, count) for address, count in places]
    finally:
        os.close(descriptor)


def piece(descriptor: int, address: int, count: int) -> bytes:
    """Return up to `count` bytes. A read of /proc/PID/maps returns at most a page, so it is repeated."""
    parts: list[bytes] = []
    try:
        while count > 0 and (part := os.pread(descriptor, count, address)):
            parts.append(part)
            address, count = address + len(part), count - len(part)
    except (OSError, OverflowError):
        pass
    return b"".join(parts)


def serve() -> None:
    """Answer questions in order, until the parent is gone or idle."""
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):  # the parent has ended, perhaps in the middle of a question
            return
        number, pieces = answer(*json.loads(line))
        lengths = struct.pack(f"=i{len(pieces)}I", number, *map(len, pieces))
        try:
            sys.stdout.buffer.write(lengths + b"".join(pieces))
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the parent has ended before it read the answer
            os._exit(0)  # a normal exit would try to write again, and print an error


if __name__ == "__main__":
    serve()
