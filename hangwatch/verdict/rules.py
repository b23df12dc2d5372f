"""Pure: the rules by which ranks are accused, as one table. `culprit` applies them, docs/verdicts.md prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import structs

from hangwatch.model import (
    BLOCKED_STATES,
    STOPPED_STATES,
    Confidence,
    Group,
    Grouping,
    Member,
    Motion,
    Signature,
)
from hangwatch.stacks import activity, user_code
from hangwatch.stacks import frames as stack_frames
from hangwatch.stacks.idle_reasons import is_refused
from hangwatch.stacks.user_code import caller
from hangwatch.verdict import clauses, sentences

GPU_IN_KERNEL_RATIO = 0.5
_REFUSALS = ("PermissionDenied", "CannotPause")  # of the rank, or of all that this user may touch


Process: TypeAlias = tuple[str | None, int | None]
"""A node, and a pid on it."""


class Scene(NamedTuple):
    """A grouping, sorted by what its groups can tell; `failed` have a fault that says something of the rank.

    `shut` have a file system under their program that gives no answer: that they cannot be dumped says nothing of them.
    `existing` is how many ranks are known to exist where was looked: on one node (`is_part`), or in the whole job.
    """

    grouping: Grouping
    stacked: tuple[Group, ...]
    failed: tuple[Group, ...]
    gone: tuple[Group, ...]
    shut: tuple[Group, ...]
    existing: int
    is_part: bool

    @property
    def has_numbers(self) -> bool:
        """Whether a flight recorder shows an operation that stays open: then sequence numbers are evidence."""
        return any(
            one.stays_open
            for member in self.grouping.members
            for recorder in member.recorded
            for group in recorder.groups
            for one in group.operations
        )

    @property
    def answered(self) -> int:
        """How many ranks gave a stack or a telling fault."""
        return count_ranks((*self.stacked, *self.failed))


class Rule(NamedTuple):
    """When ranks are accused: these are suspect, so many of the others wait for these kinds, so sure, in these words.

    `who` and `waiting` say it for docs/verdicts.md. Those that wait for one of `waiting` must be at least half of the
    ranks in `half_of` ("dumped": that gave a stack and are no suspects; "others": that answered and are no suspects;
    "answered": all that answered), and outnumber the suspects: "as many" may be equal, "more" allows one against one,
    "three times" does not. `by_stack`: a stack makes them suspect, so who stands at the same place does not wait
    for them; of such rules the first with suspects decides, but for one that `gives_way`.

    A rule of `first_look` accuses nobody: `settle` says what would tell more of its suspects. They are named only where
    it `may_name` and the machine says the same of them.
    """

    kind: str
    who: str
    suspects: Callable[[Scene], Sequence[Group]]
    waiting: tuple[str, ...]
    half_of: Literal["dumped", "others", "answered"]
    outnumber: Literal["as many", "more", "three times"]
    confidence: Confidence
    weigh: Callable[[Suspicion], Confidence]
    words: Callable[[Suspicion], str]
    by_stack: bool = False
    gives_way: bool = False
    settle: Callable[[Suspicion], str] | None = None
    may_name: bool = False


class Suspicion(NamedTuple):
    """What a rule found: the suspects, all others with a stack, and how many of those that answered are no suspects."""

    rule: Rule
    scene: Scene
    suspects: tuple[Group, ...]
    others: tuple[Group, ...]
    rest: int

    @property
    def members(self) -> list[Member]:
        """All suspected ranks."""
        return [member for group in self.suspects for member in group.members]

    def waiting(self, *kinds: str) -> int:
        """How many of the others wait for one of `kinds`."""
        beside = {group.key for group in self.suspects} if self.rule.by_stack else set()
        if "work" in kinds:
            return sum(member.signature is Signature.GPU_WORKS for group in self.others for member in group.members)
        return count_ranks(group for group in self.others if waits_for(group) in kinds and group.key not in beside)


def survey(grouping: Grouping, ranks_here: int | None) -> Scene:
    """A grouping, sorted for the rules; `ranks_here` as in `culprit.judge`."""
    gone = tuple(g for g in grouping.groups if g.gone or (g.fault and g.fault.reason == "ProcessGone"))
    stacked = tuple(g for g in grouping.groups if g.fault is None and not g.gone)
    failed = tuple(g for g in grouping.groups if g.fault and g not in gone and _tells(g, stacked))
    groups = (g for g in grouping.groups if g.fault and g not in gone and g not in failed)
    shut = (part_of(g, lambda member: member.silent_mount is not None) for g in groups)
    is_part = ranks_here is not None and ranks_here < grouping.ranks_known
    existing = max(ranks_here or 0, len(grouping.members)) if is_part else grouping.ranks_known
    return Scene(grouping, stacked, failed, gone, tuple(g for g in shut if g), existing, is_part)


def _tells(group: Group, stacked: Sequence[Group]) -> bool:
    """Whether a failed dump says something of the rank; a refusal does only where a neighbour could be dumped."""
    if group.fault is None or group.fault.about != "target":
        return False
    return group.fault.reason not in _REFUSALS or _neighbours(stacked, group) > 0


# --- who is suspect, and how sure that is ----------------------------------------------------------------------------


def _stacked_where(
    wanted: Callable[[Group], bool], also: Callable[[Group, Member], bool] = lambda _group, _member: True
) -> Callable[[Scene], Sequence[Group]]:
    """Ranks of such groups. One that stood in a wait for ranks before has come out of it: it does come.

    Nor is one that was measured behind its GPU: it is waited for no more than the others; nor one that spins without
    the GIL while another is blocked outside of every wait: that one is what the spinner's GPU may wait for. Nor is one
    that may be behind its GPU, see `may_be_behind_gpu`; nor one that waits, by the kernel's word, for a lock that
    another rank holds or may hold, for a key of the store, or for what another rank is to send.
    """

    def suspects(scene: Scene) -> Sequence[Group]:
        may_be = may_be_late(scene)

        def suspected(group: Group) -> Group | None:
            return part_of(
                group,
                lambda member: (
                    may_be(member)
                    and not may_be_behind_gpu(member)
                    and member.asks_rank is None
                    and also(group, member)
                    and not _is_in_torch(group, member)
                ),
            )

        return [part for group in scene.stacked if wanted(group) and (part := suspected(group))]

    return suspects


def _without_held_up(found: Callable[[Scene], Sequence[Group]]) -> Callable[[Scene], Sequence[Group]]:
    """Those that it finds, without ranks that may wait for a lock in which another one stands, see `is_before`.

    Stacks alone cannot tell that from a culprit; of whom the kernel was asked, it was asked about locks, too.
    """

    def suspects(scene: Scene) -> Sequence[Group]:
        waiting = [group for group in scene.stacked if group.waits]

        def told(group: Group) -> Group | None:
            if not any(user_code.is_before(group, other) for other in waiting):
                return group
            return part_of(group, lambda member: member.main_cpu_ratio is not None)

        return [part for group in found(scene) if (part := told(group))]

    return suspects


def may_be_late(scene: Scene) -> Callable[[Member], bool]:
    """Whether what was measured of a rank allows that the others wait for it, see `_stacked_where`."""
    blocked = any(_is_blocked_outside(group) for group in scene.stacked)
    processes = processes_of(scene.grouping)

    def may_be(member: Member) -> bool:
        if member.waited_before or member.signature is Signature.BEHIND_GPU:
            return False
        if member.shares_lock or holder(member) in processes or member.awaits_store is not None:
            return False
        return not (blocked and member.signature is Signature.SPINS and member.owns_gil is not True)

    return may_be


def may_be_behind_gpu(member: Member) -> bool:
    """True if its GPU runs a kernel and it was seen in one round: only a second one tells whether it waits for that."""
    return member.rounds < 2 and (member.utilization_ratio or 0.0) >= GPU_IN_KERNEL_RATIO


def _is_blocked_outside(group: Group) -> bool:
    stands = any(member.signature is Signature.BLOCKED for member in group.members)
    return stands and group.waits_for not in {"ranks", "gpu"}


def _is_in_torch(group: Group, member: Member) -> bool:
    """Whether it sleeps in torch's own code, called from a function that no rule knows: `work.wait()` has no frame."""
    return member.waits_in_torch and activity.known(group.activity).waits_for == "unknown"


