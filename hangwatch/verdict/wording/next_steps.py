"""The table `next_steps.toml`: the first step to take for each kind of verdict."""

from __future__ import annotations

import functools

from hangwatch import tables
from hangwatch.model import Value, Verdict


class NextStep(Value, frozen=True, forbid_unknown_fields=True):
    """The meaning of a kind of verdict, and the first step to take. Each is one line."""

    means: str
    first: str


@functools.cache
def load_steps() -> dict[str, NextStep]:
    """Return the rows of `next_steps.toml`, keyed by kind of verdict, in the order of the runbook."""
    return tables.load("hangwatch.verdict.wording", "next_steps.toml", dict[str, NextStep])


def next_step(verdict: Verdict) -> str:
    """Return the first step to take after this verdict; "" for an unknown kind.

    If there are ranks to check first, it is the check that decides on them.
    """
    if not verdict.named and verdict.first_look:
        return verdict.first_look[0].settle
    step = load_steps().get(verdict.kind)
    pid = next((rank.pid for rank in verdict.named if rank.pid is not None), None)
    return step.first.replace("{pid}", "PID" if pid is None else str(pid)) if step else ""
