"""Lines of gdb's output: threads, frames, and the stack of the thread that died. Pure."""

import re
from collections.abc import Iterable

from hangwatch.limits import MOST_DUMPED_FRAMES

THREAD = re.compile(r'^Thread (\d{1,6}) \((?:Thread 0x[0-9a-f]{1,16} \()?(?:LWP|process) (\d{1,10})\)?(?: "(.*)")?\):$')
FRAME = re.compile(r"^#(\d{1,6}) +(?:0x[0-9a-f]+ in )?(.*)$")
WHERE = re.compile(r" (?:(from) (\S+)|(at) (\S+?)(?::\d+)?)$")


def find_dead_frames(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the compiled frames of the thread that died (thread 1 of a core), innermost first.

    Frames of the C library are included.
    """
    found: list[str] = []
    is_it = False
    for line in lines:
        if thread := THREAD.match(line):
            is_it = thread.group(1) == "1"
        elif is_it and len(found) < MOST_DUMPED_FRAMES and (frame := FRAME.match(line)):
            where = WHERE.search(frame.group(2))
            file = (where.group(2) or where.group(4)).rpartition("/")[2] if where else "?"
            found.append(f"{find_name(frame.group(2))} ({file})")
    return tuple(found)


def find_name(text: str) -> str:
    """Return the function of a frame: the text before its arguments. These begin outside of template brackets."""
    depth = 0
    for index, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and index and text[index - 1] == " ":
            return text[: index - 1]
    return text
