"""Read file systems for the parent, and write each answer at once. A script, with one thread per path.

Started as `python -I -S filesystems_child.py DEADLINE_SECONDS KIND PATH [KIND PATH]...`. An answer is its length (4
bytes) and `(number of the question, answer)` in the format of marshal. After its start it touches no other path, so
that the parent can tell which path blocks. It does without json and threading, which would double the CPU of its start.
"""

import _thread
import marshal
import os
import stat
import sys
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
        if kind == "file":
            status = os.lstat(path)
            target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""  # noqa: PTH115 - no pathlib here
            device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
            return {"mode": status.st_mode, "device": device, "target": target}
        space = os.statvfs(path)
    except OSError as error:
        return {"errno": error.errno}
    return {
        "size_bytes": space.f_blocks * space.f_frsize,
        "available_bytes": space.f_bavail * space.f_frsize,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "seconds": time.monotonic() - started,
    }


def mapped_devices(path: str) -> list[str]:
    """Return the file systems of mapped files (/proc/PID/maps), as major:minor; that of the program is the first."""
    with open(path, "rb") as maps:  # noqa: PTH123 - started often: no pathlib here
        rows = [line.split(None, 5) for line in maps]
    named = [row[3].decode() for row in rows if len(row) == 6 and row[5].startswith(b"/") and row[4] != b"0"]
    numbers = [device.split(":") for device in dict.fromkeys(named)]
    return [f"{int(major, 16)}:{int(minor, 16)}" for major, minor in numbers]


def answer_all(deadline_seconds: float, questions: list[tuple[str, str]]) -> None:
    """Write `(number, answer)` for each question. Return when all are answered, or at the deadline."""
    lock, done = _thread.allocate_lock(), _thread.allocate_lock()
    open_questions = set(range(len(questions)))

    def write(number: int, kind: str, path: str) -> None:
        message = marshal.dumps((number, answer(kind, path)))
        with lock:
            os.write(1, len(message).to_bytes(4, sys.byteorder) + message)
            open_questions.discard(number)
            if not open_questions:
                done.release()

    done.acquire()
    for number, (kind, path) in enumerate(questions):
        _thread.start_new_thread(write, (number, kind, path))
    done.acquire(timeout=deadline_seconds)


if __name__ == "__main__":
    answer_all(float(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2], strict=True)))
    # The parent reads the end of the output, even while a blocked thread keeps this process alive
    os.close(1)
    os._exit(0)
