"""The table of rules that name ranks. `judge` applies them, and docs/verdicts.md prints them. Pure."""

from collections.abc import Callable, Sequence
from functools import partial

from hangwatch.collectives.process_groups import PROVING
from hangwatch.model import BLOCKED_STATES, Confidence, Group, Member, Motion, Signature
from hangwatch.stacks import activity_table, user_code
from hangwatch.stacks.progress import GPU_IN_KERNEL_RATIO
from hangwatch.verdict.findings import ANYTHING, Finding, Rule
from hangwatch.verdict.scene import (
    DEADLY,
    Scene,
    asks_unknown_thread,
    count_ranks,
    is_collective,
    keep_groups,
    keep_members,
    may_be_behind_gpu,
    may_copy_tensor,
    waits_for,
    waits_in_program,
    wants_gil,
)

_MOST_COMPARED = 64  # waiting groups, the largest ones

# --- which ranks are suspects, and how certain that is ---------------------------------------------------------------


def _make_stack_finder(
    wanted: Callable[[Group], bool], also: Callable[[Group, Member], bool] = lambda _group, _member: True
) -> Callable[[Scene], Sequence[Group]]:
    """Return a function that finds the ranks in groups for which `wanted` is true, except ranks that may be victims.

    A rank may be a victim in these cases:
    * It was seen waiting for ranks in an earlier round. So it joins its collectives.
    * It waits for its GPU, or may do so, see `may_be_behind_gpu` and `may_copy_tensor`.
    * It spins without the GIL while another rank is blocked outside every wait. Its GPU may wait for that rank.
    * Its system call waits for a lock that another rank holds or may hold, for a key of the store, or for data of
      another rank.
    """

    def suspects(scene: Scene) -> Sequence[Group]:
        are_behind_gpus = not any(group.waits_for == "ranks" for group in scene.stacked)

        def suspected(group: Group) -> Group | None:
            return keep_members(
                group,
                lambda member: (
                    scene.may_be_late(member)
                    and not may_be_behind_gpu(member)
                    and not (are_behind_gpus and may_copy_tensor(group, member))
                    and member.waits.asks_rank is None
                    and also(group, member)
                    and not _sleeps_in_torch(group, member)
                ),
            )

        return [part for group in scene.stacked if wanted(group) and (part := suspected(group))]

    return suspects


def _remove_lock_waiters(may_be_suspects: Callable[[Scene], Sequence[Group]]) -> Callable[[Scene], Sequence[Group]]:
    """Return a function that leaves out the ranks of `may_be_suspects` that may wait for a lock of another rank.

    Such a rank is at an earlier line than a rank that waits, see `is_at_earlier_line`. A rank with measurements is
    kept, because hangwatch has also read its locks.
    """

    def suspects(scene: Scene) -> Sequence[Group]:
        waiting = [group for group in scene.stacked if group.waits][:_MOST_COMPARED]

        def kept(group: Group) -> Group | None:
            if not any(user_code.is_at_earlier_line(group, other) for other in waiting):
                return group
            return keep_members(group, lambda member: member.usage.main_cpu_ratio is not None)

        return [part for group in may_be_suspects(scene) if (part := kept(group))]

    return suspects


def _sleeps_in_torch(group: Group, member: Member) -> bool:
    """True if a rank sleeps in torch's code below a Python function that is unknown or a wait by its name alone.

    Some calls of torch, for example `work.wait()`, have no Python frame.
    """
    by_name = activity_table.find_activity(group.activity).waits_for
    return member.waits.waits_in_torch is True and by_name in ("unknown", "lock")


def _is_blocked_with_idle_gpu(group: Group, member: Member) -> bool:
    """True if the rank's GPU is idle and the rank was measured blocked, or waiting for a peer outside the job.

    A call that may read a tensor may also wait for the GPU. A rank in such a call counts only if its peer or file is
    known.
    """
    idle = member.gpu.utilization_ratio is not None and member.gpu.utilization_ratio < GPU_IN_KERNEL_RATIO
    is_known = member.waits.awaited is not None or member.waits.stuck_on is not None
    may_be = is_known or not activity_table.find_activity(group.activity).may_read_gpu
    return idle and may_be and member.signature in {Signature.BLOCKED, Signature.AWAITS_OUTSIDE}


def _find_members(scene: Scene, wanted: Callable[[Member], bool]) -> Sequence[Group]:
    """Return the ranks for which `wanted` is true, with or without a stack. Ranks without a process are left out."""
    return keep_groups((group for group in scene.grouping.groups if group not in scene.gone), wanted)


def died_first(scene: Scene) -> Sequence[Group]:
    """Return the ended ranks that died before all others by their crash artifacts, and blame no other rank."""
    return keep_groups(
        scene.gone, lambda member: member.died is not None and member.died.is_first and not member.died.of_others
    )


# Collectives that a rank may complete before the others join.
_ENDS_EARLY = frozenset({"broadcast", "gather", "reduce", "scatter"})


