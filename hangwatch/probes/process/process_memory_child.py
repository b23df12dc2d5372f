"""Read the memory of other processes for a parent that must never wait for it. A script.

Started as `python -I -S process_memory_child.py SECONDS`. A question is its length (4 bytes) and a list in the format
of marshal, with one row for each file: [path of a file of /proc/PID, [[address, bytes]...], start ticks of the
process]. The answer for each file is an errno, the length of each piece (4 bytes each), and the pieces. A file with
start ticks stays open until it is not read for a minute. The process ends when its parent is gone, or after SECONDS
without a question. It does without json and contextlib, which would double the CPU of its start.
"""

import errno
import marshal
import os
import resource
import select
import struct
import sys
import time

KEPT_SECONDS = 60.0
kept: dict[tuple[str, int], tuple[int, float]] = {}  # descriptor, time of its last use


def answer(path: str, places: list[tuple[int, int]], start_ticks: int) -> tuple[int, list[bytes]]:
    """Return the errno of open(2), 0 if it succeeded, and each place's content. Blocks while a page is silent."""
    key = path, start_ticks
    try:
        descriptor = kept[key][0] if key in kept else os.open(path, os.O_RDONLY)
    except OSError as error:
        return error.errno or -1, [b""] * len(places)
    if start_ticks and key not in kept and read_start_ticks(os.path.dirname(path)) != start_ticks:  # noqa: PTH120
        os.close(descriptor)
        return errno.ESRCH, [b""] * len(places)
    if start_ticks:
        kept[key] = descriptor, time.monotonic()
    try:
        return 0, [piece(descriptor, address, count) for address, count in places]
    finally:
        if not start_ticks:
            os.close(descriptor)


def read_start_ticks(folder: str) -> int:
    """Return the start time of a process in clock ticks, field 22 of proc_pid_stat(5); 0 if it has ended."""
    try:
        with open(f"{folder}/stat", "rb") as stat:  # noqa: PTH123
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def close_unused() -> None:
    """Close the kept files that were not read for a minute."""
    now = time.monotonic()
    for key in [key for key, (_, used_at) in kept.items() if now - used_at > KEPT_SECONDS]:
        os.close(kept.pop(key)[0])


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
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        pass
    while select.select([0], [], [], float(sys.argv[1]))[0]:
        length = int.from_bytes(sys.stdin.buffer.read(4), sys.byteorder)
        question = sys.stdin.buffer.read(length)
        if not question or len(question) < length:  # the parent has ended, perhaps in the middle of a question
            return
        files = marshal.loads(question)  # noqa: S302 - from our own parent, which runs the same Python
        close_unused()
        try:
            for file in files:
                number, pieces = answer(*file)
                lengths = struct.pack(f"=i{len(pieces)}I", number, *map(len, pieces))
                sys.stdout.buffer.write(lengths + b"".join(pieces))
                sys.stdout.buffer.flush()
        except BrokenPipeError:  # the parent has ended before it read the answer
            os._exit(0)  # a normal exit would try to write again, and print an error


if __name__ == "__main__":
    serve()
