"""Metrics of the checks: results, run times, and the numbers that checks measured."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hangwatch.metrics.series import LABEL_LENGTH, gauge, sentence_label
from hangwatch.model import CheckStatus, Point
from hangwatch.state.board import Snapshot


def results(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the result of each check, the time of its last run, and the run's duration."""
    status = gauge("check_status", "Status of the check: 0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL", ("check",))
    info = gauge("check_info", "Status, reason and message of the check", ("check", "status", "reason", "message"))
    success = gauge("check_success", "1 if the check ran without an internal error", ("check",))
    duration = gauge("check_duration_seconds", "Duration of the last run", ("check",))
    ran = gauge("check_last_run_timestamp_seconds", "Time of the last run", ("check",))
    faults = gauge("check_faults", "Readings that the check needed but could not get", ("check",))
    for name, result in snapshot.checks.items():
        verdict = result.verdict
        status.add_metric([name], verdict.status.value)
        # Each message with other numbers is a new series, so only checks that are not OK have the message.
        message = "" if verdict.status is CheckStatus.OK else sentence_label(verdict.message)
        info.add_metric([name, verdict.status.name, verdict.reason, message], 1)
        success.add_metric([name], float(result.success))
        duration.add_metric([name], result.duration_seconds)
        ran.add_metric([name], result.ran_unix_seconds)
        faults.add_metric([name], len(result.faults))
    yield from (status, info, success, duration, ran, faults)


def points(points: Iterable[Point]) -> Iterator[Metric]:
    """Yield the numbers that checks measured, under the names that the checks define."""
    grouped: dict[str, list[Point]] = {}
    for point in points:
        grouped.setdefault(point.name, []).append(point)
    for name, rows in grouped.items():
        labels = [key for key, _ in rows[0].labels]
        kind = CounterMetricFamily if rows[0].kind == "counter" else GaugeMetricFamily
        family = kind(f"hangwatch_{name}", rows[0].help, labels=labels)
        for row in rows:
            values = dict(row.labels)
            family.add_metric([values.get(label, "")[:LABEL_LENGTH] for label in labels], row.value)
        yield family