def _find_ended(scene: Scene) -> Sequence[Group]:
    """Return the ended ranks that no crash artifact acquits.

    Left out, if another rank waits for a file, a pipe or a peer outside of the job: ranks without crash artifacts. They
    may have left when their work was done, and the others may wait for that rank. They may also have left after their
    part of a gather, if another rank is in no known wait for ranks.
    """
    waits = [member.waits for member in scene.stacked_members]
    is_other_outside = any(each.stuck_on or each.awaited or each.object == "file" for each in waits)
    open_in = {group.operation or "" for group in scene.stacked if is_collective(group)}
    may_end_early = not open_in.isdisjoint(_ENDS_EARLY) and not any(name.startswith(PROVING) for name in open_in)
    is_other_apart = any(waits_for(group) != "ranks" for group in scene.stacked)
    may_have_left = is_other_outside or (may_end_early and is_other_apart)

    def may_have_died(member: Member) -> bool:
        return not may_have_left if member.died is None else not member.died.of_others

    return keep_groups(scene.gone, may_have_died)


def has_crashed(member: Member) -> bool:
    """True if the kernel log reports a crash or an OOM kill of the rank's process or of one of its workers."""
    return any(line.name in DEADLY for line in member.kernel.lines)


def find_stopped(scene: Scene) -> Sequence[Group]:
    """Return the ranks in state T or t, and the ranks that the cgroup freezer has frozen."""
    return _find_members(scene, lambda member: member.is_stopped)


def _find_held_up(scene: Scene) -> Sequence[Group]:
    """Return the blocked ranks that wait for a process which cannot go on."""
    blocked = _find_members(scene, lambda member: member.signature is Signature.BLOCKED)
    return keep_groups(blocked, lambda member: member.waits.awaited is not None and member.waits.awaited.end == "held")


def _find_blocked(scene: Scene) -> Sequence[Group]:
    """Return the ranks in state D in every round, and the ranks that wait for a file system that does not respond.

    A rank seen in only one round is left out if it waits for ranks or may wait for its GPU: that state may be short.
    """
    blocked = _find_members(
        scene,
        lambda member: (
            member.kernel.state in BLOCKED_STATES
            and member.waits.frozen_cgroup is None
            and not may_be_behind_gpu(member)
        ),
    )
    blocked = [group for group in blocked if not (group.waits and max(member.rounds for member in group.members) < 2)]
    return [*blocked, *scene.waiting_for_mount]


def _deaf_master(scene: Scene) -> Sequence[Group]:
    """Return rank 0 if it does not serve the store while it refuses the connections of other ranks."""
    groups = scene.stacked if scene.refused else ()
    not_at_store = [group for group in groups if not activity_table.find_activity(group.activity).meets_at_store]
    first = keep_groups(not_at_store, lambda member: member.id.rank == 0)
    return keep_groups(first, lambda member: member.waits.store is not None and not member.waits.store.has_connection)


def _weigh_master_without_store(finding: Finding) -> Confidence:
    """Return medium confidence if rank 0 uses the CPU, because it may still be starting; else high confidence."""
    works = any(member.signature in {Signature.SPINS, Signature.COMPUTES} for member in finding.members)
    return Confidence.MEDIUM if works else Confidence.HIGH


def _weigh_gone(finding: Finding) -> Confidence:
    """Return high confidence if all others wait, and at least half of them for ranks, not for GPUs. Else medium."""
    others = count_ranks(finding.others)
    all_wait = finding.waiting("ranks", "gpu") == others
    return Confidence.HIGH if all_wait and finding.waiting("ranks") * 2 >= others else Confidence.MEDIUM


def _weigh_undumpable(finding: Finding) -> Confidence:
    """Return high confidence if three quarters of the responding ranks wait for ranks. Else return medium confidence.

    High confidence also needs three ranks with a stack on the node of each suspect, to show that dumps succeed there.
    """
    explicit = finding.waiting("ranks") * 4 >= 3 * finding.scene.answered
    return Confidence.HIGH if explicit and finding.fewest_neighbours >= 3 else Confidence.MEDIUM


def _weigh_outside(finding: Finding, sure: Confidence) -> Confidence:
    """Return `sure`, or a lower confidence if few ranks wait for ranks or if many ranks are named.

    Ranks that wait for GPUs do not count as ranks that wait for ranks.
    """
    named, answered = len(finding.members), finding.scene.answered
    explicit = finding.waiting("ranks")
    if sure is Confidence.MEDIUM and explicit * 2 < answered - named:
        return Confidence.LOW
    outside = count_ranks(finding.others) - explicit
    if 0 < outside <= named and all(map(waits_in_program, finding.suspects)):
        return Confidence.LOW  # these ranks have not joined either, and the suspects may wait for them
    many = named > 1 and named * 4 > answered
    few = explicit * 4 < 3 * (answered - named)
    return Confidence.MEDIUM if sure is Confidence.HIGH and (many or few) else sure


