"""Read the details of GPUs that cannot be sampled each second, because the driver calls are too slow."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pynvml
from msgspec.structs import replace

from hangwatch.model import Fault, GpuName, GpuTraffic
from hangwatch.probes.gpu.details import (
    Details,
    GpuBus,
    GpuFabric,
    GpuFirmware,
    GpuHealth,
    GpuLinks,
    GpuOccupancy,
    GpuPlace,
    NvLink,
    PeerAccess,
)
from hangwatch.probes.gpu.driver_process import gpm
from hangwatch.probes.gpu.driver_process.nvml_device import ABSENT, Gpu, nvml_fault, pci_address, scaled

READ = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml defines as a tuple
SET_WORDS = 16  # 64 CPUs or memory nodes per word, up to 1,024
ALL_LINKS = 0xFFFFFFFF  # the scope for the sum over all NVLinks (nvml.h)
WIDE = (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)

LINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
LINK_PEERS = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
}
ACCESS = {
    pynvml.NVML_P2P_STATUS_OK: "Ok",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "ChipsetNotSupported",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "GpuNotSupported",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "TopologyNotSupported",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "DisabledByRegistryKey",
    pynvml.NVML_P2P_STATUS_NOT_SUPPORTED: "NotSupported",
}
PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
RECOVERY_ACTIONS = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "None",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "GpuReset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "NodeReboot",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "DrainPeerToPeer",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "DrainAndReset",
    5: "RecoverImexDomain",
    6: "BusReset",
    7: "SystemReboot",
}
FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: None,
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "NotStarted",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "InProgress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "Completed",
}
FABRIC_PROBLEMS = {"DegradedBandwidth": 0, "RouteRecovery": 2, "RouteUnhealthy": 4, "AccessTimeoutRecovery": 6}
"""Two-bit fields of the fabric health mask, as name and shift. Values: 0 not supported, 1 true, 2 false (nvml.h)."""

MISCONFIGURATION_SHIFT = 8
"""Shift of a four-bit field. Values: 0 not supported, 1 none, greater values as in `MISCONFIGURATIONS` (nvml.h)."""

MISCONFIGURATIONS = {
    2: "IncorrectSystemGuid",
    3: "IncorrectChassisSerial",
    4: "NoPartition",
    5: "InsufficientNvLinks",
    6: "IncompatibleFirmware",
    7: "InvalidLocation",
    8: "InvalidGpuState",
}


def _field(gpu: Gpu, field: int, scope: int = 0) -> int | None:
    """Return an NVML field value as an unsigned number; None if the GPU lacks the field.

    `scope` is the number of the NVLink, if the field is about one NVLink.
    """
    answer = _read_field(gpu, field, scope)
    if answer is None:
        return None
    return int(answer.value.ullVal if answer.valueType in WIDE else answer.value.uiVal)


def _counters(gpu: Gpu, fields: Iterable[int], scope: int = 0, unit: int = 1) -> tuple[int, int] | None:
    """Return two byte counters, sent and received; None if one is missing, or has only 32 bits and would overflow."""
    answers = [_read_field(gpu, field, scope) for field in fields]
    found = [int(answer.value.ullVal) * unit for answer in answers if answer is not None and answer.valueType in WIDE]
    return (found[0], found[1]) if len(found) == 2 else None


def _read_field(gpu: Gpu, field: int, scope: int) -> Any:
    """Return the c_nvmlFieldValue_t of a field; None if the GPU lacks it. Other errors are added to its faults."""
    values = gpu.ask(pynvml.nvmlDeviceGetFieldValues, [(field, scope)])
    if values is None:
        return None
    if values[0].nvmlReturn not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INVALID_ARGUMENT, *ABSENT):
        error = pynvml.NVMLError(values[0].nvmlReturn)
        gpu.faults.append(nvml_fault(error, f"nvmlDeviceGetFieldValues({field})", gpu.index))
    return values[0] if values[0].nvmlReturn == pynvml.NVML_SUCCESS else None


def _bits_set(words: Iterable[int] | None) -> tuple[int, ...]:
    """Return the numbers in a bit set of 64-bit words."""
    return tuple(64 * i + bit for i, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)


def _link_peer(gpu: Gpu, link: int) -> tuple[str | None, str | None]:
    """Return the kind and PCI address of the other end of an active link; each is None if unknown."""
    kind = gpu.ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
    pci = gpu.ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
    return None if kind is None else LINK_PEERS.get(kind), pci_address(pci) if pci else None


def _link(gpu: Gpu, link: int, up: bool) -> NvLink:
    peer, peer_pci = _link_peer(gpu, link) if up else (None, None)
    ask = gpu.ask
    return NvLink(
        link=link,
        up=up,
        version=LINK_VERSIONS.get(ask(pynvml.nvmlDeviceGetNvLinkVersion, link) or 0),
        peer=peer,
        peer_pci=peer_pci,
        replays=ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
        recoveries=ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        crc_flit_errors=ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        crc_data_errors=ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
        failed_recoveries=_field(gpu, pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, link)
        if up
        else None,
        symbol_errors=_field(gpu, pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS, link) if up else None,
    )


def _link_states(gpu: Gpu) -> dict[int, bool]:
    """Return the state of each NVLink, true if it is up; empty on a GPU without NVLink."""
    count = _field(gpu, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    states: dict[int, bool] = {}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS if count is None else count):
        try:
            states[link] = bool(pynvml.nvmlDeviceGetNvLinkState(gpu.handle, link))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT or error.value in ABSENT:
                break  # the last link of this GPU was the previous one
            raise
    return states


def links(gpu: Gpu, gpus: Sequence[Gpu]) -> GpuLinks:
    """Return the NVLinks of a GPU and its peer-to-peer access."""
    return GpuLinks.copy_from(
        gpu,
        links=tuple(_link(gpu, link, up) for link, up in _link_states(gpu).items()),
        peers=tuple(_peer_access(gpu, other) for other in gpus if other is not gpu),
    )


def _peer_access(gpu: Gpu, other: Gpu) -> PeerAccess:
    def access(capability: int) -> str | None:
        status = gpu.ask_pair(pynvml.nvmlDeviceGetP2PStatus, other, capability)
        return None if status is None else ACCESS.get(status, "Unknown")

    return PeerAccess(
        peer=other.index,
        nvlink=access(pynvml.NVML_P2P_CAPS_INDEX_NVLINK),
        read=access(READ),
        write=access(pynvml.NVML_P2P_CAPS_INDEX_WRITE),
    )


def place(gpu: Gpu, gpus: Sequence[Gpu]) -> GpuPlace:
    """Return the location of the GPU, and its distance to the other GPUs."""
    ask = gpu.ask
    memory_nodes = _bits_set(ask(pynvml.nvmlDeviceGetMemoryAffinity, SET_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE))
    others = [other for other in gpus if other is not gpu]
    levels = {other.index: gpu.ask_pair(pynvml.nvmlDeviceGetTopologyCommonAncestor, other) for other in others}
    peers = [_link_peer(gpu, link) for link, up in _link_states(gpu).items() if up]
    return GpuPlace.copy_from(
        gpu,
        cpus=_bits_set(ask(pynvml.nvmlDeviceGetCpuAffinity, SET_WORDS)),
        numa_node=memory_nodes[0] if memory_nodes else None,
        gpu_numa_node=ask(pynvml.nvmlDeviceGetNumaNodeId),
        paths={index: PATHS[level] for index, level in levels.items() if level in PATHS},
        direct_links=dict(Counter(address for kind, address in peers if kind == "gpu" and address)),
        switch_links=sum(kind == "switch" for kind, _ in peers),
    )


def health(gpu: Gpu, _: Sequence[Gpu]) -> GpuHealth:
    """Return errors, remapped rows, clock throttling and the recommended recovery action of a GPU."""
    ask = gpu.ask
    action = _field(gpu, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    correctable, uncorrectable, pending, failed = ask(pynvml.nvmlDeviceGetRemappedRows) or (None, None, None, None)
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    persistence = ask(pynvml.nvmlDeviceGetPersistenceMode)
    return GpuHealth.copy_from(
        gpu,
        recovery_action=None if action is None else RECOVERY_ACTIONS.get(action, f"Action{action}"),
        uncorrected_errors=ask(pynvml.nvmlDeviceGetTotalEccErrors, uncorrected, pynvml.NVML_VOLATILE_ECC),
        lifetime_uncorrected_errors=ask(pynvml.nvmlDeviceGetTotalEccErrors, uncorrected, pynvml.NVML_AGGREGATE_ECC),
        remapped_rows_correctable=correctable,
        remapped_rows_uncorrectable=uncorrectable,
        row_remap_pending=None if pending is None else bool(pending),
        row_remap_failed=None if failed is None else bool(failed),
        clocks_event_reasons=ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons),
        persistence_mode=None if persistence is None else bool(persistence),
        temperature_celsius=scaled(ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU), 1.0),
    )


def bus(gpu: Gpu, _: Sequence[Gpu]) -> GpuBus:
    """Return the state of the PCIe link of a GPU."""
    ask = gpu.ask
    utilization = ask(pynvml.nvmlDeviceGetUtilizationRates)
    return GpuBus.copy_from(
        gpu,
        generation=ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        generation_max=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        width_max=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        replays=ask(pynvml.nvmlDeviceGetPcieReplayCounter),
        utilization_ratio=None if utilization is None else utilization.gpu / 100,
        nvlinks_up=sum(_link_states(gpu).values()),
    )


def occupancy(gpu: Gpu, _: Sequence[Gpu]) -> GpuOccupancy:
    """Return the processes with a context and the memory in use. Both are unknown for a GPU split by MIG."""
    ask = gpu.ask
    if gpu.is_split():
        return GpuOccupancy.copy_from(gpu, pids=None)
    compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
    graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3) or ()
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    return GpuOccupancy.copy_from(
        gpu,
        pids=None if compute is None else tuple(sorted({process.pid for process in (*compute, *graphics)})),
        memory_used_bytes=None if memory is None else memory.used,
    )


def traffic(gpu: Gpu, _: Sequence[Gpu]) -> GpuTraffic:
    """Return the bytes that NVLink and PCIe have carried, and the use of the GPU."""
    began = GpuTraffic(index=gpu.index, uuid=gpu.uuid, taken_monotonic_seconds=time.monotonic())
    if gpu.is_split():
        return began
    pcie = _counters(gpu, (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES))
    return replace(
        began,
        nvlink_bytes=_nvlink_bytes(gpu),
        pcie_bytes=pcie,
        pcie_bytes_per_second=None if pcie else _pcie_rates(gpu),
        use=gpm.use(gpu),
    )


def _nvlink_bytes(gpu: Gpu) -> tuple[int, int] | None:
    """Return the bytes that NVLink has sent and received, by the counters of any version; None without counters."""
    kibibytes = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    in_bytes = (pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)
    return _counters(gpu, kibibytes, ALL_LINKS, 1024) or _counters(gpu, in_bytes, ALL_LINKS)


def _pcie_rates(gpu: Gpu) -> tuple[float, float] | None:
    """Return the bytes per second that PCIe sends and receives; None if one of them is missing.

    Each of the two driver calls measures for 20 ms. They replace the byte counters, which drivers before 555 lack.
    """
    sent = scaled(gpu.ask(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_TX_BYTES), 1e3)
    received = scaled(gpu.ask(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_RX_BYTES), 1e3)
    return None if sent is None or received is None else (sent, received)


def fabric(gpu: Gpu, _: Sequence[Gpu]) -> GpuFabric:
    """Return the state of this GPU in its NVSwitch fabric."""
    answer = pynvml.c_nvmlGpuFabricInfo_v2_t()
    if gpu.ask(pynvml.nvmlDeviceGetGpuFabricInfoV, pynvml.byref(answer)) is None:
        return GpuFabric.copy_from(gpu)
    state = FABRIC_STATES.get(answer.state & 0xFF, f"State{answer.state & 0xFF}")
    cluster = bytes(answer.clusterUuid)
    return GpuFabric.copy_from(
        gpu,
        state=state,
        error=answer.status if state == "Completed" else 0,
        clique=answer.cliqueId if state == "Completed" else None,
        cluster_uuid=cluster.hex() if any(cluster) else None,
        health_problems=tuple(_fabric_problems(answer.healthMask)),
    )


def _fabric_problems(mask: int) -> list[str]:
    problems = [word for word, shift in FABRIC_PROBLEMS.items() if mask >> shift & 0x3 == 1]
    misconfiguration = mask >> MISCONFIGURATION_SHIFT & 0xF
    if misconfiguration > 1:
        problems.append(MISCONFIGURATIONS.get(misconfiguration, f"Misconfiguration{misconfiguration}"))
    return problems


def firmware(gpu: Gpu, _: Sequence[Gpu]) -> GpuFirmware:
    """Return the versions of firmware and CUDA."""
    # 1000 * major + 10 * minor (nvml.h), the same for all GPUs
    cuda = gpu.ask(lambda _: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
    return GpuFirmware.copy_from(
        gpu,
        vbios=gpu.ask(pynvml.nvmlDeviceGetVbiosVersion),
        inforom=gpu.ask(pynvml.nvmlDeviceGetInforomImageVersion),
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


KINDS: dict[str, Callable[[Gpu, Sequence[Gpu]], GpuName]] = {
    "GpuLinks": links,
    "GpuPlace": place,
    "GpuHealth": health,
    "GpuOccupancy": occupancy,
    "GpuBus": bus,
    "GpuFabric": fabric,
    "GpuFirmware": firmware,
    "TrafficSweep": traffic,
}
"""The reader of each kind of details, by `source.kind_name`."""


def collect(
    kind: str,
    gpus: Sequence[Gpu],
    lost: Sequence[Fault],
    between: Callable[[], object],
    announce: Callable[[int | None, str], object],
) -> Details[GpuName]:
    """Collect details of one kind (a key of KINDS) of all GPUs.

    `announce` is called before each GPU with its index, and after it with None. Then `between` is called, so that
    sampling continues.
    """
    values: list[GpuName] = []
    faults = list(lost)
    for gpu in gpus:
        gpu.faults = []
        announce(gpu.index, kind)
        try:
            values.append(KINDS[kind](gpu, gpus))
        except pynvml.NVMLError as error:
            gpu.faults = [nvml_fault(error, kind, gpu.index)]
        faults += gpu.faults
        announce(None, "")
        between()
    return Details(gpus=tuple(values), faults=tuple(faults))
