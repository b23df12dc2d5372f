"""Read the source line of a frame of a process, with the rights of its owner. Only for a person who dumps a process.

py-spy is called again, because the frames of a dump have no whole paths. Nothing is paused.
"""

from __future__ import annotations

import json
import sys

from hangwatch.formats import pyspy_json
from hangwatch.model import Fault, Frame
from hangwatch.probes import child
from hangwatch.probes.process import procfs, pyspy

_DEADLINE_SECONDS = 2.0
_RUNNER = child.Runner("reader of a source line")


def read(pid: int, frame: Frame) -> str:
    """Return the source line of a frame in a process, without indentation; "" if it cannot be read.

    It has at most 200 characters. The process may have gone on since `frame` was dumped: then there is no line.
    """
    state = procfs.read_state(pid)
    answer = pyspy.dump(pid, deadline_seconds=_DEADLINE_SECONDS, mode=pyspy.DumpMode(may_pause=False))
    path = pyspy_json.find_path(answer.json, frame) if answer.json is not None else None
    if state is None or path is None or not path.startswith("/") or frame.line is None:
        return ""
    printed = _RUNNER.run(
        [sys.executable, "-I", "-m", "hangwatch.probes.process.source_line_child"],
        state[0],
        share=f"uid {procfs.read_user_id(pid)}",
        deadline_seconds=_DEADLINE_SECONDS,
        question=json.dumps({"pid": pid, "path": path, "line": frame.line}).encode(),
    )
    if isinstance(printed, Fault) or printed.code or procfs.read_state(pid) is None:
        return ""
    return printed.out.decode("utf-8", "replace")
