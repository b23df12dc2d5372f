"""Rules on sequence numbers: from a wait-for graph to the ranks that `judge` may name or check first. Pure.

An awaited rank is named only if it has no open operation and, by its stack and the kernel, waits for no rank.
"""

from collections.abc import Callable, Set
from functools import cache
from typing import Literal, NamedTuple

from hangwatch.collectives import wait_graph
from hangwatch.collectives.process_groups import process_key
from hangwatch.collectives.wait_graph import PendingOperation, Stance, WaitGraph
from hangwatch.model import Group, Grouping, Member, RankId, Signature, list_by_key
from hangwatch.stacks import activity_table
from hangwatch.stacks.progress import polls_repeatedly
from hangwatch.stacks.side_threads import decides, find_wait_of_thread
from hangwatch.stacks.user_code import is_in_user_code
from hangwatch.verdict.scene import Process, lock_holder, process_of, waits_for

Kind = Literal["NotJoined", "GpuBehind", "Cycle", "Mismatch", "AllJoined", "Unknown"]
"""The kinds of verdicts that follow from sequence numbers."""


class Answer(NamedTuple):
    """The result of a wait-for graph: the ranks to name or to check first.

    The most important pending operation of `graph` comes first. `is_still_open` is true if all ranks have joined it,
    but several have not finished it.
    """

    kind: Kind
    graph: WaitGraph = WaitGraph()
    named: tuple[int, ...] = ()
    check_first: tuple[int, ...] = ()
    is_still_open: bool = False

    def find_thread(self, group: Group) -> str:
        """Return the name of the thread for which others wait, if it is the same in all ranks of a group; else "".

        Also "" if that thread already describes the group.
        """
        names = {self.graph.threads.get(process_key(member.id) or 0, "") for member in group.members}
        return "" if len(names) > 1 or decides(group, *names) else names.pop()


def decide(graph: WaitGraph) -> Answer:
    """Return the result of a wait-for graph. A mismatch comes first, then GPUs that are behind, then missing ranks."""
    answer = Answer("Unknown", graph)
    if graph.mismatches:
        return answer._replace(kind="Mismatch", check_first=_find_lone_sides(graph))
    if graph.gpus and 2 * len(graph.gpus) <= len(graph.waiting):
        behind = tuple(end.rank for end in graph.gpus)
        is_sure = all(end.behind for end in graph.gpus)
        return answer._replace(kind="GpuBehind", named=behind if is_sure else (), check_first=behind)
    if graph.awaited:
        return _decide_on_awaited(answer)
    return answer._replace(kind="AllJoined") if graph.is_complete else answer


def _decide_on_awaited(answer: Answer) -> Answer:
    """Return the result for a graph with awaited ranks.

    An awaited rank without an open operation comes first, then one with an open operation. Its stance by stack and
    kernel decides if it is named.
    """
    graph, stances = answer.graph, answer.graph.awaited
    for stance in ("elsewhere", "held"):  # first ranks that wait for nothing: they may block the ranks in "held"
        if named := tuple(rank for rank, its in stances.items() if its == stance and rank not in graph.busy):
            waiting = graph.waiting | {rank for rank, its in stances.items() if its == "waits"}
            return answer._replace(kind="NotJoined", named=named if len(named) <= len(waiting) else ())
    if busy := tuple(rank for rank, its in stances.items() if its in ("elsewhere", "held")):
        return answer._replace(kind="NotJoined", check_first=busy)
    if graph.cycle:
        return answer._replace(kind="Cycle", check_first=_find_lone_waiter(graph))
    if still_open := _find_still_open(graph):
        places = set(map(id, still_open))
        others = (operation for operation in graph.pending if id(operation) not in places)
        return answer._replace(
            kind="AllJoined", graph=graph._replace(pending=(*still_open, *others)), is_still_open=True
        )
    idle = tuple(rank for rank in stances if rank not in graph.busy)
    if not idle or any(stances[rank] == "waits" for rank in idle):
        return answer
    return answer._replace(kind="NotJoined", check_first=idle if len(idle) == 1 else ())


def _find_lone_sides(graph: WaitGraph) -> tuple[int, ...]:
    """Return each rank that is the only rank of a group with one operation, if several others have another one."""
    last = [(sides[-2][1], sides[-1][1]) for sides in graph.mismatches]
    return tuple(sorted({fewest[0] for more, fewest in last if len(fewest) == 1 < len(more)}))


def _find_lone_waiter(graph: WaitGraph) -> tuple[int, ...]:
    """Return the rank that alone waits in its operations: alone of the cycle, or else, if several do, of the job.

    () if there is no such rank, or more than one.
    """
    company = list_by_key((rank, len(operation.waiting)) for operation in graph.pending for rank in operation.waiting)
    of_job = {rank for rank in graph.cycle if set(company.get(rank, ())) == {1}}
    alone = graph.lone if len(graph.lone) == 1 else graph.lone & of_job
    return tuple(alone) if len(alone) == 1 else ()


