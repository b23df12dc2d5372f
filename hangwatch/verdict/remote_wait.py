"""Test for a node on which all ranks wait for ranks of other nodes. This node is not the cause of a hang. Pure."""

from hangwatch.collectives import wait_graph
from hangwatch.collectives.process_groups import process_key
from hangwatch.model import Grouping, Verdict
from hangwatch.verdict.sequence_rules import decide, stance_of


def waits_for_other_nodes(grouping: Grouping, verdict: Verdict, *, has_ranks_on_other_nodes: bool) -> bool:
    """True if every rank of this node waits for ranks of other nodes, so no rank of this node blocks the job.

    With flight recorders, each rank of this node must have joined the pending operations or wait in another operation,
    and these operations must have members on other nodes. Without flight recorders, all ranks must be in one wait, and
    `has_ranks_on_other_nodes` must be true. False if the verdict names a rank of this node or has one to check first.
    """
    members = [member for member in grouping.members if not member.waiting]
    stance = stance_of(grouping)
    if verdict.named or verdict.check_first or not members or any(stance(member, "") != "waits" for member in members):
        return False
    graph = wait_graph.build(members, stance, grouping.world_size)
    if not graph.pending:
        return has_ranks_on_other_nodes and verdict.kind == "AllWaiting"
    on_this_node = {process_key(member.id) for member in members}
    outward = [
        operation
        for operation in graph.pending
        if not on_this_node.issuperset(operation.members) or (has_ranks_on_other_nodes and not operation.is_whole)
    ]
    waiting = {rank for operation in outward for rank in operation.waiting}
    missing = on_this_node.intersection(graph.awaited)
    return decide(graph).kind == "Unknown" and bool(outward) and missing <= waiting
