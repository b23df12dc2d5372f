"""How values are worded in reports: times, ranks, shares. Everything that came from a process passes `printable`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from hangwatch.fleet.ranks import fold_nodes, fold_ranks
from hangwatch.hang import activity, sentences
from hangwatch.model import Evidence, Group, Incident, JobState, Member, Motion, RankId, Stack, Verdict

_VOTES = {True: "for", False: "against", None: "context"}
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible (D)",
    "T": "stopped (T)",
    "t": "traced (t)",
    "Z": "zombie (Z)",
    "I": "idle kernel",
    "X": "dead (X)",
}


def printable(text: str) -> str:
    """The text with everything a terminal or a browser could act on (escapes, line ends, direction) spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def elided(text: str, characters: int) -> str:
    """Printable text of at most so many characters."""
    text = printable(text)
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def utc(unix_seconds: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """A wall clock time for people on many nodes; a number that is no time is shown as it is."""
    try:
        return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:g} s"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 03 min`, `4 d 02 h`: two units at most."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 24 else f"{hours // 24} d {hours % 24:02} h"


def count(number: int, noun: str) -> str:
    """`1 rank`, `16,384 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def who(rank: RankId) -> str:
    """`rank 7 (node gpu-a12, local rank 7, pid 4711)`, with what is known."""
    parts = [f"node {printable(rank.node)}"] if rank.node else []
    parts += [f"local rank {rank.local_rank}"] if rank.local_rank is not None else []
    parts += [f"pid {rank.pid}"] if rank.pid is not None else []
    if rank.rank is not None:
        return f"rank {rank.rank}" + (f" ({', '.join(parts)})" if parts else "")
    return ", ".join(reversed(parts)) or "a rank without a number"


def folded(ids: Sequence[RankId]) -> str:
    """`0-6,8-511`; where global ranks are unknown, local ranks or pids by node."""
    ranks = [rank.rank for rank in ids if rank.rank is not None]
    unknown = [rank for rank in ids if rank.rank is None]
    parts = [fold_ranks(ranks)] if ranks else []
    by_node: dict[str, list[RankId]] = {}
    for rank in unknown:
        by_node.setdefault(rank.node or "", []).append(rank)
    for node, those in by_node.items():
        local = [rank.local_rank for rank in those if rank.local_rank is not None]
        pids = [rank.pid for rank in those if rank.local_rank is None and rank.pid is not None]
        place = f"{printable(node)} " if node else ""
        parts += [f"{place}local {fold_ranks(local)}"] if local else []
        parts += [f"{place}pid {fold_ranks(pids)}"] if pids else []
    return "; ".join(parts) or "?"


def nodes(ids: Iterable[RankId]) -> str:
    """The nodes of these ranks, folded: `gpu[01-40]`; empty where none is known."""
    names = {printable(rank.node) for rank in ids if rank.node}
    return fold_nodes(sorted(names)) if names else ""


def group_ids(group: Group) -> list[RankId]:
    """Who is in the group, in the order of ranks."""
    return sorted((member.id for member in group.members), key=RankId.sort_key)


def odd_groups(groups: Sequence[Group], verdict: Verdict) -> frozenset[str]:
    """Keys of the groups that hold a named rank."""
    named = set(verdict.named)
    return frozenset(group.key for group in groups if any(member.id in named for member in group.members))


def all_odd(groups: Iterable[Group], odd: frozenset[str]) -> bool:
    """Whether a branch holds odd groups only: it is theirs to mark."""
    return all(group.key in odd for group in groups)


def shown_groups(groups: Sequence[Group], odd: frozenset[str], limit: int) -> tuple[list[Group], list[Group]]:
    """The groups that a report shows, largest first, and those it only counts: the odd ones come before the large."""
    ordered = sorted(groups, key=lambda group: -len(group.members))
    first = {id(group) for group in sorted(ordered, key=lambda group: group.key not in odd)[:limit]}
    return [g for g in ordered if id(g) in first], [g for g in ordered if id(g) not in first]


def more_groups(rest: Sequence[Group]) -> str:
    """The sentence that stands for the groups that are not shown."""
    ranks = sum(len(group.members) for group in rest)
    return f"and {count(len(rest), 'smaller group')} with {count(ranks, 'rank')}: see incident.json"


def doing(group: Group) -> str:
    """What a group does, as a clause after its ranks: `wait in all_reduce`, `is loading data during evaluation`."""
    several = len(group.members) > 1
    if group.gone:
        return "are gone: no such processes" if several else "is gone: no such process"
    if group.fault is not None:
        return printable(f"no stack: {group.fault.reason}")
    unknown = group.activity == "unknown" and not group.operation
    clause = "in an unknown activity" if unknown else sentences.does(group, several=several)
    phase = (group.phase or "").replace("_", " ")
    return printable(clause if phase in clause else f"{clause} during {phase}")


def aside(stack: Stack, group: Group) -> str:
    """A worker or another thread of a rank, and what it does: `its worker (1 x pt_data_worker) is loading data`."""
    kind = "worker" if stack in group.workers else "thread"
    clause = "" if stack.activity == "unknown" else f" {activity.says(stack.activity, None)}"
    return printable(f"its {kind} ({stack.name}){clause}")


def motion(group: Group) -> str:
    """`frozen`, `moving`, `3 of 8 moving`, or empty after a single round and where no process is left to move."""
    if group.gone:
        return ""
    moving = sum(member.motion is Motion.MOVING for member in group.members)
    if 0 < moving < len(group.members):
        return f"{moving} of {len(group.members)} moving"
    return "" if group.motion is Motion.UNKNOWN else group.motion.value


def numbers(members: Sequence[Member]) -> tuple[tuple[str, str], ...]:
    """The second votes of some ranks, as name and range: process state, wchan, CPU, I/O, GPU power, GPU utilisation."""
    states = Counter(_STATES.get(member.state, member.state) for member in members if member.state)
    wchans = Counter(printable(member.wchan) for member in members if member.wchan and member.wchan != "0")
    rows = (
        ("state", _tally(states, len(members))),
        ("wchan", _tally(wchans, len(members))),
        ("GIL", _held(members)),
        ("CPU", _range([_percent(member.cpu_ratio) for member in members], "%")),
        ("I/O", _range([_kilobytes(member.io_bytes_per_second) for member in members], "kB/s")),
        ("GPU power", _range([member.power_watts for member in members], "W")),
        ("GPU utilisation", _range([_percent(member.utilization_ratio) for member in members], "%")),
    )
    return tuple((name, text) for name, text in rows if text)


def vote(evidence: Evidence) -> str:
    """`for`, `against` or `context`."""
    return _VOTES[evidence.supports]


def standing(incident: Incident) -> tuple[str, str]:
    """How the job stands, with a word for it: `State`, `hung; opened ...`; a dump by hand was only `Taken`."""
    opened = utc(incident.opened_unix_seconds)
    if incident.closed_unix_seconds is not None:
        after = duration(incident.closed_unix_seconds - incident.opened_unix_seconds)
        return "State", f"{incident.state.value} after {after}; opened {opened}"
    if incident.timeline or incident.state is not JobState.SUSPECTED:
        return "State", f"{incident.state.value}; opened {opened}"
    return "Taken", opened


def _tally(counts: Counter[str], members: int) -> str:
    if len(counts) == 1 and counts.total() == members:
        return next(iter(counts))
    return ", ".join(f"{number} {name}" for name, number in counts.most_common(4))


def _held(members: Sequence[Member]) -> str:
    holders = sum(member.owns_gil is True for member in members)
    if not holders:
        return ""
    return "held" if holders == len(members) else f"held by {holders} of {len(members)}"


def _range(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = round(min(known)), round(max(known))
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else ratio * 100


def _kilobytes(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else bytes_per_second / 1000
