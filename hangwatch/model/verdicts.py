"""Verdicts and recommended actions: the values that `verdict` makes for `state` and `report`."""

from enum import Enum
from typing import Literal

from hangwatch.model.dumps import RankId
from hangwatch.model.value import Value


class Confidence(str, Enum):
    """Confidence of a verdict; docs/verdicts.md states the rules."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


ActionKind = Literal["wait", "restart_elsewhere", "fix_storage", "fix_network", "restart", "fix_program", "investigate"]
"""The kinds of recommended actions. `verdict/actions.toml` explains them."""


class RecommendedAction(Value, frozen=True):
    """The recommended action after a verdict. hangwatch itself never takes it.

    `reason` is the text for people, `target` the thing it is about (a GPU, a path, a peer), "" if none is known.
    `exclude_nodes` are the nodes that a new start of the job should not use, only for "restart_elsewhere".
    """

    kind: ActionKind = "investigate"
    reason: str = ""
    target: str = ""
    exclude_nodes: tuple[str, ...] = ()
    confidence: Confidence = Confidence.NONE


class Evidence(Value, frozen=True):
    """One observation with its ranks. `supports`: true for the verdict, false against it, None if neutral."""

    kind: str
    message: str
    ranks: tuple[RankId, ...] = ()
    supports: bool | None = None


class CheckFirst(RankId, frozen=True, kw_only=True):
    """A rank to check first when no rank can be named: the reason (`why`), and a test that decides (`settle`)."""

    why: str
    settle: str


class Verdict(Value, frozen=True):
    """The culprits (`named`, empty if no rank can be named), and ranks to check first (`check_first`, no culprits).

    `stuck_on`: the blocked call or line, "" if no rank is blocked. `next_step`: the first step, else that of the kind.
    `action`: the recommended action, see `verdict.recommendation`. `fingerprint`: equal for hangs in which
    the stacks of the suspects and of the waiting ranks have the same functions and files.
    """

    kind: str
    message: str
    named: tuple[RankId, ...] = ()
    confidence: Confidence = Confidence.NONE
    evidence: tuple[Evidence, ...] = ()
    check_first: tuple[CheckFirst, ...] = ()
    stuck_on: str = ""
    next_step: str = ""
    action: RecommendedAction = RecommendedAction()
    fingerprint: str = ""


class Supplement(Value, frozen=True):
    """Facts in addition to a capture: from logs, the kernel log or environments. `verdict.judge` adds them.

    `headline` is the message of a verdict on these facts alone. `sentence` is added to a verdict that names no rank.
    `check_first` is used if it has no ranks to check first. `next_step`: the remedy of the headline's problem.
    `only_if_stuck`: not for a job that progresses or rests.
    """

    evidence: tuple[Evidence, ...] = ()
    headline: str = ""
    sentence: str = ""
    check_first: tuple[CheckFirst, ...] = ()
    next_step: str = ""
    only_if_stuck: bool = False
