"""The two short lines of a verdict: `stuck_on`, the call or line that blocks, and `next_step`, the first step. Pure."""

import shlex

from msgspec import structs

from hangwatch import words
from hangwatch.model import BLOCKED_STATES, CallTarget, FileLock, Group, KernelCall, Member, Motion
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.user_code import innermost_user_frame
from hangwatch.verdict import kinds
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import OPENS_FIFO
from hangwatch.verdict.wording import clauses, guidance, sequence_numbers
from hangwatch.verdict.wording.next_steps import first_step

_MOST_CHARACTERS = 160


def stuck_on(finding: Finding) -> str:
    """Return the call, lock or line in which the first suspect is blocked, and its process; "" if it is not blocked.

    Without a suspect: the operation in which the ranks wait. A suspect that uses CPU or is not named: "perhaps".
    """
    if kinds.find(finding.kind).job != "stuck" or _is_working(finding):
        return ""
    if finding.kind == "GpuBehind":
        return sequence_numbers.describe_operation(finding.answer.graph.gpus[0].operation)
    if finding.suspects:
        first = finding.suspects[0].members[0]
        text = _place_of_rank(finding.suspects[0], first)
        return f"perhaps {text}" if text and (clauses.uses_cpu(first) or not finding.is_named) else text
    if finding.answer.graph.pending and finding.by_numbers:
        return sequence_numbers.describe_operation(finding.answer.graph.pending[0])
    if finding.kind == "MountSilent":
        mounts = {member.kernel.silent_mount for member in finding.scene.without_stack}
        return f"{words.join_words(sorted(filter(None, mounts)))}, which does not respond"
    if finding.scene.is_one_process and finding.others:
        return _place_of_rank(finding.others[0], finding.others[0].members[0])
    waiting = [
        group
        for group in finding.others
        if group.frames and (group.waits_for in {"ranks", "gpu"} or finding.kind != "CannotTell")
    ]
    line = clauses.describe_line(waiting[0]) if len(waiting) == 1 else ""
    return f"{clauses.operations(waiting)}{line}" if waiting else ""


def next_step(finding: Finding, settle: str) -> str:
    """Return the first step: look at the object of the blocked call, else `settle`, else the step for the kind."""
    group = next(
        iter(finding.suspects or finding.others[: finding.kind == "AllAlike" or finding.scene.is_one_process]), None
    )
    if group is not None and group.activity == "debugger":
        return "ask the person who uses the debugger"
    if _is_working(finding):
        return guidance.WORKS
    if finding.scene.have_all_ended and not finding.suspects:
        return "read the end of the job's log: it shows if the job ended as planned"
    remedies = [group.fault.remedy if group.fault is not None else "" for group in finding.scene.grouping.groups]
    if finding.kind == "CannotTell" and remedies and all(remedies):  # no process could be dumped
        return remedies[0]
    kind = kinds.find(finding.kind)
    if (
        group is not None
        and kind.job == "stuck"
        and finding.kind != "GpuBehind"
        and (look := look_at(group.members[0]))
    ):
        return look
    frozen = [member for group in finding.others for member in group.members if member.waits.frozen_cgroup]
    if finding.kind == "Suspended" and frozen:
        return look_at(frozen[0])
    if settle:
        return settle
    if not finding.suspects and finding.scene.grouping.is_from_text and finding.scene.grouping.absent:
        return guidance.ALL_DUMPS
    if group is not None and group.waits and finding.scene.is_one_process:
        if not group.members[0].is_measured:
            return f"{guidance.ALL_DUMPS} (a folder is enough): they show which one it waits for"
        return dump_whole_job()
    if group is not None and group.frames and (kind.at_line or finding.scene.is_one_process):
        return look_at_line(group, group.members[0])
    return first_step(
        finding.kind,
        (member.id for member in finding.members),
        are_all_captured=finding.scene.stacks == finding.scene.grouping.world_size,
        may_use_gpus=not all(member.waits.has_device is False for member in finding.scene.grouping.members),
    )


