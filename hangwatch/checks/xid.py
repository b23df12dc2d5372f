"""What the kernel's log and the driver say of GPUs, NVSwitches and hung tasks.

XIDs are the NVIDIA driver's own error numbers; their meaning and what to do stand in `xids.toml`, after NVIDIA's
catalogue. SXIDs are those of NVSwitches. `hung_task` is the kernel's word that a process sat in an uninterruptible
sleep for two minutes: often the very rank that the others wait for. NVML tells XIDs, too, since the daemon began: one
that both tell is one event; one that the log does not hold (it was overwritten, or may not be read) counts as well,
without its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Literal

from msgspec import Meta

from hangwatch import tables, words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point, Value
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import XidDetails, XidEvent
from hangwatch.probes.node.kmsg import KernelEvent, KernelEvents
from hangwatch.probes.node.machine import Node

XIDS = Metric(name="xid_errors_total", help="XIDs in the kernel's log", labels=("pci", "xid"), kind="counter")
NVML_ONLY = Metric(
    name="xid_nvml_only_events", help="XIDs that NVML told and the kernel's log does not hold", labels=("pci", "xid")
)
SXIDS = Metric(name="sxid_errors_total", help="SXIDs in the kernel's log", labels=("pci", "sxid"), kind="counter")
HUNG = Metric(name="hung_tasks_total", help="tasks that the kernel reported as hung", labels=("comm",), kind="counter")
MISSED = Metric(name="kernel_log_missed_total", help="records overwritten before they were read", kind="counter")
NVML_TELLS = ", told by NVML"
RECOVERY_ACTION_CHANGED = 154
SAME_EVENT_SECONDS = 60.0
"""NVML is asked at each sample, so it tells an XID later than the log, whose clock drifts against CLOCK_MONOTONIC."""
METRIC_OF_KIND = {"xid": XIDS, "sxid": SXIDS, "hung_task": HUNG}


class Settings(contract.Settings, frozen=True):
    """For how long an event counts, and which XIDs do not."""

    recent_seconds: Annotated[
        float, Meta(ge=1.0, le=604800.0, description="XIDs that are no more than a warning, hung tasks")
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
    """How serious an XID is; some say it in their own line, which NVML does not tell."""
    listed = meanings().get(code, UNLISTED).severity
    if listed != "as_told":
        return listed
    if text.endswith(NVML_TELLS):
        return "warning"
    if code == RECOVERY_ACTION_CHANGED:
        return "notice" if re.search(r"to 0x\w+ \(None\)", text) else "critical"
    return "critical" if re.search(r"\bFatal\b", text) else "warning"


class Sample(contract.Sample, frozen=True):
    """The events of the log and of NVML, oldest first, and how long this node is up.

    `counts` and `missed` are of the log; `by_nvml` are the events that NVML told, too, `nvml_only` those it alone told.
    """

    events: tuple[KernelEvent, ...]
    counts: tuple[tuple[str, str, int, int], ...]
    missed: int
    boot_seconds: float
    by_nvml: tuple[KernelEvent, ...] = ()
    nvml_only: tuple[KernelEvent, ...] = ()


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read what is new in /dev/kmsg, and what NVML has told; what came before is remembered."""
    log = node.kernel_log.read(node.dev_root / "kmsg")
    details = query.details(node, XidDetails)
    told = details.events if isinstance(details, XidDetails) else ()
    if (log is None or isinstance(log, Fault)) and not told:
        return log
    read = log if isinstance(log, KernelEvents) else KernelEvents()
    both, alone = _joined(read.events, told)
    events = sorted((*read.events, *alone), key=lambda event: event.boot_seconds)
    return Sample(
        events=tuple(events),
        counts=read.counts,
        missed=read.missed,
        boot_seconds=node.clock.monotonic(),
        by_nvml=both,
        nvml_only=alone,
    )


def _joined(
    logged: Sequence[KernelEvent], told: Iterable[XidEvent]
) -> tuple[tuple[KernelEvent, ...], tuple[KernelEvent, ...]]:
    """The events of the log that NVML told as well, and those that NVML alone told.

    The log keeps the newest of each GPU and number: what NVML told before that one is in the log's count.
    """
    newest = {(_gpu(event.subject), event.code): event for event in logged if event.kind == "xid"}
    both: dict[KernelEvent, None] = {}
    alone: dict[tuple[str, int], KernelEvent] = {}
    for one in told:
        gpu = _gpu(one.pci_address or "")
        known = [event for (its, code), event in newest.items() if code == one.code and gpu in ("", its)]
        since = one.seen_monotonic_seconds - SAME_EVENT_SECONDS
        same = next((event for event in known if event.boot_seconds >= since), None)
        if same is not None:
            both[same] = None
        else:
            alone[gpu, one.code] = KernelEvent(
                kind="xid",
                subject=gpu or "unknown",
                code=one.code,
                boot_seconds=one.seen_monotonic_seconds,
                text=f"XID {one.code} of GPU {gpu or 'unknown'}{NVML_TELLS}",
            )
    return tuple(both), tuple(alone.values())


