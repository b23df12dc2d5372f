"""Pure: which frames of a stack are the user's own program, and which ranks stand at the same line of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from msgspec import structs

from hangwatch.model import Frame, Group, Grouping, Thread
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames

_MOST_FRAMES = 16
_MOST_LINES = 8
_ENTERS = ("__enter__", "__aenter__")


def user_frames(thread: Thread) -> tuple[Frame, ...]:
    """The innermost frames of the user's own program in a stack, 16 at most; none where only libraries are known.

    Where the paths do not tell, as in py-spy's text, what is of no package that the table knows is the user's.
    """
    places = tuple(frame.place for frame in thread.frames)
    frames = (thread.frames[index] for index in _users(places, thread.installed_frames))
    return tuple(structs.replace(frame, locals=()) if frame.locals else frame for frame in frames)


@lru_cache(maxsize=1 << 10)
def _users(places: tuple[stack_frames.Place, ...], installed_frames: int | None) -> tuple[int, ...]:
    """Which of these frames are the user's, remembered: most ranks stand alike."""
    owned = stack_frames.owned_by_user([file for _, file in places], installed_frames)
    found = (
        index
        for index, (place, is_users) in enumerate(zip(places, owned, strict=True))
        if is_users or (is_users is None and not _is_library(*place))
    )
    return tuple(itertools.islice(found, _MOST_FRAMES))


@lru_cache(maxsize=1 << 16)
def _is_library(function: str, file: str) -> bool:
    """Whether a frame is compiled, generated, or of a package that the table knows."""
    is_code = not stack_frames.short_path(file).startswith("<") and not stack_frames.is_native(function, file)
    return not is_code or file.partition("/")[0].removesuffix(".py") in activity.packages()


def python_frames(group: Group) -> list[Frame]:
    """The frames by which a group is shown, without compiled ones."""
    return [frame for frame in group.frames if not stack_frames.is_native(frame.function, frame.file)]


def own_frame(group: Group) -> Frame | None:
    """The innermost frame of the user's program that has a name, at the line of the rank that stands for the group."""
    frames = group.members[0].stack.user_frames
    named = (frame for frame in frames if stack_frames.called(frame.place))
    return next(named, next(iter(frames), None))


def is_in_user_code(group: Group) -> bool:
    """Whether its innermost Python frame is the user's: no library's function stands inside it."""
    own, python = group.members[0].stack.user_frames, python_frames(group)
    return bool(own and python) and own[0].place == python[0].place


def is_before(group: Group, other: Group) -> bool:
    """Whether it stands, or enters a `with` block, at an earlier line of the function in which the other one went on.

    Around that both stand in the same functions at the same lines. So stands who waits for a lock that the other holds,
    or may, where a line is not known.
    """
    own, others = python_frames(group)[::-1], python_frames(other)[::-1]
    for place, (frame, ahead) in enumerate(zip(own, others, strict=False)):
        if frame.place != ahead.place:
            return False
        within, beyond = own[place + 1 :], others[place + 1 :]
        if frame.line is None or ahead.line is None:
            part, is_earlier = [one.place for one in within[:1]] != [one.place for one in beyond[:1]], True
        else:
            part, is_earlier = frame.line != ahead.line, frame.line < ahead.line
        if part:
            enters = any(stack_frames.plain_name(one.function) in _ENTERS for one in within)
            return (enters or not within) and is_earlier
    return False


def caller(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside of the library that runs collectives: who called it."""
    for frame in frames:
        is_library_call = activity.is_marked("collective", frame.function, frame.file)
        if not is_library_call and not stack_frames.is_native(frame.function, frame.file):
            return frame
    return None


def by_line(grouping: Grouping) -> Grouping:
    """The grouping with groups that agree in the lines of the user's code, too, largest first."""
    parts = (part for group in grouping.groups for part in split_by_line(group))
    ordered = sorted(parts, key=lambda part: (-part.size, part.members[0].id.sort_key()))
    return structs.replace(grouping, groups=tuple(ordered))


def split_by_line(group: Group) -> tuple[Group, ...]:
    """The group as parts that stand at the same lines of the user's code, largest first; whole where they agree.

    So it is where lines are missing, and where there are more than eight: those are of ranks that run.
    """
    lines = dict.fromkeys(member.stack.user_frames for member in group.members)
    are_known = all(frame.line is not None for own in lines for frame in own)
    if not 1 < len(lines) <= _MOST_LINES or not are_known:
        return (group,)
    parts = (
        structs.replace(
            group,
            members=tuple(member for member in group.members if member.stack.user_frames == own),
            frames=_at_lines(group.frames, own),
        )
        for own in lines
    )
    ordered = sorted(parts, key=lambda part: (-part.size, part.members[0].id.sort_key()))
    return tuple(structs.replace(part, key=f"{part.key}-{number}") for number, part in enumerate(ordered))


def _at_lines(frames: Sequence[Frame], own: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of one rank, with the lines at which another one stands in the same functions."""
    left, found = list(own), []
    for frame in frames:
        same = bool(left) and frame.place == left[0].place
        found.append(structs.replace(frame, line=left.pop(0).line) if same else frame)
    return tuple(found)
