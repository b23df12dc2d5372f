"""Print the stacks of a process as `py-spy dump --json` does. A script: `python -I pystack_child.py PID`.

The engine of pystack reads memory with process_vm_readv(2): without ptrace, a stop or a signal. The command `pystack`
is not used: it opens each source file by the name in the target's code. The target's owner chooses this name, for
example a FIFO or a device. The engine also opens some mapped files by path, so those are checked first.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

MOST_MAPS_BYTES = 16 << 20
MOST_FRAMES = 16384  # of one thread


def find_replaced_file(pid: int) -> str | None:
    """Return the path of a mapped file that pystack must not open; None if there is none.

    That is a path which is no longer a regular file, or a Python file that was replaced. See proc_pid_maps(5).
    """
    with Path(f"/proc/{pid}/maps").open("rb") as file:
        rows = [line.split(None, 5) for line in file.read(MOST_MAPS_BYTES).splitlines()]
    paths = {row[5]: int(row[4]) for row in rows if len(row) == 6 and row[5].startswith(b"/")}
    for path, inode in paths.items():
        try:
            status = os.lstat(path)
        except OSError:
            continue  # in another mount namespace, or deleted: it cannot be opened
        is_device = stat.S_ISCHR(status.st_mode) and path.startswith(b"/dev/")  # CUDA maps its devices
        is_another = b"python" in path.rpartition(b"/")[2] and status.st_ino != inode
        if is_another or not (stat.S_ISREG(status.st_mode) or is_device):
            return os.fsdecode(path)
    return None


def plain(text: Any) -> str:
    """Return a text without characters that UTF-8 cannot hold."""
    return str(text).encode("utf-8", "replace").decode()


def stacks(pid: int) -> list[dict[str, Any]]:
    """Return the threads of the main interpreter, innermost frame first. Raises the errors of the engine."""
    from pystack.engine import NativeReportingMode, StackMethod, get_process_threads

    engine_threads = get_process_threads(
        pid, stop_process=False, native_mode=NativeReportingMode.OFF, locals=False, method=StackMethod.AUTO
    )
    threads = []
    for thread in engine_threads:
        if getattr(thread, "interpreter_id", None):  # not the main interpreter, which is 0
            continue
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
    """Print the stacks of process `pid`. Return the exit status: 0 with JSON on stdout, 1 with a message on stderr."""
    try:
        if (path := find_replaced_file(pid)) is not None:
            raise ValueError(f"the mapped file {path} is not the file at this path")
        print(json.dumps(stacks(pid)))
    except Exception as error:
        print(plain(error).partition("\n")[0][:400] or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
