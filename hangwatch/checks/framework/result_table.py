"""Output of check results: exit code, table and JSON. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, cast

import msgspec

from hangwatch import __version__
from hangwatch.checks.framework.contract import ABSENT
from hangwatch.checks.framework.node_facts import Facts
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault, Point, Value, list_by_key

Status: TypeAlias = Literal["OK", "WARNING", "CRITICAL", "UNKNOWN"]
FailOn: TypeAlias = Literal["warning", "critical"]
EXIT_CODES = {CheckStatus.OK: 0, CheckStatus.WARNING: 1, CheckStatus.CRITICAL: 2, CheckStatus.UNKNOWN: 3}
FAILING = {
    "warning": frozenset({CheckStatus.WARNING, CheckStatus.CRITICAL}),
    "critical": frozenset({CheckStatus.CRITICAL}),
}


class JsonPoint(Value, frozen=True):
    """One exported number. `name` is the full name of the metric. `value` is null if it is infinite (no limit)."""

    name: str
    value: float | None
    labels: dict[str, str]


class CheckSummary(Value, frozen=True):
    """The name of a check and its verdict."""

    check: str
    status: Status
    reason: str
    message: str
    remedy: str


class JsonResult(CheckSummary, frozen=True):
    """One run of one check. `success` is false if the check itself failed or did not return.

    `faults` are the parts of the node that did not respond or could not be read.
    """

    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[Fault, ...]
    points: tuple[JsonPoint, ...]
    table: tuple[tuple[str, ...], ...]


class JsonReport(Value, frozen=True):
    """The output of `hangwatch check --json`. `status` is the most severe status of all checks.

    `began_unix_seconds` and `printed_unix_seconds` are times of the node's wall clock: when the checks began, and when
    the report was printed.
    """

    schema_version: int
    hangwatch_version: str
    node: str
    began_unix_seconds: float
    printed_unix_seconds: float
    status: Status
    exit_code: int
    checks: tuple[JsonResult, ...]
    facts: Facts


def worst_status(results: Iterable[CheckResult]) -> CheckStatus:
    """Return the most severe status: CRITICAL, then WARNING, then UNKNOWN, then OK. Without results, return OK."""
    return max((result.verdict.status for result in results), default=CheckStatus.OK)


def exit_code(results: Sequence[CheckResult], fail_on: FailOn | None = None) -> int:
    """Return 0, 1, 2, 3 for OK, WARNING, CRITICAL, UNKNOWN, as Nagios plugins do.

    With `fail_on`, return 0 for a status that is less severe, and for UNKNOWN, which is not a reason to drain a node.
    """
    return status_exit_code(worst_status(results), fail_on)


def status_exit_code(status: CheckStatus, fail_on: FailOn | None = None) -> int:
    """Return the exit code for the most severe status. `fail_on` works as in `exit_code`."""
    if fail_on is not None and status not in FAILING[fail_on]:
        return 0
    return EXIT_CODES[status]


def report_table(results: Sequence[CheckResult], verbose: bool = False) -> list[tuple[str, ...]]:
    """Return the rows for a terminal: the header, then the checks, the most severe first.

    Checks that do not apply to this node share the last row. If two checks have the same finding, the row of the
    second names the first. `verbose` shows all rows in full, the duration of each check, and every fault.
    """
    rows: list[tuple[str, ...]] = [("check", "status", "reason", "what was seen", "what to do")]
    ranked = sorted(results, key=lambda result: (-result.verdict.status, result.check))
    if verbose:
        return [*rows, *(row for result in ranked for row in _verbose_rows(result))]
    absent = [result for result in ranked if result.verdict.reason == ABSENT]
    if len(absent) > 1:
        ranked = [result for result in ranked if result not in absent]
    first: dict[CheckVerdict, str] = {}
    for result in ranked:
        verdict = result.verdict
        name = first.setdefault(verdict, result.check)
        if name == result.check or verdict.status is CheckStatus.OK:
            rows.append((result.check, verdict.status.name, verdict.reason, verdict.message, verdict.remedy))
        else:
            rows.append((result.check, verdict.status.name, verdict.reason, f"as {name}", ""))
    return [*rows, _absent_row(absent)] if len(absent) > 1 else rows


def _verbose_rows(result: CheckResult) -> Iterator[tuple[str, ...]]:
    verdict = result.verdict
    message = f"{verdict.message} ({result.duration_seconds:.2f} s)"
    yield result.check, verdict.status.name, verdict.reason, message, verdict.remedy
    for fault in result.faults:
        yield "", "", fault.reason, f"{fault.subject}: {fault.detail}", fault.remedy


def _absent_row(results: Sequence[CheckResult]) -> tuple[str, ...]:
    """Return one row for all checks that do not apply to this node, grouped by message."""
    names_by_message = list_by_key((result.verdict.message, result.check) for result in results)
    most_first = sorted(names_by_message.items(), key=lambda item: -len(item[1]))
    messages = "; ".join(f"{message} ({', '.join(names)})" for message, names in most_first)
    return f"{len(results)} others", CheckStatus.OK.name, ABSENT, f"do not apply: {messages}", ""


def verbose_tables(results: Iterable[CheckResult]) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    """Return (name of the check, rows) for each check with a table, else with metrics. The first row is the header."""
    tables = ((result.check, result.table or _point_rows(result.points)) for result in results)
    return [(name, rows) for name, rows in tables if len(rows) > 1]


def _point_rows(points: Sequence[Point]) -> tuple[tuple[str, ...], ...]:
    """Return one row for each metric and subject, such as a GPU."""
    subjects = [" ".join(f"{name}={value}" for name, value in point.labels) for point in points]
    rows = [(point.name, subject, f"{point.value:.10g}") for point, subject in zip(points, subjects, strict=True)]
    return (("metric", "of", "value"), *rows)


def to_json(
    results: Sequence[CheckResult],
    node: str,
    fail_on: FailOn | None = None,
    *,
    facts: Facts = Facts(),  # noqa: B008 - frozen
    began_unix_seconds: float = 0.0,
    printed_unix_seconds: float = 0.0,
) -> str:
    """Return the report as JSON text. Its schema is docs/check.schema.json."""
    report = JsonReport(
        schema_version=1,
        hangwatch_version=__version__,
        node=node,
        began_unix_seconds=began_unix_seconds,
        printed_unix_seconds=printed_unix_seconds,
        status=cast("Status", worst_status(results).name),
        exit_code=exit_code(results, fail_on),
        checks=tuple(
            JsonResult.copy_from(
                result,
                result.verdict,
                status=result.verdict.status.name,
                duration_seconds=round(result.duration_seconds, 6),
                points=tuple(
                    JsonPoint(name=f"hangwatch_{point.name}", value=point.value, labels=dict(point.labels))
                    for point in result.points
                ),
            )
            for result in results
        ),
        facts=facts,
    )
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
