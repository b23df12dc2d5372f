"""The facts of a job, collected once for all rules: its ranks by stacks, failed dumps, waits and progress. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import TypeAlias

from msgspec import structs

from hangwatch.model import STOPPED_STATES, Group, Grouping, Member, Motion, Signature, Value
from hangwatch.stacks import activity_table, user_code
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.completed_collectives import find_pause
from hangwatch.stacks.idle_reasons import find_idle_kind, find_refused
from hangwatch.stacks.progress import GPU_IN_KERNEL_RATIO
from hangwatch.stacks.user_code import find_caller, is_in_user_code
from hangwatch.tables import kernel_lines
from hangwatch.verdict.measurements import OddGpu, find_odd_gpu

DEADLY = frozenset(name for name, row in kernel_lines.load().items() if row.deadly)
"""The names of kernel log lines that report the crash or the OOM kill of a process."""
_REFUSALS = ("PermissionDenied", "CannotPause")  # the cause is the rank, or a missing right of this user

OPENS_FIFO = frozenset({"wait_for_partner", "fifo_open"})
"""The functions of fs/pipe.c in which open() of a FIFO sleeps."""

Process: TypeAlias = tuple[str | None, int | None]
"""A process: the name of its node, and its pid."""


class Scene(Value, frozen=True, dict=True, eq=False, gc=True):
    """The facts of a job for the rules. Launchers are left out unless the job has no ranks yet.

    `stacked` are the groups with a stack. `failed` could not be dumped because of the rank itself. `gone` have no
    process. `without_stack` could not be dumped because a file system did not respond; `waiting_for_mount` are the
    groups that wait for it in the kernel. `existing` is the number of ranks known to exist: on this node if `is_part`,
    else in the whole job. `moving` is the number of ranks that progress. `health` is set if the job progresses or is
    idle. The store refuses the connections of the ranks in `refused`. `is_blocked_outside` is true if a rank is
    blocked, but not in a wait for ranks or GPUs.
    """

    grouping: Grouping
    launchers: tuple[Member, ...]
    stacked: tuple[Group, ...]
    failed: tuple[Group, ...]
    gone: tuple[Group, ...]
    without_stack: tuple[Member, ...]
    waiting_for_mount: tuple[Group, ...]
    existing: int
    is_part: bool
    stacks_by_node: Mapping[str | None, int]
    refused: tuple[Member, ...]
    moving: int
    health: str | None
    is_blocked_outside: bool

    @cached_property
    def is_one_process(self) -> bool:
        """True if only one process was captured, and the size of its job is unknown: nothing is known about others."""
        return len(self.grouping.members) == 1 and self.grouping.world_size is None

    @cached_property
    def has_numbers(self) -> bool:
        """True if a flight recorder shows an operation that stays open. Then sequence numbers can be evidence."""
        return any(any(member.recorder.open_operations) for member in self.grouping.members)

    @cached_property
    def answered(self) -> int:
        """The number of ranks that have a stack or a failed dump with the cause in the rank itself."""
        return count_ranks((*self.stacked, *self.failed))

    @cached_property
    def stacks(self) -> int:
        """The number of ranks with a stack."""
        return sum(self.stacks_by_node.values())

    @cached_property
    def processes(self) -> frozenset[Process]:
        """The processes of all ranks."""
        return frozenset(map(process_of, self.grouping.members))

    @cached_property
    def stacked_members(self) -> list[Member]:
        """The ranks with a stack."""
        return [member for group in self.stacked for member in group.members]

    @cached_property
    def at_unreachable_address(self) -> list[Member]:
        """The ranks with a stack that wait for others at an address that no other node can reach."""
        return [member for member in self.stacked_members if member.waits.enclosed_at is not None]

    @cached_property
    def store_servers(self) -> list[Member]:
        """The ranks with a stack that serve a store."""
        stores = ((member, member.waits.store) for member in self.stacked_members)
        return [member for member, store in stores if store is not None and store.socket == "serving"]

    @cached_property
    def have_all_ended(self) -> bool:
        """True if every rank known to exist has ended."""
        return 0 < self.existing <= count_ranks(self.gone)

    @cached_property
    def odd_gpu(self) -> OddGpu | None:
        """The only rank with a GPU that differs from all others; None if there is no such rank."""
        return find_odd_gpu(self.grouping.members)

    @cached_property
    def by_line(self) -> Scene:
        """The same facts, with the groups split by the lines of the user's code."""
        fine = user_code.split_groups_by_line(self.grouping)
        stacked = tuple(group for group in fine.groups if group.fault is None and not group.gone)
        return structs.replace(self, grouping=fine, stacked=stacked)

    @cached_property
    def are_at_different_lines(self) -> bool:
        """True if all ranks are in the same functions at different lines, and their roles do not explain this."""
        groups = self.stacked
        lines = {user_code.call_lines(group.members[0].stack) for group in groups}
        if len(groups) < 2 or len(lines) < len(groups) or () in lines or is_between_two(groups[0]):
            return False
        return self.are_alike and (not is_rooted(groups[0]) or len({own[1:] for own in lines}) > 1)

    @cached_property
    def are_alike(self) -> bool:
        """True if all groups are in the same functions."""
        places = {
            (group.activity, *(frame.place for frame in stack_frames.python_frames(group.frames)))
            for group in self.stacked
        }
        return len(places) <= 1

    @cached_property
    def locked_out(self) -> list[Member]:
        """The ranks that wait for a file lock if its holder is known."""
        locks = ((member, member.waits.file_lock) for member in self.stacked_members)
        return [member for member, lock in locks if lock is not None and lock.holder_pid]

    @cached_property
    def are_all_collective(self) -> bool:
        """True if every group is in a wait for ranks, and none waits for one other rank, as a pipeline stage does."""
        return all(is_collective(group) and not is_between_two(group) for group in self.stacked)

    @cached_property
    def only_roles(self) -> bool:
        """True if all ranks are in one collective with a root, called from one function: they differ only by role."""
        callers = [find_caller(group.frames) for group in self.stacked]
        called_by = {frame and (frame.function, stack_frames.short_path(frame.file)) for frame in callers}
        is_same = len({group.operation for group in self.stacked}) == len(called_by) == 1 and None not in called_by
        return len(callers) == 2 and is_same and all(map(is_rooted, self.stacked))

    def may_be_late(self, member: Member) -> bool:
        """True unless measurements show that this rank waits for another rank or for its GPU.

        False for a rank that was seen waiting for ranks before, waits for its GPU, waits for a lock or store key of
        another rank, or spins without the GIL while another rank is blocked.
        """
        if member.stack.waited_before or member.signature is Signature.BEHIND_GPU:
            return False
        if member.waits.shares_lock or member.waits.awaits_store is not None:
            return False
        if member.waits.file_lock is not None and lock_holder(member) in self.processes:
            return False
        spins = member.signature is Signature.SPINS and member.stack.owns_gil is not True
        return not (self.is_blocked_outside and spins)

    def may_be_cause(self, group: Group) -> bool:
        """True if no rank of the group progresses, and each may be late."""
        return group.motion is not Motion.MOVING and all(map(self.may_be_late, group.members))

    def are_settled_by_kernel(self, members: Iterable[Member]) -> bool:
        """True if each of these ranks was blocked in every round in one call that no rank ends."""
        return all(_is_settled_by_kernel(member, self.processes) for member in members)


