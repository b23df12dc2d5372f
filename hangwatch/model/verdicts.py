"""Verdicts: verdict -> state, report."""

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
    """One piece of evidence: an observation, its ranks, and whether it supports the verdict (None: neutral)."""

    kind: str
    message: str
    ranks: tuple[RankId, ...] = ()
    supports: bool | None = None


class CheckFirst(RankId, frozen=True, kw_only=True):
    """A rank to check first when no rank can be named: why this rank, and what would settle it."""

    why: str
    settle: str


class Verdict(Value, frozen=True):
    """The culprits (`named`), or the reason why no rank can be named (`named` is empty).

    `first_look` are hints where to begin, not culprits.
    """

    kind: str
    message: str
    named: tuple[RankId, ...] = ()
    confidence: Confidence = Confidence.NONE
    evidence: tuple[Evidence, ...] = ()
    first_look: tuple[CheckFirst, ...] = ()


class Supplement(Value, frozen=True):
    """Facts in addition to a capture: from logs, the kernel log or environments. `verdict.supplements` adds them.

    `headline` is the message of a verdict on these facts alone. A verdict that names no rank gets the `sentence`, and
    `check_first` if it has no such rank. With `only_if_stuck` this happens only if the job neither progresses nor
    rests.
    """

    evidence: tuple[Evidence, ...] = ()
    headline: str = ""
    sentence: str = ""
    check_first: tuple[CheckFirst, ...] = ()
    only_if_stuck: bool = False
