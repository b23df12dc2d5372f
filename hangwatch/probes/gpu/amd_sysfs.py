"""AMD GPUs, read from the files of the amdgpu driver in /sys. Tested only on a made-up /sys, never on such a GPU.

Sources: Documentation/gpu/amdgpu/thermal.rst of Linux for hwmon (power1_average, power1_input and power1_cap in
microwatts, temp1_input in millidegrees) and gpu_busy_percent; driver-misc.rst for mem_info_vram_total and unique_id.
The compute driver: drivers/gpu/drm/amd/amdkfd, kfd_process.c for proc/PID/vram_GPU and kfd_topology.c for gpu_id,
location_id and domain of topology/nodes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hangwatch.model import Fault, GpuSample, GpuSweep, SamplerStatus
from hangwatch.probes import pseudo_files
from hangwatch.probes.gpu.source import NO_DETAILS, DetailsT

VENDOR = "0x1002"
STOP_SECONDS = 2.0
_CARD = re.compile(r"card[0-9]{1,4}")
_NUMBER_BYTES = 64
_REMEDY = "dmesg | grep -i -e amdgpu -e kfd; if `amd-smi` does not return either, drain and reboot the node"


class Card(NamedTuple):
    """A GPU of the amdgpu driver: its PCI address, its folder in /sys and the folder of its sensors."""

    address: str
    device: Path
    sensors: Path


class AmdSampler:
    """A `GpuSource` that reads all AMD GPUs every `sample_seconds` in a thread.

    A read may block for ever if a GPU hangs. Then the status is stalled, and the thread is abandoned at exit.
    """

    def __init__(self, *, sample_seconds: float, deadline_seconds: float, sys_root: Path = Path("/sys")) -> None:
        self._sys_root, self._sample_seconds = sys_root, sample_seconds
        self._silence_seconds = sample_seconds + deadline_seconds
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="amd-reader", daemon=True)
        self._latest: GpuSweep | None = None
        self._started = 0.0

    def start(self) -> None:
        """Start the thread. Return at once."""
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Wait for it at most two seconds."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def latest(self) -> GpuSweep | None:
        """Return the last sweep, however old; None before the first one."""
        return self._latest

    def wait_for_sweep(self, deadline_seconds: float) -> GpuSweep | None:
        """Wait for the first sweep and return the newest; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest, deadline_seconds)
            return self._latest

    def status(self) -> SamplerStatus:
        """Return the state of the sampling itself."""
        latest = self._latest
        seconds = time.monotonic() - (self._started if latest is None else latest.taken_monotonic_seconds)
        if seconds <= self._silence_seconds:
            return SamplerStatus(alive=latest is not None)
        detail = f"the amdgpu driver has not responded for {seconds:.0f} s"
        fault = Fault(subject="driver", reason="Stalled", detail=detail, remedy=_REMEDY)
        return SamplerStatus(stalled=True, fault=fault)

    def query(self, kind: type[DetailsT], deadline_seconds: float) -> DetailsT | Fault:
        """Return the newest sweep, or a fault: other details are not read from AMD GPUs."""
        if kind is not GpuSweep:
            return Fault(subject="AMD GPUs", reason=NO_DETAILS, detail=f"{kind.__name__} is read from NVIDIA GPUs only")
        sweep = self.wait_for_sweep(deadline_seconds)
        if isinstance(sweep, kind):
            return sweep
        detail = f"the amdgpu driver did not respond within {deadline_seconds:g} s"
        return Fault(subject="driver", reason="Stalled", detail=detail, remedy=_REMEDY)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            sweep = read_sweep(self._sys_root)
            with self._changed:
                self._latest = sweep
                self._changed.notify_all()
            self._stopping.wait(max(0.0, began + self._sample_seconds - time.monotonic()))


def find_cards(sys_root: Path) -> tuple[Card, ...]:
    """Return the AMD GPUs that measure their power, sorted by PCI address."""
    found = pseudo_files.names(sys_root / "class/drm", "drm")
    cards = (_find_card(sys_root / "class/drm" / name / "device") for name in _listed(found) if _CARD.fullmatch(name))
    return tuple(sorted({card.address: card for card in cards if card is not None}.values()))


