"""The recommended action after a verdict, and the confidence of both."""

from enum import Enum
from typing import Literal

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
