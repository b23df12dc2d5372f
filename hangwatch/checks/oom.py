"""Processes that the kernel killed for lack of memory, and the limit that they reached.

A kill at the limit of a control group (a container or Slurm job) is a warning that names the owner. If the node itself
ran out of memory, the kernel kills the largest process, which may be a rank or a daemon. That is critical for
`critical_recent_seconds`. The killed process is often a loader worker, and its rank then waits for it. If hangwatch
cannot read the kernel log, the kernel's counter still shows the number of kills.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, list_by_key
from hangwatch.probes.node import oom_kills
from hangwatch.probes.node.kmsg import KernelEvents
from hangwatch.probes.node.machine import Node
from hangwatch.probes.node.oom_kills import OomKill, OomKills

PATH_CHARACTERS = 100
EVERY_SECONDS = 15.0
COUNTED_WINDOW = 41
"""The samples of ten minutes. A kill that only the kernel's counter shows is a finding for that time."""

MORE_MEMORY = (
    "give the job more memory (`--mem` of Slurm, resources.limits.memory of a pod), or use fewer loader workers; "
    "`hangwatch check ranks --verbose`"
)
NODE_REMEDY = (
    "`dmesg -T | grep -iE -A40 'invoked oom-killer'` lists the memory use; `systemctl --failed` lists killed daemons; "
    "set a memory limit for each job (ConstrainRAMSpace=yes in cgroup.conf)"
)
KERNEL_LOG_REMEDY = "`dmesg -T | grep -i 'killed process'` on the host lists the killed processes"


class Settings(contract.Settings, frozen=True):
    """Time for which a kill is a finding."""

    recent_seconds: Annotated[float, describe("time after a kill during which it is a warning", 1.0, 604800.0)] = 3600.0
    critical_recent_seconds: Annotated[
        float,
        describe("time after a kill during which it is critical if the node itself ran out of memory", 0.0, 604800.0),
    ] = 600.0


class Sample(contract.Sample, frozen=True):
    """The kills in the kernel log, the kernel's counter of kills, and the uptime of the node in seconds.

    `log` and `counted` are None if they cannot be read. `why_no_log` is the cause if `log` is None.
    """

    log: OomKills | None
    counted: int | None
    boot_seconds: float
    why_no_log: str = ""


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the new records of /dev/kmsg, and the counter of kills in /proc/vmstat."""
    read = node.kernel_log.read(node.dev_root / "kmsg")
    counted = oom_kills.read_kill_count(node.proc_root)
    if not isinstance(read, KernelEvents) and not isinstance(counted, int):
        return read or counted
    return Sample(
        log=read.oom if isinstance(read, KernelEvents) else None,
        counted=counted if isinstance(counted, int) else None,
        boot_seconds=node.clock.monotonic(),
        why_no_log=f"{read.subject}: {read.detail}" if isinstance(read, Fault) else "there is no /dev/kmsg",
    )


METRICS = (
    Metrics[Sample, Sample](
        Metric(
            "oom_kills_total",
            "processes killed for lack of memory, from the kernel log",
            lambda sample: {(comm, limit): count for comm, limit, count in (sample.log.counts if sample.log else ())},
            by=("comm", "limit"),
        ),
        Metric(
            "oom_kills_counted_total",
            "processes killed for lack of memory since the node booted",
            lambda sample: sample.counted,
        ),
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the recent kills. Kills of the same owner are one finding."""
    sample = window[-1]
    if sample.log is None:
        # Judge the kernel's counter alone. It shows the number of kills, but neither the processes nor the times.
        counts = [sample.counted for sample in window if sample.counted is not None]
        no_log = f"the kernel log cannot be read, so the killed processes are unknown ({window[-1].why_no_log})"
        growth = contract.counter_growth([{"": count} for count in counts]).get("", 0)
        minutes = (window[-1].boot_seconds - window[0].boot_seconds) / 60
        if growth:
            message = f"{words.count(growth, 'OOM kill')} in the last {max(1.0, minutes):.0f} min; {no_log}"
            return warning("OutOfMemory", message, KERNEL_LOG_REMEDY)
        total = words.count(counts[-1] if counts else 0, "OOM kill")
        return ok("NoOomKill", f"no new OOM kill, {total} since the node booted; {no_log}")
    hours = settings.recent_seconds / 3600
    healthy = ok("NoOomKill", f"no process was killed for lack of memory in the last {hours:g} h")
    return worst(_findings(sample.log, sample.boot_seconds, settings), healthy)


def _findings(log: OomKills, now_boot_seconds: float, settings: Settings) -> Iterator[CheckVerdict]:
    recent = (kill for kill in reversed(log.kills) if now_boot_seconds - kill.boot_seconds <= settings.recent_seconds)
    for kills in list_by_key(((kill.limit, kill.owner), kill) for kill in recent).values():
        newest, age_seconds = kills[0], now_boot_seconds - kills[0].boot_seconds
        message = f"{newest.owner}: {_killed(kills, age_seconds)}"
        if newest.limit == "node":
            level = critical if age_seconds <= settings.critical_recent_seconds else warning
            yield level("NodeOutOfMemory", f"the node ran out of memory; {message}", NODE_REMEDY)
        else:
            yield warning("OutOfMemory", f"{message}, {_limit(newest)}", MORE_MEMORY)


def _killed(kills: Sequence[OomKill], age_seconds: float) -> str:
    newest = kills[0]
    user = "" if newest.uid is None else f", uid {newest.uid}"
    process = f"{words.printable(newest.comm)} (pid {newest.pid}{user})"
    if len(kills) == 1:
        return f"{process} was killed for lack of memory {words.ago(age_seconds)}"
    more = " or more" if len(kills) == oom_kills.KILLS_KEPT else ""
    return f"{len(kills)}{more} processes were killed for lack of memory, last {process} {words.ago(age_seconds)}"


def _limit(kill: OomKill) -> str:
    if kill.limit == "cpuset":
        return "because its NUMA nodes (cpuset) had no memory left"
    where = f" {words.elided(kill.limit_cgroup, PATH_CHARACTERS)}" if kill.limit_cgroup else ""
    return f"at the limit of the control group{where}"


def table(sample: Sample) -> contract.Rows:
    """Return one row per kill, newest first."""
    yield "when", "owner", "pid", "uid", "comm", "limit", "control group"
    for kill in reversed(sample.log.kills if sample.log else ()):
        age = words.ago(sample.boot_seconds - kill.boot_seconds)
        yield age, kill.owner, kill.pid, kill.uid, words.printable(kill.comm), kill.limit, kill.limit_cgroup


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    every_seconds=EVERY_SECONDS,
    window=COUNTED_WINDOW,
    absent="this node has neither /dev/kmsg nor a counter of OOM kills",
)
