"""Prints the stacks of one process as `py-spy dump --json` does. Runs by itself, as `python -I pystack_child.py PID`.

The engine of pystack reads memory with process_vm_readv(2): without ptrace, a stop or a signal. Its command is not
used, since that opens each source file by the name that the target's code gives, which its owner writes: a FIFO, a
device. Of the files that the target has mapped the engine opens some by their paths, so these are looked at first.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

MOST_MAPS_BYTES = 16 << 20
MOST_FRAMES = 16384  # of one thread


def strange_file(pid: int) -> str | None:
    """A path among the mapped files that leads to something else here; see proc_pid_maps(5)."""
    with Path(f"/proc/{pid}/maps").open("rb") as file:
        rows = [line.split(None, 5) for line in file.read(MOST_MAPS_BYTES).splitlines()]
    paths = {row[5]: int(row[4]) for row in rows if len(row) == 6 and row[5].startswith(b"/")}
    for path, inode in paths.items():
        try:
            found = os.lstat(path)
        except OSError:
            continue  # of another mount namespace, or deleted: it cannot be opened
        is_device = stat.S_ISCHR(found.st_mode) and path.startswith(b"/dev/")  # CUDA maps its devices
        is_another = b"python" in path.rpartition(b"/")[2] and found.st_ino != inode
        if is_another or not (stat.S_ISREG(found.st_mode) or is_device):
            return os.fsdecode(path)
    return None


def plain(text: Any) -> str:
    """Text that JSON and UTF-8 can hold."""
    return str(text).encode("utf-8", "replace").decode()


def stacks(pid: int) -> list[dict[str, Any]]:
    """The threads with Python frames, frames innermost first. Raises what the engine raises."""
    from pystack.engine import NativeReportingMode, StackMethod, get_process_threads

    found = get_process_threads(
        pid, stop_process=False, native_mode=NativeReportingMode.OFF, locals=False, method=StackMethod.AUTO
    )
    threads = []
    for thread in found:
        frames = [
            {
                "name": plain(frame.code.scope),
                "filename": plain(frame.code.filename),
                "line": frame.code.location.lineno,
            }
            for frame, _ in zip(thread.frames, range(MOST_FRAMES), strict=False)
        ]
        threads.append({"os_thread_id": thread.tid, "owns_gil": thread.holds_the_gil > 0, "frames": frames[::-1]})
    return threads


def main(pid: int) -> int:
    """The exit status: 0 with JSON on stdout, 1 with a complaint on stderr."""
    try:
        if (path := strange_file(pid)) is not None:
            raise ValueError(f"what it has mapped as {path} is another file here")
        print(json.dumps(stacks(pid)))
    except Exception as error:
        print(plain(error).partition("\n")[0][:400] or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