def _find_still_open(graph: WaitGraph) -> tuple[PendingOperation, ...]:
    """Return the operations that all members have joined and several ranks have not finished.

    () unless all awaited ranks wait in open operations. An operation that only one rank has not finished does not
    count, because that rank may be the cause.
    """
    if not graph.waiting.issuperset(graph.awaited) or set(graph.awaited.values()) != {"waits"}:
        return ()
    joined_by_all = (one for one in graph.pending if one.is_whole and not one.missing and not one.unknown)
    return tuple(one for one in joined_by_all if len(one.waiting) > 1)


def decide_by_records(grouping: Grouping) -> Answer:
    """Return the result of the flight recorders. If they show no pending operation, nothing is known."""
    answer = decide(wait_graph.build(grouping.members, stance_of(grouping), grouping.world_size))
    return answer if answer.graph.pending else Answer("Unknown")


def stance_of(grouping: Grouping) -> Callable[[Member, str], Stance]:
    """Return a function that returns the kind of wait of a thread of a member of `grouping`: see `Stance`."""

    @cache  # without flight records, no stance is asked for
    def describe() -> tuple[dict[RankId, tuple[Group, str, bool]], frozenset[Process]]:
        described = [(group, waits_for(group), is_in_user_code(group)) for group in grouping.groups if group.members]
        groups = {member.id: facts for facts in described for member in facts[0].members}
        return groups, frozenset(map(process_of, grouping.members))

    def stance(member: Member, thread: str) -> Stance:
        groups, processes = describe()
        group, kind, is_in_code = groups[member.id]
        if thread and not member.is_stopped and not decides(group, thread):
            return _STANCE_OF_THREAD.get(find_wait_of_thread(group, thread), "unclear")
        return _stance(
            group,
            member,
            processes,
            kind="unknown" if _loops_without_ranks(group, member) else kind,
            is_in_code=is_in_code,
        )

    return stance


_STANCE_OF_THREAD: dict[str, Stance] = {"ranks": "waits", "gpu": "waits", "lock": "held", "nothing": "elsewhere"}


def _loops_without_ranks(group: Group, member: Member) -> bool:
    """True if a rank waits in an event loop, and each connection of that loop ends in a known process that is no rank.

    That is the process itself, or another process of this node.
    """
    call = member.kernel.call if activity_table.find_activity(group.activity).idles else None
    if call is None or member.waits.asks_rank is not None or member.waits.server is not None:
        return False
    return 0 < sum(one.other_pid is not None and one.kind != "listening" for one in call.behind) == call.descriptors


def _waits_in_itself(group: Group, member: Member, kind: str) -> bool:
    """True if only its own process can end a rank's wait, and each of its other Python threads waits for others, too.

    It waits for one of its threads, or for a pipe or socket with both ends in its own process.
    """
    if member.waits.awaited is not None or any(
        activity_table.find_activity(one.activity).waits_for not in {"lock", "thread"} for one in group.threads
    ):
        return False
    call = member.kernel.call
    ends = {target.other_pid for target in call.behind} if call is not None and call.descriptors == 1 else set()
    in_futex = member.kernel.rests == "thread" or (call is not None and call.name == "futex")
    return (kind == "thread" and in_futex) or ends == {member.id.pid} != {None}


def _stance(group: Group, member: Member, processes: Set[Process], *, kind: str, is_in_code: bool) -> Stance:
    """Return the kind of wait of a rank (see `Stance`) by its stack, system call and state.

    `kind` is `waits_for` of its group. A rank that waits for a lock of another rank waits for that rank. A rank that
    sleeps in torch's code waits, too, though no Python frame shows it. These ranks may wait for any rank:
    * a rank that receives from an unknown sender,
    * a rank that waits for a lock in memory which another rank also maps,
    * a rank that waits for a lock or a thread, while one of its other threads waits for ranks,
    * a rank that waits for threads at different places,
    * a rank that polls in its own code.
    """
    if member.is_stopped:
        return "elsewhere"
    if group.fault is not None or group.gone:
        return "unclear"
    if lock_holder(member) in processes or (member.waits.waits_in_torch and kind in {"nothing", "unknown"}):
        return "waits"
    if (
        is_in_code
        and polls_repeatedly(member)
        and all(operation.by_main for operation in member.recorder.open_operations)
    ):
        return "unclear"
    match kind:
        case "ranks" | "gpu":
            return "waits"
        case _ if member.waits.asks_rank is not None:
            return "unclear"
        case "lock" if member.waits.shares_lock:
            return "unclear"
        case "lock" | "thread" if group.awaited_differ or any(
            activity_table.find_activity(thread.activity).waits_for == "ranks" for thread in group.threads
        ):
            return "unclear"
        case "nothing":
            return "elsewhere"
        case _ if kind == "lock" or _waits_in_itself(group, member, kind):
            return "held"
        case "unknown" if is_in_code and not member.kernel.receives:
            return "elsewhere"
    computes = member.signature is Signature.SPINS and member.waits.has_device is False
    return "elsewhere" if computes or member.signature is Signature.AWAITS_OUTSIDE else "unclear"
