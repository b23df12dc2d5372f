"""The fake NVIDIA driver: tests/fake_nvml/nvml.c, compiled once per session, and the scenario it answers from."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def h100(count: int = 8) -> list[str]:
    """Lines of a healthy node of H100 SXM at work: 600 W of 700, utilisation 98 %."""
    return [
        "driver_version 570.86.15",
        f"gpus {count}",
        "gpu all name NVIDIA H100 80GB HBM3",
        *(f"gpu {index} uuid {uuid_of(index)}" for index in range(count)),
        "gpu all power_watts 600",
        "gpu all power_limit_watts 700",
        "gpu all utilization_ratio 0.98",
        f"gpu all memory_total_bytes {80 * 2**30}",
        f"gpu all memory_used_bytes {70 * 2**30}",
        "gpu all sm_clock_hertz 1980e6",
        "gpu all temperature_celsius 55",
        "gpu all energy_joules 1000000",
    ]


class FakeDriver:
    """A scenario file and the environment that makes pynvml load the fake library and read it.

    `write` replaces the whole scenario at once (never half written for a reader); `add` appends lines to it, and the
    last line that fits a question wins.
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
        """From now on the driver is not loaded."""
        self.scenario.unlink()


def compile_library(folder: Path) -> Path:
    """Build the fake libnvidia-ml.so.1 in `folder`; skips the test where there is no C compiler."""
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
    """A node of 8 healthy H100 until the test says otherwise."""
    yield FakeDriver(fake_nvml_library, tmp_path / f"gpus{next(_numbers)}.scenario", h100())
