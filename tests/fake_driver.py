"""The fake NVIDIA driver: tests/fake_nvml/nvml.c, compiled once per session, and its scenario file."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hangwatch.probes.gpu.sampler import NvmlSampler
from tests.conftest import stopping, wait_for

SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


HGX_ADDRESSES = ("1b:00", "43:00", "52:00", "61:00", "9d:00", "c3:00", "d1:00", "df:00")
BOX_ADDRESSES = ("17:00", "31:00", "98:00", "b1:00")
OK, NOT_SUPPORTED, CHIPSET = 0, 5, 1  # nvmlGpuP2PStatus_t
P2P_READ, P2P_WRITE, P2P_NVLINK = 0, 1, 2
NODE, SYS = 40, 50  # nvmlGpuTopologyLevel_t


def gpus(count: int, name: str, watts: float, limit_watts: float, memory_gib: int) -> list[str]:
    """Return the scenario lines of `count` busy GPUs that are the same on all kinds of nodes."""
    return [
        "driver_version 570.86.15",
        f"gpus {count}",
        f"gpu all name {name}",
        *(f"gpu {index} uuid {uuid_of(index)}" for index in range(count)),
        f"gpu all power_watts {watts}",
        f"gpu all power_limit_watts {limit_watts}",
        "gpu all utilization_ratio 0.98",
        f"gpu all memory_total_bytes {memory_gib * 2**30}",
        f"gpu all memory_used_bytes {(memory_gib - 10) * 2**30}",
        "gpu all sm_clock_hertz 1980e6",
        "gpu all temperature_celsius 55",
        "gpu all energy_joules 1000000",
        "cuda_driver_version 12080",
        "gpu all vbios 96.00.99.00.01",
        "gpu all inforom G520.0200.00.05",
        "gpu all persistence_mode 1",
        "gpu all clocks_event_reasons 0x4",  # the power cap, as on any busy GPU
        "gpu all ecc uncorrected volatile 0",
        "gpu all ecc uncorrected aggregate 0",
        "gpu all remapped_rows 0 0 0 0",
        "gpu all pcie_width_max 16",
        "gpu all pcie_width 16",
        "gpu all pcie_replays 0",
    ]


def sockets(count: int, addresses: tuple[str, ...]) -> list[str]:
    """Return the scenario lines for two sockets of 48 cores, with half of the GPUs on each."""
    half = count // 2 or 1
    return [
        *(f"gpu {index} pci_bus_id 0000:{address}" for index, address in enumerate(addresses[:count])),
        *(f"gpu {index} cpu_affinity {'0-47 96-143' if index < half else '48-95 144-191'}" for index in range(count)),
        *(f"gpu {index} numa_node {int(index >= half)}" for index in range(count)),
        *(
            f"gpu {one} peer {other} topology {NODE if (one < half) == (other < half) else SYS}"
            for one in range(count)
            for other in range(count)
            if one != other
        ),
    ]


def h100(count: int = 8) -> list[str]:
    """Return the scenario of a healthy node of H100s at 600 W of 700 W, with 18 NVLinks to NVSwitches each."""
    return [
        *gpus(count, "NVIDIA H100 80GB HBM3", 600, 700, 80),
        *sockets(count, HGX_ADDRESSES),
        "gpu all field 230 0",
        "gpu all pcie_generation_max 5",
        "gpu all pcie_generation 5",
        "gpu all field 91 18",
        "gpu all link all state 1",
        "gpu all link all version 6",
        "gpu all link all remote_type 2",
        "gpu all link all remote 0000:07:00",
        "gpu all link all errors all 0",
        f"gpu all peer all p2p all {OK}",
        "gpu all fabric state 3",
        "gpu all fabric clique 0",
    ]


def pcie_box(count: int = 4) -> list[str]:
    """Return the scenario of a healthy PCIe node of L40S GPUs, which may access each other's memory."""
    return [
        *gpus(count, "NVIDIA L40S", 300, 350, 48),
        *sockets(count, BOX_ADDRESSES),
        "gpu all pcie_generation_max 4",
        "gpu all pcie_generation 4",
        f"gpu all peer all p2p all {OK}",
        f"gpu all peer all p2p {P2P_NVLINK} {NOT_SUPPORTED}",
    ]


class FakeDriver:
    """A scenario file, and the environment variables that make pynvml load the fake library.

    `write` replaces the whole scenario atomically. `add` appends lines. The last line that matches a query applies.
    """

    def __init__(self, library: Path, scenario: Path, lines: Iterable[str]) -> None:
        self.scenario = scenario
        self.environ = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_SCENARIO": str(scenario),
        }
        self.lines: list[str] = []
        self.write(lines)

    def write(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        temporary = self.scenario.with_suffix(".new")
        temporary.write_text("".join(f"{line}\n" for line in self.lines))
        temporary.replace(self.scenario)

    def add(self, *lines: str) -> None:
        self.write([*self.lines, *lines])

    def remove(self, *lines: str) -> None:
        self.write([line for line in self.lines if line not in lines])

    def vanish(self) -> None:
        """Unload the driver: all later calls fail."""
        self.scenario.unlink()


@contextmanager
def sampling(driver: FakeDriver, sample_seconds: float = 1.0, deadline_seconds: float = 10.0) -> Iterator[NvmlSampler]:
    """Sample the GPUs of the driver. Yield the sampler after its first sweep."""
    sampler = NvmlSampler(environ=driver.environ, sample_seconds=sample_seconds, deadline_seconds=deadline_seconds)
    sampler.start()
    with stopping(sampler):
        wait_for(sampler.latest, "a first sweep")
        yield sampler


def compile_library(folder: Path) -> Path:
    """Build the fake libnvidia-ml.so.1 in `folder`. Skip the test if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): the fake NVIDIA driver cannot be built")
    library = folder / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *options, "-o", library, SOURCE], check=True)
    return library


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("fake_nvml"))


_numbers = itertools.count()


@pytest.fixture
def fake_driver(fake_nvml_library: Path, tmp_path: Path) -> Iterator[FakeDriver]:
    """Return the driver of 8 healthy H100 GPUs. The test may change its scenario."""
    yield FakeDriver(fake_nvml_library, tmp_path / f"gpus{next(_numbers)}.scenario", h100())
