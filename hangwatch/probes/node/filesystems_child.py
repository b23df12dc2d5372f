"""Read file systems for the parent, and print each answer at once. A script, with one thread per path.

Started as `python -I -S filesystems_child.py DEADLINE_SECONDS JSON`; JSON is a list of [kind, path]. After its start it
touches no other path, so that the parent can tell which path blocks.
"""

import json
import os
import sys
import threading
import time

NAMES_LIMIT = 20_000


def answer(kind: str, path: str) -> dict[str, object]:
    """Return the answer for one path. Blocks as long as the file system does not respond."""
    started = time.monotonic()
    try:
        if kind == "devices":
            return {"devices": mapped_devices(path)}
        if kind == "names":
            return {"names": os.listdir(path)[:NAMES_LIMIT]}  # noqa: PTH208 - started often: no pathlib here
        space = os.statvfs(path)
    except OSError as error:
        return {"errno": error.errno}
    return {
        "size": space.f_blocks * space.f_frsize,
        "available": space.f_bavail * space.f_frsize,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "seconds": time.monotonic() - started,
    }


def mapped_devices(path: str) -> list[str]:
    """Return the file systems of the files in /proc/PID/maps, as major:minor like mountinfo.

    The file system of the program is the first.
    """
    with open(path, "rb") as maps:  # noqa: PTH123 - started often: no pathlib here
        rows = [line.split(None, 5) for line in maps]
    named = [row[3].decode() for row in rows if len(row) == 6 and row[5].startswith(b"/") and row[4] != b"0"]
    numbers = [device.split(":") for device in dict.fromkeys(named)]
    return [f"{int(major, 16)}:{int(minor, 16)}" for major, minor in numbers]


def ask_all(deadline_seconds: float, questions: list[tuple[str, str]]) -> None:
    """Print `[index, answer]` for each question. Return when all are answered, or at the deadline."""
    answered = threading.Semaphore(0)
    lock = threading.Lock()

    def ask(index: int, kind: str, path: str) -> None:
        line = json.dumps([index, answer(kind, path)]) + "\n"
        with lock:
            os.write(1, line.encode())
        answered.release()

    for index, (kind, path) in enumerate(questions):
        threading.Thread(target=ask, args=(index, kind, path), daemon=True).start()
    end = time.monotonic() + deadline_seconds
    for _ in questions:
        if not answered.acquire(timeout=max(0.0, end - time.monotonic())):
            break


if __name__ == "__main__":
    ask_all(float(sys.argv[1]), json.loads(sys.argv[2]))
    os.close(1)  # the parent reads the end of the output, even while a blocked thread keeps this process alive
    os._exit(0)
