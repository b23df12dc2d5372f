"""Whether the driver thinks well of each GPU: lost, to be recovered, memory errors, slowed clocks, persistence mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, critical, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import GpuHealth, HealthDetails
from hangwatch.probes.node.machine import Node

GPU = ("gpu", "uuid")
LOST = Metric(name="gpu_lost", help="GPUs that the driver knows of and that do not answer")
RECOVERY = Metric(name="gpu_recovery_needed", help="1 when the driver asks for a reset or reboot", labels=GPU)
UNCORRECTED = Metric(
    name="gpu_uncorrected_memory_errors", help="Uncorrectable ECC errors since the GPU was last reset", labels=GPU
)
REMAPPED = Metric(
    name="gpu_remapped_rows", help="Memory rows replaced by spare ones over the life of the GPU", labels=(*GPU, "cause")
)
REMAP_PENDING = Metric(name="gpu_row_remap_pending", help="1 when a row is replaced at the next reset", labels=GPU)
REMAP_FAILED = Metric(name="gpu_row_remap_failed", help="1 when no spare row was left", labels=GPU)
SLOWED = Metric(name="gpu_clocks_slowed", help="1 for each reason that holds the clocks down", labels=(*GPU, "reason"))
PERSISTENCE = Metric(name="gpu_persistence_mode", help="1 when the driver stays loaded between jobs", labels=GPU)

SLOWDOWNS = {
    0x08: ("HwSlowdown", "the hardware slows its clocks (heat, power or a brake signal)"),
    0x20: ("SwThermalSlowdown", "the driver slows its clocks: too hot"),
    0x40: ("HwThermalSlowdown", "the hardware slows its clocks: too hot"),
    0x80: ("HwPowerBrakeSlowdown", "the power supply of the server slows its clocks"),
}
"""nvmlClocksEventReason*; the reasons that are not here (idle, power cap, application clocks) are no fault."""

SLOWDOWN_REMEDY = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {index}; check fans, inlet air and power supplies"

DRIVER_TROUBLE = {
    "DriverNotFound": "DriverMissing",
    "DriverNotLoaded": "DriverMissing",
    "LibRmVersionMismatch": "DriverMismatch",
}
"""Faults of the driver that certainly stop every new CUDA program of this node, and what they are called here."""

RECOVERY_REMEDIES = {
    "GpuReset": "stop what runs on it (hangwatch, too), then `nvidia-smi --gpu-reset -i {index}`",
    "DrainAndReset": "let its jobs end, stop hangwatch, then `nvidia-smi --gpu-reset -i {index}`",
    "DrainPeerToPeer": "let the jobs that use peer-to-peer end, then look again",
    "RecoverImexDomain": "restart nvidia-imex on every node of the domain",
    "BusReset": "drain the node, then reset the GPU's bus, or reboot",
}
REBOOT = "drain the node, then reboot it"


class Settings(contract.Settings, frozen=True):
    """What the driver reports of the health of each GPU."""

    require_persistence_mode: bool = True


class Sample(contract.Sample, frozen=True):
    """The health of all GPUs. `driver_fault` is set where no driver answers for GPUs that are there."""

    gpus: tuple[GpuHealth, ...] = ()
    driver_fault: Fault | None = None


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Ask the driver about every GPU; a driver that is wedged or missing is itself what this check is about."""
    del settings
    details = query.details(node, HealthDetails)
    if isinstance(details, Fault):
        wedged = node.gpus is not None and node.gpus.status().stalled
        return Sample(driver_fault=details) if wedged or details.reason in DRIVER_TROUBLE else details
    if details is None or not (details.gpus or details.faults):
        return None
    return Sample(gpus=details.gpus, faults=details.faults)


