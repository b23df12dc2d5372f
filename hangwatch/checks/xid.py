"""Errors of GPUs (XID), NVSwitches (SXID) and other devices, and hung tasks, from the kernel log and NVML.

XIDs are error numbers of the NVIDIA driver. `xids.toml` has their meaning and remedy, after NVIDIA's catalogue. The
kernel reports a hung task if a process was in an uninterruptible sleep for two minutes. It is often the rank that the
other ranks wait for. A line that matches a row of `kernel_lines.toml` with a severity is an error without a number.
NVML also reports the XIDs since the daemon started. An XID in both sources is one event. An XID that only NVML reports
counts too: the log line was overwritten, or hangwatch has no permission to read the log.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import XidDetails, XidEvent
from hangwatch.probes.node.kmsg import KernelEvent, KernelEvents, LoggedLine
from hangwatch.probes.node.machine import Node
from hangwatch.tables import kernel_lines, xids

XIDS = Metric(name="xid_errors_total", help="XIDs in the kernel log", labels=("pci", "xid"), kind="counter")
NVML_ONLY = Metric(
    name="xid_nvml_only_events", help="XIDs that NVML reported and the kernel log lacks", labels=("pci", "xid")
)
SXIDS = Metric(name="sxid_errors_total", help="SXIDs in the kernel log", labels=("pci", "sxid"), kind="counter")
HUNG = Metric(name="hung_tasks_total", help="tasks that the kernel reported as hung", labels=("comm",), kind="counter")
MISSED = Metric(
    name="kernel_log_missed_total",
    help="kernel log records that were overwritten before hangwatch read them",
    kind="counter",
)
SAME_EVENT_SECONDS = 60.0
"""Tolerance between the times of one XID in both sources.

NVML events get the time of the sample, which is later than the log line. The log's clock drifts against
CLOCK_MONOTONIC.
"""
METRIC_OF_KIND = {"xid": XIDS, "sxid": SXIDS, "hung_task": HUNG}


class Settings(contract.Settings, frozen=True):
    """Time for which an event is a finding, and the XIDs to ignore."""

    recent_seconds: Annotated[
        float,
        Meta(ge=1.0, le=604800.0, description="time after an XID warning or a hung task during which it is a finding"),
    ] = 3600.0
    critical_recent_seconds: Annotated[
        float,
        Meta(ge=1.0, le=2592000.0, description="time after a critical XID or an SXID during which it is a finding"),
    ] = 86400.0
    ignored_xids: Annotated[
        tuple[int, ...], Meta(description="XIDs that are only counted: they are never a finding")
    ] = ()


class Sample(contract.Sample, frozen=True):
    """The events of the kernel log and of NVML, oldest first. `boot_seconds` is the uptime of the node.

    `counts` are (kind, subject, code, number of events) in the log. `missed` counts log records that were
    overwritten before hangwatch read them. `by_nvml` are the events in both sources, `nvml_only` the events in NVML
    only. `lines` are errors without a number.
    """

    events: tuple[KernelEvent, ...]
    counts: tuple[tuple[str, str, int, int], ...]
    missed: int
    boot_seconds: float
    lines: tuple[LoggedLine, ...] = ()
    by_nvml: tuple[KernelEvent, ...] = ()
    nvml_only: tuple[KernelEvent, ...] = ()


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the new records of /dev/kmsg and the XIDs of NVML. Both probes also return the events of earlier reads."""
    log = node.kernel_log.read(node.dev_root / "kmsg")
    details = query.details(node, XidDetails)
    from_nvml = details.events if isinstance(details, XidDetails) else ()
    if (log is None or isinstance(log, Fault)) and not from_nvml:
        return log
    read = log if isinstance(log, KernelEvents) else KernelEvents()
    in_both, nvml_only = _match_events(read.events, from_nvml)
    events = sorted((*read.events, *nvml_only), key=lambda event: event.boot_seconds)
    return Sample(
        events=tuple(events),
        counts=read.counts,
        missed=read.missed,
        lines=tuple(line for line in read.lines if kernel_lines.load()[line.name].severity),
        boot_seconds=node.clock.monotonic(),
        by_nvml=in_both,
        nvml_only=nvml_only,
    )