def _find_card(device: Path) -> Card | None:
    if pseudo_files.read_or_empty(device / "vendor", _NUMBER_BYTES).strip() != VENDOR:
        return None
    for name in _listed(pseudo_files.names(device / "hwmon", "hwmon")):
        sensors = device / "hwmon" / name
        if any((sensors / power).exists() for power in ("power1_average", "power1_input")):
            return Card(device.resolve().name, device, sensors)
    return None


def read_sweep(sys_root: Path) -> GpuSweep:
    """Return one reading of all AMD GPUs."""
    pids = _find_processes(sys_root / "class/kfd/kfd")
    gpus = [_read_card(index, card, pids.get(card.address, ())) for index, card in enumerate(find_cards(sys_root))]
    version = pseudo_files.read_or_empty(sys_root / "module/amdgpu/version", _NUMBER_BYTES).strip()
    return GpuSweep(
        taken_monotonic_seconds=time.monotonic(),
        taken_unix_seconds=time.time(),
        gpus=tuple(gpus),
        driver_version=version or None,
    )


def _read_card(index: int, card: Card, pids: tuple[int, ...]) -> GpuSample:
    """Return the readings of one GPU. A file that cannot be read is a fault, and an absent file None."""
    faults: list[Fault] = []

    def number(path: Path) -> int | None:
        text = pseudo_files.read(path, f"gpu {index}", _NUMBER_BYTES)
        if isinstance(text, Fault):
            faults.append(text)
        return pseudo_files.number(text)

    def scaled(path: Path, unit: float) -> float | None:
        value = number(path)
        return None if value is None else value * unit

    watts = scaled(card.sensors / "power1_average", 1e-6)
    if watts is None:
        watts = scaled(card.sensors / "power1_input", 1e-6)
    unique_id = pseudo_files.read_or_empty(card.device / "unique_id", _NUMBER_BYTES).strip()
    name = pseudo_files.read_or_empty(card.device / "product_name", _NUMBER_BYTES).strip()
    model = pseudo_files.read_or_empty(card.device / "device", _NUMBER_BYTES).strip()
    return GpuSample(
        index=index,
        uuid=f"AMD-{unique_id or card.address}",
        name=name or f"AMD GPU {model}",
        power_watts=watts,
        power_limit_watts=scaled(card.sensors / "power1_cap", 1e-6) or None,
        utilization_ratio=scaled(card.device / "gpu_busy_percent", 0.01),
        memory_used_bytes=number(card.device / "mem_info_vram_used"),
        memory_total_bytes=number(card.device / "mem_info_vram_total"),
        temperature_celsius=scaled(card.sensors / "temp1_input", 0.001),
        pids=pids,
        faults=tuple(faults),
    )


def _find_processes(kfd: Path) -> dict[str, tuple[int, ...]]:
    """Return the processes that hold memory of each GPU, by its PCI address.

    The compute driver lists a process for every GPU that it may use, with 0 bytes for those that it does not use.
    """
    addresses = dict(_find_addresses(kfd / "topology/nodes"))
    found: dict[str, list[int]] = {}
    processes = (name for name in _listed(pseudo_files.names(kfd / "proc", "kfd")) if name.isdecimal())
    for pid in sorted(processes, key=int):
        for gpu_id, address in addresses.items():
            held = pseudo_files.number(pseudo_files.read(kfd / "proc" / pid / f"vram_{gpu_id}", "kfd", _NUMBER_BYTES))
            if held:
                found.setdefault(address, []).append(int(pid))
    return {address: tuple(pids) for address, pids in found.items()}


def _find_addresses(nodes: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the PCI address of each GPU in KFD's topology. A CPU has the number 0."""
    for name in _listed(pseudo_files.names(nodes, "kfd")):
        gpu_id = pseudo_files.number(pseudo_files.read(nodes / name / "gpu_id", "kfd", _NUMBER_BYTES))
        lines = (line.split() for line in pseudo_files.read_or_empty(nodes / name / "properties").splitlines())
        values = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}
        if gpu_id and "location_id" in values:
            place = values["location_id"]  # bus, device and function, as the PCI bus numbers them
            device, function = place >> 3 & 31, place & 7
            yield gpu_id, f"{values.get('domain', 0):04x}:{place >> 8 & 255:02x}:{device:02x}.{function}"


def _listed(names: tuple[str, ...] | Fault | None) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else ()
