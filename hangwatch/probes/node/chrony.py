"""What chronyd on this node says of its clock: `chronyc -c tracking`, which answers to any user on loopback."""

from __future__ import annotations

import os
import shutil

from hangwatch.model import Fault, ProcessId, Value
from hangwatch.probes import child

DEADLINE_SECONDS = 3.0
FIELDS = 14
_RUNNER = child.Runner("chronyc")


class Tracking(Value, frozen=True):
    """Chrony's view, in seconds; `offset_seconds` is how far the system clock is ahead (positive) of NTP time.

    `source` is the name or address of the reference, `synchronized` false while the leap status says so.
    """

    source: str
    stratum: int
    offset_seconds: float
    synchronized: bool


def tracking(arguments: tuple[str, ...] = ()) -> Tracking | Fault | None:
    """Ask chronyd; None where there is no chrony, or none running. `arguments` go to chronyc (`-p`, another port)."""
    program = shutil.which("chronyc", path=os.environ.get("PATH", os.defpath) + ":/usr/bin")
    if program is None:
        return None
    us = ProcessId(pid=os.getpid(), start_ticks=0)
    command = [program, "-c", *arguments, "tracking"]
    answer = _RUNNER.refusal(us) or _RUNNER.run(command, us, share="", deadline_seconds=DEADLINE_SECONDS)
    if isinstance(answer, Fault) and answer.reason == "CannotStart":
        return Fault(subject="chronyc", reason="CannotRun", detail=answer.detail)
    if isinstance(answer, Fault):
        return Fault(
            subject="chronyd",
            reason="ChronyNoAnswer",
            detail=f"chronyc tracking gave no answer within {DEADLINE_SECONDS:g} s",
            remedy="systemctl status chronyd",
        )
    if answer.code != 0:  # "506 Cannot talk to daemon": chrony is installed, something else keeps the time
        return None
    return parse_tracking(answer.out.decode("utf-8", "replace"))


def parse_tracking(text: str) -> Tracking | Fault:
    """The line of `chronyc -c tracking`: reference id, name, stratum, time, then offsets in seconds, leap status last.

    The fifth field is positive when the clock is slow; here ahead is positive.
    """
    fields = text.strip().split(",")
    try:
        if len(fields) != FIELDS:
            raise ValueError(f"{len(fields)} fields, not {FIELDS}")
        return Tracking(
            source=fields[1] or fields[0],
            stratum=int(fields[2]),
            offset_seconds=-float(fields[4]),
            synchronized=fields[13] != "Not synchronised",
        )
    except ValueError as error:
        return Fault(subject="chronyd", reason="UnreadableAnswer", detail=f"chronyc tracking: {error}: {text[:200]!r}")
