"""The first step to take for a verdict."""

from collections.abc import Iterable

from hangwatch.model import RankId, Verdict
from hangwatch.verdict import kinds
from hangwatch.verdict.wording.action_text import describe_action


def next_step(verdict: Verdict) -> str:
    """Return the first step: to restart the job, if that is recommended, else the first step of the verdict.

    Without one, return the check that decides on ranks to check first, else the step of the kind. "" for an unknown
    kind.
    """
    if verdict.action.kind in ("restart", "restart_elsewhere"):
        return describe_action(verdict.action)
    if verdict.next_step:
        return verdict.next_step
    if not verdict.named and verdict.check_first:
        return verdict.check_first[0].settle
    return first_step(verdict.kind, verdict.named)


def first_step(kind: str, ranks: Iterable[RankId]) -> str:
    """Return the step of a kind of verdict, with the first known pid of `ranks`; "" for an unknown kind."""
    pid = next((rank.pid for rank in ranks if rank.pid is not None), None)
    return kinds.find(kind).first.replace("{pid}", "PID" if pid is None else str(pid))
