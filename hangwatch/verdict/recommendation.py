"""The recommended action after a verdict, by the table `actions.toml`. Pure."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import tables, words
from hangwatch.model import (
    BLOCKED_STATES,
    CRASHED,
    ActionKind,
    CallTarget,
    Confidence,
    Evidence,
    Group,
    Grouping,
    KernelLine,
    Member,
    Motion,
    PastHang,
    RecommendedAction,
    Value,
    Verdict,
    is_loopback,
)
from hangwatch.tables import kernel_lines, xids
from hangwatch.verdict import kinds
from hangwatch.verdict.fingerprint import hash_parts, make_fingerprint
from hangwatch.verdict.sequence_rules import decide_by_records
from hangwatch.verdict.timeout_forecast import recorded_end

DAY_SECONDS = 86400.0

_MOST_NODES = 3
_CAPTURE_SECONDS = 15.0
_LOST_CONNECTION = re.compile(r"\b(Dist(Network|Store)Error|ConnectionResetError|Connection reset by peer)\b")


class Row(Value, frozen=True, forbid_unknown_fields=True):
    """One row of actions.toml."""

    action: ActionKind
    reason: str
    why: str
    noun: str = ""


class History(NamedTuple):
    """Earlier hangs, and the facts of this one to compare with: its node, user id, fingerprint and time.

    `uid` is None if the user id is not known. `with_action` sets the fingerprint.
    """

    hangs: Sequence[PastHang] = ()
    node: str = ""
    uid: int | None = None
    fingerprint: str = ""
    unix_seconds: float = 0.0

    def since(self, seconds: float = DAY_SECONDS) -> Iterator[PastHang]:
        """Yield the hangs of the last `seconds`. The clock may have been set back by as much."""
        return (hang for hang in self.hangs if abs(self.unix_seconds - hang.opened_unix_seconds) < seconds)


class _Facts(NamedTuple):
    """The facts that the conditions test. `suspects` are the named ranks, else the ranks to check first."""

    verdict: Verdict
    grouping: Grouping
    suspects: Sequence[tuple[Group, Member]]
    history: History
    is_known_pause: bool

    @property
    def kind(self) -> kinds.Kind:
        """The row of the kind of verdict."""
        return kinds.find(self.verdict.kind)

    @property
    def members(self) -> Sequence[Member]:
        """The suspects without their groups."""
        return [member for _, member in self.suspects]

    @property
    def looked_at(self) -> Sequence[Member]:
        """The suspects; all ranks if there is none."""
        return self.members or self.grouping.members


class _Match(NamedTuple):
    """A condition that holds: the `target` of the action, and the ranks that it concerns."""

    target: str = ""
    ranks: Sequence[Member] = ()


@functools.cache
def load() -> dict[str, Row]:
    """Return the rows of actions.toml by condition, in order."""
    return tables.load("hangwatch.verdict", "actions.toml", dict[str, Row])


def with_action(
    verdict: Verdict, grouping: Grouping, history: History | None = None, *, is_known_pause: bool = False
) -> Verdict:
    """Return the verdict with the recommended action and the fingerprint.

    `is_known_pause`: the job has paused at this place before. Without `history`, no earlier hang is known.
    """
    suspects = _find_suspects(verdict, grouping)
    mark = make_fingerprint((group for group, _ in suspects), grouping.groups)
    ranks = [member for _, member in suspects] or grouping.members
    died = next((member.died for member in ranks if member.died is not None), None)
    if not mark and died is not None and verdict.kind == CRASHED:  # a dead rank has no stack
        mark = hash_parts((CRASHED, died.text))
    facts = _Facts(verdict, grouping, suspects, (history or History())._replace(fingerprint=mark), is_known_pause)
    matches = ((row, match) for name, row in load().items() if (match := CONDITIONS[name](facts)))
    row, match = next(matches, (None, None))
    match = match if isinstance(match, _Match) else _Match()
    action = RecommendedAction() if row is None else _make_action(row, match, verdict)
    before = tuple(_describe_earlier_hangs(facts.history))
    return replace(verdict, action=action, fingerprint=mark, evidence=(*verdict.evidence, *before))


def _describe_earlier_hangs(history: History) -> Iterator[Evidence]:
    """Yield evidence if the job hung at the same place in the last 7 days: how often, and on which nodes."""
    same = [one for one in history.since(7 * DAY_SECONDS) if one.fingerprint == history.fingerprint != ""]
    if same:
        times = words.count(len(same), "time")
        message = f"blocked at the same place {times} in the last 7 days: {_describe_hangs(same)}"
        yield Evidence(kind="history", message=message)


def _describe_hangs(hangs: Iterable[PastHang]) -> str:
    """Return the nodes of some hangs as text: "gpu-07 (2 times), gpu-11 (1 time)"."""
    by_node = Counter(hang.node for hang in hangs).most_common(_MOST_NODES)
    return ", ".join(f"{words.printable(node)} ({words.count(number, 'time')})" for node, number in by_node)


def _make_action(row: Row, match: _Match, verdict: Verdict) -> RecommendedAction:
    nodes = sorted({member.id.node for member in match.ranks if member.id.node})
    return RecommendedAction(
        kind=row.action,
        reason=row.reason.replace("{target}", match.target),
        target=match.target,
        exclude_nodes=tuple(nodes) if row.action == "restart_elsewhere" else (),
        confidence=verdict.confidence if verdict.named else Confidence.LOW,
    )


def _match_ranks(members: Sequence[Member]) -> _Match | None:
    """Return a match with these ranks as its target; None without any."""
    return _Match(words.name_ranks([member.id for member in members]), members) if members else None


def _find_suspects(verdict: Verdict, grouping: Grouping) -> list[tuple[Group, Member]]:
    ranks = verdict.named or verdict.check_first
    if not ranks:
        return []
    keys, numbers = {rank.sort_key() for rank in ranks}, {rank.rank for rank in ranks}
    return [
        (group, member)
        for group in grouping.groups
        for member in group.members
        if member.id.rank in numbers and member.id.sort_key() in keys
    ]


# --- wait -------------------------------------------------------------------------------------------------------------


def _lacks_nodes(facts: _Facts) -> bool:
    launchers = (member.waiting for member in facts.grouping.members if member.waiting is not None)
    return facts.verdict.kind == "NoRanks" and any(waiting.needs_several_nodes for waiting in launchers)


def _sleeps(facts: _Facts) -> _Match | None:
    """Match if all suspects are in a sleep that ends before the collective timeout, within a day.

    It is longer than a capture: a loop of short sleeps may never end.
    """
    sleeps, latest = [member.stack.sleep for member in facts.members], recorded_end(facts.grouping) or math.inf
    ends = (
        sleep is not None
        and not sleep.is_polling
        and _CAPTURE_SECONDS < sleep.seconds < DAY_SECONDS
        and sleep.until_unix_seconds < latest
        for sleep in sleeps
    )
    return _match_ranks(facts.members if all(ends) else [])


def _may_progress(facts: _Facts) -> bool:
    """True if hangwatch measured a rank and cannot say that it is blocked. Ranks known from text do not count."""
    measured = (member for member in facts.grouping.members if member.is_measured)
    return not facts.kind.is_final and any(member.motion is not Motion.FROZEN for member in measured)


# --- hardware ---------------------------------------------------------------------------------------------------------


def _find_line(members: Sequence[Member], is_wanted: Callable[[KernelLine], bool]) -> tuple[KernelLine, Member] | None:
    """Return a recent line and its rank. The job has survived an older line."""
    lines = ((line, member) for member in members for line in member.kernel.lines)
    return next(((line, member) for line, member in lines if line.is_recent and is_wanted(line)), None)


def _is_gpu_error(line: KernelLine) -> bool:
    code, row = xids.read_code(line.text), kernel_lines.load().get(line.name)
    if code is not None:
        return xids.severity(code, line.text) == "critical"
    return row is not None and row.names == "gpu" and row.severity == "critical"


def _has_gpu_error(facts: _Facts) -> _Match | None:
    found = _find_line(facts.looked_at, _is_gpu_error)
    if found is None:
        return None
    line, member = found
    code = xids.read_code(line.text)
    if code is None:
        return _Match(f"GPU {line.subject} ({kernel_lines.load()[line.name].meaning})", [member])
    return _Match(f"XID {code} of GPU {line.subject} ({xids.find_meaning(code).meaning})", [member])


def _has_adapter_error(facts: _Facts) -> _Match | None:
    if not facts.kind.all_wait or facts.verdict.named:
        return None
    found = _find_line(facts.grouping.members, lambda line: line.name == "mlx5_fatal")
    return None if found is None else _Match(f"the network adapter {found[0].subject}", [found[1]])


def _find_target(facts: _Facts, is_wanted: Callable[[Member, CallTarget], bool]) -> tuple[CallTarget, Member] | None:
    """Return a wanted target of the blocked call of a suspect or its worker; without suspects, of any rank."""
    targets = ((one, member) for member in facts.looked_at for call in member.kernel.calls for one in call.behind)
    return next(((target, member) for target, member in targets if is_wanted(member, target)), None)


def _waits_for_local_device(facts: _Facts) -> _Match | None:
    """Match if a named rank is in state D in a call on one file, which is on a disk or a GPU of its node."""
    for _, member in facts.suspects:
        call, is_blocked = member.kernel.call, member.kernel.state in BLOCKED_STATES
        targets = call.behind if call is not None and call.descriptors == 1 else ()
        is_silent = member.kernel.silent_mount is not None or any(map(_is_storage_error, member.kernel.lines))
        local = next((one for one in targets if one.is_local_device or one.what.startswith("/dev/nvidia")), None)
        if facts.verdict.named and is_blocked and local is not None and not is_silent:
            return _Match(local.what, [member])
    return None


# --- storage and network ----------------------------------------------------------------------------------------------


def _is_storage_error(line: KernelLine) -> bool:
    row = kernel_lines.load().get(line.name)
    return row is not None and row.names in ("nfs", "lustre", "ceph")


def _waits_for_storage(facts: _Facts) -> _Match | None:
    mounts = sorted({member.kernel.silent_mount for member in facts.looked_at if member.kernel.silent_mount})
    if mounts:
        return _Match(words.join_words(mounts), facts.looked_at)
    found = _find_target(facts, lambda _, target: target.kind == "file" and target.is_remote)
    if found is not None:
        return _Match(f"{found[0].what} on {found[0].mount}" if found[0].mount else found[0].what, [found[1]])
    blocked = [member for member in facts.looked_at if member.kernel.state in BLOCKED_STATES]
    logged = _find_line(blocked, _is_storage_error)
    return None if logged is None else _Match(logged[0].subject or "its storage", [logged[1]])


def _has_unreachable_rank(facts: _Facts) -> _Match | None:
    if facts.verdict.kind != "WrongInterface":
        return None
    places = {member.waits.enclosed_at for member in facts.grouping.members}
    return _Match(", ".join(sorted(filter(None, places))[:1]) or "their address")


def _waits_for_remote_peer(facts: _Facts) -> _Match | None:
    def is_remote(member: Member, target: CallTarget) -> bool:
        is_here = target.other_pid is not None or is_loopback(target.what.partition(" port ")[0])
        return member.waits.awaited is not None and target.kind == "connection" and not is_here

    found = _find_target(facts, is_remote) if facts.suspects else None
    return None if found is None else _Match(found[0].what, [found[1]])


def _has_port_errors(facts: _Facts) -> _Match | None:
    if not facts.kind.all_wait or facts.verdict.named:
        return None
    ports = ((member.gpu.ports, member) for member in facts.grouping.members if member.gpu.ports is not None)
    return next((_Match(port.worse[0], [member]) for port, member in ports if port.worse), None)


# --- earlier hangs ----------------------------------------------------------------------------------------------------


def _was_restarted_today(facts: _Facts) -> _Match | None:
    history = facts.history
    same = [one for one in history.since() if history.fingerprint and one.fingerprint == history.fingerprint]
    nodes = sorted({one.node for one in same if one.action == "restart" and one.uid == history.uid})
    return _Match(words.join_words(nodes[:_MOST_NODES])) if nodes else None


def _hung_for_two_owners(facts: _Facts) -> _Match | None:
    history = facts.history
    others = {one.uid for one in history.since() if one.node == history.node} - {None, history.uid}
    return _Match(history.node) if others and history.uid is not None else None


def _hung_on_other_nodes(facts: _Facts) -> _Match | None:
    history = facts.history
    is_alone = bool(facts.suspects) and not any(map(_has_call_target, facts.looked_at))
    nodes = {one.node for one in history.hangs if history.fingerprint and one.fingerprint == history.fingerprint}
    others = sorted(nodes - {history.node})[:_MOST_NODES]
    return _Match(words.join_words(others)) if others and is_alone else None


# --- restart or fix the program ---------------------------------------------------------------------------------------


def _lost_its_connection(facts: _Facts) -> _Match | None:
    """Match if the first dead rank reports a lost connection. The rank's user writes this report."""
    if facts.verdict.kind != CRASHED:
        return None
    dead = ((member, member.died) for member in facts.looked_at if member.died is not None)
    lost = [member for member, died in dead if _LOST_CONNECTION.search(died.detail or died.text)]
    return _match_ranks(lost[:1])


