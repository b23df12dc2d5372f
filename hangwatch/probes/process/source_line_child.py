"""Print one line of a source file with the rights of the owner of a process.

Started as `python -I -m hangwatch.probes.process.source_line_child` with one JSON question on stdin: pid, path, line,
rights. The path comes from the memory of that process, so its owner chooses it. The rights are those that the process
had before its stack was read; if it has others now, there is no line. The daemon cannot take these rights: it reads
only files that belong to that user. The file must be regular and of bounded size. No link is followed, except links
that only root can have made. A read may block while the file system does not respond.
"""

import os
import sys
from itertools import islice
from pathlib import Path

from hangwatch.formats import bounded_read, decoding
from hangwatch.model import Value
from hangwatch.probes.process.credentials import Credentials, read_credentials, take_rights

MOST_BYTES = 4 << 20
MOST_CHARACTERS = 200


class Question(Value, frozen=True):
    """The line to read, and the rights to read it with."""

    pid: int
    path: str
    line: int
    rights: Credentials


def read_line(question: Question) -> str:
    """Return the line of the file, without indentation; "" if there is none, or if the process has other rights now.

    Raises OSError and FileError.
    """
    rights = question.rights
    if read_credentials(question.pid) != rights:
        return ""
    folder = os.open(f"/proc/{question.pid}/root", os.O_PATH | os.O_DIRECTORY)  # as in crash_artifacts_child.debug
    is_theirs = True
    try:
        take_rights(rights.uid, rights.gid, rights.groups)
    except PermissionError:  # the daemon may not: only a file of that user is read
        is_theirs = False
    root = Path(f"/proc/self/fd/{folder}")
    below = root.joinpath(*Path(question.path).parts[1:])
    with bounded_read.open_below(root, below, roots_links=True) as file:
        status = os.fstat(file.fileno())  # a file of a pseudo file system has size 0
        if not 0 < status.st_size <= MOST_BYTES or not (is_theirs or status.st_uid == rights.uid):
            return ""
        text = next(islice(file, question.line - 1, None), b"").decode("utf-8", "replace").strip()
    if read_credentials(question.pid) != rights:
        return ""
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def main() -> None:
    """Answer the question on standard input."""
    question = decoding.decode_json(sys.stdin.buffer.read(), Question)
    try:
        sys.stdout.write(read_line(question))
    except (OSError, bounded_read.FileError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