def _is_held(group: Group, member: Member) -> bool:
    """Whether it was measured to wait for something, with a GPU that has nothing to do.

    Where its calls may read a tensor it may be blocked behind its GPU: then for whom it waits must be known.
    """
    idle = member.utilization_ratio is not None and member.utilization_ratio < GPU_IN_KERNEL_RATIO
    is_known = member.awaited is not None or member.stuck_on is not None
    may_be = is_known or not activity.known(group.activity).may_read_gpu
    return idle and may_be and member.signature in {Signature.BLOCKED, Signature.AWAITS_OUTSIDE}


def _where(scene: Scene, wanted: Callable[[Member], bool]) -> Sequence[Group]:
    """Ranks of which the kernel says so in every round: its word counts however their dump failed."""
    groups = (group for group in scene.grouping.groups if group not in scene.gone)
    return [part for group in groups if (part := part_of(group, wanted))]


def _gone_for_a_reason(scene: Scene) -> Sequence[Group]:
    """Of the ranks without a process those that are known to have crashed: who died first, else all."""
    return died_first(scene) or [part for group in scene.gone if (part := part_of(group, has_crashed))]


def _gone_without_another(scene: Scene) -> Sequence[Group]:
    """Of the ranks without a process those that followed nobody, as far as is known: who was first may be elsewhere."""

    def followed(member: Member) -> bool:
        return member.died is not None and member.died.of_others

    return [part for group in scene.gone if (part := part_of(group, lambda member: not followed(member)))]


