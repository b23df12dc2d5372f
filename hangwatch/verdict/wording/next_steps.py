"""The first step to take for a verdict, and its recommended action, as sentences. Pure."""

from collections.abc import Iterable

from hangwatch import words
from hangwatch.model import ActionKind, RankId, RecommendedAction, Verdict
from hangwatch.verdict import kinds

_TITLES: dict[ActionKind, str] = {
    "wait": "wait",
    "restart_elsewhere": "restart the job on other nodes",
    "fix_storage": "repair the storage",
    "fix_network": "repair the network",
    "restart": "restart the job",
    "fix_program": "fix the program",
    "investigate": "investigate",
}


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


def first_step(kind: str, ranks: Iterable[RankId], *, are_all_captured: bool = False, may_use_gpus: bool = True) -> str:
    """Return the step of a kind of verdict, with the first known pid of `ranks`; "" for an unknown kind.

    `are_all_captured` is true if every rank of the job was captured. Without `may_use_gpus`, no rank has a device open.
    """
    pid, row = next((rank.pid for rank in ranks if rank.pid is not None), None), kinds.find(kind)
    step = (not may_use_gpus and row.first_on_cpus) or (are_all_captured and row.first_of_all) or row.first
    return step.replace("{pid}", "PID" if pid is None else str(pid))


def describe_action(action: RecommendedAction) -> str:
    """Return an action with its reason, such as "restart the job: no process serves the store at 10.0.0.1:29500"."""
    title = _TITLES[action.kind]
    if action.exclude_nodes:
        title = f"restart the job without {words.join_words(action.exclude_nodes)}"
    return f"{title}: {action.reason}" if action.reason else title
