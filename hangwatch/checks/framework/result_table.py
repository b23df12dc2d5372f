"""Results as people and programs read them: an exit code, a table, JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from hangwatch import __version__
from hangwatch.checks.framework.contract import ABSENT
from hangwatch.checks.framework.node_facts import Facts
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Value

Status: TypeAlias = Literal["OK", "WARNING", "CRITICAL", "UNKNOWN"]
FailOn: TypeAlias = Literal["warning", "critical"]
EXIT_CODES = {CheckStatus.OK: 0, CheckStatus.WARNING: 1, CheckStatus.CRITICAL: 2, CheckStatus.UNKNOWN: 3}
FAILING = {
    "warning": frozenset({CheckStatus.WARNING, CheckStatus.CRITICAL}),
    "critical": frozenset({CheckStatus.CRITICAL}),
}


class JsonFault(Value, frozen=True):
    """Something that should have answered and did not."""

    subject: str
    reason: str
    detail: str
    remedy: str


class JsonPoint(Value, frozen=True):
    """One exported number; `name` is the metric's full name, `value` null where it is unlimited."""

    name: str
    value: float | None
    labels: dict[str, str]


class JsonResult(Value, frozen=True):
    """One run of one check. `success` is false when the check itself failed or did not come back."""

    check: str
    status: Status
    reason: str
    message: str
    remedy: str
    success: bool
    duration_seconds: float
    ran_unix_seconds: float
    faults: tuple[JsonFault, ...]
    points: tuple[JsonPoint, ...]
    table: tuple[tuple[str, ...], ...]


class JsonReport(Value, frozen=True):
    """`hangwatch check --json`. `status` is the worst of all checks, `exit_code` what the command ends with.

    `began_unix_seconds` and `printed_unix_seconds` are the wall clock of the node at the first and last moment.
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
    """The most severe status: CRITICAL, then WARNING, then UNKNOWN; OK when there is no result."""
    return max((result.verdict.status for result in results), default=CheckStatus.OK)


def exit_code(results: Sequence[CheckResult], fail_on: FailOn | None = None) -> int:
    """0, 1, 2, 3 for OK, WARNING, CRITICAL, UNKNOWN, as Nagios has it.

    With `fail_on`, whatever is less than that, UNKNOWN included, is 0: nobody drains a node for what is not known.
    """
    return exit_code_of(worst_status(results), fail_on)


def exit_code_of(status: CheckStatus, fail_on: FailOn | None = None) -> int:
    """As `exit_code`, of the most severe status."""
    if fail_on is not None and status not in FAILING[fail_on]:
        return 0
    return EXIT_CODES[status]


def report_table(results: Sequence[CheckResult], verbose: bool = False) -> list[tuple[str, ...]]:
    """Rows for people, header first, the most severe check first.

    The last column holds what to type. Checks that have nothing to look at here are one row, the last; one that has
    found just what another has says no more than that, in a row of its own, which scripts look for. `verbose` shows
    everything, the seconds that each check took, and every fault.
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
    """Those that have nothing to look at, together by why."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        reasons.setdefault(result.verdict.message, []).append(result.check)
    most_first = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    seen = "; ".join(f"{message} ({', '.join(names)})" for message, names in most_first)
    return f"{len(results)} others", CheckStatus.OK.name, ABSENT, f"do not apply: {seen}", ""


def verbose_tables(results: Iterable[CheckResult]) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    """The tables of those checks that have one: (name of the check, rows with the header first)."""
    return [(result.check, result.table) for result in results if len(result.table) > 1]


def to_json(
    results: Sequence[CheckResult],
    node: str,
    fail_on: FailOn | None = None,
    *,
    facts: Facts = Facts(),  # noqa: B008 - frozen
    began_unix_seconds: float = 0.0,
    printed_unix_seconds: float = 0.0,
) -> str:
    """The report as JSON text; docs/check.schema.json describes it."""
    report = JsonReport(
        schema_version=1,
        hangwatch_version=__version__,
        node=node,
        began_unix_seconds=began_unix_seconds,
        printed_unix_seconds=printed_unix_seconds,
        status=_status(worst_status(results)),
        exit_code=exit_code(results, fail_on),
        checks=tuple(_json_result(result) for result in results),
        facts=facts,
    )
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _json_result(result: CheckResult) -> JsonResult:
    verdict = result.verdict
    return JsonResult(
        check=result.check,
        status=_status(verdict.status),
        reason=verdict.reason,
        message=verdict.message,
        remedy=verdict.remedy,
        success=result.success,
        duration_seconds=round(result.duration_seconds, 6),
        ran_unix_seconds=result.ran_unix_seconds,
        faults=tuple(
            JsonFault(subject=fault.subject, reason=fault.reason, detail=fault.detail, remedy=fault.remedy)
            for fault in result.faults
        ),
        points=tuple(
            JsonPoint(name=f"hangwatch_{point.name}", value=point.value, labels=dict(point.labels))
            for point in result.points
        ),
        table=result.table,
    )


def _status(status: CheckStatus) -> Status:
    names: dict[CheckStatus, Status] = {
        CheckStatus.OK: "OK",
        CheckStatus.WARNING: "WARNING",
        CheckStatus.CRITICAL: "CRITICAL",
        CheckStatus.UNKNOWN: "UNKNOWN",
    }
    return names[status]


def json_schema() -> str:
    """The JSON schema of `to_json`, as docs/check.schema.json holds it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(JsonReport)}
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"
