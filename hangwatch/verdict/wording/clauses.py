"""Clauses on the activities, calls and lines of ranks. The caller puts the names of the ranks in front. Pure."""

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
    Grouping,
    KernelCall,
    Member,
    Motion,
    RankId,
    Signature,
    Stack,
    list_by_key,
)
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.progress import SPINNING_RATIO
from hangwatch.stacks.rates import exceeds
from hangwatch.stacks.user_code import find_caller, innermost_user_frames
from hangwatch.tables import kernel_lines

_MOST_LINES = 3
_MOST_THREADS = 3
_POOLS = ("futures/_base.py", "futures/process.py", "multiprocessing/pool.py", "multiprocess/pool.py")
_SHORT_SLEEP_SECONDS = 1.0  # such a sleep is over before it is read
_SINGULAR = (("is ", "are "), ("has ", "have "), ("waits ", "wait "), ("sleeps", "sleep"), ("polls ", "poll "))


def describe_activity(group: Group, *, several: bool = False) -> str:
    """Return a clause on the activity of a group: "is loading data (DataLoader)"; with `several`, "are ..."."""
    if group.members and all(member.is_stopped for member in group.members):
        return f"{'are' if several else 'is'} {describe_stop(group.members)}"
    worker = find_busy_worker(group)
    if worker is not None and worker.user_frame is not None:
        at_loader = group.activity == "data_loading" and not _is_of_pool(worker.frames)
        singular, plural = ("loader worker", "loader workers") if at_loader else ("worker process", "worker processes")
        if several:
            return f"wait for their {plural} (in {worker.user_frame})"
        return f"waits for its {singular} ({_describe_worker(worker)}, in {worker.user_frame})"
    clause = (
        _describe_file_lock(group)
        or _awaits_threads(group)
        or _describe_shared_lock(group)
        or _describe_store_wait(group)
        or describe_sleep(group)
        or activity_table.describe_activity(group.activity, group.operation)
    )
    if (measured := _find_measured_wait(group)) is not None:
        awaited = "other ranks" if group.waits else "other ranks or its GPU"
        clause = f"waits in {measured}, for {awaited}" if _is_in_torch(group) else f"waits for its GPU in {measured}"
    if several:
        for singular, plural in _SINGULAR:
            if clause.startswith(singular):
                return plural + clause[len(singular) :].replace("its GPU", "their GPUs").replace(" its ", " their ")
    return clause


def _awaits_threads(group: Group) -> str | None:
    """Return a clause for ranks that wait for a thread of theirs which decides, or for several that differ."""
    if group.awaited_differ:
        each = [
            words.printable(f"{stack.name} is in {stack.user_frame or stack.frames[0]}")
            for stack in group.awaited[:_MOST_THREADS]
        ]
        return f"waits for threads of its own that differ: {words.join_words(each)}"
    if not group.awaited or group.awaited[0].frames != group.frames or group.waits_for in {"ranks", "gpu"}:
        return None
    does = activity_table.describe_activity(group.activity, group.operation)
    has_left = any(stack.name == "MainThread" and stack.frames[-1].function == "_shutdown" for stack in group.threads)
    return (
        f"{'has left its program and waits' if has_left else 'waits'} for its thread "
        f"{words.printable(group.awaited[0].name)}, which {does}"
    )


def describe_caller(member: Member) -> str:
    """Return the caller of the system call of a rank: "rank 3", or "rank 3 waits for its thread reader, which"."""
    rank = words.name_ranks([member.id])
    thread = member.kernel.call.thread if member.kernel.call is not None else ""
    return f"{rank} waits for its thread {words.printable(thread)}, which" if thread else rank


def ended_by(member: Member) -> str | None:
    """Return the crash of a rank's process or worker in the kernel log: "segfault in libc.so.6"; None without one.

    The library is given by its file name only.
    """
    rows = kernel_lines.load()
    line = next((one for one in member.kernel.lines if one.name in rows and rows[one.name].deadly), None)
    if line is None:
        return None
    return line.name.replace("_", " ") + (f" in {line.where}" if line.where else "")


def _describe_file_lock(group: Group) -> str | None:
    """Return a clause if measurements show that all ranks of the group wait for the same file lock; else None."""
    locks = {member.waits.file_lock for member in group.members}
    lock = locks.pop() if len(locks) == 1 else None
    if lock is None:
        return None
    waits = "waits for its child process, which waits" if lock.by_child else "waits"
    return f"{waits} for the lock of {lock.path}{_describe_holder(lock)}"


