"""Verdicts: verdict -> state, report."""

from __future__ import annotations

from enum import Enum

from hangwatch.model.dumps import RankId
from hangwatch.model.value import Value


class Confidence(str, Enum):
    """How sure a verdict is; docs/verdicts.md states the rules."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NONE = "none"


class Evidence(Value, frozen=True):
    """One vote: what was seen, of whom, and whether it speaks for the verdict (None: neither for nor against)."""

    kind: str
    message: str
    ranks: tuple[RankId, ...] = ()
    supports: bool | None = None


class FirstLook(RankId, frozen=True, kw_only=True):
    """A rank to look at first where nobody can be accused: why this one, and what would settle it."""

    why: str
    settle: str


class Verdict(Value, frozen=True):
    """Who is the odd one, or why nobody can be named. `named` is empty when nobody is accused.

    `first_look` accuses nobody: it says where to begin.
    """

    kind: str
    message: str
    named: tuple[RankId, ...] = ()
    confidence: Confidence = Confidence.NONE
    evidence: tuple[Evidence, ...] = ()
    first_look: tuple[FirstLook, ...] = ()


class Supplement(Value, frozen=True):
    """Facts beside a capture: from logs, the kernel's log or environments. `verdict.supplements` adds them.

    `headline` is the message of a verdict on these facts alone. A verdict that names no rank gets the `sentence`, and
    `check_first` if it has no such rank; with `only_if_stuck` only if the job neither progresses nor rests.
    """

    evidence: tuple[Evidence, ...] = ()
    headline: str = ""
    sentence: str = ""
    check_first: tuple[FirstLook, ...] = ()
    only_if_stuck: bool = False