def points(sample: Sample) -> Iterable[Point]:
    """The numbers behind the verdict; a GPU that does not have one exports none."""
    yield LOST.point(len(_lost(sample)))
    for gpu in sample.gpus:
        own = {"gpu": str(gpu.index), "uuid": gpu.uuid}
        if gpu.recovery_action is not None:
            yield RECOVERY.point(gpu.recovery_action != "None", **own)
        for metric, number in (
            (UNCORRECTED, gpu.uncorrected_errors),
            (REMAP_PENDING, gpu.row_remap_pending),
            (REMAP_FAILED, gpu.row_remap_failed),
            (PERSISTENCE, gpu.persistence_mode),
        ):
            if number is not None:
                yield metric.point(number, **own)
        for cause, rows in (
            ("correctable", gpu.remapped_rows_correctable),
            ("uncorrectable", gpu.remapped_rows_uncorrectable),
        ):
            if rows is not None:
                yield REMAPPED.point(rows, cause=cause, **own)
        if gpu.clocks_event_reasons is not None:
            for bit, (reason, _) in SLOWDOWNS.items():
                yield SLOWED.point(bool(gpu.clocks_event_reasons & bit), reason=reason, **own)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Lost or to be recovered is CRITICAL, what a reset mends or what slows a job is WARNING."""
    sample = window[-1]
    if sample.driver_fault is not None:
        return _driver_verdict(sample.driver_fault)
    findings = [_lost_verdict(fault) for fault in _lost(sample)]
    for gpu in sample.gpus:
        findings += [*_recovery(gpu), *_memory(gpu), *_slowdowns(gpu)]
    findings += _persistence(sample.gpus, settings)
    return worst(
        findings,
        ok(
            "GpusHealthy",
            f"{words.count(len(sample.gpus), 'GPU')}: none lost, no recovery due, memory and clocks as they should be",
        ),
    )


def _driver_verdict(fault: Fault) -> CheckVerdict:
    reason = DRIVER_TROUBLE.get(fault.reason)
    if reason is None:
        about = "" if fault.subject == "driver" else f"{fault.subject.replace('gpu', 'GPU')}: "
        return critical("DriverStalled", f"the driver does not answer: {about}{fault.detail}", fault.remedy)
    return critical(reason, f"no CUDA program can start: {fault.detail}", fault.remedy)


def _lost(sample: Sample) -> list[Fault]:
    """The faults of GPUs that gave no details at all."""
    answering = {f"gpu {gpu.index}" for gpu in sample.gpus}
    unanswered = {fault.subject: fault for fault in sample.faults if fault.subject not in answering}
    return list(unanswered.values())


def _lost_verdict(fault: Fault) -> CheckVerdict:
    return critical(
        fault.reason, f"{fault.subject.replace('gpu', 'GPU')} does not answer: {fault.detail}", fault.remedy
    )


def _recovery(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    if gpu.recovery_action not in (None, "None"):
        action = gpu.recovery_action
        remedy = RECOVERY_REMEDIES.get(action or "", REBOOT).format(index=gpu.index)
        yield critical("RecoveryNeeded", f"GPU {gpu.index}: the driver asks for {action}", remedy)


def _memory(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    reset = f"at the end of its job: stop hangwatch, `nvidia-smi --gpu-reset -i {gpu.index}`, or reboot"
    if gpu.row_remap_failed:
        yield critical(
            "RowRemapFailed",
            f"GPU {gpu.index} has no spare memory rows left for a bad one",
            f"replace the GPU: `nvidia-smi -q -d ROW_REMAPPER -i {gpu.index}` is the evidence for an RMA",
        )
    if gpu.row_remap_pending:
        yield warning("RowRemapPending", f"GPU {gpu.index} replaces a bad memory row at its next reset", reset)
    elif gpu.uncorrected_errors:
        count = gpu.uncorrected_errors
        yield warning(
            "UncorrectableEcc",
            f"GPU {gpu.index} had {words.count(count, 'uncorrectable memory error')} since its last reset",
            f"{reset}; look for XID 48, 63, 94 and 95 in `dmesg`",
        )


def _slowdowns(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    mask = gpu.clocks_event_reasons or 0
    for bit, (reason, meaning) in SLOWDOWNS.items():
        if mask & bit and not (reason == "HwSlowdown" and mask & 0xC0):  # the finer reasons say it better
            heat = "" if gpu.temperature_celsius is None else f" ({gpu.temperature_celsius:.0f} C)"
            yield warning(reason, f"GPU {gpu.index}: {meaning}{heat}", SLOWDOWN_REMEDY.format(index=gpu.index))


def _persistence(gpus: Sequence[GpuHealth], settings: Settings) -> Iterable[CheckVerdict]:
    off = [str(gpu.index) for gpu in gpus if gpu.persistence_mode is False]
    if off and settings.require_persistence_mode:
        yield warning(
            "PersistenceModeOff",
            f"persistence mode is off on GPU {', '.join(off)}: jobs start slowly, and errors are forgotten in between",
            "systemctl enable --now nvidia-persistenced",
        )


def table(sample: Sample) -> Rows:
    """One row per GPU."""
    header = (
        "GPU",
        "name",
        "recovery",
        "uncorrected",
        "lifetime",
        "remapped",
        "pending",
        "failed",
        "clocks",
        "persistence",
    )
    return [header, *(_row(gpu) for gpu in sample.gpus)]


def _row(gpu: GpuHealth) -> tuple[str, ...]:
    mask = gpu.clocks_event_reasons
    slowed = [reason for bit, (reason, _) in SLOWDOWNS.items() if mask is not None and mask & bit]
    remapped = (gpu.remapped_rows_correctable, gpu.remapped_rows_uncorrectable)
    cells = (
        gpu.index,
        gpu.name,
        gpu.recovery_action,
        gpu.uncorrected_errors,
        gpu.lifetime_uncorrected_errors,
        None if remapped == (None, None) else sum(rows or 0 for rows in remapped),
        gpu.row_remap_pending,
        gpu.row_remap_failed,
        None if mask is None else ", ".join(slowed) or "free",
        gpu.persistence_mode,
    )
    return tuple(_shown(cell) for cell in cells)


def _shown(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "" if cell is None else str(cell)


CHECK = Check(
    name="gpu_health",
    every_seconds=60.0,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(LOST, RECOVERY, UNCORRECTED, REMAPPED, REMAP_PENDING, REMAP_FAILED, SLOWED, PERSISTENCE),
    absent="this node has no NVIDIA GPU",
    table=table,
)
