"""The table `next_steps.toml`: the first step to take for each kind of verdict."""

import functools
from collections.abc import Iterable

from hangwatch import tables
from hangwatch.model import RankId, Value, Verdict
from hangwatch.verdict.wording.action_text import describe_action


class NextStep(Value, frozen=True, forbid_unknown_fields=True):
    """The meaning of a kind of verdict, and the first step to take. Each is one line."""

    means: str
    first: str


@functools.cache
def load_steps() -> dict[str, NextStep]:
    """Return the rows of `next_steps.toml`, keyed by kind of verdict, in the order of the runbook."""
    return tables.load("hangwatch.verdict.wording", "next_steps.toml", dict[str, NextStep])


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
    step, pid = load_steps().get(kind), next((rank.pid for rank in ranks if rank.pid is not None), None)
    return step.first.replace("{pid}", "PID" if pid is None else str(pid)) if step else ""
