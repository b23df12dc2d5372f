"""`hangwatch check network --to HOST:PORT`: do ports answer that a job is going to need? No check: it runs when asked.

A port that refuses is reached, and nobody listens on it: before a job that is what is to be expected, so it is a
warning. All else stops a job.
"""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch import words
from hangwatch.checks.framework.contract import ok, worst
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault
from hangwatch.probes.network import ports
from hangwatch.probes.network.ports import Port
from hangwatch.probes.node.machine import Clock

CHECK_NAME = "network"
DEADLINE_SECONDS = 2 * ports.CONNECT_SECONDS + 1.0


def run(wanted: Sequence[Port], clock: Clock) -> CheckResult:
    """Try these ports once; each that does not answer is a fault of the result."""
    ran_unix_seconds, began = clock.unix(), clock.monotonic()
    answers = ports.try_all(wanted, DEADLINE_SECONDS)
    faults = [fault for fault in answers.values() if fault is not None]
    verb = "answers" if len(answers) == 1 else "answer"
    return CheckResult(
        check=CHECK_NAME,
        verdict=worst(
            map(_verdict, faults),
            ok("PortsAnswer", f"{words.count(len(answers), 'port')} {verb}: {', '.join(map(str, answers))}"),
        ),
        success=True,
        duration_seconds=clock.monotonic() - began,
        ran_unix_seconds=ran_unix_seconds,
        faults=tuple(faults),
    )


def status_of(reason: str) -> CheckStatus:
    """How bad it is that a port does not answer, for this reason."""
    return CheckStatus.WARNING if reason == "Refused" else CheckStatus.CRITICAL


def _verdict(fault: Fault) -> CheckVerdict:
    return CheckVerdict(
        status=status_of(fault.reason),
        reason=fault.reason,
        message=f"{fault.subject}: {fault.detail}",
        remedy=fault.remedy,
    )
