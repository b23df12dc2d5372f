"""Pure: the activities, calls and lines of ranks as clauses, to be put after the names of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from hangwatch import words
from hangwatch.model import (
    BLOCKED_STATES,
    FUSE_WAITS,
    STOPPED_STATES,
    CallTarget,
    FileLock,
    Frame,
    Group,
    KernelCall,
    Member,
    Motion,
    RankId,
    Signature,
    Stack,
)
from hangwatch.stacks import activity
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.user_code import find_caller, innermost_user_frames
from hangwatch.tables import kernel_lines

_MOST_LINES = 3
_SHORT_SLEEP_SECONDS = 1.0  # such a sleep is over before it is read
_SINGULAR = (("is ", "are "), ("waits ", "wait "), ("sleeps", "sleep"), ("polls ", "poll "))


def describe_activity(group: Group, *, several: bool = False) -> str:
    """Return the activity of a group: "is loading data (DataLoader)", for several "are loading data (DataLoader)"."""
    worker = find_busy_worker(group)
    if worker is not None and worker.own is not None:
        if several:
            return f"wait for their loader workers (in {worker.own})"
        return f"waits for its loader worker ({_describe_worker(worker)}, in {worker.own})"
    clause = (
        _waits_for_file_lock(group)
        or _shares_lock(group)
        or _awaits_store(group)
        or _sleeps(group)
        or activity.describe_activity(group.activity, group.operation)
    )
    if group.waits_for == "gpu" and activity.find_activity(group.activity).waits_for != "gpu":
        by_stack = f"waits in PyTorch's own code ({_innermost(group)}), for other ranks or its GPU"
        clause = by_stack if _is_in_torch(group) else f"waits for its GPU in {_innermost(group)}"  # both measured
    if several:
        for singular, plural in _SINGULAR:
            if clause.startswith(singular):
                return plural + clause[len(singular) :].replace("its GPU", "their GPUs").replace(" its ", " their ")
    return clause


def ended_by(member: Member) -> str | None:
    """Return how the process of a rank or a worker ended, by the kernel log: "segfault in libc.so.6"; None if unknown.

    The name of the library is only a file name.
    """
    rows = kernel_lines.load()
    line = next((one for one in member.kernel.lines if one.name in rows and rows[one.name].deadly), None)
    if line is None:
        return None
    return line.name.replace("_", " ") + (f" in {line.where}" if line.where else "")


def _waits_for_file_lock(group: Group) -> str | None:
    """Return a clause for a measured wait for one file lock; None if the ranks do not all wait for the same lock."""
    locks = {member.waits.file_lock for member in group.members}
    lock = locks.pop() if len(locks) == 1 else None
    if lock is None:
        return None
    child = "its child process, which waits for " if lock.by_child else ""
    return f"waits for {child}the lock of {lock.path}{_held_by(lock)}"


def _shares_lock(group: Group) -> str | None:
    """Return a clause for a measured wait for a lock in shared memory; None without such a wait."""
    shares = group.waits_for == "lock" and all(member.waits.shares_lock for member in group.members)
    return "waits for a lock in memory shared with another rank" if shares else None


def _awaits_store(group: Group) -> str | None:
    """Return a clause for a measured wait for a key of the store in unknown functions; None without such a wait."""
    asks = group.waits and activity.find_activity(group.activity).waits_for == "unknown"
    waits = asks and all(member.waits.awaits_store == "main" for member in group.members)
    return f"waits for a key of the store in {_innermost_function(group)}" if waits else None


def _sleeps(group: Group) -> str | None:
    """Return a clause for ranks that were measured asleep; None if their stacks show a wait for ranks."""
    sleeps = [member.stack.sleep for member in group.members]
    latest = max(filter(None, sleeps), key=lambda sleep: sleep.until_unix_seconds, default=None)
    if group.waits_for == "ranks" or latest is None or None in sleeps:
        return None
    is_short = latest.seconds < _SHORT_SLEEP_SECONDS and not latest.is_polling
    return None if is_short else words.describe_sleep(latest)


def _held_by(lock: FileLock) -> str:
    if lock.holder_pid is None:
        return " (holder unknown: it has ended and a child inherited the lock, or it is on another node)"
    return f", held by pid {lock.holder_pid} ({lock.holder_comm})"


def describe_call(member: Member, ranks: Mapping[int, RankId]) -> str | None:
    """Return the system call of a rank: "read() on /data/shard-3, on /data (nfs4), in each of 3 rounds".

    `ranks` are the ranks of its node, by pid. None if its call was not read, or if it is in no call.
    """
    return None if member.kernel.call is None else _in_call(member.kernel.call, member, ranks)


def describe_worker_call(member: Member, ranks: Mapping[int, RankId]) -> str | None:
    """Return the system call of the worker for which a rank waits; None if that call was not read."""
    worker = member.kernel.worker_call
    if worker is None:
        return None
    # The state of the rank does not tell if the worker waits for a file system.
    of_worker = structs.replace(
        member,
        id=structs.replace(member.id, pid=worker.pid),
        kernel=structs.replace(member.kernel, state=None, wchan=None),
    )
    return f"its worker (pid {worker.pid}) is in {_in_call(worker.call, of_worker, ranks)}"


def _in_call(call: KernelCall, member: Member, ranks: Mapping[int, RankId]) -> str:
    rounds = "" if call.rounds < 2 else f", in each of {call.rounds} rounds"
    return f"{describe_object(call, member, ranks)}{rounds}"


def describe_object(call: KernelCall, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Return a system call of a rank with its file, peer, child or lock. `ranks` are those of its node, by pid."""
    if call.file_lock is not None:
        return f"{call.says} {call.file_lock.path}{_held_by(call.file_lock)}"
    about = [_describe_target(one, member, ranks) for one in call.behind]
    if call.descriptors > len(about) > 0:
        about.append(words.count(call.descriptors - len(about), "other descriptor"))
    if call.path:
        about = [call.path]
    if call.child_pid is not None:
        about = [f"its child {call.child_pid} ({call.child_comm})"]
    if not about:
        return f"{call.name}()"
    return f"{call.says} {words.join_words(about)}"


