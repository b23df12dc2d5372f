"""Health of each GPU as the driver reports it: lost, recovery needed, memory errors, slow clocks, persistence mode."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import GPU, Check, Metric, Metrics, Rows, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckStatus, CheckVerdict, Fault
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import SLOWDOWNS, Details, GpuHealth
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

MEANINGS = {
    "HwSlowdown": "the hardware slows its clocks (heat, power or a brake signal)",
    "SwThermalSlowdown": "the driver slows its clocks: too hot",
    "HwThermalSlowdown": "the hardware slows its clocks: too hot",
    "HwPowerBrakeSlowdown": "the power supply of the server slows its clocks",
}
SLOWDOWN_REMEDY = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {index}; check fans, inlet air and power supplies"

DRIVER_TROUBLE = {
    "DriverNotFound": "DriverMissing",
    "DriverNotLoaded": "DriverMissing",
    "LibRmVersionMismatch": "DriverMismatch",
}
"""Reason of a driver fault -> reason of this check. These faults stop every new CUDA program on the node."""

RECOVERY_REMEDIES = {
    "GpuReset": "stop all processes on the GPU, also hangwatch; then `nvidia-smi --gpu-reset -i {index}`",
    "DrainAndReset": "let its jobs end, stop hangwatch, then `nvidia-smi --gpu-reset -i {index}`",
    "DrainPeerToPeer": "let the jobs that use peer-to-peer end, then check again",
    "RecoverImexDomain": "restart nvidia-imex on every node of the domain",
    "BusReset": "drain the node, then reset the GPU's bus, or reboot",
}
REBOOT = "drain the node, then reboot it"


class Settings(contract.Settings, frozen=True):
    """Requirements for the health of each GPU."""

    expected_gpus: Annotated[int, describe("critical if the driver lists fewer GPUs than this; 0: unknown", 0, 64)] = 0
    require_persistence_mode: Annotated[bool, describe("warn if persistence mode is off")] = True


class Sample(contract.Sample, frozen=True):
    """The health of all GPUs.

    `driver_fault` is set if the driver is missing, does not respond, or mismatches its library. `bus` are the addresses
    of the GPUs on the PCI bus. `users` are the ranks on each GPU, by its uuid.
    """

    gpus: tuple[GpuHealth, ...] = ()
    bus: tuple[str, ...] = ()
    users: Mapping[str, str] = msgspec.field(default_factory=dict)
    driver_fault: Fault | None = None


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read the health of every GPU from the driver. A driver that is missing or does not respond is a finding too."""
    details = query.details(node, Details[GpuHealth])
    if isinstance(details, Fault):
        hangs = node.gpus is not None and node.gpus.status().stalled
        return Sample(driver_fault=details) if hangs or details.reason in DRIVER_TROUBLE else details
    if details is None:
        return None
    ranks = [
        (uuid, contract.RankName.of_rank(job, rank))
        for job in node.jobs
        for rank in job.ranks
        for uuid in rank.gpu_uuids
    ]
    users, bus = {uuid: str(rank) for uuid, rank in ranks}, pci.nvidia_gpus(node.sys_root)
    return Sample(gpus=details.gpus, bus=bus, users=users, faults=details.faults)


