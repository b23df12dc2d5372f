"""Pure: do all ranks of a node wait for ranks of other nodes? Then the job may hang, but not this node."""

from __future__ import annotations

from hangwatch.collectives import wait_graph
from hangwatch.model import Grouping, Verdict
from hangwatch.verdict.scene import stance_of


def waits_elsewhere(grouping: Grouping, verdict: Verdict, *, is_elsewhere_too: bool) -> bool:
    """True if no rank here holds the job up: every rank waits, and what they wait for is not on this node.

    Exactly where flight recorders tell it: every rank here has come to what is waited for, or waits elsewhere itself,
    and there are members on other nodes. Where they tell nothing all must stand in one wait, of a job that
    `is_elsewhere_too`: it is known to have ranks that are not of this node. A rank that is named, or checked first,
    is of this node, so then it is false.
    """
    members = [member for member in grouping.members if not member.waiting]
    stance = stance_of(grouping)
    if verdict.named or verdict.first_look or not members or any(stance(member) != "waits" for member in members):
        return False
    found = wait_graph.judge(members, stance, grouping.world_size)
    if not found.meetings:
        return is_elsewhere_too and verdict.kind == "AllWaiting"
    here = {member.id.rank for member in members}
    outward = [
        one for one in found.meetings if not here.issuperset(one.members) or (is_elsewhere_too and not one.is_whole)
    ]
    waiting = {rank for one in outward for rank in one.waiting}
    missing = {rank for one in found.meetings for rank in one.missing if rank in here}
    return found.kind == "unknown" and bool(outward) and missing <= waiting