def tells_call(member: Member) -> bool:
    """True if more than the name of its call is known. The name alone shows little: any wait for a lock is a futex."""
    return tells(member.kernel.call)


def tells_what_holds(member: Member) -> bool:
    """True if more than the name of its call is known, or of the call of the worker for which it waits."""
    return tells(member.kernel.call) or (
        member.kernel.worker_call is not None and tells(member.kernel.worker_call.call)
    )


def tells(call: KernelCall | None) -> bool:
    """True if the object of a call is known: a file, a peer, a child or a lock."""
    return call is not None and bool(call.behind or call.path or call.child_pid or call.file_lock)


def _describe_target(target: CallTarget, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Describe one file, pipe or peer.

    A remote file system counts as not responding only if the kernel waits for it. A process that reads a FIFO on it
    waits for the other end of the FIFO, in state S.
    """
    match target.kind:
        case "file" if target.mount:
            waits_for_it = member.kernel.state in BLOCKED_STATES or member.kernel.wchan in FUSE_WAITS
            is_silent = target.is_remote and waits_for_it and member.signature is Signature.BLOCKED
            return f"{target.what}, on {target.mount}{', which does not respond' if is_silent else ''}"
        case "pipe":
            return f"a pipe {_describe_connection(target, member, ranks)}"
        case "unix":
            return f"{target.what} {_describe_connection(target, member, ranks)}"
        case "connection":
            gone = ", which is gone" if target.is_lost else ""
            peer = f" of {_describe_other_end(target, member, ranks)}" if target.other_pid is not None else ""
            return f"{target.what}{peer}{gone}"
        case "listening":
            return f"{target.what}, on which it listens"
    return target.what


def _describe_connection(target: CallTarget, member: Member, ranks: Mapping[int, RankId]) -> str:
    if target.other_pid is None:
        return "with an unknown other end"
    return f"connected to {_describe_other_end(target, member, ranks)}"


def _describe_other_end(target: CallTarget, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Return the process at the other end of a pipe or socket."""
    if target.other_pid == member.id.pid:
        return "this process"
    rank = None if target.other_pid is None else ranks.get(target.other_pid)
    return words.name_ranks([rank]) if rank is not None else f"pid {target.other_pid} ({target.other_comm})"


def find_busy_worker(group: Group) -> Stack | None:
    """Return a worker process that has a task; None if the group does not wait for workers, or no worker has a task."""
    if activity.find_activity(group.activity).work_is_in != "workers":
        return None
    return next((worker for worker in group.workers if worker.own is not None), None)


def _describe_worker(worker: Stack) -> str:
    state = "stopped" if worker.state in STOPPED_STATES else "blocked in the kernel"
    held = worker.state in STOPPED_STATES | BLOCKED_STATES
    return f"pid {worker.pid}, {state}" if held else f"pid {worker.pid}"


def _innermost(group: Group) -> str:
    """Return the operation of a group; its innermost function if the operation is unknown."""
    return group.operation or _innermost_function(group)


def _innermost_function(group: Group) -> str:
    return stack_frames.plain_name(group.frames[0].function) if group.frames else "its own code"


def has_gpu(group: Group) -> bool:
    """True if a rank has a GPU or is known to wait for one. A backward pass alone does not show a GPU."""
    known = activity.find_activity(group.activity)
    waits = "its GPU" in known.says or (known.waits_for != "gpu" and not _is_in_torch(group))
    return waits or any(member.gpu.utilization_ratio is not None for member in group.members)


def _is_in_torch(group: Group) -> bool:
    """True if all ranks sleep in code of PyTorch, NCCL or CUDA, and nothing else is known of their waits."""
    return all(member.waits.waits_in_torch for member in group.members)


def describe_line(group: Group) -> str:
    """Return the line of the user's code: " at train.py:38", below native frames with its function.

    Without one, return the caller of the collective, or "".
    """
    caller = find_caller(group.frames) if group.waits else None
    frames = innermost_user_frames(group) or ([] if caller is None else [caller])
    if not frames:
        return ""
    is_native = bool(group.frames) and stack_frames.is_native(group.frames[0].function, group.frames[0].file)
    return f"{f' in {frames[0].function}' if is_native else ''} at {places(frames)}"


def places(frames: Sequence[Frame]) -> str:
    """Return the file and lines of frames of one function: "train.py:38 or 40"; the file alone if lines are many.

    At most three lines are shown.
    """
    lines = sorted({frame.line for frame in frames if frame.line is not None})
    if len(lines) < 2 or len({frame.place for frame in frames}) > 1:
        return place(frames[0])
    return f"{frames[0].file}:{' or '.join(map(str, lines))}" if len(lines) <= _MOST_LINES else frames[0].file


def place(frame: Frame) -> str:
    """Return the file and line of a frame; the function if the line is unknown."""
    return str(frame) if frame.line is None else f"{frame.file}:{frame.line}"


def operations(groups: Iterable[Group]) -> str:
    """Return the operations in which groups wait: "broadcast (7 ranks) and all_reduce (4 ranks)".

    The operation with most ranks comes first. Operations after the fourth are counted.
    """
    counts: dict[str, int] = {}
    for group in groups:
        name = (group.operation if group.waits else None) or _measured(group) or _describe_place(group)
        counts[name] = counts.get(name, 0) + len(group.members)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({words.count(number)})" for name, number in ordered[:4]]
    if len(ordered) > 4:
        shown.append(f"{words.count(len(ordered) - 4, 'other operation')}")
    return ordered[0][0] if len(ordered) == 1 else words.join_words(shown)


def _describe_place(group: Group) -> str:
    """Return the part of the program in which a group is: "the backward pass"; else its operation or activity."""
    known = activity.find_activity(group.activity)
    place = known.says.removesuffix(" ({operation})").removeprefix("is in ")
    if known.waits_for == "gpu" and place != known.says.removesuffix(" ({operation})"):
        return place.replace("its ", "their ")
    return group.operation or group.activity.replace("_", " ")


def _measured(group: Group) -> str | None:
    """Return the function of a wait that only measurements show; None for other waits."""
    if group.activity != "unknown" or group.waits_for != "gpu":
        return None
    own = _innermost_function(group)
    return f"PyTorch's own code ({own})" if _is_in_torch(group) else own


def describe_top_frames(group: Group, depth: int = 4) -> str:
    """Return the innermost frames of a group in one line."""
    return " < ".join(str(frame) for frame in group.frames[:depth])


def hint_at_progress(members: Sequence[Member]) -> str:
    """Return a hint if a rank that has not joined moves or uses CPU; else ""."""
    who = "It" if len(members) == 1 else "Some of them"
    if any(member.motion is Motion.MOVING for member in members):
        return f" {who} {'is' if who == 'It' else 'are'} working, and may join when that is done."
    if any(member.signature is Signature.SPINS for member in members):
        return f" {who} {'uses' if who == 'It' else 'use'} CPU: either work that ends by itself, or an endless loop."
    return ""