METRICS = (
    Metrics[Sample, Sample](
        Metric("gpu_lost", "GPUs that the driver lists but that do not respond", lambda sample: len(_lost(sample))),
    ),
    Metrics[Sample, GpuHealth](
        Metric(
            "gpu_recovery_needed",
            "1 if the driver requests a reset or reboot",
            lambda gpu: None if gpu.recovery_action is None else gpu.recovery_action != "None",
        ),
        Metric(
            "gpu_uncorrected_memory_errors",
            "Uncorrectable ECC errors since the GPU was last reset",
            lambda gpu: gpu.uncorrected_errors,
        ),
        Metric(
            "gpu_remapped_rows",
            "Memory rows replaced by spare rows during the life of the GPU",
            lambda gpu: {
                "correctable": gpu.remapped_rows_correctable,
                "uncorrectable": gpu.remapped_rows_uncorrectable,
            },
            by=("cause",),
        ),
        Metric(
            "gpu_row_remap_pending",
            "1 if a memory row will be replaced at the next reset",
            lambda gpu: gpu.row_remap_pending,
        ),
        Metric(
            "gpu_row_remap_failed",
            "1 if no spare row was left to replace a bad memory row",
            lambda gpu: gpu.row_remap_failed,
        ),
        Metric(
            "gpu_clocks_slowed",
            "1 for each reason that slows the clocks",
            lambda gpu: {
                reason: None if gpu.clocks_event_reasons is None else bool(gpu.clocks_event_reasons & bit)
                for reason, bit in SLOWDOWNS.items()
            },
            by=("reason",),
        ),
        Metric("gpu_persistence_mode", "1 if the driver stays loaded between jobs", lambda gpu: gpu.persistence_mode),
        subjects=lambda sample: sample.gpus,
        labels=GPU,
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Judge the driver and each GPU.

    CRITICAL: the driver fails, or a GPU is lost, needs recovery or has no spare memory row. All other findings are
    WARNING.
    """
    sample = window[-1]
    if sample.driver_fault is not None:
        return _driver_verdict(sample.driver_fault)
    lost = [
        critical(fault.reason, f"{fault.subject.replace('gpu', 'GPU')} does not respond: {fault.detail}", fault.remedy)
        for fault in _lost(sample)
    ]
    troubles = (finding for gpu in sample.gpus for finding in (*_recovery(gpu), *_memory(gpu), *_slowdowns(gpu)))
    reports = {
        "none lost": (),
        "none needs recovery": [gpu.recovery_action for gpu in sample.gpus],
        "no memory errors": [gpu.uncorrected_errors for gpu in sample.gpus],
        "no slow clocks": [gpu.clocks_event_reasons for gpu in sample.gpus],
    }
    read = ", ".join(text for text, values in reports.items() if None not in values)
    count, bus = words.count(len(sample.gpus), "GPU"), f" of {len(sample.bus)} on the PCI bus" if sample.bus else ""
    return worst(
        [*lost, *troubles, *_not_listed(sample, settings), *_persistence(sample.gpus, settings)],
        ok("GpusHealthy", f"{count}{bus} healthy: {read}"),
    )


def _driver_verdict(fault: Fault) -> CheckVerdict:
    reason = DRIVER_TROUBLE.get(fault.reason)
    if reason is None:
        about = "" if fault.subject == "driver" else f"{fault.subject.replace('gpu', 'GPU')}: "
        return critical("DriverStalled", f"the driver does not respond: {about}{fault.detail}", fault.remedy)
    return critical(reason, f"no CUDA program can start: {fault.detail}", fault.remedy)


def _lost(sample: Sample) -> list[Fault]:
    """Return the fault of each GPU that reported nothing."""
    answering = {f"gpu {gpu.index}" for gpu in sample.gpus}
    return list({fault.subject: fault for fault in sample.faults if fault.subject not in answering}.values())


def _not_listed(sample: Sample, settings: Settings) -> Iterable[CheckVerdict]:
    """Find GPUs on the PCI bus that the driver does not list. The addresses of lost GPUs are not known."""
    lost, addresses = len(_lost(sample)), {gpu.pci_address for gpu in sample.gpus}
    absent = [address for address in sample.bus if address not in addresses]
    if len(absent) > lost and None not in addresses:
        message = f"the driver does not list the GPU at {', '.join(absent)}, which is on the PCI bus"
        yield critical("GpuNotListed", message, "`dmesg | grep -i -e nvrm -e xid`; drain the node, then reboot it")
    if (listed := len(sample.gpus) + lost) < settings.expected_gpus:
        message = f"the driver lists {words.count(listed, 'GPU')}, expected_gpus is {settings.expected_gpus}"
        yield critical("GpusMissing", message, "`lspci -d 10de:`, `dmesg | grep -i nvrm`; reseat or replace the GPU")


def _parts(sample: Sample) -> dict[str, str]:
    places = {gpu.uuid: f"GPU {gpu.index} at {gpu.pci_address or 'an unknown address'}" for gpu in sample.gpus}
    return places | {uuid: f"{places[uuid]}, used by {user}" for uuid, user in sample.users.items() if uuid in places}


def _recovery(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    if gpu.recovery_action not in (None, "None"):
        action = gpu.recovery_action
        remedy = RECOVERY_REMEDIES.get(action or "", REBOOT).format(index=gpu.index)
        yield critical("RecoveryNeeded", f"GPU {gpu.index} needs recovery: the driver requests {action}", remedy)


def _memory(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    reset = f"when its job has ended: stop hangwatch, `nvidia-smi --gpu-reset -i {gpu.index}`, or reboot"
    if gpu.row_remap_failed:
        yield critical(
            "RowRemapFailed",
            f"GPU {gpu.index} has no spare memory row left to replace a bad one",
            f"replace the GPU; attach `nvidia-smi -q -d ROW_REMAPPER -i {gpu.index}` to the RMA request",
        )
    if gpu.row_remap_pending:
        yield warning("RowRemapPending", f"GPU {gpu.index} will replace a bad memory row at its next reset", reset)
    elif gpu.uncorrected_errors:
        count = gpu.uncorrected_errors
        yield warning(
            "UncorrectableEcc",
            f"GPU {gpu.index} had {words.count(count, 'uncorrectable memory error')} since its last reset",
            f"{reset}; look for XID 48, 63, 94 and 95 in `dmesg`",
        )


def _slowdowns(gpu: GpuHealth) -> Iterable[CheckVerdict]:
    for reason in gpu.slowdowns:
        heat = "" if gpu.temperature_celsius is None else f" ({gpu.temperature_celsius:.0f} C)"
        yield warning(reason, f"GPU {gpu.index}: {MEANINGS[reason]}{heat}", SLOWDOWN_REMEDY.format(index=gpu.index))


def _persistence(gpus: Sequence[GpuHealth], settings: Settings) -> Iterable[CheckVerdict]:
    off = [str(gpu.index) for gpu in gpus if gpu.persistence_mode is False]
    if off and settings.require_persistence_mode:
        yield warning(
            "PersistenceModeOff",
            f"persistence mode is off on GPU {', '.join(off)}: jobs start slowly and lose error counts of the GPU",
            "systemctl enable --now nvidia-persistenced",
        )


def table(sample: Sample) -> Rows:
    """Return one row per GPU."""
    names = ("name", "recovery", "uncorrected", "lifetime", "remapped", "pending", "failed", "clocks", "persistence")
    yield "GPU", *names
    for gpu in sample.gpus:
        remapped = (gpu.remapped_rows_correctable, gpu.remapped_rows_uncorrectable)
        yield (
            gpu.index,
            gpu.name,
            gpu.recovery_action,
            gpu.uncorrected_errors,
            gpu.lifetime_uncorrected_errors,
            None if remapped == (None, None) else sum(rows or 0 for rows in remapped),
            gpu.row_remap_pending,
            gpu.row_remap_failed,
            None if gpu.clocks_event_reasons is None else ", ".join(gpu.slowdowns) or "free",
            gpu.persistence_mode,
        )


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    parts=_parts,
    vanished=CheckStatus.CRITICAL,
    absent="this node has no NVIDIA GPU",
)
