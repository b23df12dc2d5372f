"""What the kernel's log says of GPUs, NVSwitches, hung tasks and killed processes.

XIDs are the NVIDIA driver's own error numbers; their meaning and what to do stand in `xids.toml`, after NVIDIA's
catalogue. SXIDs are those of NVSwitches. `hung_task` is the kernel's word that a process sat in an uninterruptible
sleep for two minutes: often the very rank that the others wait for. An OOM kill takes a rank or a loader worker away,
and the others wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Literal

from msgspec import Meta

from hangwatch import tables
from hangwatch.checks import contract
from hangwatch.checks.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.kmsg import KernelEvent
from hangwatch.probes.node import Node

XIDS = Metric(name="xid_errors_total", help="XIDs in the kernel's log", labels=("pci", "xid"), kind="counter")
SXIDS = Metric(name="sxid_errors_total", help="SXIDs in the kernel's log", labels=("pci", "sxid"), kind="counter")
HUNG = Metric(name="hung_tasks_total", help="tasks that the kernel reported as hung", labels=("comm",), kind="counter")
KILLS = Metric(name="oom_kills_total", help="processes killed for lack of memory", labels=("comm",), kind="counter")
MISSED = Metric(name="kernel_log_missed_total", help="records overwritten before they were read", kind="counter")
RECOVERY_ACTION_CHANGED = 154
METRIC_OF_KIND = {"xid": XIDS, "sxid": SXIDS, "hung_task": HUNG, "oom_kill": KILLS}


class Settings(contract.Settings, frozen=True):
    """For how long an event counts, and which XIDs do not."""

    recent_seconds: Annotated[
        float, Meta(ge=1.0, le=604800.0, description="XIDs that are no more than a warning, hung tasks, OOM kills")
    ] = 3600.0
    critical_recent_seconds: Annotated[
        float, Meta(ge=1.0, le=2592000.0, description="XIDs after which a GPU needs care, and SXIDs")
    ] = 86400.0
    ignored_xids: Annotated[tuple[int, ...], Meta(description="XIDs that are counted and never a finding")] = ()


class Meaning(Value, frozen=True):
    """One row of xids.toml."""

    meaning: str
    severity: Literal["critical", "warning", "notice", "as_told"]
    action: str


UNLISTED = Meaning(
    meaning="not in hangwatch's table",
    severity="warning",
    action="look it up in https://docs.nvidia.com/deploy/xid-errors/",
)


@cache
def meanings() -> dict[int, Meaning]:
    """The table of XIDs."""
    rows = tables.load("hangwatch.checks", "xids.toml", dict[str, Meaning])
    return {int(number): meaning for numbers, meaning in rows.items() for number in numbers.split(",")}


def severity(code: int, text: str) -> Literal["critical", "warning", "notice"]:
    """How serious an XID is; some say it in their own line."""
    listed = meanings().get(code, UNLISTED).severity
    if listed != "as_told":
        return listed
    if code == RECOVERY_ACTION_CHANGED:
        return "notice" if re.search(r"to 0x\w+ \(None\)", text) else "critical"
    return "critical" if re.search(r"\bFatal\b", text) else "warning"


class Sample(contract.Sample, frozen=True):
    """The events of the log, oldest first, with their counts, and how long this node is up."""

    events: tuple[KernelEvent, ...]
    counts: tuple[tuple[str, str, int, int], ...]
    missed: int
    boot_seconds: float


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read what is new in /dev/kmsg; what came before is remembered."""
    log = node.kernel_log.read(node.dev_root / "kmsg")
    if log is None or isinstance(log, Fault):
        return log
    return Sample(events=log.events, counts=log.counts, missed=log.missed, boot_seconds=node.clock.monotonic())


def points(sample: Sample) -> Iterable[Point]:
    """How often each was seen since hangwatch began to read, including what the log still held then."""
    yield MISSED.point(sample.missed)
    for kind, subject, code, count in sample.counts:
        metric = METRIC_OF_KIND[kind]
        values = dict(zip(metric.labels, (subject, str(code)), strict=False))
        yield metric.point(count, **values)


def errors_told(points: Iterable[Point]) -> float:
    """How many XIDs and SXIDs these points count."""
    return sum(point.value for point in points if point.name in {XIDS.name, SXIDS.name})


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """The recent events, worst first; one finding for equal ones."""
    sample = window[-1]
    findings: dict[tuple[str, str, int], CheckVerdict] = {}
    for event in reversed(sample.events):
        finding = _judge_event(event, sample.boot_seconds - event.boot_seconds, settings)
        if finding is not None:
            findings.setdefault((event.kind, event.subject, event.code), finding)
    hours = settings.critical_recent_seconds / 3600
    healthy = ok("KernelLogQuiet", f"no XID, SXID, hung task or OOM kill that matters in the last {hours:.0f} h")
    return worst(findings.values(), healthy)


def _judge_event(event: KernelEvent, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    if event.kind == "xid":
        return _judge_xid(event, age_seconds, settings)
    if event.kind == "sxid":
        return _judge_sxid(event, age_seconds, settings)
    if age_seconds > settings.recent_seconds:
        return None
    who = f"{event.subject} (pid {event.code})"
    if event.kind == "hung_task":
        remedy = "`hangwatch check storage`; `dmesg -T | grep -A20 'blocked for more'`"
        return warning("HungTask", f"{who} hung in the kernel {_ago(age_seconds)}", remedy)
    remedy = "give the job more memory or fewer loader workers; `hangwatch check ranks --verbose`"
    return warning("OutOfMemory", f"{who} was killed for lack of memory {_ago(age_seconds)}", remedy)


def _judge_xid(event: KernelEvent, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    row, level = meanings().get(event.code, UNLISTED), severity(event.code, event.text)
    limit = settings.critical_recent_seconds if level == "critical" else settings.recent_seconds
    if level == "notice" or event.code in settings.ignored_xids or age_seconds > limit:
        return None
    message = f"GPU {event.subject}: XID {event.code} {_ago(age_seconds)}: {row.meaning}"
    if level == "critical":
        return critical("GpuError", message, row.action)
    return warning("GpuWarning", message, row.action)


def _judge_sxid(event: KernelEvent, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    """`SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 ...`: the switch's driver says itself how bad it is."""
    if age_seconds > settings.critical_recent_seconds:
        return None
    line = event.text.partition(f"{event.code},")[2].strip()
    message = f"NVSwitch {event.subject}: SXID {event.code} {_ago(age_seconds)}: {line}"
    if re.match(r"fatal", line, re.IGNORECASE):
        remedy = "drain the node, reset all GPUs and switches; `hangwatch check fabric`"
        return critical("SwitchError", message, remedy)
    return warning("SwitchWarning", message, "`hangwatch check fabric`, `hangwatch check nvlink_status`")


def _ago(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def table(sample: Sample) -> contract.Rows:
    """The events, newest first."""
    return [("when", "event"), *_rows(sample)]


def _rows(sample: Sample) -> Iterator[tuple[str, str]]:
    for event in reversed(sample.events):
        yield _ago(sample.boot_seconds - event.boot_seconds), event.text


CHECK = Check(
    name="xid",
    every_seconds=15,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(XIDS, SXIDS, HUNG, KILLS, MISSED),
    table=table,
    absent="this node shows no /dev/kmsg",
)
