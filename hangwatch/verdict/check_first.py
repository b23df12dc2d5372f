"""The table of rules that find ranks to check first if no rank can be named. Pure.

Each rule looks for a difference that healthy jobs often have, too. Such a difference alone does not name a rank.
`judge` also tests that enough other ranks wait, as it does for the rules in `rules.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from hangwatch.model import Confidence, Group, Motion, Signature
from hangwatch.stacks import activity_table
from hangwatch.stacks.user_code import find_caller, is_in_user_code
from hangwatch.verdict.findings import ANYTHING, Rule
from hangwatch.verdict.rules import died_first, find_stopped
from hangwatch.verdict.scene import (
    DEADLY,
    Scene,
    asks_unknown_thread,
    is_answered_by_process,
    is_between_two,
    is_collective,
    is_rooted,
    keep_groups,
    lock_holder,
    may_copy_tensor,
    process_of,
    waits_for,
)

# --- which ranks differ -----------------------------------------------------------------------------------------------


def _find_only_group(wanted: Callable[[Scene, Group], bool]) -> Callable[[Scene], Sequence[Group]]:
    """Return a function that finds the only group for which `wanted` is true. It does not look at the largest group.

    It returns an empty list if no group matches, or if several groups do.
    """

    def suspects(scene: Scene) -> Sequence[Group]:
        found = [group for group in scene.stacked[1:] if wanted(scene, group)]
        return found if len(found) == 1 else []

    return suspects


def _is_in_own_code(scene: Scene, group: Group) -> bool:
    """True if the group is in the program's own code, does not move, and is not known to be waiting there.

    A group that waits for its GPU counts only if no other group waits for its GPU in the program's own code. One that
    is busy counts if it may wait for its GPU, see `may_copy_tensor`.
    """
    if not scene.may_be_cause(group) or group.awaited or not is_in_user_code(group):
        return False
    alike = (other for other in scene.stacked if other is not group and is_in_user_code(other))
    kind = waits_for(group)
    may_copy = all(may_copy_tensor(group, member) for member in group.members)
    return kind == "unknown" or may_copy or (kind == "gpu" and all(other.waits_for != "gpu" for other in alike))


def _find_group_outside_jax_program(scene: Scene) -> Sequence[Group]:
    """Return the only group outside a JAX program over all processes, if it is in the program's own code.

    All other groups must be in such a program and must not move.
    """
    odd = [
        group
        for group in scene.stacked
        if group.motion is not Motion.FROZEN or not activity_table.has_mark("all_processes", group.frames)
    ]
    return odd if len(odd) == 1 and _is_in_own_code(scene, odd[0]) else []


def _do_others_wait_for_gpus(scene: Scene, group: Group) -> bool:
    return all(other.waits_for == "gpu" for other in scene.stacked if other is not group)


def _idles_in_loop(group: Group) -> bool:
    """True if the group waits in a loop for something from outside the job."""
    return activity_table.find_activity(group.activity).idles


def _awaits_orders(group: Group) -> bool:
    """True if the group waits in a loop for its next order from another process."""
    frame = find_caller(group.frames)
    receives = is_rooted(group) or is_between_two(group) or not is_collective(group)
    return group.waits and receives and frame is not None and activity_table.is_marked("orders", *frame.place)


def _awaits_process_or_events(scene: Scene, group: Group) -> bool:
    """True if the group waits for another process or for events and does not move. All others must wait for their GPUs.

    In a healthy inference engine, a rank may wait for its next request while other ranks are in a collective. But no
    rank begins a step on the GPU alone.
    """
    waits = is_answered_by_process(group) or _idles_in_loop(group)
    return waits and group.motion is not Motion.MOVING and _do_others_wait_for_gpus(scene, group)


def _find_outside_collectives(wanted: Callable[[Group], bool]) -> Callable[[Scene], Sequence[Group]]:
    """Return a function that finds the `wanted` groups; none unless all other groups are in collectives."""

    def suspects(scene: Scene) -> Sequence[Group]:
        idle = [group for group in scene.stacked if wanted(group)]
        inside = [group for group in scene.stacked if not wanted(group)]
        return idle if inside and all(map(is_collective, inside)) else []

    return suspects


def _find_by_kernel_log(*names: str) -> Callable[[Scene], Sequence[Group]]:
    """Return a function that finds the ranks for which the kernel log has a line with one of these names."""

    def suspects(scene: Scene) -> Sequence[Group]:
        return keep_groups(scene.stacked, lambda member: any(line.name in names for line in member.kernel.lines))

    return suspects


def _is_outside_awaited_lock(scene: Scene, group: Group) -> bool:
    """True if the group is in the program's own code while others wait for a lock that no rank outside it holds."""
    own = set(map(process_of, group.members))
    holders = {lock_holder(member) for member in scene.locked_out if process_of(member) not in own}
    return holders <= own and _is_in_own_code(scene, group)


