"""Shorten the paths of calls in labels of metrics and /status, which users without rights on a job read. Pure."""

import shlex
from collections.abc import Iterator

from hangwatch import words
from hangwatch.model import Grouping

_LONGEST_SHOWN = 80  # characters of a path in a sentence, see `stuck_on`


def shorten_paths(text: str, grouping: Grouping) -> str:
    """Return the text with the last two parts of each path of a call: folders may have names of customers."""
    for path in sorted({*_paths(grouping)}, key=len, reverse=True):
        text = text.replace(f"--path {shlex.quote(path)}`", "--path FILE` with the path in the report,")
        short = "/".join(("…", *path.split("/")[-2:]))
        for shown in (path, words.cut_middle(path, _LONGEST_SHOWN)):
            text = text.replace(shown, short)
    return text


def _paths(grouping: Grouping) -> Iterator[str]:
    """Yield the paths with more than two parts of the calls of all ranks and of their workers."""
    for member in grouping.members:
        worker, lock = member.kernel.worker_call, member.waits.file_lock
        every = [lock.path] if lock is not None else []
        for call in (member.kernel.call, worker.call if worker is not None else None):
            if call is not None:
                every += [call.path, call.file_lock.path if call.file_lock is not None else ""]
                every += [target.what for target in call.behind if target.kind == "file"]
        yield from (path for path in every if path.count("/") > 2)