def _match_events(
    logged: Sequence[KernelEvent], from_nvml: Iterable[XidEvent]
) -> tuple[tuple[KernelEvent, ...], tuple[KernelEvent, ...]]:
    """Return the log events that NVML also reported, and the events that only NVML reported.

    `logged` has only the newest event of each GPU and XID. An older NVML event of the same GPU and XID matches it
    too.
    """
    newest = {(xids.shorten_address(event.subject), event.code): event for event in logged if event.kind == "xid"}
    in_both: dict[KernelEvent, None] = {}
    nvml_only: dict[tuple[str, int], KernelEvent] = {}
    for xid in from_nvml:
        gpu = xids.shorten_address(xid.pci_address or "")
        since = xid.seen_monotonic_seconds - SAME_EVENT_SECONDS
        same = next(
            (
                event
                for (address, code), event in newest.items()
                if code == xid.code and gpu in ("", address) and event.boot_seconds >= since
            ),
            None,
        )
        if same is not None:
            in_both[same] = None
        else:
            nvml_only[gpu, xid.code] = KernelEvent(
                kind="xid",
                subject=gpu or "unknown",
                code=xid.code,
                boot_seconds=xid.seen_monotonic_seconds,
                text=f"XID {xid.code} of GPU {gpu or 'unknown'}{xids.FROM_NVML}",
            )
    return tuple(in_both), tuple(nvml_only.values())


def points(sample: Sample) -> Iterable[Point]:
    """Yield the number of events since the oldest record that the kernel log still had when hangwatch started."""
    yield MISSED.point(sample.missed)
    for kind, subject, code, count in sample.counts:
        metric = METRIC_OF_KIND[kind]
        values = dict(zip(metric.labels, (subject, str(code)), strict=False))
        yield metric.point(count, **values)
    for event in sample.nvml_only:
        yield NVML_ONLY.point(1, pci=event.subject, xid=str(event.code))


def count_errors(points: Iterable[Point]) -> float:
    """Return the number of XIDs and SXIDs in `points`."""
    return sum(point.value for point in points if point.name in {XIDS.name, SXIDS.name, NVML_ONLY.name})


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the recent events and lines. Events with the same subject and code are one finding, the worst."""
    sample = window[-1]
    findings: dict[tuple[str, str, int], CheckVerdict] = {}
    for event in reversed(sample.events):
        finding, key = _judge_event(event, sample, settings), (event.kind, event.subject, event.code)
        if finding is not None and (key not in findings or finding.status > findings[key].status):
            findings[key] = finding
    hours = settings.critical_recent_seconds / 3600
    healthy = ok("KernelLogQuiet", f"no relevant XID, SXID or hung task in the last {hours:.0f} h")
    return worst([*findings.values(), *_judge_lines(sample, settings)], healthy)


def _judge_lines(sample: Sample, settings: Settings) -> Iterator[CheckVerdict]:
    for line in reversed(sample.lines):
        row, age_seconds = kernel_lines.load()[line.name], sample.boot_seconds - line.boot_seconds
        if age_seconds <= _recent_seconds(row.severity, settings):
            judged = critical if row.severity == "critical" else warning
            device = "GPU" if row.names == "gpu" else "device"
            message = f"{device} {line.subject or 'unknown'} {words.ago(age_seconds)}: {row.meaning}"
            yield judged("DeviceError", message, row.remedy)


def _recent_seconds(level: str, settings: Settings) -> float:
    return settings.critical_recent_seconds if level == "critical" else settings.recent_seconds


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
    """Return a text on the sources of an XID, in parentheses; "" if only the kernel log reported it."""
    if event in sample.nvml_only:
        return " (reported by NVML only; the kernel log does not have it)"
    return " (reported by the kernel log and by NVML)" if event in sample.by_nvml else ""


def _judge_xid(event: KernelEvent, age_seconds: float, settings: Settings, sources: str) -> CheckVerdict | None:
    row, level = xids.find_meaning(event.code), xids.severity(event.code, event.text)
    is_ignored = level == "notice" or event.code in settings.ignored_xids
    if is_ignored or age_seconds > _recent_seconds(level, settings):
        return None
    message = f"GPU {event.subject}: XID {event.code} {words.ago(age_seconds)}: {row.meaning}{sources}"
    if level == "critical":
        return critical("GpuError", message, row.action)
    return warning("GpuWarning", message, row.action)


def _judge_sxid(event: KernelEvent, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    """Judge an SXID. Its log line states its severity: `SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 ...`."""
    if age_seconds > settings.critical_recent_seconds:
        return None
    line = event.text.partition("): ")[2].partition(",")[2].strip()
    message = f"NVSwitch {event.subject}: SXID {event.code} {words.ago(age_seconds)}: {line}"
    if xids.is_fatal_switch_line(event.text):
        return critical("SwitchError", message, "drain the node, reset all GPUs and switches; `hangwatch check fabric`")
    return warning("SwitchWarning", message, "`hangwatch check fabric`, `hangwatch check nvlink_status`")


def table(sample: Sample) -> contract.Rows:
    """Return one row per event and line, newest first."""
    events = [(event.boot_seconds, event.text) for event in sample.events]
    events += [(line.boot_seconds, line.text) for line in sample.lines]
    return [("when", "event"), *((words.ago(sample.boot_seconds - at), text) for at, text in sorted(events)[::-1])]


CHECK = Check(
    every_seconds=15,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    table=table,
    absent="this node has no /dev/kmsg, and NVML reports no XID",
)
