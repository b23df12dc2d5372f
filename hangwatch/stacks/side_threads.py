"""Threads of a rank beside its main thread: their names and stacks, and the work for which others may wait. Pure."""

import itertools
from collections.abc import Sequence

from msgspec import structs

from hangwatch.model import Frame, Group, KernelFacts, ProcessDump, RecorderFacts, Stack, StackFacts, Thread
from hangwatch.stacks import activity, activity_table
from hangwatch.stacks.frames import plain_name
from hangwatch.stacks.user_code import user_frames

_EXECUTOR = "concurrent/futures/thread.py"
_STARTS = ("threading.py", _EXECUTOR)


def name_thread(thread: Thread) -> str:
    """Return the name of a thread, or its number if the source has no names."""
    return thread.name or thread.thread_id


def make_stack(thread: Thread, table: activity.Table) -> Stack:
    """Return the stack of a thread with its activity, by which it explains a group."""
    return Stack(
        name=name_thread(thread),
        frames=thread.frames,
        activity=table.classify_thread(_remove_start_frames(thread)).activity,
    )


def _remove_start_frames(thread: Thread) -> Thread:
    """Return the thread without the frames that started it, which look like a wait, unless it has no other frames."""
    frames = thread.frames
    while frames and not thread.is_main and frames[-1].file.endswith(_STARTS):
        frames = frames[:-1]
    return structs.replace(thread, frames=frames) if frames else thread


def find_wait_of_thread(group: Group, name: str) -> str:
    """Return the kind of wait of a thread by its stack; "unknown" if it is not shown."""
    activities = (stack.activity for stack in group.threads if stack.name == name)
    return activity_table.find_activity(next(activities, "unknown")).waits_for


def decides(group: Group, name: str) -> bool:
    """True if the main threads of a group wait for this thread alone, and its stack describes the group."""
    return [(stack.name, stack.frames) for stack in group.awaited] == [(name, group.frames)]


def with_thread(group: Group, name: str) -> Group:
    """Return the group with the stack of this thread instead of its deciding one; "" for the deciding one.

    It has no stack if the thread is not among the shown ones. The kernel's facts about the main thread are left out.
    """
    if not name:
        return group
    stack = next((stack for stack in group.threads if stack.name == name), Stack(name, ()))
    facts = StackFacts(user_frames=user_frames(Thread(name, name, stack.frames)))
    members = (
        structs.replace(member, stack=facts, kernel=KernelFacts(state=member.kernel.state)) for member in group.members
    )
    return structs.replace(
        group,
        activity=stack.activity,
        operation=next((plain_name(frame.function) for frame in stack.frames), None),
        waits_for=find_wait_of_thread(group, name),
        members=tuple(members),
        frames=stack.frames,
        threads=(),
        awaited=(),
    )


def is_group_thread_busy(rounds: Sequence[ProcessDump], recorder: RecorderFacts, table: activity.Table) -> bool:
    """True if a thread that uses a process group, for which others may wait, was at work in the last round."""
    users = {group.thread for library in recorder.libraries for group in library.groups} - {""}
    threads = [thread for thread in rounds[-1].threads if name_thread(thread) in users] if users else []
    activities = (table.classify_thread(_remove_start_frames(thread)) for thread in threads)
    return any(doing.row.waits_for in ("nothing", "unknown") for doing in activities)


def find_stuck_task(rounds: Sequence[ProcessDump], table: activity.Table) -> Frame | None:
    """Return the frame of the user's code in which an executor's task was in all rounds, at least two; else None."""
    if len(rounds) < 2:
        return None
    found = [{frame: None for thread in dump.threads for frame in _find_task_frames(thread, table)} for dump in rounds]
    return next((frame for frame in found[-1] if all(frame in one for one in found)), None)


def _find_task_frames(thread: Thread, table: activity.Table) -> tuple[Frame, ...]:
    """Return the innermost frame of the user's code in the task of an executor thread; () if the thread has no task."""
    frames = tuple(itertools.takewhile(lambda frame: not frame.file.endswith(_EXECUTOR), thread.frames))
    if thread.is_main or len(frames) == len(thread.frames):
        return ()
    task = structs.replace(thread, frames=frames)
    if table.classify_thread(task).row.waits_for not in ("unknown", "nothing", "lock"):
        return ()
    return user_frames(task)[:1]