def died_first(scene: Scene) -> Sequence[Group]:
    """Ranks without a process of which what they left says that none died before them."""

    def is_first(member: Member) -> bool:
        return member.died is not None and member.died.is_first and not member.died.of_others

    return [part for group in scene.gone if (part := part_of(group, is_first))]


def has_crashed(member: Member) -> bool:
    """Whether the kernel's log says that its process, or a worker of it, ended by a fault or was killed for memory."""
    return clauses.ended_by(member) is not None


def _stopped(scene: Scene) -> Sequence[Group]:
    """Ranks in state T or t, and those that a freezer holds, whatever state that is shown as."""
    return _where(scene, lambda member: member.state in STOPPED_STATES or member.frozen_cgroup is not None)


def _blocked(scene: Scene) -> Sequence[Group]:
    """Ranks in state D in every round, and those that wait for the file system on which py-spy hangs.

    Not one that was seen so once, in a wait for ranks: that passes, and it is where the others are. Nor one that was
    seen so once and may be behind its GPU.
    """
    groups = (part_of(group, lambda member: member.waits_for_mount) for group in scene.shut)

    def is_blocked(member: Member) -> bool:
        return member.state in BLOCKED_STATES and member.frozen_cgroup is None and not may_be_behind_gpu(member)

    blocked = _where(scene, is_blocked)
    blocked = [group for group in blocked if not (group.waits and max(member.rounds for member in group.members) < 2)]
    return [*blocked, *(group for group in groups if group)]


def _undumpable(scene: Scene) -> Sequence[Group]:
    """Ranks that cannot be dumped, by a fault that says something of them."""
    return [part for group in scene.failed if (part := part_of(group, lambda member: not may_be_behind_gpu(member)))]


def _deaf_master(scene: Scene) -> Sequence[Group]:
    """Rank 0 where it does something else than to serve the store, of which others are refused."""
    if not any(is_refused(group, member) for group in scene.stacked for member in group.members):
        return []

    def is_deaf(member: Member) -> bool:
        return member.id.rank == 0 and member.store is not None and not member.store.has_connection

    elsewhere = [group for group in scene.stacked if not activity.known(group.activity).meets_at_store]
    return [part for group in elsewhere if (part := part_of(group, is_deaf))]


def _weigh_deaf_master(suspicion: Suspicion) -> Confidence:
    """Less sure where it works: it may be at its start, and come."""
    works = any(member.signature in {Signature.SPINS, Signature.COMPUTES} for member in suspicion.members)
    return Confidence.MEDIUM if works else Confidence.HIGH


def _weigh_gone(suspicion: Suspicion) -> Confidence:
    """Less sure where most of the others show GPU waits only."""
    return Confidence.HIGH if suspicion.waiting("ranks") * 2 >= count_ranks(suspicion.others) else Confidence.MEDIUM


def _weigh_blocked(suspicion: Suspicion) -> Confidence:
    """A disk wait passes: one round is not enough to be sure."""
    return Confidence.HIGH if min(member.rounds for member in suspicion.members) > 1 else Confidence.MEDIUM


def _weigh_as_it_is(suspicion: Suspicion) -> Confidence:
    return suspicion.rule.confidence


def _weigh_undumpable(suspicion: Suspicion) -> Confidence:
    """Sure where three neighbours could be dumped and three quarters of the job wait explicitly."""
    explicit = suspicion.waiting("ranks") * 4 >= 3 * suspicion.scene.answered
    return Confidence.HIGH if explicit and _fewest_neighbours(suspicion) >= 3 else Confidence.MEDIUM