def _describe_shared_lock(group: Group) -> str | None:
    """Return a clause if measurements show that all ranks of the group wait for a lock in shared memory; else None."""
    shares = group.waits_for == "lock" and all(member.waits.shares_lock for member in group.members)
    return "waits for a lock in memory shared with another rank" if shares else None


def _describe_store_wait(group: Group) -> str | None:
    """Return a clause if measurements show that ranks in unknown functions wait for a key of the store; else None."""
    asks = group.waits and activity_table.find_activity(group.activity).waits_for == "unknown"
    waits = asks and all(member.waits.awaits_store == "main" for member in group.members)
    return f"waits for a key of the store in {_find_innermost_function(group)}" if waits else None


def describe_sleep(group: Group) -> str | None:
    """Return a clause if measurements show that all ranks sleep; None if not, or if their stacks wait for ranks."""
    sleeps = [member.stack.sleep for member in group.members]
    latest = max(filter(None, sleeps), key=lambda sleep: sleep.until_unix_seconds, default=None)
    if group.waits_for == "ranks" or latest is None or None in sleeps:
        return None
    is_short = latest.seconds < _SHORT_SLEEP_SECONDS and not latest.is_polling
    return None if is_short else words.describe_sleep(latest)


def _describe_holder(lock: FileLock) -> str:
    if lock.holder_pid is None:
        return " (holder unknown: it has ended and a child inherited the lock, or it is on another node)"
    return f" (held by pid {lock.holder_pid}, {lock.holder_comm})"


def describe_worker_call(member: Member, ranks: Mapping[int, RankId]) -> str | None:
    """Return the system call of the worker process for which a rank waits. None if the call was not read.

    `ranks` are the ranks on the same node, keyed by pid.
    """
    worker = member.kernel.worker_call
    if worker is None:
        return None
    # The state of the rank does not show if its worker waits for a file system.
    of_worker = structs.replace(
        member,
        id=structs.replace(member.id, pid=worker.pid),
        kernel=structs.replace(member.kernel, state=None, wchan=None),
    )
    return f"its worker (pid {worker.pid}) is in {describe_call(worker.call, of_worker, ranks)}"


