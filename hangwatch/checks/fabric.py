"""Whether the NVSwitch fabric has taken in every GPU: without that, CUDA programs do not start, or hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Rows, critical, ok, unknown, warning, worst
from hangwatch.model import CheckVerdict, Fault, Point
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import FabricDetails, GpuFabric
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import procfs

COMPLETED = Metric(
    name="gpu_fabric_completed",
    help="1 when the fabric manager has taken in the GPU without error",
    labels=("gpu", "uuid"),
)

MANAGER_PROGRAM = "nv-fabricmanager"
MANAGER = "systemctl status nvidia-fabricmanager; its version must be exactly that of the driver; then start it"
MANAGER_LOG = "less /var/log/fabricmanager.log; then `systemctl restart nvidia-fabricmanager` while no job runs"


class Settings(contract.Settings, frozen=True):
    """The state of the NVSwitch fabric."""


class Sample(contract.Sample, frozen=True):
    """The fabric as each GPU sees it.

    `manager_runs` is None where the driver itself tells the state; else it says whether the process was seen.
    """

    gpus: tuple[GpuFabric, ...] = ()
    switches: int = 0
    manager_runs: bool | None = None


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Ask every GPU. Before Hopper the driver does not tell: there, NVSwitches on PCI need a running fabric manager."""
    del settings
    details = query.details(node, FabricDetails)
    if details is None or isinstance(details, Fault):
        return details
    switches = len(pci.nvswitches(node.sys_root))
    driver_tells = any(gpu.state is not None for gpu in details.gpus)
    if not driver_tells and not switches:
        return None
    return Sample(
        gpus=tuple(gpu for gpu in details.gpus if gpu.state is not None),
        switches=switches,
        manager_runs=None if driver_tells else procfs.is_running(MANAGER_PROGRAM, node.proc_root),
        faults=details.faults,
    )


def points(sample: Sample) -> Iterable[Point]:
    """One number per GPU."""
    for gpu in sample.gpus:
        well = gpu.state == "Completed" and gpu.error == 0
        yield COMPLETED.point(well, gpu=str(gpu.index), uuid=gpu.uuid)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """A GPU that the fabric has not taken in is CRITICAL; one that works with less than all is WARNING."""
    del settings
    sample = window[-1]
    if sample.manager_runs is False:
        return critical(
            "FabricManagerNotRunning",
            f"{sample.switches} NVSwitches and no fabric manager: CUDA programs fail with error 802",
            MANAGER,
        )
    if sample.manager_runs:
        return ok("FabricManagerRuns", f"the fabric manager runs for {sample.switches} NVSwitches")
    findings = [finding for gpu in sample.gpus for finding in _findings(gpu)]
    cliques = Counter((gpu.cluster_uuid, gpu.clique) for gpu in sample.gpus if gpu.state == "Completed")
    if len(cliques) > 1 and not findings:
        findings.append(
            warning(
                "FabricSplit", f"the GPUs of this node are in {len(cliques)} NVLink cliques, not in one", MANAGER_LOG
            )
        )
    return worst(findings, ok("FabricCompleted", f"the fabric has taken in all {len(sample.gpus)} GPUs"))


def _findings(gpu: GpuFabric) -> Iterator[CheckVerdict]:
    name = f"GPU {gpu.index}"
    if gpu.state == "NotStarted":
        yield critical("FabricNotStarted", f"{name}: the fabric manager has not begun to take it in", MANAGER)
    elif gpu.state == "InProgress":
        yield warning(
            "FabricInProgress", f"{name}: the fabric is still being set up; no CUDA program starts before", MANAGER_LOG
        )
    elif gpu.state != "Completed":
        message = f"{name}: the driver calls the fabric {gpu.state}, which is not known here"
        remedy = "`nvidia-smi -q | grep -A 4 Fabric`; a newer hangwatch may know it"
        yield unknown("FabricStateUnknown", message, remedy)
    elif gpu.error:
        yield critical("FabricError", f"{name}: the fabric gave it up with NVML error {gpu.error}", MANAGER_LOG)
    if gpu.health_problems:
        yield warning("FabricUnhealthy", f"{name}: the fabric reports {', '.join(gpu.health_problems)}", MANAGER_LOG)


def table(sample: Sample) -> Rows:
    """One row per GPU."""
    header = ("GPU", "state", "error", "clique", "cluster", "problems")
    return [
        header,
        *(
            (
                str(gpu.index),
                gpu.state or "",
                str(gpu.error or ""),
                "" if gpu.clique is None else str(gpu.clique),
                gpu.cluster_uuid or "",
                ", ".join(gpu.health_problems),
            )
            for gpu in sample.gpus
        ),
    ]


CHECK = Check(
    name="fabric",
    every_seconds=120.0,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(COMPLETED,),
    absent="this node has no NVSwitch fabric",
    table=table,
)
