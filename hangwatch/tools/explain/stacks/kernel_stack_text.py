"""Reader for pasted /proc/PID/stack files: the kernel's part of a main thread's stack, innermost first. Pure.

The format is that of proc_pid_stack in the kernel's fs/proc/base.c, until 4.17 with addresses. The pid is in the line
of the command before it, or in that of head(1) or tail(1).
"""

import re

from hangwatch.tools.explain.stacks.faulthandler_text import NO_NUMBER
from hangwatch.tools.explain.stacks.parsed_processes import ParsedThread, Place, StackText

_FRAME = re.compile(r"^\s{0,4}\[<[0-9a-f]{1,16}>\] ([\w.]{1,200})\+0x[0-9a-f]{1,8}/0x[0-9a-f]{1,8}")
_END = re.compile(r"^\s{0,4}\[<f{8,16}>\] 0xf{8,16}$")
_HEADING = re.compile(r"/proc/(\d{1,10})/(?:task/(\d{1,10})/)?stack\b")
_ENTRY = ("do_syscall_64", "entry_SYSCALL", "x64_sys_call", "__x64_sys", "el0", "do_el0", "invoke_syscall", "__arm64_")
"""The outermost functions: the entry into the kernel is the same for all calls."""


def begins(line: str) -> bool:
    """True if a text of this kind begins with this line."""
    return _FRAME.match(line) is not None or ("/stack" in line and _HEADING.search(line) is not None)


class Reader(StackText):
    """A reader for one or more processes that follow each other."""

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of such a file."""
        if heading := _HEADING.search(line):
            pid, thread_id = heading.groups()
            if thread_id is None or int(pid) != self._pid:
                self._close_process()
            self._begin(ParsedThread(thread_id or pid, []))
            self._pid = int(pid)
            return True
        frame = _FRAME.match(line)
        if frame and self._thread is None:
            self._begin(ParsedThread(NO_NUMBER, []))
        if frame and not frame.group(1).startswith(_ENTRY):
            self._add(Place(frame.group(1), "[kernel]", None, True))
        return frame is not None or not line.strip() or _END.match(line) is not None

    def _keep(self, thread: ParsedThread) -> None:
        super()._keep(thread)
        if self._main is None or thread.thread_id == str(self._pid):
            self._main = thread