def _weigh_outside(suspicion: Suspicion) -> Confidence:
    """Less sure where few wait explicitly for ranks (GPU waits are weaker) or where many are named."""
    sure, named, answered = suspicion.rule.confidence, len(suspicion.members), suspicion.scene.answered
    explicit = suspicion.waiting("ranks")
    if sure is Confidence.MEDIUM and explicit * 2 < answered - named:
        return Confidence.LOW
    many = named > 1 and named * 4 > answered
    few = explicit * 4 < 3 * (answered - named)
    return Confidence.MEDIUM if sure is Confidence.HIGH and (many or few) else sure


def _say_undumpable(suspicion: Suspicion) -> str:
    return sentences.undumpable(suspicion.suspects, suspicion.others, _fewest_neighbours(suspicion))


def _outside(
    who: str,
    wanted: Callable[[Group], bool],
    waiting: tuple[str, ...],
    confidence: Confidence,
    also: Callable[[Group, Member], bool] = lambda _group, _member: True,
    *,
    gives_way: bool = False,
    knows_size: bool = False,
    may_be_held_up: bool = True,
) -> Rule:
    """A rule on ranks that are in no wait while the others are. A weak suspicion needs a clear majority.

    With `knows_size` only where the world size is known: whom the others wait for may not be in view. Without
    `may_be_held_up` nobody who may wait for another one to leave a block of the program's code.
    """
    found = _stacked_where(wanted, also)
    if not may_be_held_up:
        found = _without_held_up(found)
    return Rule(
        kind="OutsideCollective",
        who=who,
        suspects=lambda scene: [] if knows_size and scene.grouping.world_size is None else found(scene),
        waiting=waiting,
        half_of="answered",
        outnumber="three times" if confidence is Confidence.LOW else "more",
        confidence=confidence,
        weigh=_weigh_outside,
        words=lambda suspicion: sentences.outside(suspicion.suspects, suspicion.others),
        by_stack=True,
        gives_way=gives_way,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        kind="RankGone",
        who="have no process any more, and died first by what they left, or ended by a fault by the kernel's log",
        suspects=_gone_for_a_reason,
        waiting=("ranks", "gpu"),
        half_of="dumped",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_gone,
        words=lambda suspicion: sentences.gone(suspicion.suspects, suspicion.others, suspicion.scene.gone),
    ),
    Rule(
        kind="RankGone",
        who="have no process any more (or a zombie) on a node that answers, and followed nobody by what they left",
        suspects=_gone_without_another,
        waiting=("ranks", "gpu"),
        half_of="dumped",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_gone,
        words=lambda suspicion: sentences.gone(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankBlocked",
        who="are in state `D` in every round, or in a call on the silent file system on which py-spy hangs",
        suspects=_blocked,
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_blocked,
        words=lambda suspicion: sentences.blocked(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankStopped",
        who="are in state `T` or `t` in every round (SIGSTOP, a debugger, a tracer), or held by a freezer",
        suspects=_stopped,
        waiting=("ranks", "gpu"),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_as_it_is,
        words=lambda suspicion: sentences.stopped(suspicion.suspects, suspicion.others),
    ),
    Rule(
        kind="RankUndumpable",
        who="cannot be dumped, by a fault that says something of them",
        suspects=_undumpable,
        waiting=("ranks", "gpu"),
        half_of="dumped",
        outnumber="as many",
        confidence=Confidence.MEDIUM,
        weigh=_weigh_undumpable,
        words=_say_undumpable,
    ),
    Rule(
        kind="MasterRefused",
        who="are rank 0, not at the store and without a socket of it, while others are refused there",
        suspects=_deaf_master,
        waiting=("ranks",),
        half_of="others",
        outnumber="as many",
        confidence=Confidence.HIGH,
        weigh=_weigh_deaf_master,
        words=lambda suspicion: sentences.deaf_master(suspicion.suspects, suspicion.others),
    ),
    _outside(
        "are busy or stuck by themselves, or hold the GIL in a function that no rule knows",
        lambda group: waits_for(group) == "nothing",
        ("ranks", "gpu", "lock", "thread"),
        Confidence.HIGH,
    ),
    _outside(
        "leave the job, while the others wait in it",
        lambda group: activity.known(group.activity).leaves_the_job,
        ("ranks",),
        Confidence.MEDIUM,
        gives_way=True,
    ),
    _outside(
        "wait for a lock or a thread",
        lambda group: group.waits_for in {"lock", "thread"} and not asks_unknown_thread(group),
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _outside(
        "stand behind the GPU, but hold the GIL (extensions can hold it while they wait, so this is weaker), and no "
        "thread of theirs was seen to wait for it",
        lambda group: group.waits_for == "gpu" and group.holds_gil and not wants_gil(group),
        ("ranks", "gpu"),
        Confidence.MEDIUM,
    ),
    _outside(
        "are blocked in functions that no rule knows, or wait for somebody outside of the job, with an idle GPU",
        lambda group: waits_for(group) == "unknown" or activity.known(group.activity).by_name_alone,
        ("ranks", "gpu"),
        Confidence.MEDIUM,
        _is_held,
        gives_way=True,
    ),
    _outside(
        "are in functions that no rule knows, and, where stacks alone tell, before no line at which another one waits",
        lambda group: waits_for(group) == "unknown",
        ("ranks",),
        Confidence.LOW,
        may_be_held_up=False,
    ),
    _outside(
        "stand behind the GPU, but move",
        lambda group: group.waits_for == "gpu" and group.motion is Motion.MOVING,
        ("ranks",),
        Confidence.MEDIUM,
    ),
    _outside(
        "stand behind the GPU, where it is known how many ranks there are",
        lambda group: group.waits_for == "gpu",
        ("ranks",),
        Confidence.LOW,
        knows_size=True,
    ),
)
"""The rules by which ranks are accused, in their order. Section 4 of docs/verdicts.md is printed from them."""


# --- facts of several groups ---------------------------------------------------------------------------------------


def count_ranks(groups: Iterable[Group]) -> int:
    """How many ranks the groups hold."""
    return sum(group.size for group in groups)


def waits_for(group: Group) -> str:
    """What a group waits for; who runs Python that no rule knows waits for nothing."""
    return "nothing" if group.runs_python else group.waits_for


def processes_of(grouping: Grouping) -> frozenset[Process]:
    """Those of all ranks."""
    return frozenset((member.id.node, member.id.pid) for member in grouping.members)


def asks_unknown_thread(group: Group) -> bool:
    """Whether it waits for a thread, and one of it stands in functions that no rule knows: it may wait for ranks."""
    threads = (activity.known(thread.activity) for thread in group.threads)
    return group.waits_for == "thread" and any(known.waits_for == "unknown" for known in threads)


def wants_gil(group: Group) -> bool:
    """Whether a thread of it waits for the GIL: Python that runs gives it away, code that waits inside it does not."""
    return any(frame.function.startswith("take_gil") for thread in group.threads for frame in thread.frames)


def holder(member: Member) -> Process | None:
    """The process that holds the lock of a file for which a rank waits; None where it waits for none."""
    return None if member.file_lock is None else (member.id.node, member.file_lock.holder_pid)


def only_roles(groups: Sequence[Group]) -> bool:
    """Sender and receivers of one rooted collective, entered through the same helper."""
    if len(groups) != 2 or not all(group.waits for group in groups):
        return False
    first, second = groups
    if first.operation != second.operation or not is_rooted(first):
        return False
    called_by = [caller(group.frames) for group in groups]
    places = {(frame.function, stack_frames.short_path(frame.file)) for frame in called_by if frame is not None}
    return None not in called_by and len(places) == 1


def is_rooted(group: Group) -> bool:
    """Whether it waits in a collective of which one rank is the root, and stands in other code or at another line."""
    return group.waits and activity.is_marked("rooted", group.operation or "")


def part_of(group: Group, wanted: Callable[[Member], bool]) -> Group | None:
    """The group with only these members, None without any."""
    members = tuple(member for member in group.members if wanted(member))
    return structs.replace(group, members=members) if members else None


def without(suspects: Sequence[Group], groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups without the suspected members."""
    suspected = {member.id for group in suspects for member in group.members}
    parts = (part_of(group, lambda member: member.id not in suspected) for group in groups)
    return tuple(part for part in parts if part)


def _fewest_neighbours(suspicion: Suspicion) -> int:
    return min(_neighbours(suspicion.scene.stacked, group) for group in suspicion.suspects)


def _neighbours(stacked: Sequence[Group], group: Group) -> int:
    """How many ranks could be dumped on each node of this group, at least."""
    dumped = Counter(member.id.node for other in stacked for member in other.members)
    return min(dumped[node] for node in {member.id.node for member in group.members})
