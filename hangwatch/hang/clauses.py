"""Pure: what the ranks of a group do, as a clause after their names."""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch import words
from hangwatch.hang import activity
from hangwatch.hang import frames as stack_frames
from hangwatch.hang.user_code import caller, own_frame
from hangwatch.model import BLOCKED_STATES, STOPPED_STATES, FileLock, Frame, Group, Stack

_SINGULAR = (("is ", "are "), ("waits ", "wait "), ("stands ", "stand "), ("sleeps", "sleep"))


def does(group: Group, *, several: bool = False) -> str:
    """What the ranks of a group do: "is loading data (DataLoader)", for several "are loading data (DataLoader)"."""
    worker = _at_work(group)
    if worker is not None and worker.own is not None:
        if several:
            return f"wait for their loader workers, in {worker.own}"
        return f"waits for its loader worker ({_which(worker)}) in {worker.own}"
    clause = _waits_for_file_lock(group) or activity.says(group.activity, group.operation)
    if group.waits_for == "gpu" and activity.known(group.activity).waits_for != "gpu":
        clause = f"waits for its GPU in {_innermost(group)}"  # by measurement, see `hang.motion`
    if several:
        for singular, plural in _SINGULAR:
            if clause.startswith(singular):
                return plural + clause[len(singular) :].replace("its GPU", "their GPUs")
    return clause


def _waits_for_file_lock(group: Group) -> str | None:
    """By measurement, see `probes.file_locks`; None where not all of its ranks wait for the same one."""
    locks = {member.file_lock for member in group.members}
    lock = locks.pop() if len(locks) == 1 else None
    return None if lock is None else f"waits for the lock of {lock.path}{_held_by(lock)}"


def _held_by(lock: FileLock) -> str:
    if lock.holder_pid is None:
        return ", whose holder is not listed: it has ended and left it to a process that it started, or is elsewhere"
    return f", which pid {lock.holder_pid} ({lock.holder_comm}) holds"


def _at_work(group: Group) -> Stack | None:
    """The worker process that has a task, where the group leaves its work to workers."""
    if activity.known(group.activity).work_is_in != "workers":
        return None
    return next((worker for worker in group.workers if worker.own is not None), None)


def _which(worker: Stack) -> str:
    state = "stopped" if worker.state in STOPPED_STATES else "blocked in the kernel"
    held = worker.state in STOPPED_STATES | BLOCKED_STATES
    return f"pid {worker.pid}, {state}" if held else f"pid {worker.pid}"


def _innermost(group: Group) -> str:
    """The operation that is known, else the function in which it stands."""
    return group.operation or (stack_frames.plain_name(group.frames[0].function) if group.frames else "its own code")


def has_gpu(group: Group) -> bool:
    """Whether it is known that its ranks wait for a GPU, or have one: backward stands on a job without any, too."""
    waits = "its GPU" in activity.known(group.activity).says or activity.known(group.activity).waits_for != "gpu"
    return waits or any(member.utilization_ratio is not None for member in group.members)


def at(group: Group) -> str:
    """Where in the user's code it stands, else who called the collective: " at train.py:38"; else empty."""
    frame = own_frame(group) or (caller(group.frames) if group.waits else None)
    return "" if frame is None else f" at {place(frame)}"


def place(frame: Frame) -> str:
    """File and line of a frame, the function where the line is not known."""
    return str(frame) if frame.line is None else f"{frame.file}:{frame.line}"


def operations(groups: Iterable[Group]) -> str:
    """What groups wait in, the largest first: "broadcast (7 ranks) and all_reduce (4 ranks)"."""
    counts: dict[str, int] = {}
    for group in groups:
        name = (group.operation if group.waits else None) or group.activity.replace("_", " ")
        counts[name] = counts.get(name, 0) + len(group.members)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({words.count(number)})" for name, number in ordered[:4]]
    if len(ordered) > 4:
        shown.append(f"{words.count(len(ordered) - 4, 'other operation')}")
    return ordered[0][0] if len(ordered) == 1 else words.listing(shown)


def top(group: Group, depth: int = 4) -> str:
    """The innermost frames of a group in one line."""
    return " < ".join(str(frame) for frame in group.frames[:depth])
