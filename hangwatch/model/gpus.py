"""GPUs and the traffic of their links: the values that `probes.gpu` reads."""

from hangwatch.model.value import Fault, Value

_NARROWEST_WATTS = 20.0  # a smaller difference between idle and work is noise


class GpuName(Value, frozen=True):
    """The index and the uuid of a GPU."""

    index: int
    uuid: str


class GpuSample(GpuName, frozen=True):
    """One reading of one GPU. A field is None if this GPU does not have it, or if `faults` contains the reason.

    `mig_uuids` are its MIG instances. Each can have a job of its own.
    """

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
    mig_uuids: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


class GpuSweep(Value, frozen=True):
    """All GPUs of the node, read once. If one of eight GPUs is lost, there are seven samples and one fault."""

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
    """Use of a GPU over some seconds by its own counters (GPM of NVML, from Hopper on), as ratios of the maximum.

    `sm_ratio`: multiprocessors (SM) that had a kernel. `tensor_ratio`: time in tensor operations. `dram_ratio`:
    bandwidth of the GPU's memory.
    """

    sm_ratio: float
    tensor_ratio: float
    dram_ratio: float


class GpuTraffic(GpuName, frozen=True):
    """Traffic of the links of one GPU, as (sent, received), and the use of the GPU.

    The GPU counts bytes since an unknown moment; the counters wrap. `nvlink_bytes` is data without protocol
    overhead, over all NVLinks. A pair is None if this GPU or driver does not count, counts in 32 bits, or returns
    an error. All pairs are None with MIG, because its counters include other instances. `pcie_bytes_per_second` is
    a 20 ms measurement of NVML. It is set only if the GPU has no PCIe byte counter. `use` is the use since the
    previous reading. It is None in the first reading and after a gap of one minute.
    """

    taken_monotonic_seconds: float
    nvlink_bytes: tuple[int, int] | None = None
    pcie_bytes: tuple[int, int] | None = None
    pcie_bytes_per_second: tuple[float, float] | None = None
    use: GpuUse | None = None


class PortCounters(Value, frozen=True):
    """Counters of one port at one moment: the bytes that it carried in both directions, and its errors."""

    name: str
    carried_bytes: int
    errors: tuple[tuple[str, int], ...] = ()


class PortTraffic(Value, frozen=True):
    """Traffic of the InfiniBand and RoCE ports of a node during a capture.

    `bytes_per_second` is the sum over all ports and both directions. `worse` has the error counters that grew, as
    `mlx5_3/1 link_downed +1`.
    """

    bytes_per_second: float
    worse: tuple[str, ...] = ()


IDLE_UTILIZATION_RATIO = 0.05


class GpuReadings(Value, frozen=True):
    """Load of the GPUs of one rank during a capture. A field is None if the device does not have it.

    `busy_power_ratio` is the position of the power between the floor (0) and the busy level (1) of this GPU. It is
    None without a power history. `works_lightly`: the busy level is no higher than the power of a hang. NVLink and PCIe
    bytes are the sum of both directions of the rank's busiest GPU, over the rounds. `use` is from the GPU with the
    highest SM use. `ports` are the InfiniBand and RoCE ports of the rank's node.
    """

    power_watts: float | None = None
    utilization_ratio: float | None = None
    busy_power_ratio: float | None = None
    works_lightly: bool = False
    nvlink_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    use: GpuUse | None = None
    ports: PortTraffic | None = None

    @property
    def is_idle(self) -> bool:
        """True if the driver says that almost no kernel runs."""
        return self.utilization_ratio is not None and self.utilization_ratio < IDLE_UTILIZATION_RATIO


class TrafficSweep(Value, frozen=True):
    """Traffic of the links of all GPUs, read once."""

    gpus: tuple[GpuTraffic, ...] = ()
    faults: tuple[Fault, ...] = ()


class SamplerStatus(Value, frozen=True):
    """State of the GPU sampler itself.

    `alive`: the driver is open and responds. `stalled`: the driver did not respond within its deadline. `fault` is the
    reason why there are no samples ("DriverNotFound" on a machine without the driver). `restarts` is the number of
    sampling processes that were replaced. `abandoned` is the number of sampling processes that could not be killed and
    still exist.
    """

    alive: bool = False
    stalled: bool = False
    restarts: int = 0
    abandoned: int = 0
    fault: Fault | None = None


class GpuLevels(Value, frozen=True):
    """Two power levels of a GPU in watts: when idle (floor), and when this job works (busy level).

    `is_light`: the busy level is not above the power of GPUs in measured hangs, so it proves nothing.
    """

    floor_watts: float
    busy_watts: float
    is_light: bool = False

    def ratio(self, watts: float) -> float | None:
        """Return `watts` as a ratio: 0 at the floor, 1 at the busy level; None if these differ by less than 20 W."""
        width = self.busy_watts - self.floor_watts
        return (watts - self.floor_watts) / width if width >= _NARROWEST_WATTS else None
