"""GPUs, and what their links carry: probes.nvml -> daemon, hang.traffic."""

from __future__ import annotations

from hangwatch.model.value import Fault, Value


class GpuSample(Value, frozen=True):
    """One reading of one GPU. A field is None where this GPU does not have it, or where `faults` says why."""

    index: int
    uuid: str
    name: str | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hertz: float | None = None
    temperature_celsius: float | None = None
    energy_joules: float | None = None
    pids: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuSweep(Value, frozen=True):
    """All GPUs of the node, read once. One lost GPU of eight is seven samples and one fault."""

    taken_monotonic_seconds: float
    taken_unix_seconds: float
    gpus: tuple[GpuSample, ...] = ()
    faults: tuple[Fault, ...] = ()
    driver_version: str | None = None

    @property
    def unread(self) -> dict[int, Fault]:
        """The GPUs without a reading, by index, each with its fault."""
        read = {f"gpu {gpu.index}" for gpu in self.gpus}
        silent = {fault.subject: fault for fault in self.faults if fault.subject not in read}
        return {int(subject[4:]): fault for subject, fault in silent.items() if subject[4:].isdecimal()}


class GpuUse(Value, frozen=True):
    """What a GPU did over some seconds by its own counters (GPM of NVML, from Hopper on), as ratios of what it could.

    `sm_ratio`: of its multiprocessors (SM) so many had a kernel. `tensor_ratio`: the time in tensor operations.
    `dram_ratio`: of the bandwidth of its memory.
    """

    sm_ratio: float
    tensor_ratio: float
    dram_ratio: float


class GpuTraffic(Value, frozen=True):
    """What the links of one GPU have carried, as (sent, received), and what it did.

    Bytes since some moment that nobody knows, counted by the GPU: they wrap. `nvlink_bytes` is data without protocol,
    over all NVLinks. Each pair is None where this GPU or driver counts nothing, counts in 32 bits, or answers an error;
    all are with MIG, where they are those of other instances as well. `pcie_bytes_per_second`, only without such a
    counter, is what NVML saw in 20 ms. `use` is that since the reading before, None in the first and after a minute.
    """

    index: int
    uuid: str
    taken_monotonic_seconds: float
    nvlink_bytes: tuple[int, int] | None = None
    pcie_bytes: tuple[int, int] | None = None
    pcie_bytes_per_second: tuple[float, float] | None = None
    use: GpuUse | None = None


class PortCounters(Value, frozen=True):
    """One port at one time: what it has carried in both directions, and its counters of errors."""

    name: str
    carried_bytes: int
    errors: tuple[tuple[str, int], ...] = ()


class PortTraffic(Value, frozen=True):
    """What the InfiniBand and RoCE ports of a node did during a look.

    `bytes_per_second` is the sum over all ports and both directions. `worse` are the counters of errors that grew, as
    `mlx5_3/1 link_downed +1`.
    """

    bytes_per_second: float
    worse: tuple[str, ...] = ()


class GpuReadings(Value, frozen=True):
    """Load of the GPUs of one rank during a capture. A field is None if the device does not have it.

    `busy_power_ratio` is where its power lies between the floor (0) and the busy level (1) of its own GPU, None without
    a history. NVLink and PCIe bytes are the sum of both directions, of the busiest of its GPUs, over the rounds. `use`
    is that of the GPU whose SMs had most to do. `ports` are the InfiniBand and RoCE ports of its node.
    """

    power_watts: float | None = None
    utilization_ratio: float | None = None
    busy_power_ratio: float | None = None
    nvlink_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    use: GpuUse | None = None
    ports: PortTraffic | None = None


class TrafficSweep(Value, frozen=True):
    """What the links of all GPUs have carried, read once."""

    gpus: tuple[GpuTraffic, ...] = ()
    faults: tuple[Fault, ...] = ()


class SamplerStatus(Value, frozen=True):
    """How the sampling of GPUs itself fares.

    `alive`: the driver is open and answers. `stalled`: it was asked and did not answer within its deadline. `fault`
    says why there are no samples ("DriverNotFound" on a machine without the driver). `restarts` counts sampling
    processes that had to be replaced, `abandoned` those that could not even be killed and still exist.
    """

    alive: bool = False
    stalled: bool = False
    restarts: int = 0
    abandoned: int = 0
    fault: Fault | None = None
    last_answer_monotonic_seconds: float | None = None
