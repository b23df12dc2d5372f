"""Runner of checks. It measures the duration, catches exceptions and applies the deadline."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Any

from msgspec.structs import replace

from hangwatch.checks.framework.contract import ABSENT, AnyCheck, Settings, join_first, ok, unknown, worst
from hangwatch.checks.framework.registry import select
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault
from hangwatch.probes.base import background
from hangwatch.probes.node.machine import Node

log = logging.getLogger(__name__)

DEFAULT_REMEDY = (
    "`hangwatch check {name} --verbose` lists all that did not respond; `dmesg -T | tail` shows kernel errors; "
    "report a bug if the file or device is healthy"
)
"""The remedy for a fault that has none, such as a file that cannot be read or parsed."""

VANISHED_REMEDY = "`dmesg -T | tail`, `hangwatch check xid`; if it was removed on purpose, restart hangwatch"


class Window:
    """The last samples of a check, and the names of all parts of the node that a sample has shown.

    Pass the same window to each run of the check.
    """

    def __init__(self, check: AnyCheck) -> None:
        self.samples: deque[Any] = deque(maxlen=check.window)
        self.parts: dict[str, str] = {}


def run(check: AnyCheck, node: Node, settings: Settings, window: Window) -> CheckResult:
    """Run a check once, append its sample to `window`, and return the result: `CheckFailed` if the check raises."""
    ran_unix_seconds, started = node.clock.unix(), node.clock.monotonic()
    try:
        result = _run_unguarded(check, node, settings, window)
    except Exception:  # a bug in one check must not stop the other checks or the daemon
        log.exception("check %s failed; please report this bug", check.name)
        verdict = unknown(
            "CheckFailed",
            f"the check {check.name} failed because of a bug in hangwatch; the state of the node is unknown",
            "the log of hangwatch has the traceback; report this bug",
        )
        result = _result(check, verdict, success=False)
    duration_seconds = max(0.0, node.clock.monotonic() - started)
    return replace(result, duration_seconds=duration_seconds, ran_unix_seconds=ran_unix_seconds)


def _result(check: AnyCheck, verdict: CheckVerdict, success: bool = True, **others: Any) -> CheckResult:
    """Return a result without its times."""
    return CheckResult(check.name, verdict, success, duration_seconds=0.0, ran_unix_seconds=0.0, **others)


def _run_unguarded(check: AnyCheck, node: Node, settings: Settings, window: Window) -> CheckResult:
    sample = check.observe(node, settings)
    if sample is None:
        return _result(check, _judge_vanished(check, window, {}, ok(ABSENT, check.absent)))
    if isinstance(sample, Fault):
        return _result(check, _judge_faults(check, (sample,)), faults=(sample,))
    window.samples.append(sample)
    verdict = check.judge(tuple(window.samples), settings)
    if sample.faults and verdict.status is CheckStatus.OK:
        verdict = _judge_faults(check, sample.faults)
    elif not sample.faults:
        verdict = _judge_vanished(check, window, check.parts(sample), verdict)
    rows = check.table(sample) if check.table else ()
    table = tuple(tuple(map(_cell, row)) for row in rows)
    points = tuple(point for metrics in check.metrics for point in metrics.points(sample))
    return _result(check, verdict, faults=sample.faults, points=points, table=table)


def _cell(value: object) -> str:
    names = {None: "", True: "yes", False: "no"}
    return names[value] if value is None or isinstance(value, bool) else str(value)


def _judge_vanished(check: AnyCheck, window: Window, parts: Mapping[str, str], verdict: CheckVerdict) -> CheckVerdict:
    """Return the verdict; at least WARNING if a part of the node is absent that an earlier sample has shown."""
    vanished = [name for key, name in window.parts.items() if key not in parts]
    window.parts |= parts
    if not vanished:
        return verdict
    message = f"no longer present: {join_first(vanished, 4)}"
    finding = CheckVerdict(status=check.vanished, reason="Vanished", message=message, remedy=VANISHED_REMEDY)
    return worst([*([] if verdict.status is CheckStatus.OK else [verdict]), finding], verdict)


def _judge_faults(check: AnyCheck, faults: tuple[Fault, ...]) -> CheckVerdict:
    """Return UNKNOWN with the first of these faults, for a check that would be OK without them."""
    first = faults[0]
    rest = f", and {len(faults) - 1} more did not respond" if len(faults) > 1 else ""
    remedy = first.remedy or DEFAULT_REMEDY.format(name=check.name)
    return unknown(first.reason, f"{first.subject}: {first.detail}{rest}", remedy)


def stalled_result(check: AnyCheck, since_unix_seconds: float, now_unix_seconds: float) -> CheckResult:
    """Return the result for a run that began at `since_unix_seconds` and has not returned at `now_unix_seconds`."""
    waited = max(0.0, now_unix_seconds - since_unix_seconds)
    return CheckResult(
        check=check.name,
        verdict=unknown(
            "Stalled",
            f"{check.name} has not returned for {waited:.0f} s: a file, device or service does not respond",
            f"`hangwatch check {check.name}` shows if it still blocks; look for a dead mount or driver in `dmesg`",
        ),
        success=False,
        duration_seconds=waited,
        ran_unix_seconds=since_unix_seconds,
    )


def run_all(
    node: Node, settings_by_name: Mapping[str, Settings], names: Iterable[str] = (), deadline_seconds: float = 10.0
) -> list[CheckResult]:
    """Run the named checks once, in parallel. If `names` is empty, run all enabled checks.

    The function returns within `deadline_seconds`. A check that has not returned by then is UNKNOWN (`Stalled`).
    Its thread is abandoned and does not keep the process alive. Raises UnknownCheckError.
    """
    names = list(names)
    settings = {check.name: settings_by_name.get(check.name) or check.settings() for check in select(names)}
    selected = [check for check in select(names) if names or settings[check.name].enabled]
    began_unix_seconds, began = node.clock.unix(), node.clock.monotonic()
    runs = {
        check: background.start(partial(run, check, node, settings[check.name], Window(check)), f"check-{check.name}")
        for check in selected
    }
    wait(runs.values(), max(0.0, began + deadline_seconds - node.clock.monotonic()))
    now = node.clock.unix()
    return [
        done.result() if done.done() else stalled_result(check, began_unix_seconds, now) for check, done in runs.items()
    ]
