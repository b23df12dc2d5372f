"""Print one line of a source file with the rights of the owner of a process.

Started as `python -I -m hangwatch.probes.process.source_line_child` with one JSON question on stdin: pid, path, line.
The path comes from the memory of that process, so its owner chooses it. The file must be regular and of bounded size.
No link is followed, except links that only root can have made. A read may block while the file system does not respond.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

from hangwatch.formats import bounded_read

MOST_BYTES = 4 << 20
MOST_CHARACTERS = 200


def become_owner(pid: int) -> None:
    """Take the user, group and further groups of a process. Raises OSError if that fails, and KeyError for a thread."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    user, group = (int(rows[name].split()[3]) for name in ("Uid", "Gid"))  # those for file systems, proc_pid_status(5)
    if os.geteuid() == 0:
        os.setgroups([int(further) for further in rows["Groups"].split()])
        os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def read_line(pid: int, path: str, line: int) -> str:
    """Return the line of the file, without indentation; "" if there is none. Raises OSError and FileError."""
    folder = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)  # as in crash_artifacts_child.debug
    become_owner(pid)
    root = Path(f"/proc/self/fd/{folder}")
    with bounded_read.open_below(root, root.joinpath(*Path(path).parts[1:]), roots_links=True) as file:
        if not 0 < os.fstat(file.fileno()).st_size <= MOST_BYTES:  # a file of a pseudo file system has size 0
            return ""
        text = next(islice(file, line - 1, None), b"").decode("utf-8", "replace").strip()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def main() -> None:
    """Answer the question on standard input."""
    question = json.load(sys.stdin)
    try:
        sys.stdout.write(read_line(question["pid"], question["path"], question["line"]))
    except (OSError, bounded_read.FileError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