def describe_call(call: KernelCall, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Return a system call of a rank: "read() on /data/shard-3, on /data (nfs4), in each of 3 rounds".

    `ranks` are the ranks on its node, keyed by pid.
    """
    rounds = f", in each of {call.rounds} rounds" if call.rounds > 1 else ""
    return f"{describe_object(call, member, ranks)}{rounds}"


def describe_object(call: KernelCall, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Return a system call of a rank with its file, peer, child or lock. `ranks` are those of its node, by pid."""
    if call.file_lock is not None:
        return f"{call.says} {call.file_lock.path}{_describe_holder(call.file_lock)}"
    about = [*dict.fromkeys(_describe_target(one, member, ranks) for one in call.behind)]
    if call.descriptors > len(call.behind) > 0:
        about.append(words.count(call.descriptors - len(call.behind), "other descriptor"))
    if call.path:
        about = [call.path]
    if call.child_pid is not None:
        about = [f"its child {call.child_pid} ({call.child_comm})"]
    return f"{call.says} {words.join_words(about)}" if about else f"{call.name}()"


def blocked_call(member: Member, grouping: Grouping) -> str:
    """Return the system call of a rank with its object: "write() to a pipe that pid 47 (tee, stopped) reads"."""
    call = member.kernel.call
    assert call is not None
    ranks = {one.id.pid: one.id for one in grouping.members if one.id.pid is not None and one.id.node == member.id.node}
    about = [*dict.fromkeys(_blocking_object(one, call, member, ranks) for one in call.behind)]
    if call.file_lock is not None:
        about = [f"{call.file_lock.path}{_describe_holder(call.file_lock)}"]
    elif call.child_pid is not None:
        about = [f"its child {_process(call.child_pid, call.child_comm, call.child_state)}"]
    thread = f" in its thread {words.printable(call.thread)}" if call.thread else ""
    return f"{call.says} {call.path or words.join_words(about)}{thread}"


def _blocking_object(target: CallTarget, call: KernelCall, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Describe one file, pipe or peer like `_describe_target`; a pipe by the process at its other end."""
    if target.kind != "pipe" or target.other_pid is None or target.other_pid == member.id.pid:
        return _describe_target(target, member, ranks)
    uses = "reads" if call.name.startswith(("write", "pwrite")) else "writes"
    return f"a pipe that {_describe_other_end(target, member, ranks)} {uses}"


def describe_stop(members: Iterable[Member]) -> str:
    """Return the reason why stopped ranks do not run."""
    frozen = {member.waits.frozen_cgroup for member in members}
    if None in frozen:
        return "stopped (state T) by a debugger, a tracer or SIGSTOP"
    return f"frozen (control group {words.join_words(sorted(map(str, frozen)))})"


def _process(pid: int, comm: str, state: str) -> str:
    """Return a process in words: "pid 47 (tee, stopped)"."""
    return f"pid {pid} ({comm}{', stopped' if state in STOPPED_STATES else ''})"


def _describe_target(target: CallTarget, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Describe the file, pipe or peer of a system call.

    A remote file system is described as not responding only if the process waits for it in the kernel. A process that
    reads a FIFO on a remote file system waits in state S for the other end of the FIFO.
    """
    match target.kind:
        case "file" if target.mount:
            waits_for_it = member.kernel.state in BLOCKED_STATES or member.kernel.wchan in FUSE_WAITS
            is_silent = target.is_remote and waits_for_it and member.signature is Signature.BLOCKED
            return f"{target.what}, on {target.mount}{', which does not respond' if is_silent else ''}"
        case "pipe" | "unix":
            is_unnamed = target.kind == "pipe" and not target.what.startswith("/")
            what = "a pipe" if is_unnamed else target.what
            if target.other_pid is None:
                return f"{what} with an unknown other end"
            return f"{what} connected to {_describe_other_end(target, member, ranks)}"
        case "connection":
            gone = ", which is gone" if target.is_lost else ""
            peer = f" of {_describe_other_end(target, member, ranks)}" if target.other_pid is not None else ""
            return f"{target.what}{peer}{gone}"
        case "listening":
            return f"{target.what}, on which it listens"
    return target.what


def _describe_other_end(target: CallTarget, member: Member, ranks: Mapping[int, RankId]) -> str:
    """Return the rank or process at the other end of a pipe or socket, which must be known."""
    if target.other_pid is None or target.other_pid == member.id.pid:
        return "this process"
    rank = ranks.get(target.other_pid)
    other = _process(target.other_pid, target.other_comm, target.other_state)
    return other if rank is None else words.name_ranks([rank])


def find_busy_worker(group: Group) -> Stack | None:
    """Return the first worker process with a task. None if there is none, or if the group does not wait for workers.

    The kernel shows for which workers it waits. A group that waits for a thread in the code of a pool waits for the
    workers of that pool. A worker that waits at a queue comes last: it may wait for its next task.
    """
    at_loader = activity_table.find_activity(group.activity).work_is_in == "workers"
    at_pool = group.waits_for == "thread" and _is_of_pool(group.frames)
    told = (worker for worker in group.workers if worker.user_frame is not None)
    busy = [one for one in told if one.is_awaited or at_loader or (at_pool and _is_of_pool(one.frames))]
    return min(busy, key=lambda one: activity_table.find_activity(one.activity).waits_for == "thread", default=None)


def _is_of_pool(frames: Iterable[Frame]) -> bool:
    return any(frame.file.endswith(_POOLS) for frame in frames)


def _describe_worker(worker: Stack) -> str:
    blocked = ", blocked in the kernel" if worker.state in BLOCKED_STATES else ""
    return f"pid {worker.pid}{', stopped' if worker.state in STOPPED_STATES else blocked}"


def _find_innermost_function(group: Group) -> str:
    return stack_frames.plain_name(group.frames[0].function) if group.frames else "its own code"


def has_gpu(group: Group) -> bool:
    """True if a rank of the group has a GPU or is known to wait for one. A backward pass alone proves no GPU."""
    known = activity_table.find_activity(group.activity)
    waits = "its GPU" in known.says or (known.waits_for != "gpu" and not _is_in_torch(group))
    return waits or any(member.gpu.utilization_ratio is not None for member in group.members)


def _is_in_torch(group: Group) -> bool:
    """True if measurements show that all ranks of the group sleep in code of PyTorch, NCCL or CUDA."""
    return all(member.waits.waits_in_torch for member in group.members)


def describe_line(group: Group) -> str:
    """Return the line of the user's code: " at train.py:38", below native frames with its function.

    Without one, return the line of the operation, of a collective that of its caller, or "".
    """
    told = (place for place, frame in enumerate(group.frames) if _is_operation(frame, group))
    caller = find_caller(group.frames[next(told, 0) :]) if group.waits else None
    frames = innermost_user_frames(group) or ([] if caller is None else [caller])
    if not frames:
        return ""
    is_native = bool(group.frames) and stack_frames.is_native(group.frames[0].function, group.frames[0].file)
    names = is_native and not _is_operation(frames[0], group)
    return f"{f' in {frames[0].function}' if names else ''} at {places(frames)}"


def _is_operation(frame: Frame, group: Group) -> bool:
    return stack_frames.plain_name(frame.function).lstrip("_") == (group.operation or "").lstrip("_")


def places(frames: Sequence[Frame]) -> str:
    """Return the file and lines of frames in one function: "train.py:38 or 40"; above three lines the file alone."""
    lines = sorted({frame.line for frame in frames if frame.line is not None})
    if len(lines) < 2 or len({frame.place for frame in frames}) > 1:
        return place(frames[0])
    return f"{frames[0].file}:{' or '.join(map(str, lines))}" if len(lines) <= _MOST_LINES else frames[0].file


def place(frame: Frame) -> str:
    """Return the file and line of a frame. If the line is unknown, return its function and file."""
    return str(frame) if frame.line is None else f"{frame.file}:{frame.line}"


def operations(groups: Iterable[Group]) -> str:
    """Return the operations in which groups wait: "broadcast (7 ranks) and all_reduce (4 ranks)".

    The operation with the most ranks comes first. After the fourth operation, only the number of the others is given.
    """
    sizes = list_by_key((_find_measured_wait(group) or _describe_place(group), group.size) for group in groups)
    ordered = sorted(((name, sum(of_name)) for name, of_name in sizes.items()), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({words.count(number)})" for name, number in ordered[:4]]
    if len(ordered) > 4:
        shown.append(f"{words.count(len(ordered) - 4, 'other operation')}")
    return ordered[0][0] if len(ordered) == 1 else words.join_words(shown)


def _describe_place(group: Group) -> str:
    """Return the part of the program in which a group is, for example "the backward pass".

    For other activities, return the operation of the group, or else the name of its activity.
    """
    known = activity_table.find_activity(group.activity)
    place = known.says.removesuffix(" ({operation})").removeprefix("is in ")
    if known.waits_for == "gpu" and place != known.says.removesuffix(" ({operation})"):
        return place.replace("its ", "their ")
    return group.operation or group.activity.replace("_", " ")


def _find_measured_wait(group: Group) -> str | None:
    """Return the function in which a group waits for its GPU or ranks, if only measurements show that; else None."""
    is_known = activity_table.find_activity(group.activity).waits_for in ("ranks", "gpu")
    if is_known or not (group.waits_for == "gpu" or (group.waits and _is_in_torch(group))):
        return None
    own = group.operation or _find_innermost_function(group)
    return f"PyTorch's own code ({own})" if _is_in_torch(group) else own


def describe_top_frames(group: Group) -> str:
    """Return the four innermost frames of a group in one line: "wait (queue.py:171) < get (loader.py:48)"."""
    return " < ".join(str(frame) for frame in group.frames[:4])


def hint_at_progress(members: Sequence[Member]) -> str:
    """Return a sentence if one of the ranks progresses or uses CPU, because it may still join; else ""."""
    who = "It" if len(members) == 1 else "Some of them"
    if any(member.motion is Motion.MOVING for member in members):
        return f" {who} {'is' if who == 'It' else 'are'} working, and may join when that is done."
    if any(map(uses_cpu, members)):
        return f" {who} {'uses' if who == 'It' else 'use'} CPU: either work that ends by itself, or an endless loop."
    return ""


def uses_cpu(member: Member) -> bool:
    """True if a rank spins, or if it and its children use half of a core and it is unknown if it progresses."""
    use = member.usage.cpu_ratio
    return member.signature is Signature.SPINS or (member.motion is Motion.UNKNOWN and exceeds(use, SPINNING_RATIO))
