"""Hints on what to check first if no rank can be named. Pure."""

from collections import Counter
from collections.abc import Sequence

from hangwatch import words
from hangwatch.model import Group, Grouping, Member, PortUse
from hangwatch.stacks import activity_table
from hangwatch.stacks import frames as stack_frames
from hangwatch.verdict.wording import clauses

_MOST_SENTENCES = 2
_POLLING_SECONDS = 10.0  # a shorter sleep has ended before its end is read
_LINKS = "XIDs, NVLink and network errors"
WORKS = "wait: a checkpoint, an evaluation or a compilation ends without help"
ALL_DUMPS = "give the dumps of all ranks of the job"
_BRANCH = "if there are none, a rank took another branch or process group: compare sequence numbers"


def where_to_look(grouping: Grouping) -> str:
    """Return the hints that follow a headline that names no rank. The text begins with a space.

    Ranks that could not be dumped or did not respond come first, then the waits of the groups. A measured wait is
    preferred to the activity of the stack. NVLink, XIDs and sequence numbers are mentioned only if all ranks wait for
    ranks or GPUs.
    """
    groups = [group for group in grouping.groups if not group.fault and not group.gone]
    failed = [member for group in grouping.groups if group.fault for member in group.members]
    if failed:
        pronoun = words.agree(failed, "it", "them")
        hint = f"{words.count(len(failed))} could not be dumped: check {pronoun} first, see the evidence."
        calls = [_blocked_call(member, grouping) for member in failed if member.kernel.tells_object]
        return "".join(f" {text}" for text in (*([hint] if groups else ()), *calls[:_MOST_SENTENCES]))
    specific_hints = list(dict.fromkeys(filter(None, map(_find_hint, groups))))[:_MOST_SENTENCES]
    calls = _blocked_calls(grouping, groups)
    hints = specific_hints or ([] if calls else _list_general_hints(grouping, groups))
    return "".join(f" {sentence}" for sentence in (*_describe_missing_ranks(grouping), *calls, *hints))


def _blocked_calls(grouping: Grouping, groups: Sequence[Group]) -> list[str]:
    """Describe the call of one rank of each group, if more than the name of the call was read."""
    told = ([member for member in group.members if member.kernel.tells_object] for group in groups)
    firsts = [(group.size - 1, members[0]) for group, members in zip(groups, told, strict=True) if members]
    return [
        _blocked_call(member, grouping, f", like {words.count(others, 'other rank')} at that place," if others else "")
        for others, member in firsts[:_MOST_SENTENCES]
    ]


def _blocked_call(member: Member, grouping: Grouping, others: str = "") -> str:
    rank = words.name_ranks([member.id])
    return words.sentence(f"{rank}{others} is blocked in {clauses.blocked_call(member, grouping)}.")


def _find_hint(group: Group) -> str | None:
    locks = {member.waits.file_lock for member in group.members}
    if len(locks) == 1 and (lock := locks.pop()):
        if lock.holder_pid is None:
            return (
                f"Find the process that has {lock.path} open (`fuser -v`): "
                "the lock's holder has ended, or is on another node."
            )
        return f"Check pid {lock.holder_pid} ({lock.holder_comm}), which holds the lock of {lock.path}."
    awaited = {member.waits.awaited for member in group.members}
    if len(awaited) == 1 and (outside := awaited.pop()):
        return f"Check {outside.says}" + (": does it respond?" if outside.may_answer else ".")
    sleeps = [member.stack.sleep for member in group.members]
    long = [sleep.until_unix_seconds for sleep in sleeps if sleep and sleep.seconds > _POLLING_SECONDS]
    if len(long) == group.size:
        return f"Look again after {words.utc(max(long))}: their sleep ends then."
    row = activity_table.find_activity(group.activity)
    return (row.meets_at_store and _describe_store(group.members)) or row.look_at


def _describe_store(members: Sequence[Member]) -> str | None:
    """Return a hint on the store at which ranks meet, from the state of their sockets. None if no socket was read."""
    seen = [(member, member.waits.store) for member in members if member.waits.store is not None]
    if not seen:
        return None

    def name_ranks_with(socket: PortUse) -> str:
        return words.name_ranks([member.id for member, store in seen if store.socket == socket])

    uses = {store.socket for _, store in seen}
    parts = [f"Check the store at {seen[0][1].endpoint}"]
    parts.append(f"{name_ranks_with('serving')} serves it" if "serving" in uses else "none of these ranks serves it")
    if "silent" in uses:
        parts.append(f"connection requests of {name_ranks_with('silent')} are not answered")
    apart = [member.id for member, store in seen if not store.has_connection]
    if apart:
        parts.append(f"{words.name_ranks(apart)} {words.agree(apart, 'has', 'have')} no connection to it")
    return f"{parts[0]}: {words.join_words(parts[1:])}."


def _describe_missing_ranks(grouping: Grouping) -> list[str]:
    if grouping.is_from_text and grouping.absent:
        counted = words.count_ranges(grouping.absent)
        are = "is" if counted == "1 rank" else "are"
        return [f"{counted} ({words.fold_ranges(grouping.absent)}) {are} not in the input: {ALL_DUMPS}."]
    if grouping.unanswered:
        counted = words.count_ranges(grouping.unanswered)
        silent = f"{counted} ({words.fold_ranges(grouping.unanswered)}"
        nodes = _count_silent_nodes(grouping)
        whole = f", the size of {words.count(nodes, 'whole node')}" if nodes else ""
        them = "it" if counted == "1 rank" else "them"
        return [f"{silent}{whole}) did not respond: check {them} first."]
    return ["Check the other nodes, too."] if grouping.absent_not_queried else []


def _list_general_hints(grouping: Grouping, groups: list[Group]) -> list[str]:
    """Return hints for groups for which neither a measurement nor the table of activities gives one."""
    if grouping.unanswered or (grouping.is_from_text and grouping.absent):
        return []
    if any(group.waits_for not in {"ranks", "gpu"} for group in groups):
        are_native = any(stack_frames.is_native(*frame.place) for group in groups for frame in group.frames[:1])
        return [] if are_native else ["`hangwatch dump --native` shows their calls below Python."]
    alone = len(grouping.members) == 1 and (grouping.world_size or 1) == 1
    return [f"Check for {_LINKS}." if alone else f"Check for {_LINKS}; {_BRANCH}."]


def _count_silent_nodes(grouping: Grouping) -> int:
    """Return the number of whole nodes that did not respond, if all nodes have the same number of ranks.

    0 if the responding nodes have only one rank each, or if a node has no name.
    """
    per_node = Counter(member.id.node for member in grouping.members if member.id.rank is not None)
    ranks = max(per_node.values(), default=0)
    if ranks < 2 or None in per_node:
        return 0
    # The first node begins at rank 0.
    return sum(max(0, silent.stop // ranks - -(-silent.start // ranks)) for silent in grouping.unanswered)