def build_scene(grouping: Grouping, ranks_here: int | None) -> Scene:
    """Return the facts of a grouping for the rules.

    `ranks_here` is the number of the job's ranks on the captured node; None if the whole job was captured.
    """
    launchers = tuple(member for member in grouping.members if member.waiting)
    if launchers:
        ranks = tuple(keep_groups(grouping.groups, lambda member: not member.waiting))
        grouping = structs.replace(grouping, groups=ranks or grouping.groups)
    gone = tuple(g for g in grouping.groups if g.gone or (g.fault and g.fault.reason == "ProcessGone"))
    stacked = tuple(g for g in grouping.groups if g.fault is None and not g.gone)
    by_node = Counter(member.id.node for group in stacked for member in group.members)
    failed = tuple(g for g in grouping.groups if g.fault and g not in gone and _is_about_rank(g, by_node))
    others = (g for g in grouping.groups if g.fault and g not in gone and g not in failed)
    shut = keep_groups(others, lambda member: member.kernel.silent_mount is not None)
    held = tuple(keep_groups(shut, lambda member: member.kernel.waits_for_mount))
    is_part = ranks_here is not None and ranks_here < grouping.expected_rank_count
    members = [member for group in stacked for member in group.members]
    moving = [member.motion for member in members].count(Motion.MOVING)
    is_moving = moving * 2 > len(members)
    is_paused = find_pause(grouping.members) is not None
    health = "Moving" if is_moving else "NoHangSeen" if is_paused else find_idle_kind(grouping)
    return Scene(
        grouping=grouping,
        launchers=launchers,
        stacked=stacked,
        failed=failed,
        gone=gone,
        without_stack=tuple(member for group in shut for member in group.members),
        waiting_for_mount=held,
        existing=max(ranks_here or 0, len(grouping.members)) if is_part else grouping.expected_rank_count,
        is_part=is_part,
        stacks_by_node=by_node,
        refused=tuple(member for group in stacked for member in find_refused(group)),
        moving=moving,
        health=health,
        is_blocked_outside=any(
            member.signature is Signature.BLOCKED
            for group in stacked
            if group.waits_for not in {"ranks", "gpu"}
            for member in group.members
        ),
    )