def _lacks_thread_in_collective(scene: Scene, group: Group) -> bool:
    """True if no thread of the group is in a collective, but every other group has a thread in one.

    All main threads must be in the same functions.
    """
    if not scene.are_alike or _has_thread_in_collective(group):
        return False
    return all(_has_thread_in_collective(other) for other in scene.stacked if other is not group)


def _has_thread_in_collective(group: Group) -> bool:
    return any(activity_table.find_activity(thread.activity).in_key for thread in group.threads)


def _find_lock_holders(scene: Scene) -> Sequence[Group]:
    """Return the ranks, except any that wait for their GPU, that hold a file lock for which another rank waits."""
    members = scene.grouping.members
    held = {lock_holder(member) for member in members if member.waits.file_lock is not None}
    stacked = (group for group in scene.stacked if group.waits_for != "gpu")
    return keep_groups(stacked, lambda member: process_of(member) in held)


def _other_of_three(scene: Scene) -> Sequence[Group]:
    odd = [group for group in scene.stacked if not is_collective(group)]
    if not 2 <= scene.grouping.expected_rank_count <= 3 or len(scene.stacked) != 2 or len(odd) != 1:
        return []
    is_unknown = odd[0].waits_for == "unknown" or asks_unknown_thread(odd[0])
    return odd if is_unknown or _is_in_own_code(scene, odd[0]) else []


def _find_busy_half(scene: Scene) -> Sequence[Group]:
    """Return the busy ranks, if all are in one activity and all other ranks are in one call of one collective."""
    busy = [group for group in scene.stacked if group.waits_for == "nothing"]
    others = [group for group in scene.stacked if group.waits_for != "nothing"]
    is_one = len({group.activity for group in busy}) == len(others) == 1
    return busy if is_one and is_collective(others[0]) else []


def _find_low_power(scene: Scene) -> Sequence[Group]:
    """Return the groups without a working GPU, if each of their GPUs draws less power than every working GPU.

    Return an empty list if the power of one of these GPUs is unknown.
    """
    works = Signature.GPU_WORKS
    working = [member for member in scene.stacked_members if member.signature is works]
    still = [group for group in scene.stacked if all(member.signature is not works for member in group.members)]
    drawn = [member.gpu.power_watts for group in still for member in group.members]
    least = min((member.gpu.power_watts or 0.0 for member in working), default=0.0)
    return still if drawn and all(watts is not None and watts < least for watts in drawn) else []


# --- the table -------------------------------------------------------------------------------------------------------


_make_rule = partial(
    Rule,
    "OutsideCollective",
    half_of="answered",
    confidence=Confidence.NONE,
    by_stack=True,
    sentence="differs",
)

