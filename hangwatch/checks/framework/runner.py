"""The one guard around every check: it times it, catches what it raises, and notices that it did not come back."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from hangwatch.checks.framework.contract import ABSENT, AnyCheck, Sample, Settings, ok, unknown
from hangwatch.checks.framework.registry import select
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault
from hangwatch.probes.node.machine import Node

log = logging.getLogger(__name__)

LOOK_YOURSELF = (
    "`hangwatch check {name} --verbose` lists all that did not answer; `dmesg -T | tail` for what the kernel complains "
    "of; report it where the file or device is well"
)
"""What to type where nobody knows better: a file that cannot be read or understood has no remedy of its own."""

Window: TypeAlias = "deque[Any]"


def new_window(check: AnyCheck) -> Window:
    """An empty window of the length that the check asks for; hand the same one to each of its runs."""
    return deque(maxlen=check.window)


def run(check: AnyCheck, node: Node, settings: Settings, window: Window) -> CheckResult:
    """Run a check once. The sample joins `window`; whatever the check raises costs this one result, never more."""
    ran_unix_seconds, started = node.clock.unix(), node.clock.monotonic()
    try:
        parts = _ask(check, node, settings, window)
    except Exception:  # the guard: a bug in one check must not take the others, or the daemon, along
        log.exception("check %s failed; please report it as a bug", check.name)
        parts = _Parts(
            verdict=unknown(
                "CheckFailed",
                f"the check itself failed, so nothing is known about {check.name}",
                "see the log of hangwatch for the traceback, and report it",
            ),
            success=False,
        )
    return CheckResult(
        check=check.name,
        duration_seconds=max(0.0, node.clock.monotonic() - started),
        ran_unix_seconds=ran_unix_seconds,
        **msgspec.structs.asdict(parts),
    )


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What of a CheckResult depends on the check's answer."""

    verdict: CheckVerdict
    success: bool = True
    faults: tuple[Fault, ...] = ()
    points: tuple[Any, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


def _ask(check: AnyCheck, node: Node, settings: Settings, window: Window) -> _Parts:
    sample = check.observe(node, settings)
    if sample is None:
        return _Parts(verdict=ok(ABSENT, check.absent))
    if isinstance(sample, Fault):
        return _Parts(verdict=_not_answered(check, (sample,)), faults=(sample,))
    window.append(sample)
    verdict = check.judge(tuple(window), settings)
    if sample.faults and verdict.status is CheckStatus.OK:
        verdict = _not_answered(check, sample.faults)
    return _Parts(
        verdict=verdict,
        faults=sample.faults,
        points=tuple(check.points(sample)),
        table=_rows(check, sample),
    )


def _rows(check: AnyCheck, sample: Sample) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in check.table(sample)) if check.table else ()


def _not_answered(check: AnyCheck, faults: tuple[Fault, ...]) -> CheckVerdict:
    """What did not answer is not known to be well, whatever the rest says."""
    first = faults[0]
    rest = f", and {len(faults) - 1} more did not answer" if len(faults) > 1 else ""
    remedy = first.remedy or LOOK_YOURSELF.format(name=check.name)
    return unknown(first.reason, f"{first.subject}: {first.detail}{rest}", remedy)


def stalled(check: AnyCheck, since_unix_seconds: float, now_unix_seconds: float) -> CheckResult:
    """The result of a run that began at `since_unix_seconds` and has not come back."""
    waited = max(0.0, now_unix_seconds - since_unix_seconds)
    return CheckResult(
        check=check.name,
        verdict=unknown(
            "Stalled",
            f"{check.name} has not come back for {waited:.0f} s: something it asks does not answer",
            f"`hangwatch check {check.name}` shows whether it still blocks; look for a dead mount or driver in `dmesg`",
        ),
        success=False,
        duration_seconds=waited,
        ran_unix_seconds=since_unix_seconds,
    )


def run_all(
    node: Node, settings_by_name: Mapping[str, Settings], names: Iterable[str] = (), deadline_seconds: float = 10.0
) -> list[CheckResult]:
    """Run the named checks side by side, once; returns within `deadline_seconds`. Without a name, all that are enabled.

    One that does not come back is UNKNOWN, `Stalled`; its thread is left behind and does not keep the process alive.
    Raises UnknownCheckError.
    """
    named = list(names)
    used = {check.name: settings_by_name.get(check.name) or check.settings() for check in select(named)}
    chosen = [check for check in select(named) if named or used[check.name].enabled]
    results: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()

    def run_one(check: AnyCheck) -> None:
        results.put(run(check, node, used[check.name], new_window(check)))

    began_unix_seconds, began = node.clock.unix(), node.clock.monotonic()
    for check in chosen:
        threading.Thread(target=run_one, args=(check,), name=f"check-{check.name}", daemon=True).start()
    came: dict[str, CheckResult] = {}
    while len(came) < len(chosen):
        left = began + deadline_seconds - node.clock.monotonic()
        try:
            result = results.get(timeout=max(0.0, left))
        except queue.Empty:
            break
        came[result.check] = result
    now = node.clock.unix()
    return [came.get(check.name) or stalled(check, began_unix_seconds, now) for check in chosen]
