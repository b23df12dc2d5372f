"""Who the kernel killed for lack of memory, and at whose limit.

A process that is killed at the limit of its own control group (its container, its Slurm job) is that job's trouble: a
warning, which says whose. Where the node itself has no memory left the kernel kills whom it finds largest, a daemon of
the node as well as a rank: that is critical for a while. The victim is often a loader worker, and the ranks then wait
for it. Where the kernel's log may not be read, or there is none, the kernel's counter still tells how many were killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.node import oom_kills
from hangwatch.probes.node.kmsg import KernelEvents
from hangwatch.probes.node.machine import Node
from hangwatch.probes.node.oom_kills import OomKill, OomKills

KILLS = Metric(
    name="oom_kills_total", help="processes killed for lack of memory, by the kernel's log", labels=("comm", "limit"),
    kind="counter",
)  # fmt: skip
COUNTED = Metric(
    name="oom_kills_counted_total", help="processes killed for lack of memory since the node started", kind="counter"
)
PATH_CHARACTERS = 100
EVERY_SECONDS = 15.0
COUNTED_WINDOW = 41
"""Samples of ten minutes: for so long does a kill count of which the kernel's counter alone tells."""

MORE_MEMORY = (
    "more memory for it (`--mem` of Slurm, resources.limits.memory of a pod), or fewer loader workers; "
    "`hangwatch check ranks --verbose`"
)
NODE_REMEDY = (
    "`dmesg -T | grep -iE -A40 'invoked oom-killer'` lists who used what; `systemctl --failed` for daemons that were "
    "killed; give jobs a limit of their own (ConstrainRAMSpace=yes in cgroup.conf)"
)
WHOSE = "the kernel's log names them: `dmesg -T | grep -i 'killed process'` on the node itself"


class Settings(contract.Settings, frozen=True):
    """For how long a kill counts."""

    recent_seconds: Annotated[float, Meta(ge=1.0, le=604800.0, description="a kill is a warning for so long")] = 3600.0
    critical_recent_seconds: Annotated[
        float, Meta(ge=0.0, le=604800.0, description="critical for so long where the node itself had no memory left")
    ] = 600.0


class Sample(contract.Sample, frozen=True):
    """The kills of the kernel's log, None where it is not read, and how many its counter tells; how long it is up."""

    log: OomKills | None
    counted: int | None
    boot_seconds: float
    why_no_log: str = ""


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read what is new in /dev/kmsg, and the counter of /proc/vmstat."""
    read = node.kernel_log.read(node.dev_root / "kmsg")
    counted = oom_kills.count(node.proc_root)
    if not isinstance(read, KernelEvents) and not isinstance(counted, int):
        return read or counted
    return Sample(
        log=read.oom if isinstance(read, KernelEvents) else None,
        counted=counted if isinstance(counted, int) else None,
        boot_seconds=node.clock.monotonic(),
        why_no_log=f"{read.subject}: {read.detail}" if isinstance(read, Fault) else "there is no /dev/kmsg",
    )


def points(sample: Sample) -> Iterable[Point]:
    """How often the kernel killed, by its log and by its counter."""
    if sample.counted is not None:
        yield COUNTED.point(sample.counted)
    for comm, limit, count in sample.log.counts if sample.log else ():
        yield KILLS.point(count, comm=comm, limit=limit)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """The recent kills of each owner, worst first."""
    sample = window[-1]
    if sample.log is None:
        return _judge_counted(window)
    hours = settings.recent_seconds / 3600
    healthy = ok("NobodyKilled", f"no process was killed for lack of memory in the last {hours:g} h")
    return worst(_findings(sample.log, sample.boot_seconds, settings), healthy)


def _findings(log: OomKills, now_boot_seconds: float, settings: Settings) -> Iterator[CheckVerdict]:
    owners: dict[tuple[str, str], list[OomKill]] = {}
    for kill in reversed(log.kills):
        if now_boot_seconds - kill.boot_seconds <= settings.recent_seconds:
            owners.setdefault((kill.limit, kill.owner), []).append(kill)
    for kills in owners.values():
        newest, age_seconds = kills[0], now_boot_seconds - kills[0].boot_seconds
        message = f"{newest.owner}: {_killed(kills, age_seconds)}"
        if newest.limit == "node":
            level = critical if age_seconds <= settings.critical_recent_seconds else warning
            yield level("NodeOutOfMemory", f"the node had no memory left, and of {message}", NODE_REMEDY)
        else:
            yield warning("OutOfMemory", f"{message}, {_limit(newest)}", MORE_MEMORY)


def _killed(kills: Sequence[OomKill], age_seconds: float) -> str:
    newest = kills[0]
    user = "" if newest.uid is None else f", uid {newest.uid}"
    one = f"{words.printable(newest.comm)} (pid {newest.pid}{user})"
    if len(kills) == 1:
        return f"{one} was killed for lack of memory {words.ago(age_seconds)}"
    more = " or more" if len(kills) == oom_kills.KILLS_KEPT else ""
    return f"{len(kills)}{more} processes were killed for lack of memory, the last {one} {words.ago(age_seconds)}"


def _limit(kill: OomKill) -> str:
    if kill.limit == "cpuset":
        return "since the NUMA nodes that it may use had none left"
    where = f" {words.elided(kill.limit_cgroup, PATH_CHARACTERS)}" if kill.limit_cgroup else ""
    return f"at the limit of the control group{where}"


def _judge_counted(window: Sequence[Sample]) -> CheckVerdict:
    """By the counter alone, which says neither who it was nor when, only that it grew."""
    counts = [sample.counted for sample in window if sample.counted is not None]
    why = f"whose is not known ({window[-1].why_no_log})"
    grown = contract.growth([{"": count} for count in counts]).get("", 0)
    minutes = (window[-1].boot_seconds - window[0].boot_seconds) / 60
    if grown:
        message = f"{words.count(grown, 'OOM kill')} in the last {max(1.0, minutes):.0f} min; {why}"
        return warning("OutOfMemory", message, WHOSE)
    since = words.count(counts[-1] if counts else 0, "OOM kill")
    return ok("NobodyKilled", f"{since} since the node started, none seen to happen; {why}")


def table(sample: Sample) -> contract.Rows:
    """The kills, newest first."""
    rows = [("when", "whose", "pid", "uid", "comm", "limit", "control group")]
    for kill in reversed(sample.log.kills if sample.log else ()):
        age = words.ago(sample.boot_seconds - kill.boot_seconds)
        uid = "" if kill.uid is None else str(kill.uid)
        rows.append((age, kill.owner, str(kill.pid), uid, words.printable(kill.comm), kill.limit, kill.limit_cgroup))
    return rows


CHECK = Check(
    name="oom",
    every_seconds=EVERY_SECONDS,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(KILLS, COUNTED),
    table=table,
    window=COUNTED_WINDOW,
    absent="this node shows neither /dev/kmsg nor a counter of OOM kills",
)