def _is_about_rank(group: Group, stacks_by_node: Mapping[str | None, int]) -> bool:
    """True if the rank itself is the cause of its failed dump.

    A dump that was refused counts only if another rank on the same node could be dumped. Text often lacks the nodes.
    """
    if group.fault is None or group.fault.about != "target":
        return False
    nodes = [member.id.node for member in group.members]
    return group.fault.reason not in _REFUSALS or all(node and stacks_by_node.get(node) for node in nodes)


# --- facts of groups and ranks ---------------------------------------------------------------------------------------


def count_ranks(groups: Iterable[Group]) -> int:
    """Return the number of ranks in these groups."""
    return sum(group.size for group in groups)


def waits_for(group: Group) -> str:
    """Return the kind of wait of a group: "ranks", "gpu", "lock", "thread", "nothing" or "unknown".

    It is "nothing" if the group runs Python code in an unknown function, and "ranks" if the kernel shows that each rank
    receives from another rank. A sleep that the program itself has called is not a wait for a GPU, in any part of the
    program.
    """
    if group.waits_for == "unknown" and group.members and all(member.waits.asks_rank for member in group.members):
        return "ranks"
    if (
        group.waits_for == "gpu"
        and is_in_user_code(group)
        and all(member.stack.sleep is not None and member.waits.waits_in_torch is False for member in group.members)
    ):
        return "unknown"
    return "nothing" if group.runs_python else group.waits_for


def process_of(member: Member) -> Process:
    """Return the process of a rank."""
    return member.id.node, member.id.pid


def lock_holder(member: Member) -> Process | None:
    """Return the process that holds the file lock for which a rank waits; None if the rank waits for no file lock."""
    return None if member.waits.file_lock is None else (member.id.node, member.waits.file_lock.holder_pid)


def _is_settled_by_kernel(member: Member, processes: Set[Process]) -> bool:
    """True if in every round the rank, or the thread that it waits for, was blocked in one call that no rank ends.

    The call is about a path, a file, a pipe, a file lock or a stopped child. `processes` are those of all ranks.
    """
    call = member.kernel.call
    if call is None or member.signature is not Signature.BLOCKED or not 1 < member.rounds <= call.rounds:
        return False
    waits = member.waits
    if waits.asks_rank is not None or waits.shares_lock or waits.awaits_store is not None:
        return False
    if call.file_lock is not None:
        return (member.id.node, call.file_lock.holder_pid) not in processes
    if call.child_pid is not None:
        return call.child_state in STOPPED_STATES
    if len(call.behind) != 1 or call.descriptors != 1:
        return bool(call.path)
    target = call.behind[0]
    is_own = target.other_pid == member.id.pid or (member.id.node, target.other_pid) in processes
    return target.kind == "file" or (target.kind == "pipe" and not is_own)


