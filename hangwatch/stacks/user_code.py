"""The frames of the user's program in a stack, and the ranks at the same line of that program. Pure."""

import itertools
from collections.abc import Sequence
from functools import lru_cache

from msgspec import structs

from hangwatch.model import Frame, Group, Grouping, Member, StackFacts, Thread
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames

_MOST_FRAMES = 16
_MOST_LINES = 8
_ENTERS = ("__enter__", "__aenter__")


def user_frames(thread: Thread) -> tuple[Frame, ...]:
    """Return the innermost frames of the user's program in a stack, at most 16. () if all frames belong to libraries.

    If the owner of a file with a short path is unknown, as in py-spy's text, it is the user unless the table contains
    its package.
    """
    places = tuple(frame.place for frame in thread.frames)
    frames = (thread.frames[index] for index in _find_user_frame_indexes(places, thread.installed_frames))
    return tuple(structs.replace(frame, locals=()) if frame.locals else frame for frame in frames)


def library_frames(thread: Thread) -> tuple[Frame, ...]:
    """Return the frames inside the innermost frame of the user's program: the library call that it has made."""
    own = _find_user_frame_indexes(tuple(frame.place for frame in thread.frames), thread.installed_frames)
    return thread.frames[: own[0]] if own else thread.frames


@lru_cache(maxsize=1 << 10)
def _find_user_frame_indexes(places: tuple[stack_frames.Place, ...], installed_frames: int | None) -> tuple[int, ...]:
    """Return the indexes of the frames of the user's program. Most ranks have the same stack, so they are cached."""
    owned = stack_frames.find_owners([file for _, file in places], installed_frames)
    found = (
        index
        for index, (place, is_users) in enumerate(zip(places, owned, strict=True))
        if is_users or (is_users is None and not _is_library(*place))
    )
    return tuple(itertools.islice(found, _MOST_FRAMES))


@lru_cache(maxsize=1 << 16)
def _is_library(function: str, file: str) -> bool:
    """True if a frame is compiled or generated code, or belongs to a package in the table."""
    is_code = not stack_frames.short_path(file).startswith("<") and not stack_frames.is_native(function, file)
    return not is_code or file.partition("/")[0].removesuffix(".py") in activity_table.packages()


def innermost_user_frame(group: Group) -> Frame | None:
    """Return the innermost frame of the user's program in the stack of a group, if possible one with a name."""
    return _innermost_named(group.members[0].stack.user_frames)


def innermost_user_frames(group: Group) -> list[Frame]:
    """Return the innermost named frame of the user's program of each rank in a group. Equal lines are returned once."""
    frames = (_innermost_named(member.stack.user_frames) for member in group.members)
    return list(dict.fromkeys(frame for frame in frames if frame is not None))


def _innermost_named(frames: Sequence[Frame]) -> Frame | None:
    named = (frame for frame in frames if stack_frames.display_name(frame.place))
    return next(named, next(iter(frames), None))


def is_in_user_code(group: Group) -> bool:
    """True if the innermost Python frame of the group belongs to the user's program, not to a library."""
    own, python = group.members[0].stack.user_frames, stack_frames.python_frames(group.frames)
    return bool(own and python) and own[0].place == python[0].place


def is_at_earlier_line(group: Group, other: Group) -> bool:
    """True if `group` is at an earlier line than `other` in a function in which both are.

    At that line, `group` runs the function's own code or enters a `with` block. The frames around the function must be
    equal, with equal lines. Such a group may wait for a lock that the other group holds. If a line is unknown, `group`
    counts as being at the earlier line.
    """
    frames, others = (stack_frames.python_frames(each.frames)[::-1] for each in (group, other))
    for place, (frame, ahead) in enumerate(zip(frames, others, strict=False)):
        if frame.place != ahead.place:
            return False
        within, beyond = frames[place + 1 :], others[place + 1 :]
        if frame.line is None or ahead.line is None:
            part, is_earlier = [inner.place for inner in within[:1]] != [inner.place for inner in beyond[:1]], True
        else:
            part, is_earlier = frame.line != ahead.line, frame.line < ahead.line
        if part:
            enters = any(stack_frames.plain_name(inner.function) in _ENTERS for inner in within)
            return (enters or not within) and is_earlier
    return False


def find_caller(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost Python frame outside the library that runs collectives: their caller; None without one."""
    python = stack_frames.python_frames(frames)
    return next((frame for frame in python if not activity_table.is_marked("collective", *frame.place)), None)


def find_framework_caller(thread: Thread) -> Frame | None:
    """Return the caller of a collective if it belongs to a framework and its line is known; None if not."""
    caller = find_caller(thread.frames) if activity_table.has_mark("collective", thread.frames) else None
    return caller if caller and caller.line is not None and caller not in user_frames(thread) else None


def call_lines(stack: StackFacts) -> tuple[Frame, ...]:
    """Return the lines that tell where a rank is: that of the call of a collective, and those of the user's program."""
    return stack.user_frames if stack.caller is None else (stack.caller, *stack.user_frames)


def split_groups_by_line(grouping: Grouping) -> Grouping:
    """Split the groups by the lines of the user's code and of calls of collectives. The largest part comes first."""
    parts = (part for group in grouping.groups for part in split_by_line(group))
    ordered = sorted(parts, key=lambda part: (-part.size, part.members[0].id.sort_key()))
    return structs.replace(grouping, groups=tuple(ordered))


def split_by_line(group: Group) -> tuple[Group, ...]:
    """Split a group by its `call_lines`. The largest part comes first.

    The group stays whole if a line is missing, or if its ranks are in more than eight different places: then they are
    running.
    """
    lines = dict.fromkeys(call_lines(member.stack) for member in group.members)
    are_known = all(frame.line is not None for places in lines for frame in places)
    if not 1 < len(lines) <= _MOST_LINES or not are_known:
        return (group,)
    parts = (make_part(group, [one for one in group.members if call_lines(one.stack) == places]) for places in lines)
    ordered = sorted(parts, key=lambda part: (-part.size, part.members[0].id.sort_key()))
    return tuple(structs.replace(part, key=f"{part.key}-{number}") for number, part in enumerate(ordered))


def make_part(group: Group, members: Sequence[Member]) -> Group:
    """Return the group with only these members, and its frames with the line numbers of the first of them.

    Only a part with the representative of the group has its workers: those of other ranks may be at other places.
    """
    left, found = list(call_lines(members[0].stack)), []
    for frame in group.frames:
        same = bool(left) and frame.place == left[0].place
        found.append(structs.replace(frame, line=left.pop(0).line) if same else frame)
    workers = group.workers if members[0].id == group.members[0].id else ()
    return structs.replace(group, members=tuple(members), frames=tuple(found), workers=workers)
