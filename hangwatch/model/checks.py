"""Values for results of checks, which `checks` makes for the board, `metrics` and `cli`."""

from __future__ import annotations

from enum import Enum

from hangwatch.model.value import Fault, Value


class CheckStatus(int, Enum):
    """Status of a check, in Nagios' order except UNKNOWN, which is between OK and WARNING and is shown as neither."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    CRITICAL = 3


class CheckVerdict(Value, frozen=True):
    """The result of a check: a CamelCase reason for machines, a sentence for people, and what to type.

    The sentence is set when all is well, too.
    """

    status: CheckStatus
    reason: str
    message: str
    remedy: str = ""


class Point(Value, frozen=True):
    """A number that a check exports as `hangwatch_<name>`. The name ends in a base unit; `kind` is gauge or counter."""

    name: str
    value: float
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    kind: str = "gauge"


class CheckResult(Value, frozen=True):
    """One run of one check, recorded by the guard around it. `success` is false if the check itself failed to run."""

    check: str
    verdict: CheckVerdict
    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[Fault, ...] = ()
    points: tuple[Point, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
