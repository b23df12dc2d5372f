"""Errors of GPUs (XID), NVSwitches (SXID) and other devices, and hung tasks, from the kernel log and NVML.

XIDs are error numbers of the NVIDIA driver. `xids.toml` has their meaning and remedy, after NVIDIA's catalogue. The
kernel reports a hung task if a process was in an uninterruptible sleep for two minutes. It is often the rank that the
other ranks wait for. A line that matches a row of `kernel_lines.toml` with a severity is an error without a number.
NVML also reports the XIDs since the daemon started. An XID in both sources is one event. An XID that only NVML reports
counts too: the log line was overwritten, or hangwatch has no permission to read the log.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import XidDetails, XidEvent
from hangwatch.probes.node import kmsg
from hangwatch.probes.node.kmsg import KernelEvents, LoggedLine
from hangwatch.probes.node.machine import Node
from hangwatch.tables import kernel_lines, xids

SAME_EVENT_SECONDS = 60.0
"""Tolerance between the times of one XID in both sources.

NVML events get the time of the sample, which is later than the log line. The log's clock drifts against
CLOCK_MONOTONIC.
"""


class Settings(contract.Settings, frozen=True):
    """Time for which an event is a finding, and the XIDs to ignore."""

    recent_seconds: Annotated[
        float, describe("seconds for which an XID warning or a hung task is a finding", 1.0, 604800.0)
    ] = 3600.0
    critical_recent_seconds: Annotated[
        float, describe("seconds for which a critical XID or an SXID is a finding", 1.0, 2592000.0)
    ] = 86400.0
    ignored_xids: Annotated[tuple[int, ...], describe("XIDs that are only counted: they are never a finding")] = ()


class Sample(contract.Sample, frozen=True):
    """The errors in the kernel log and in NVML, oldest first. `boot_seconds` is the uptime of the node.

    `counts` are (row, subject, code, number of lines) in the log. `missed` counts log records that were overwritten
    before hangwatch read them. `by_nvml` are the XIDs in both sources, `nvml_only` the XIDs in NVML only.
    """

    lines: tuple[LoggedLine, ...]
    counts: tuple[tuple[str, str, int, int], ...]
    missed: int
    boot_seconds: float
    by_nvml: tuple[LoggedLine, ...] = ()
    nvml_only: tuple[LoggedLine, ...] = ()


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the new records of /dev/kmsg and the XIDs of NVML. Both probes also return the events of earlier reads."""
    log = node.kernel_log.read(node.dev_root / "kmsg")
    details = query.details(node, XidDetails)
    from_nvml = details.events if isinstance(details, XidDetails) else ()
    if (log is None or isinstance(log, Fault)) and not from_nvml:
        return log
    read = log if isinstance(log, KernelEvents) else KernelEvents()
    in_both, nvml_only = _match_events(read.lines, from_nvml)
    rows = kernel_lines.load()
    logged = (line for line in read.lines if line.name in kmsg.COUNTED or rows[line.name].severity)
    return Sample(
        lines=tuple(sorted((*logged, *nvml_only), key=lambda line: line.boot_seconds)),
        counts=read.counts,
        missed=read.missed,
        boot_seconds=node.clock.monotonic(),
        by_nvml=in_both,
        nvml_only=nvml_only,
    )


def _match_events(
    logged: Sequence[LoggedLine], from_nvml: Iterable[XidEvent]
) -> tuple[tuple[LoggedLine, ...], tuple[LoggedLine, ...]]:
    """Return the lines of XIDs that NVML also reported, and lines for the XIDs that only NVML reported.

    `logged` has only the newest line of each GPU and XID. An older NVML event of the same GPU and XID matches it too.
    """
    newest = {(xids.shorten_address(line.subject), line.code): line for line in logged if line.name == "xid"}
    in_both: dict[LoggedLine, None] = {}
    nvml_only: dict[tuple[str, int], LoggedLine] = {}
    for xid in from_nvml:
        gpu, seen_seconds = xids.shorten_address(xid.pci_address or ""), xid.seen_monotonic_seconds
        of_code = ((address, line) for (address, code), line in newest.items() if code == xid.code)
        same = (
            line
            for address, line in of_code
            if gpu in ("", address) and line.boot_seconds >= seen_seconds - SAME_EVENT_SECONDS
        )
        if (line := next(same, None)) is not None:
            in_both[line] = None
        else:
            subject = gpu or "unknown"
            text = f"XID {xid.code} of GPU {subject}{xids.FROM_NVML}"
            nvml_only[gpu, xid.code] = LoggedLine("xid", subject, "", xid.code, boot_seconds=seen_seconds, text=text)
    return tuple(in_both), tuple(nvml_only.values())