def may_be_behind_gpu(member: Member) -> bool:
    """True if a rank was seen in only one round, with a kernel on its GPU. It may wait for that kernel."""
    return member.rounds < 2 and (member.gpu.utilization_ratio or 0.0) >= GPU_IN_KERNEL_RATIO


def may_copy_tensor(group: Group, member: Member) -> bool:
    """True if a rank known only from text is busy in the user's own code, without the GIL.

    A copy of a tensor from the GPU has no Python frame, and waits for the kernels before it as the other ranks do.
    """
    is_measured = member.is_measured or member.gpu.utilization_ratio is not None
    is_busy = group.waits_for == "nothing" and is_in_user_code(group)
    return is_busy and not is_measured and not group.holds_gil


def waits_in_program(group: Group) -> bool:
    """True if all ranks of the group wait for a lock, or if all poll or rest in the program's own code.

    A rank rests if it sleeps or waits for a thread.
    """
    if group.waits_for == "lock":
        return True
    waits = (member.signature is Signature.POLLS or member.kernel.rests is not None for member in group.members)
    return is_in_user_code(group) and all(waits)


def asks_unknown_thread(group: Group) -> bool:
    """True if the group waits for a thread that may wait for ranks or clients, as one in unknown functions may."""
    if group.awaited and group.waits_for == "unknown":
        return True
    threads = (activity_table.find_activity(thread.activity) for thread in group.threads)
    ends = (member.waits.awaited.end for member in group.members if member.waits.awaited is not None)
    return group.waits_for == "thread" and ("unknown" in ends or any(known.waits_for == "unknown" for known in threads))


def wants_gil(group: Group) -> bool:
    """True if a thread of the group waits for the GIL.

    A rank that runs Python code gives up the GIL again and again. A call that waits may keep it.
    """
    return any(frame.function.startswith("take_gil") for thread in group.threads for frame in thread.frames)


def is_rooted(group: Group) -> bool:
    """True if the group waits in a collective with a root. The root may call it from another function or line."""
    return group.waits and activity_table.is_marked("rooted", group.operation or "")


def is_collective(group: Group) -> bool:
    """True if the group waits for ranks to join the same call, not for a reply, a request or the end of the job."""
    known = activity_table.find_activity(group.activity)
    return group.waits and known.work_is_in != "threads" and not known.leaves_the_job


def is_answered_by_process(group: Group) -> bool:
    """True if the group waits for a reply, a request or an event of another process, which may be no rank."""
    return group.waits and activity_table.find_activity(group.activity).work_is_in == "threads"


def is_between_two(group: Group) -> bool:
    """True if the group waits for one other rank, as a pipeline stage does."""
    return activity_table.find_activity(group.activity).is_between_two


def keep_members(group: Group, wanted: Callable[[Member], bool]) -> Group | None:
    """Return the group with only the members for which `wanted` is true, see `make_part`; None if there are none."""
    members = tuple(filter(wanted, group.members))
    return user_code.make_part(group, members) if members else None


def keep_groups(groups: Iterable[Group], wanted: Callable[[Member], bool]) -> list[Group]:
    """Return the groups with only the members for which `wanted` is true. Groups without such members are left out."""
    parts = (keep_members(group, wanted) for group in groups)
    return [part for part in parts if part]


def remove_suspects(suspects: Sequence[Group], groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups without the ranks in `suspects`."""
    suspected = {member.id for group in suspects for member in group.members}
    numbers = {rank.rank for rank in suspected}
    return tuple(keep_groups(groups, lambda one: one.id.rank not in numbers or one.id not in suspected))
