"""Test of the ports that a job is going to need: `hangwatch check network --to HOST:PORT`. It runs only on request.

A refused connection is a warning: the host is reachable, but no process listens on the port. That is normal before a
job starts. Every other failure is critical.
"""

from collections.abc import Sequence

from hangwatch import words
from hangwatch.checks.framework.contract import ok, worst
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault
from hangwatch.probes.network import ports
from hangwatch.probes.network.ports import Port
from hangwatch.probes.node.machine import Clock

CHECK_NAME = "network"
DEADLINE_SECONDS = 2 * ports.CONNECT_SECONDS + 1.0


def try_ports(wanted: Sequence[Port], clock: Clock) -> CheckResult:
    """Connect to each port once and return the result. Its faults are about ports that refused or did not respond."""
    ran_unix_seconds, began = clock.unix(), clock.monotonic()
    answers = ports.connect_all(wanted, DEADLINE_SECONDS)
    faults = [fault for fault in answers.values() if fault is not None]
    verb = "accepts connections" if len(answers) == 1 else "accept connections"
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


def failure_status(reason: str) -> CheckStatus:
    """Return the status of a port from `reason`, the reason of its fault."""
    return CheckStatus.WARNING if reason == "Refused" else CheckStatus.CRITICAL


def _verdict(fault: Fault) -> CheckVerdict:
    message = f"{fault.subject}: {fault.detail}"
    return CheckVerdict.copy_from(fault, status=failure_status(fault.reason), message=message)
