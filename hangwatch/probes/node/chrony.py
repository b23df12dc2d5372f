"""Read the clock state from chronyd with `chronyc -c tracking`, which any user may run."""

import os
import shutil

from hangwatch.model import Fault, Value
from hangwatch.probes.base import child_runner

DEADLINE_SECONDS = 3.0
FIELDS = 14
_RUNNER = child_runner.Runner("chronyc")
_LOCAL_CLOCK = "7F7F0101"  # the reference id of the directive `local`: chronyd follows its own clock


class Tracking(Value, frozen=True):
    """The clock state of chronyd. `offset_seconds` is positive if the system clock is ahead of NTP time.

    `source` is the name or address of the reference clock. `synchronized` comes from the leap status; it is false
    without a source, even if the directive `local` makes chronyd report a normal state.
    """

    source: str
    stratum: int
    offset_seconds: float
    synchronized: bool


def read_tracking(arguments: tuple[str, ...] = ()) -> Tracking | Fault | None:
    """Return the state of chronyd; None if chrony is not installed or not running.

    `arguments` are options of chronyc, for example `-p` for another port.
    """
    program = shutil.which("chronyc", path=os.environ.get("PATH", os.defpath) + ":/usr/bin")
    if program is None:
        return None
    command = [program, "-c", *arguments, "tracking"]
    answer = _RUNNER.refusal() or _RUNNER.run(command, deadline_seconds=DEADLINE_SECONDS)
    if isinstance(answer, Fault) and answer.reason == "CannotStart":
        return Fault(subject="chronyc", reason="CannotRun", detail=answer.detail)
    if isinstance(answer, Fault):
        return Fault(
            subject="chronyd",
            reason="ChronyNoAnswer",
            detail=f"chronyc tracking did not respond within {DEADLINE_SECONDS:g} s",
            remedy="systemctl status chronyd",
        )
    if answer.code != 0:  # "506 Cannot talk to daemon": chrony is installed but not running
        return None
    return parse_tracking(answer.out.decode("utf-8", "replace"))


def parse_tracking(text: str) -> Tracking | Fault:
    """Parse the output of `chronyc -c tracking`.

    Its fields are reference id, name, stratum, time, offsets in seconds and others; the last is the leap status. The
    fifth field is positive if the clock is slow; `offset_seconds` has the opposite sign.
    """
    fields = text.strip().split(",")
    try:
        if len(fields) != FIELDS:
            raise ValueError(f"{len(fields)} fields instead of {FIELDS}")
        return Tracking(
            source=fields[1] or fields[0],
            stratum=int(fields[2]),
            offset_seconds=-float(fields[4]),
            synchronized=fields[13] != "Not synchronised" and fields[0] != _LOCAL_CLOCK,
        )
    except ValueError as error:
        return Fault(subject="chronyd", reason="UnreadableAnswer", detail=f"chronyc tracking: {error}: {text[:200]!r}")