def _ran_out_of_node_memory(facts: _Facts) -> _Match | None:
    found = _find_line(facts.looked_at, lambda line: line.name == "oom_kill" and line.text.startswith("Out of memory"))
    return _match_ranks([] if found is None else found[1:])


def _has_call_target(member: Member) -> bool:
    """True if a file, mount, peer, device or other process may be behind the blocked call of a rank or its worker."""
    kernel, waits = member.kernel, member.waits
    is_call = any(call.has_object for call in kernel.calls)
    targets = (kernel.silent_mount, waits.file_lock, waits.awaited, waits.stuck_on, waits.object, waits.tracer)
    is_in_kernel = not member.is_measured or kernel.state in BLOCKED_STATES
    return is_call or is_in_kernel or any(target is not None for target in targets)


def _waits_for_own_lock(facts: _Facts) -> _Match | None:
    is_lock = all(
        group.waits_for in ("lock", "thread") and member.kernel.rests == "thread" for group, member in facts.suspects
    )
    is_own = facts.verdict.named and is_lock and not any(map(_has_call_target, facts.members))
    return _match_ranks(facts.members if is_own else [])


CONDITIONS: dict[str, Callable[[_Facts], _Match | bool | None]] = {
    "progresses": lambda facts: (
        facts.kind.job == "working" or any(member.motion is Motion.MOVING for member in facts.members)
    ),
    "lacks_nodes": _lacks_nodes,
    "is_idle": lambda facts: facts.kind.job == "idle",
    "sleeps": _sleeps,
    "is_known_pause": lambda facts: facts.is_known_pause,
    "is_at_rest": lambda facts: facts.kind.job == "at rest",
    "may_progress": _may_progress,
    "has_gpu_error": _has_gpu_error,
    "is_behind_gpu": lambda facts: _match_ranks(facts.members if facts.verdict.kind == "GpuBehind" else []),
    "has_adapter_error": _has_adapter_error,
    "waits_for_local_device": _waits_for_local_device,
    "waits_for_storage": _waits_for_storage,
    "has_unreachable_rank": _has_unreachable_rank,
    "waits_for_remote_peer": _waits_for_remote_peer,
    "has_port_errors": _has_port_errors,
    "was_restarted_today": _was_restarted_today,
    "hung_for_two_owners": _hung_for_two_owners,
    "lost_its_connection": _lost_its_connection,
    "ran_out_of_node_memory": _ran_out_of_node_memory,
    "has_mismatch": lambda facts: facts.kind.by_order and kinds.find(decide_by_records(facts.grouping).kind).by_order,
    "waits_for_own_lock": _waits_for_own_lock,
    "hung_on_other_nodes": _hung_on_other_nodes,
}
"""The condition of each row of actions.toml, by the name of the row. True if it holds and has no target and no rank."""