def _gpu(address: str) -> str:
    """A PCI address as the driver's lines have it, `0000:3b:00`, however NVML writes it (`00000000:3B:00.0`)."""
    domain, _, rest = address.lower().partition(".")[0].partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest else ""


def points(sample: Sample) -> Iterable[Point]:
    """How often each was seen since hangwatch began to read, including what the log still held then."""
    yield MISSED.point(sample.missed)
    for kind, subject, code, count in sample.counts:
        metric = METRIC_OF_KIND[kind]
        values = dict(zip(metric.labels, (subject, str(code)), strict=False))
        yield metric.point(count, **values)
    for event in sample.nvml_only:
        yield NVML_ONLY.point(1, pci=event.subject, xid=str(event.code))


def errors_told(points: Iterable[Point]) -> float:
    """How many XIDs and SXIDs these points count."""
    return sum(point.value for point in points if point.name in {XIDS.name, SXIDS.name, NVML_ONLY.name})


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """The recent events, worst first; one finding for equal ones."""
    sample = window[-1]
    findings: dict[tuple[str, str, int], CheckVerdict] = {}
    for event in reversed(sample.events):
        finding = _judge_event(event, sample, settings)
        if finding is not None:
            findings.setdefault((event.kind, event.subject, event.code), finding)
    hours = settings.critical_recent_seconds / 3600
    healthy = ok("KernelLogQuiet", f"no XID, SXID or hung task that matters in the last {hours:.0f} h")
    return worst(findings.values(), healthy)


def _judge_event(event: KernelEvent, sample: Sample, settings: Settings) -> CheckVerdict | None:
    age_seconds = sample.boot_seconds - event.boot_seconds
    if event.kind == "xid":
        return _judge_xid(event, age_seconds, settings, _sources(event, sample))
    if event.kind == "sxid":
        return _judge_sxid(event, age_seconds, settings)
    if age_seconds > settings.recent_seconds:
        return None
    message = f"{event.subject} (pid {event.code}) hung in the kernel {words.ago(age_seconds)}"
    return warning("HungTask", message, "`hangwatch check storage`; `dmesg -T | grep -A20 'blocked for more'`")


def _sources(event: KernelEvent, sample: Sample) -> str:
    """Who told of an XID, where NVML did: without it, the log, as always."""
    if event in sample.nvml_only:
        return " (told by NVML alone, the kernel's log does not hold it)"
    return " (told by the kernel's log and by NVML)" if event in sample.by_nvml else ""


def _judge_xid(event: KernelEvent, age_seconds: float, settings: Settings, told: str) -> CheckVerdict | None:
    row, level = meanings().get(event.code, UNLISTED), severity(event.code, event.text)
    limit = settings.critical_recent_seconds if level == "critical" else settings.recent_seconds
    if level == "notice" or event.code in settings.ignored_xids or age_seconds > limit:
        return None
    message = f"GPU {event.subject}: XID {event.code} {words.ago(age_seconds)}: {row.meaning}{told}"
    if level == "critical":
        return critical("GpuError", message, row.action)
    return warning("GpuWarning", message, row.action)


def _judge_sxid(event: KernelEvent, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    """`SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 ...`: the switch's driver says itself how bad it is."""
    if age_seconds > settings.critical_recent_seconds:
        return None
    line = event.text.partition(f"{event.code},")[2].strip()
    message = f"NVSwitch {event.subject}: SXID {event.code} {words.ago(age_seconds)}: {line}"
    if re.match(r"fatal", line, re.IGNORECASE):
        remedy = "drain the node, reset all GPUs and switches; `hangwatch check fabric`"
        return critical("SwitchError", message, remedy)
    return warning("SwitchWarning", message, "`hangwatch check fabric`, `hangwatch check nvlink_status`")


def table(sample: Sample) -> contract.Rows:
    """The events, newest first."""
    return [("when", "event"), *_rows(sample)]


def _rows(sample: Sample) -> Iterator[tuple[str, str]]:
    for event in reversed(sample.events):
        yield words.ago(sample.boot_seconds - event.boot_seconds), event.text


CHECK = Check(
    name="xid",
    every_seconds=15,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(XIDS, NVML_ONLY, SXIDS, HUNG, MISSED),
    table=table,
    absent="this node shows no /dev/kmsg, and NVML tells no XID",
)
