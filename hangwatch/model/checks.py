"""Results of checks. Package `checks` makes them; the board, `metrics` and `cli` read them."""

from enum import Enum

from hangwatch.model.value import Fault, Value


class CheckStatus(int, Enum):
    """Status of a check, from best to worst. Nagios orders UNKNOWN after CRITICAL."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    CRITICAL = 3


class CheckVerdict(Value, frozen=True):
    """The result of a check, also if it is OK: a CamelCase reason for machines, a sentence for people, what to type."""

    status: CheckStatus
    reason: str
    message: str
    remedy: str = ""


class Point(Value, frozen=True):
    """A number that a check exports as the metric `hangwatch_<name>`, in a base unit. `kind`: "gauge" or "counter"."""

    name: str
    value: float
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    kind: str = "gauge"


class CheckResult(Value, frozen=True):
    """The result of one run of a check. `success` is false if the check itself failed or did not return."""

    check: str
    verdict: CheckVerdict
    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[Fault, ...] = ()
    points: tuple[Point, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
