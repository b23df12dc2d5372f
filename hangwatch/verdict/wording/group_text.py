"""Clauses on ranks and groups of ranks: their activities, and the waits of the other ranks. Pure."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from hangwatch import words
from hangwatch.model import Group, RankId, Stack
from hangwatch.stacks import activity_table
from hangwatch.stacks.user_code import innermost_user_frame, innermost_user_frames, is_in_user_code
from hangwatch.verdict.scene import count_ranks
from hangwatch.verdict.wording import clauses

SHOWN = 4


def rank_ids(groups: Iterable[Group]) -> list[RankId]:
    """Return the ranks of these groups."""
    return [member.id for group in groups for member in group.members]


def name_ranks(groups: Iterable[Group]) -> str:
    """Return the names of the ranks of these groups: "ranks 0-6 on a and b"."""
    return words.name_ranks(rank_ids(groups))


def describe(group: Group, *, several: bool | None = None) -> str:
    """Return the activity of a group as a clause: "is loading data (DataLoader)"."""
    plural = group.size > 1 if several is None else several
    doing = clauses.describe_activity(group, several=plural)
    if group.runs_python:
        where = str(group.frames[0]) if group.frames else "its code"
        doing = f"{'are' if plural else 'is'} running Python code in {where}"
    if group.waits_for in {"unknown", "gpu"} and group.holds_gil:
        return f"{'hold' if plural else 'holds'} the GIL and {doing}"
    return doing


def describe_each(groups: Sequence[Group]) -> list[str]:
    """Return a clause for each group with its ranks. After the first four groups, only the number of the rest."""
    doings = [describe(group) for group in groups[:SHOWN]]
    parts = [
        f"{name_ranks([group])} {doing}"
        + (_describe_difference(group, groups) if doings.count(doing) > 1 else _describe_line(group, doing))
        for group, doing in zip(groups, doings, strict=False)
    ]
    if len(groups) > SHOWN:
        parts.append(f"{words.count(count_ranks(groups[SHOWN:]))} in {len(groups) - SHOWN} other places")
    return parts


def describe_rank(group: Group) -> str:
    """Return a clause on the activity of one rank, with the line of the user's code: "is loading data at train.py:38".

    If the activity is unknown, the clause contains the rank's frame.
    """
    if group.activity == "unknown" and not (group.operation or group.runs_python) and group.frames:
        return f"is in {innermost_user_frame(group) or group.frames[0]}"
    doing = describe(group, several=False)
    return f"{doing}{_describe_line(group, doing)}"


def _describe_line(group: Group, doing: str) -> str:
    """Return the line of the user's code: " at train.py:38"; "" if the clause `doing` already contains it."""
    at = clauses.describe_line(group)
    return "" if at.removeprefix(" at ") in doing else at


def _describe_difference(group: Group, others: Sequence[Group]) -> str:
    """Return the innermost frame that differs from another group with the same description; "" if no frame differs."""
    for other in others:
        if other is not group and describe(other) == describe(group):
            pairs = zip_longest(group.frames, other.frames)
            frame = next((own for own, its in pairs if own is not None and own != its), None)
            return f" in {frame}" if frame is not None else ""
    return ""


def all_of(number: int, noun: str = "rank") -> str:
    """Return "both ranks" for two ranks, else "all 8 ranks"."""
    return f"both {noun}s" if number == 2 else f"all {words.count(number, noun)}"


def others_wait(others: Sequence[Group], *, awaited: str = "") -> str:
    """Return a clause on the ranks that are not suspects: "all 15 other ranks wait in broadcast".

    If a rank is named, `awaited` is " for it" or " for them".
    """
    behind = [group for group in others if group.waits_for == "gpu"]
    kinds = (
        (f"wait{awaited} in", [group for group in others if group.waits]),
        ("wait for their GPUs in" if any(map(clauses.has_gpu, behind)) else "are in", behind),
        ("wait for locks or threads:", [group for group in others if group.waits_for in {"lock", "thread"}]),
    )
    verb, waiting = next(((verb, groups) for verb, groups in kinds if groups), ("are in", list(others)))
    total, rest = count_ranks(waiting), count_ranks(others)
    if rest == 1:
        return f"the other rank {clauses.describe_activity(waiting[0])}".replace(" waits in ", f" waits{awaited} in ")
    share = all_of(rest, "other rank") if total == rest else f"{total:,} of the {rest:,} other ranks"
    if len(waiting) == 1 and not waiting[0].waits and waiting[0].waits_for != "gpu":
        return f"{share} {clauses.describe_activity(waiting[0], several=True)}"
    return f"{share} {verb} {clauses.operations(waiting)}{during(waiting)}"


def during(groups: Sequence[Group]) -> str:
    """Return the phase of the program that all these groups have in common: " during evaluation"; else ""."""
    phases = {activity_table.describe_phase(group.activity, group.phase) for group in groups}
    around = phases.pop() if len(phases) == 1 else ""
    return f" {around}" if around else ""


def describe_suspects(groups: Sequence[Group]) -> str:
    """Return a clause on the activity of some groups, with their lines of the user's code.

    If all do the same it begins with "it" or "they", else each group has a clause with the names of its ranks.
    """
    several = sum(group.size for group in groups) > 1
    same = {_describe_suspect(group, several=several) for group in groups}
    if len(same) == 1:
        return f"{'they' if several else 'it'} {same.pop()}"
    return "; ".join(f"{name_ranks([group])} {_describe_suspect(group, several=group.size > 1)}" for group in groups)


def _describe_suspect(group: Group, *, several: bool) -> str:
    own = innermost_user_frame(group)
    if own is not None and is_in_user_code(group) and not group.awaited and group.waits_for in {"unknown", "gpu"}:
        phase = f" {around}" if (around := activity_table.describe_phase(group.activity, group.phase)) else ""
        lines = innermost_user_frames(group)
        where = own if len(lines) == 1 else f"{own.function} ({clauses.places(lines)})"
        return f"{'are' if several else 'is'} in {where}, in the program's own code{phase}"
    return f"{clauses.describe_activity(group, several=several)}{clauses.describe_line(group)}"


def common_line(groups: Sequence[Group]) -> str:
    """Return the line of the user's code if there is only one group: " at train.py:38"; else ""."""
    return clauses.describe_line(groups[0]) if len(groups) == 1 else ""


def describe_in_report(group: Group) -> str:
    """Return the activity of a group without the names of its ranks: "is loading data during evaluation"."""
    several = len(group.members) > 1
    if group.gone:
        causes = sorted({member.died.full_text for member in group.members if member.died is not None})
        why = "; ".join(causes[:SHOWN]) or "the cause is unknown"
        return words.printable(f"{'have' if several else 'has'} ended: {why}")
    if group.fault is not None:
        return words.printable(f"no stack: {group.fault.reason}")
    unknown = group.activity == "unknown" and not group.operation
    clause = "in an unknown activity" if unknown else clauses.describe_activity(group, several=several)
    return words.printable(" ".join(filter(None, (clause, activity_table.describe_phase(group.activity, group.phase)))))


def describe_stack(stack: Stack, group: Group) -> str:
    """Return the activity of a worker or thread of a group: "its worker (1 x pt_data_worker) is loading data"."""
    kind = "worker" if stack in group.workers else "thread"
    clause = "" if stack.activity == "unknown" else f" {activity_table.describe_activity(stack.activity, None)}"
    if kind == "worker" and stack.activity == "data_loading" and stack.user_frame is None:
        clause = " is idle"
    return words.printable(f"its {kind} ({stack.name}){clause}")
