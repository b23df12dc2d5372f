"""Checks: checks -> board -> metrics, cli."""

from __future__ import annotations

from enum import Enum

from hangwatch.model.value import Fault, Value


class CheckStatus(int, Enum):
    """Nagios' order with UNKNOWN between well and sick: it is shown as neither."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    CRITICAL = 3


class CheckVerdict(Value, frozen=True):
    """What a check says: CamelCase reason for machines, a sentence for people (also when all is well), what to type."""

    status: CheckStatus
    reason: str
    message: str
    remedy: str = ""


class Point(Value, frozen=True):
    """One exported number of a check, as `hangwatch_<name>`: it ends in a base unit; `kind` is gauge or counter."""

    name: str
    value: float
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    kind: str = "gauge"


class CheckResult(Value, frozen=True):
    """One run of one check, as the guard around it saw it. `success` is false when the check itself failed to run."""

    check: str
    verdict: CheckVerdict
    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[Fault, ...] = ()
    points: tuple[Point, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