METRICS = (
    Metrics[Sample, Sample](
        Metric(
            "xid_errors_total",
            "XIDs in the kernel log",
            lambda sample: _count_lines(sample, "xid"),
            by=("pci", "xid"),
        ),
        Metric(
            "xid_nvml_only_events",
            "XIDs that NVML reported and the kernel log lacks",
            lambda sample: {(line.subject, str(line.code)): 1 for line in sample.nvml_only},
            by=("pci", "xid"),
        ),
        Metric(
            "sxid_errors_total",
            "SXIDs in the kernel log",
            lambda sample: _count_lines(sample, "sxid"),
            by=("pci", "sxid"),
        ),
        Metric(
            "hung_tasks_total",
            "tasks that the kernel reported as hung",
            lambda sample: {comm: count for (comm, _), count in _count_lines(sample, "hung_task").items()},
            by=("comm",),
        ),
        Metric(
            "kernel_log_missed_total",
            "kernel log records that were overwritten before hangwatch read them",
            lambda sample: sample.missed,
        ),
    ),
)


def _count_lines(sample: Sample, row: str) -> dict[tuple[str, str], int]:
    """Return the number of lines since the oldest record that the log still had when hangwatch started."""
    return {(subject, str(code)): count for name, subject, code, count in sample.counts if name == row}


def count_errors(points: Iterable[Point]) -> float:
    """Return the number of XIDs and SXIDs in `points`."""
    return sum(
        point.value
        for point in points
        if point.name in {"xid_errors_total", "sxid_errors_total", "xid_nvml_only_events"}
    )


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the recent lines. Lines of the same row, subject and code are one finding, the worst."""
    sample = window[-1]
    findings: dict[tuple[str, str, int], CheckVerdict] = {}
    for line in reversed(sample.lines):
        finding, key = _judge_line(line, sample, settings), (line.name, line.subject, line.code)
        if finding is not None and (key not in findings or finding.status > findings[key].status):
            findings[key] = finding
    hours = settings.critical_recent_seconds / 3600
    healthy = ok("KernelLogQuiet", f"no relevant XID, SXID or hung task in the last {hours:.0f} h")
    return worst(findings.values(), healthy)


def _recent_seconds(level: str, settings: Settings) -> float:
    return settings.critical_recent_seconds if level == "critical" else settings.recent_seconds


def _judge_line(line: LoggedLine, sample: Sample, settings: Settings) -> CheckVerdict | None:
    age_seconds = sample.boot_seconds - line.boot_seconds
    if line.name == "xid":
        return _judge_xid(line, age_seconds, settings, _sources(line, sample))
    if line.name == "sxid":
        return _judge_sxid(line, age_seconds, settings)
    row = kernel_lines.load()[line.name]
    if age_seconds > _recent_seconds(row.severity, settings):
        return None
    if line.name == "hung_task":
        message = f"{line.comm} (pid {line.subject}) hung in the kernel {words.ago(age_seconds)}"
        return warning("HungTask", message, "`hangwatch check storage`; `dmesg -T | grep -A20 'blocked for more'`")
    level, device = critical if row.severity == "critical" else warning, "GPU" if row.names == "gpu" else "device"
    message = f"{device} {line.subject or 'unknown'} {words.ago(age_seconds)}: {row.meaning}"
    return level("DeviceError", message, row.remedy)


def _sources(line: LoggedLine, sample: Sample) -> str:
    """Return a text on the sources of an XID, in parentheses; "" if only the kernel log reported it."""
    if line in sample.nvml_only:
        return " (reported by NVML only; the kernel log does not have it)"
    return " (reported by the kernel log and by NVML)" if line in sample.by_nvml else ""


def _judge_xid(line: LoggedLine, age_seconds: float, settings: Settings, sources: str) -> CheckVerdict | None:
    row, level = xids.find_meaning(line.code), xids.severity(line.code, line.text)
    is_ignored = level == "notice" or line.code in settings.ignored_xids
    if is_ignored or age_seconds > _recent_seconds(level, settings):
        return None
    message = f"GPU {line.subject}: XID {line.code} {words.ago(age_seconds)}: {row.meaning}{sources}"
    if level == "critical":
        return critical("GpuError", message, row.action)
    return warning("GpuWarning", message, row.action)


def _judge_sxid(line: LoggedLine, age_seconds: float, settings: Settings) -> CheckVerdict | None:
    """Judge an SXID. Its log line states its severity: `SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 ...`."""
    if age_seconds > settings.critical_recent_seconds:
        return None
    error = line.text.partition("): ")[2].partition(",")[2].strip()
    message = f"NVSwitch {line.subject}: SXID {line.code} {words.ago(age_seconds)}: {error}"
    if xids.is_fatal_switch_line(line.text):
        return critical("SwitchError", message, "drain the node, reset all GPUs and switches; `hangwatch check fabric`")
    return warning("SwitchWarning", message, "`hangwatch check fabric`, `hangwatch check nvlink_status`")


def table(sample: Sample) -> contract.Rows:
    """Return one row per line, newest first."""
    lines = sorted(((line.boot_seconds, line.text) for line in sample.lines), reverse=True)
    yield "when", "event"
    for at, text in lines:
        yield words.ago(sample.boot_seconds - at), text


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    every_seconds=15,
    absent="this node has no /dev/kmsg, and NVML reports no XID",
)
