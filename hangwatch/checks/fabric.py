"""Registration of every GPU with the NVSwitch fabric. Without it, CUDA programs do not start, or hang."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, Rows, critical, ok, unknown, warning, worst
from hangwatch.model import CheckVerdict, Fault
from hangwatch.probes.base import procfs
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuFabric
from hangwatch.probes.node import pci
from hangwatch.probes.node.machine import Node

MANAGER_PROGRAM = "nv-fabricmanager"
MANAGER = "start nvidia-fabricmanager (`systemctl status nvidia-fabricmanager`); it must have the version of the driver"
MANAGER_LOG = "less /var/log/fabricmanager.log; then `systemctl restart nvidia-fabricmanager` while no job runs"


class Sample(contract.Sample, frozen=True):
    """The fabric state of each GPU, and the number of NVSwitches on the PCI bus.

    `manager_runs` is true if a fabric manager process exists, and None if there are no NVSwitches on the bus.
    """

    gpus: tuple[GpuFabric, ...] = ()
    switches: int = 0
    manager_runs: bool | None = None


def observe(node: Node, _: contract.Settings) -> Sample | Fault | None:
    """Read the fabric state of every GPU from the driver.

    GPUs older than Hopper report no state. If such a node has NVSwitches on the PCI bus, a fabric manager must run.
    """
    details = query.details(node, Details[GpuFabric])
    if details is None or isinstance(details, Fault):
        return details
    switches = len(pci.nvswitches(node.sys_root))
    with_state = tuple(gpu for gpu in details.gpus if gpu.state is not None)
    if not with_state and not switches:
        return None
    return Sample(
        gpus=with_state,
        switches=switches,
        manager_runs=any(procfs.find_by_name((MANAGER_PROGRAM,), node.proc_root)) if switches else None,
        faults=details.faults,
    )


METRICS = (
    Metrics[Sample, GpuFabric](
        Metric(
            "gpu_fabric_completed",
            "1 if the fabric manager has registered the GPU without error",
            lambda gpu: gpu.state == "Completed" and gpu.error == 0,
        ),
        subjects=lambda sample: sample.gpus,
        labels=contract.GPU,
    ),
)


def judge(window: Sequence[Sample], _: contract.Settings) -> CheckVerdict:
    """Judge the registration and the health of the fabric.

    CRITICAL: registration has not started or has failed, or no fabric manager runs. WARNING: registration is in
    progress, or the fabric is degraded.
    """
    sample = window[-1]
    switches = f"({sample.switches} NVSwitches)"
    findings = [finding for gpu in sample.gpus for finding in _findings(gpu)]
    if sample.manager_runs is False:
        level = warning if sample.gpus else critical
        effect = "a reset GPU cannot register again" if sample.gpus else "CUDA programs fail with error 802"
        findings.append(level("FabricManagerNotRunning", f"fabric manager not running: {effect} {switches}", MANAGER))
    if not sample.gpus:
        return worst(findings, ok("FabricManagerRuns", f"fabric manager running {switches}"))
    cliques = Counter((gpu.cluster_uuid, gpu.clique) for gpu in sample.gpus if gpu.state == "Completed")
    if len(cliques) > 1 and not findings:
        message = f"the GPUs of this node are in {len(cliques)} NVLink cliques; expected 1"
        findings.append(warning("FabricSplit", message, MANAGER_LOG))
    return worst(findings, ok("FabricCompleted", f"all {len(sample.gpus)} GPUs are registered with the fabric"))


def _findings(gpu: GpuFabric) -> Iterator[CheckVerdict]:
    name = f"GPU {gpu.index}"
    if gpu.state == "NotStarted":
        yield critical("FabricNotStarted", f"{name}: registration with the fabric has not started", MANAGER)
    elif gpu.state == "InProgress":
        message = f"{name}: registration with the fabric is in progress; CUDA programs cannot start yet"
        yield warning("FabricInProgress", message, MANAGER_LOG)
    elif gpu.state != "Completed":
        message = f"{name}: unknown fabric state {gpu.state}"
        remedy = "`nvidia-smi -q | grep -A 4 Fabric`; a newer version of hangwatch may support this state"
        yield unknown("FabricStateUnknown", message, remedy)
    elif gpu.error:
        yield critical(
            "FabricError", f"{name}: registration with the fabric failed: NVML error {gpu.error}", MANAGER_LOG
        )
    if gpu.health_problems:
        yield warning("FabricUnhealthy", f"{name}: the fabric reports {', '.join(gpu.health_problems)}", MANAGER_LOG)


def table(sample: Sample) -> Rows:
    """Return one row per GPU."""
    yield "GPU", "state", "error", "clique", "cluster", "problems"
    for gpu in sample.gpus:
        yield gpu.index, gpu.state, gpu.error or None, gpu.clique, gpu.cluster_uuid, ", ".join(gpu.health_problems)


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    every_seconds=120.0,
    parts=contract.gpu_parts,
    absent="this node has no NVSwitch fabric",
)
