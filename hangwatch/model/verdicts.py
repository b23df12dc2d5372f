"""Verdicts: the values that `verdict` makes for `state` and `report`."""

from __future__ import annotations

from enum import Enum

from hangwatch.model.dumps import RankId
from hangwatch.model.value import Value


class Confidence(str, Enum):
    """Confidence of a verdict; docs/verdicts.md states the rules."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


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
    """The culprits (`named`), or the reason why no rank can be named (`named` is empty).

    `first_look` has the ranks to check first, which are not culprits.
    """

    kind: str
    message: str
    named: tuple[RankId, ...] = ()
    confidence: Confidence = Confidence.NONE
    evidence: tuple[Evidence, ...] = ()
    first_look: tuple[CheckFirst, ...] = ()


class Supplement(Value, frozen=True):
    """Facts in addition to a capture: from logs, the kernel log or environments. `verdict.supplements` adds them.

    `headline` is the message of a verdict on these facts alone. `sentence` is added to a verdict that names no rank.
    `check_first` is used if such a verdict has no ranks to check first. `only_if_stuck`: neither is used if the job is
    not stuck, or if the verdict has ranks to check first.
    """

    evidence: tuple[Evidence, ...] = ()
    headline: str = ""
    sentence: str = ""
    check_first: tuple[CheckFirst, ...] = ()
    only_if_stuck: bool = False