CHECK_FIRST: tuple[Rule, ...] = (
    _make_rule(
        "are stopped (state `T` or `t`) or frozen by their cgroup, while the others are not known to wait for ranks",
        find_stopped,
        ANYTHING,
        sentence="stopped",
        by_stack=False,
    ),
    _make_rule(
        "have ended, and died first according to their crash artifacts, while the others are not known to wait for "
        "ranks",
        died_first,
        ANYTHING,
        sentence="died",
        by_stack=False,
    ),
    _make_rule(
        "have a thread that has been blocked in state `D` for minutes, according to the kernel's log",
        _find_by_kernel_log("hung_task"),
        sentence="hung_task",
        by_stack=False,
    ),
    _make_rule(
        "have lost a worker process to a fault or the OOM killer, according to the kernel's log",
        _find_by_kernel_log(*DEADLY),
        sentence="lost_worker",
        by_stack=False,
    ),
    _make_rule(
        "hold a file lock for which other ranks wait",
        _find_lock_holders,
        ("ranks", "gpu", "lock"),
        sentence="holds_lock",
        by_stack=False,
    ),
    _make_rule(
        "wait for a lock file, while all other ranks are in collectives",
        _find_outside_collectives(lambda group: group.activity == "lock_file"),
        sentence="lock_file",
    ),
    _make_rule(
        "is one of at most three ranks and in no known wait, while the others wait in one collective",
        _other_of_three,
        ("ranks",),
        may_name=True,
    ),
    _make_rule(
        "do not progress in the program's own code",
        _find_only_group(_is_in_own_code),
        outnumber="three times",
        may_name=True,
    ),
    _make_rule(
        "are in the program's own code, while the others do not progress in a JAX program over all processes",
        _find_group_outside_jax_program,
        ("gpu",),
    ),
    _make_rule(
        "wait for one of their threads, which is in functions that no rule matches",
        _find_only_group(
            lambda scene, group: asks_unknown_thread(group) and not group.awaited_differ and scene.may_be_cause(group)
        ),
        ("ranks",),
        sentence="awaits_thread",
        outnumber="three times",
        may_name=True,
    ),
    _make_rule(
        "wait for several of their threads, which are at different places",
        _find_only_group(lambda scene, group: group.awaited_differ and scene.may_be_cause(group)),
        sentence="awaits_threads",
        outnumber="three times",
    ),
    _make_rule(
        "do not progress in the program's own code, while the others wait for a lock",
        _find_only_group(_is_outside_awaited_lock),
        ("lock",),
        outnumber="three times",
    ),
    _make_rule(
        "have no thread in a collective, while all other ranks have one; all main threads are at the same place",
        _find_only_group(_lacks_thread_in_collective),
        ANYTHING,
        sentence="without_a_thread",
        outnumber="three times",
    ),
    _make_rule(
        "are in the same functions as all others, at another line of the user's code",
        _find_only_group(lambda scene, _: scene.are_at_different_lines and not scene.moving),  # normal for some roles
        ANYTHING,
        sentence="other_line",
        outnumber="three times",
    ),
    _make_rule(
        "wait for their next order, while the others have gone on into a collective",
        _find_outside_collectives(_awaits_orders),
        ("ranks",),
        sentence="awaits_orders",
    ),
    _make_rule(
        "wait in a loop for clients or events, while the others have gone on into a collective",
        _find_outside_collectives(_idles_in_loop),
        ("ranks",),
        sentence="idles_in_loop",
    ),
    _make_rule(
        "wait for an answer from another process, while the others have gone on into a collective",
        _find_outside_collectives(lambda group: is_answered_by_process(group) and not _idles_in_loop(group)),
        ("ranks",),
        sentence="awaits_process",
        outnumber="twice",
    ),
    _make_rule(
        "wait for another process or for events, while the others wait for their GPUs",
        _find_only_group(_awaits_process_or_events),
        ("gpu",),
        sentence="other_activity",
        outnumber="three times",
    ),
    _make_rule(
        "is a single rank in another collective, or in another call of the same collective",
        _find_only_group(lambda scene, group: group.size == 1 and scene.are_all_collective and not scene.only_roles),
        ("ranks",),
        sentence="other_collective",
        outnumber="three times",
    ),
    _make_rule(
        "wait in a collective or leave the job, while the others wait for their GPUs",
        _find_only_group(lambda scene, group: group.waits and _do_others_wait_for_gpus(scene, group)),
        ("gpu",),
        sentence="other_collective",
        outnumber="three times",
    ),
    _make_rule(
        "are half of the job and busy with one activity, while the others wait in one call of a collective",
        _find_busy_half,
        ("ranks",),
        sentence="other_activity",
    ),
    _make_rule(
        "wait for their GPU, if the world size is unknown",
        _find_only_group(lambda _, group: group.waits_for == "gpu"),
        ("ranks",),
        sentence="other_collective",
        outnumber="three times",
    ),
    _make_rule(
        "have GPUs that all draw less power than every working GPU",
        _find_low_power,
        ("work",),
        sentence="low_power",
    ),
)
"""The rules for ranks to check first. They are tried in this order. Section 4 of docs/verdicts.md prints them."""