def _make_outside_rule(
    description: str,
    wanted: Callable[[Group], bool],
    waiting: tuple[str, ...],
    confidence: Confidence,
    also: Callable[[Group, Member], bool] = lambda _group, _member: True,
    *,
    gives_way: bool = False,
    knows_size: bool = False,
    may_wait_for_lock: bool = True,
) -> Rule:
    """Return a rule that names ranks in no wait while other ranks wait.

    If `confidence` is low, three times as many ranks must wait. If `knows_size` is true, the rule applies only if the
    world size is known, because a rank that was not captured could be the cause. If `may_wait_for_lock` is false, the
    rule leaves out ranks that may wait for a lock, see `_remove_lock_waiters`.
    """
    may_be_suspects = _make_stack_finder(wanted, also)
    if not may_wait_for_lock:
        may_be_suspects = _remove_lock_waiters(may_be_suspects)
    return Rule(
        kind="OutsideCollective",
        description=description,
        suspects=lambda scene: [] if knows_size and scene.grouping.world_size is None else may_be_suspects(scene),
        waiting=waiting,
        half_of="answered",
        outnumber="three times" if confidence is Confidence.LOW else "more",
        confidence=confidence,
        weigh=partial(_weigh_outside, sure=confidence),
        by_stack=True,
        gives_way=gives_way,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        kind="RankGone",
        description="have ended, and died first according to their crash artifacts or a fault in the kernel's log",
        suspects=lambda scene: died_first(scene) or keep_groups(scene.gone, has_crashed),
        half_of="dumped",
        weigh=_weigh_gone,
    ),
    Rule(
        kind="RankGone",
        description="have ended (or are a zombie) on a node that responds; no crash artifact blames another rank, and "
        "no other rank waits for a file, a pipe or a peer outside of the job, or waits for no rank while others are in "
        "a gather, reduce, scatter or broadcast",
        suspects=_find_ended,
        half_of="dumped",
        weigh=_weigh_gone,
    ),
    Rule(
        kind="RankBlocked",
        description="are in state `D` in every round, or in a call on the file system that does not respond to py-spy",
        suspects=_find_blocked,
        # A disk wait that was seen in only one round may end.
        weigh=lambda finding: (
            Confidence.HIGH if min(member.rounds for member in finding.members) > 1 else Confidence.MEDIUM
        ),
    ),
    Rule(
        kind="RankStopped",
        description="are in state `T` or `t` in every round (SIGSTOP, a debugger, a tracer), or frozen by their cgroup",
        suspects=find_stopped,
    ),
    Rule(
        kind="HelperStopped",
        description="wait for a process on their node (a worker, child or server) that is stopped, or in state `D`",
        suspects=_find_held_up,
        waiting=ANYTHING,
        confidence=Confidence.MEDIUM,
    ),
    Rule(
        kind="RankUndumpable",
        description="cannot be dumped, because of a fault of the process itself",
        suspects=lambda scene: keep_groups(scene.failed, lambda member: not may_be_behind_gpu(member)),
        half_of="dumped",
        confidence=Confidence.MEDIUM,
        weigh=_weigh_undumpable,
    ),
    Rule(
        kind="MasterRefused",
        description="are rank 0 and do not serve the store, while it refuses the connections of other ranks",
        suspects=_deaf_master,
        waiting=("ranks",),
        weigh=_weigh_master_without_store,
    ),
    _make_outside_rule(
        "are busy or blocked by themselves, or hold the GIL in a function that no rule matches",
        lambda group: waits_for(group) == "nothing",
        ("ranks", "gpu", "lock", "thread"),
        Confidence.HIGH,
    ),
    _make_outside_rule(
        "leave the job, while the others wait in it",
        lambda group: activity_table.find_activity(group.activity).leaves_the_job,
        ("ranks",),
        Confidence.MEDIUM,
        gives_way=True,
    ),
    _make_outside_rule(
        "wait for a lock or a thread",
        lambda group: (
            group.waits_for in {"lock", "thread"} and not asks_unknown_thread(group) and not group.awaited_differ
        ),
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _make_outside_rule(
        "wait for their GPU, but hold the GIL, and none of their threads waits for the GIL (weaker: extensions may "
        "hold the GIL while they wait)",
        lambda group: group.waits_for == "gpu" and group.holds_gil and not wants_gil(group),
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _make_outside_rule(
        "are blocked in functions that no rule matches, or wait for a peer outside the job, with an idle GPU",
        lambda group: waits_for(group) == "unknown" or activity_table.find_activity(group.activity).by_name_alone,
        ("ranks", "gpu"),
        Confidence.MEDIUM,
        _is_blocked_with_idle_gpu,
        gives_way=True,
    ),
    _make_outside_rule(
        "are in functions that no rule matches (by stacks alone: not at an earlier line than a rank that waits)",
        lambda group: waits_for(group) == "unknown" and not group.awaited,
        ("ranks",),
        Confidence.LOW,
        may_wait_for_lock=False,
    ),
    _make_outside_rule(
        "wait for their GPU, but progress",
        lambda group: group.waits_for == "gpu" and group.motion is Motion.MOVING,
        ("ranks",),
        Confidence.MEDIUM,
    ),
    _make_outside_rule(
        "wait for their GPU, if the world size is known",
        lambda group: group.waits_for == "gpu",
        ("ranks",),
        Confidence.LOW,
        knows_size=True,
    ),
)
"""The rules that name ranks. They are tried in this order. Section 4 of docs/verdicts.md prints them."""