def dump_whole_job(job_key: str = "") -> str:
    """Return the step for a waiting rank that was dumped alone; "" for an unknown job."""
    job = f" --job {job_key}" if job_key else ""
    return f"dump all ranks of its job: they show which rank it waits for: `hangwatch dump{job}`"


def _is_working(finding: Finding) -> bool:
    """True if a named rank progresses, or each rank to check first."""
    are_moving = [group.motion is Motion.MOVING for group in finding.suspects]
    return any(are_moving) if finding.is_named else bool(are_moving) and all(are_moving)


def look_at(member: Member) -> str:
    """Return the step for the object that a blocked rank or its worker waits for; "" if no such object is known."""
    worker, waits = member.kernel.worker_call, member.waits
    call = None if waits.awaits_store else member.kernel.call  # its server does not set the keys
    if member.is_stopped:
        return _thaw(member, waits.frozen_cgroup) if waits.frozen_cgroup else first_step("RankStopped", [member.id])
    if waits.awaited is not None and waits.awaited.end == "held":
        return f"look at {waits.awaited.name}; `kill -CONT` continues a stopped process"
    for kernel_call, wchan in ((worker.call if worker is not None else None, None), (call, member.kernel.wchan)):
        if kernel_call is not None and (look := _object_of_call(kernel_call, wchan or kernel_call.wchan, member)):
            return look
    if waits.file_lock is not None:
        return _lock(waits.file_lock)
    if member.kernel.silent_mount is not None:
        return f"look at {member.kernel.silent_mount}: repair its server or network; `hangwatch check storage`"
    if waits.awaited is not None:
        return f"look at {waits.awaited.says}" + (": does it respond?" if waits.awaited.may_answer else "")
    return f"look at {_cut(waits.stuck_on)}" if waits.stuck_on is not None else ""


def _thaw(member: Member, cgroup: str) -> str:
    """Return the command that thaws a control group. Version 1 of the freezer shows a frozen process in state D."""
    on = f" on {words.printable(member.id.node)}" if member.id.node else ""
    if ".." in cgroup.split("/"):
        return f"thaw its control group{on}, outside of the container of hangwatch"
    value, file = ("THAWED", "freezer.state") if member.kernel.state in BLOCKED_STATES else ("0", "cgroup.freeze")
    return f"thaw its control group: `echo {value} > {shlex.quote(f'/sys/fs/cgroup{cgroup}/{file}')}`{on}"


def look_at_line(group: Group, member: Member) -> str:
    """Return the step for a rank or worker that is blocked at a line: the command that shows its call below Python."""
    busy = clauses.find_busy_worker(group)
    pid = member.id.pid if busy is None else busy.pid
    if pid is not None and any(stack_frames.is_native(frame.function, frame.file) for frame in group.frames):
        return f"look at the other threads of {words.name_ranks([member.id])}: `hangwatch dump --stacks --pid {pid}`"
    asleep = clauses.describe_sleep(group)
    text = f"find out why {_line(group) if busy is None else busy.user_frame} {asleep or 'does not return'}"
    on = f" on {words.printable(member.id.node)}" if member.id.node else "" if member.is_measured else " on its host"
    if busy is None and pid is not None and member.kernel.call is not None and member.kernel.call.name == "futex":
        return (
            f"find out for which of its threads {_line(group)} waits: "
            f"`hangwatch dump --native --stacks --pid {pid}`{on}"
        )
    return text if pid is None or asleep else f"{text}: `hangwatch dump --native --pid {pid}`{on}"


def _object_of_call(call: KernelCall, wchan: str, member: Member) -> str:
    """Return the step for the object of a call of a rank or its worker; "" if it is unknown.

    `wchan` is the kernel function in which the call sleeps, if known.
    """
    if call.file_lock is not None:
        return _lock(call.file_lock)
    if call.path and wchan in OPENS_FIFO:
        return f"look at {_cut(call.path)}: it is a FIFO, and no process has opened its other end"
    if call.path:
        path = shlex.quote(words.printable(call.path))
        on = f" on {words.printable(member.id.node)}" if member.id.node else ""
        return f"ask what blocks it: `hangwatch check storage --path {path}`{on}"
    if call.child_pid is not None:
        return f"look at its child {call.child_pid} ({call.child_comm}): `hangwatch dump --pid {call.child_pid}`"
    if len(call.behind) != 1:
        return ""
    if call is member.kernel.call and call.behind[0].other_pid == member.id.pid is not None:
        return (
            "find what should answer: a process that has ended, "
            f"or a thread of this rank: `hangwatch dump --stacks --pid {member.id.pid}`"
        )
    return _target(call.behind[0])


