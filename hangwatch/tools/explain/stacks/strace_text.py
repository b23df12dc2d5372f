"""Reader for the output of strace(1), with and without -f, -o, -t, -T and -y: the call in which each thread is. Pure.

A call that has not returned is the last one of its thread, without a result. Only this call is kept, with its file:
the first text in quotes, or the path that -y prints after a descriptor. The lowest thread id is that of the process.
"""

import re

from hangwatch.tools.explain.stacks.parsed_processes import Interned, ParsedThread, Place, StackText

_CALLS = (
    r"accept4?|access|clock_nanosleep|close|connect|epoll_p?wait2?|exit_group|fcntl|fdatasync|flock|fstat|fsync|futex"
    r"|getdents64|getpid|ioctl|io_uring_enter|lseek|madvise|m(?:un)?map|mprotect|nanosleep|newfstatat|open(?:at2?)?"
    r"|p?poll|pread64|pselect6|pwrite64|read(?:link|v)?|recv(?:from|msg)|restart_syscall|rt_sig\w+|sched_yield|select"
    r"|send(?:to|msg)|l?statx?|unlink|wait(?:4|id)|writev?"
)
_LINE = re.compile(
    r"^(?:\[pid +(\d{1,10})\] |(\d{1,10}) +)?(?:\d[\d:.]{4,20} )?(<\.\.\. )?"
    rf"({_CALLS})(?:\(| resumed>)(.*)$",
    re.ASCII,
)
_ATTACHED = re.compile(r"^strace: Process (\d{1,10}) (?:attached|detached)")
_RETURNED = re.compile(r"\) += (?:-?\d+|0x[0-9a-f]+|\?)(?: |<|$|\()|\) += \?")
_FILE = re.compile(r'"((?:[^"\\]|\\.){1,400})"|^\d{1,9}<([^<>]{1,400})>')
_OTHER = re.compile(r"^(?:\[pid +\d{1,10}\] |\d{1,10} +)?(?:\d[\d:.]{4,20} )?(?:\+\+\+|---) |^strace: ")


def begins(line: str) -> bool:
    """True if a text of this tool begins with this line."""
    if line.startswith("strace: "):
        return _ATTACHED.match(line) is not None
    may_begin = "(" in line and ("<unfinished" in line or ") = " in line or ")  " in line)
    return may_begin and _LINE.match(line) is not None


class Reader(StackText):
    """A reader for the threads of one process."""

    def __init__(self, interned: Interned) -> None:
        super().__init__(interned)
        self._attached = ""
        self._calls: dict[str, list[Place]] = {}

    def feed(self, line: str) -> bool:
        """Read a line. Return false if it is not part of the output."""
        if attached := _ATTACHED.match(line):
            self._attached = self._attached or attached.group(1)
            return True
        line_of_call = _LINE.match(line)
        if line_of_call is None:
            return not line.strip() or _OTHER.match(line) is not None
        of_thread, in_file, resumed, call, arguments = line_of_call.groups()
        thread_id = of_thread or in_file or self._attached or "?"
        if thread_id not in self._calls:
            self._calls[thread_id] = []
            self._keep(ParsedThread(thread_id, self._calls[thread_id]))
        has_returned = resumed is not None or _RETURNED.search(arguments) is not None
        place = Place(_describe(call, arguments), "[kernel]", None, True)
        self._calls[thread_id][:] = [] if has_returned else [place]
        return True

    def _close_process(self) -> None:
        numbers = [thread.thread_id for thread in self._threads if thread.thread_id.isdecimal()]
        lowest = min(numbers, key=int, default="?")
        self._main = next((thread for thread in self._threads if thread.thread_id == lowest), None)
        self._pid = int(lowest) if numbers else None
        super()._close_process()


def _describe(call: str, arguments: str) -> str:
    found = _FILE.search(arguments)
    return f"{call}:{found.group(1) or found.group(2)}" if found else call
