"""Read the source line of a frame of a process, with the rights of its owner. Only this owner may read the line.

py-spy is called again, because the frames of a dump have no whole paths. Nothing is paused.
"""

import sys

import msgspec

from hangwatch.formats import pyspy_json
from hangwatch.model import Fault, Frame, ProcessId
from hangwatch.probes.base import child_runner
from hangwatch.probes.process import credentials, pyspy
from hangwatch.probes.process.source_line_child import Question

_DEADLINE_SECONDS = 2.0
_RUNNER = child_runner.Runner("reader of a source line")


def read(pid: int, frame: Frame, uid: int | None = None) -> str:
    """Return the source line of a frame in a process, without indentation; "" if it cannot be read.

    There is none if the process belongs to another user than `uid` (None: any), or changes its rights meanwhile. It has
    at most 200 characters. The process may have gone on since `frame` was dumped: then there is no line.
    """
    rights = credentials.read_credentials(pid)  # before its stack: the process may execute a setuid program after it
    answer = pyspy.dump(pid, deadline_seconds=_DEADLINE_SECONDS, mode=pyspy.DumpMode(may_pause=False))
    path = pyspy_json.find_path(answer.json, frame) if answer.json is not None else None
    if (
        rights is None
        or uid not in {None, rights.uid}
        or path is None
        or not path.startswith("/")
        or frame.line is None
    ):
        return ""
    printed = _RUNNER.run(
        [sys.executable, "-I", "-m", "hangwatch.probes.process.source_line_child"],
        ProcessId(pid=pid, start_ticks=rights.start_ticks),
        share=f"uid {rights.uid}",
        deadline_seconds=_DEADLINE_SECONDS,
        question=msgspec.json.encode(Question(pid=pid, path=path, line=frame.line, rights=rights)),
    )
    if isinstance(printed, Fault) or printed.code:
        return ""
    return printed.out.decode("utf-8", "replace")