def _target(target: CallTarget) -> str:
    if (pid := target.other_pid) is not None:
        return f"look at pid {pid} ({target.other_comm}), at the other end: `hangwatch dump --pid {pid}`"
    if target.kind == "connection":
        return f"look at {target.what}" + (", which is gone" if target.is_lost else ": does it respond?")
    mount = f", on {target.mount}" if target.mount else ""
    return f"look at {_cut(target.what)}{mount}: does it respond?" if target.kind == "file" else ""


def _lock(lock: FileLock) -> str:
    if lock.holder_pid is None:
        return f"look at {_cut(lock.path)}: `fuser -v` shows which processes have it open; its holder may be elsewhere"
    return f"look at pid {lock.holder_pid} ({lock.holder_comm}), which holds the lock of {_cut(lock.path)}"


def _place_of_rank(group: Group, member: Member) -> str:
    """Return the innermost known call or line of a rank, and its process: the worker, or the rank itself."""
    worker = member.kernel.worker_call
    rank_id = structs.replace(member.id, local_rank=None) if member.id.rank is not None else member.id
    of_rank, rank = f"in {words.name_ranks([rank_id])}", words.name_ranks([structs.replace(rank_id, pid=None)])
    if group.gone:
        return f"{rank}, which has ended"
    if member.is_stopped:
        return f"{rank}, which is stopped"
    if worker is not None and worker.call.has_object:
        return f"{_call(worker.call, member)} in {_worker(group, worker.pid)} of {rank}"
    busy = clauses.find_busy_worker(group)
    if busy is not None and busy.user_frame is not None:
        return f"{busy.user_frame} in {_worker(group, busy.pid)} of {rank}"
    if member.waits.awaits_store == "main":
        return f"a key of the store, awaited by {_line(group)} {of_rank}"
    if member.kernel.call is not None and member.kernel.call.has_object:
        return f"{_call(member.kernel.call, member)} {of_rank}"
    if member.waits.file_lock is not None:
        return f"the lock of {_cut(member.waits.file_lock.path)} {of_rank}"
    if member.kernel.silent_mount is not None:
        return f"{member.kernel.silent_mount}, which does not respond, {of_rank}"
    if member.kernel.state in BLOCKED_STATES:
        return f"{member.kernel.wchan or 'a call'} in the kernel (state D) {of_rank}"
    if group.frames:
        return f"{_line(group)} {of_rank}"
    return f"{rank}, which could not be dumped" if group.fault and group.fault.reason != "NoStack" else ""


def _line(group: Group) -> str:
    """Return the innermost function of a group, and the line of the user's code that called it."""
    leaf, own = group.frames[0], innermost_user_frame(group)
    if own is None or own.place == leaf.place:
        return str(own or leaf)
    is_native = stack_frames.is_native(leaf.function, leaf.file)
    return f"{(is_native and group.operation) or stack_frames.plain_name(leaf.function)}(), called by {own}"


def _call(call: KernelCall, member: Member) -> str:
    """Return a system call with its object. The end of a long path is kept, because it names the file."""
    if call.path and call.file_lock is None:
        name = "open" if call.name.startswith("open") else call.name
        return f'{name}("{_cut(call.path)}")'
    return words.cut_middle(clauses.describe_object(call, member, {}), _MOST_CHARACTERS)


def _worker(group: Group, pid: int | None) -> str:
    kind = "data-loader worker" if group.activity == "data_loading" else "worker process"
    return kind if pid is None else f"pid {pid}, {kind}"


def _cut(path: str) -> str:
    """Return a path of at most 80 characters, with the name of its file."""
    return words.cut_middle(path, _MOST_CHARACTERS // 2)
