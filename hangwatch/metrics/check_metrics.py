"""The checks of the node: what each says, whether it ran, and the numbers that it measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hangwatch.metrics.series import LABEL_LENGTH, gauge, sentence
from hangwatch.model import CheckStatus, Point
from hangwatch.state.board import Snapshot


def results(snapshot: Snapshot) -> Iterator[Metric]:
    """What each check says, and whether and when it ran."""
    status = gauge("check_status", "0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL", ("check",))
    info = gauge("check_info", "What the check says", ("check", "status", "reason", "message"))
    success = gauge("check_success", "1 if the check itself ran", ("check",))
    duration = gauge("check_duration_seconds", "How long the last run took", ("check",))
    ran = gauge("check_last_run_timestamp_seconds", "When the check last ran", ("check",))
    faults = gauge("check_faults", "What should have answered this check and did not", ("check",))
    for name, result in snapshot.checks.items():
        verdict = result.verdict
        status.add_metric([name], verdict.status.value)
        # A sentence with numbers in it is a new series at each run: only what is not well is worth that.
        message = "" if verdict.status is CheckStatus.OK else sentence(verdict.message)
        info.add_metric([name, verdict.status.name, verdict.reason, message], 1)
        success.add_metric([name], float(result.success))
        duration.add_metric([name], result.duration_seconds)
        ran.add_metric([name], result.ran_unix_seconds)
        faults.add_metric([name], len(result.faults))
    yield from (status, info, success, duration, ran, faults)


def points(points: Iterable[Point]) -> Iterator[Metric]:
    """The numbers that checks measured, under the names that they gave them."""
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
