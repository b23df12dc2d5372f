"""Read InfiniBand and RoCE ports from /sys/class/infiniband: state, rate, error counters."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from hangwatch.model import Fault, PortCounters, Value
from hangwatch.probes.base import background, pseudo_files

# Counters of link errors and lost packets.
COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
HARDWARE_COUNTERS = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence", "roce_adp_retrans_to")

# In units of 4 bytes (Documentation/ABI/stable/sysfs-class-infiniband).
TRAFFIC_COUNTERS = ("port_xmit_data", "port_rcv_data")
TRAFFIC_DEADLINE_SECONDS = 2.0

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*Gb/sec\s*(?:\((\d{1,3})X)?")


class Port(Value, frozen=True):
    """A port of an adapter.

    `state` is ACTIVE, DOWN, INIT, ... `physical_state` is LinkUp, Polling, Disabled, ... `rate` is the text, e.g. `400
    Gb/sec (4X NDR)`; `rate_bytes_per_second` and `lanes` are parsed from it. `counters` are those that this adapter
    has.
    """

    device: str
    port: int
    link_layer: str
    state: str
    physical_state: str
    rate: str
    rate_bytes_per_second: float | None
    lanes: int | None
    counters: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Device and port as rdma tools write them, e.g. `mlx5_0/1`."""
        return f"{self.device}/{self.port}"


class Adapter(Value, frozen=True):
    """An InfiniBand or RoCE adapter. `kind` is its type and board, e.g. `MT4129 MT_0000000838`; empty if unknown."""

    device: str
    firmware: str
    kind: str


class Ports(Value, frozen=True):
    """All ports of the node, by device and number, and the faults of reading them."""

    ports: tuple[Port, ...] = ()
    faults: tuple[Fault, ...] = ()


class Traffic:
    """A reader of traffic counters in at most one thread, because the driver of a broken adapter may not respond."""

    def __init__(self, deadline_seconds: float = TRAFFIC_DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._reading: Future[tuple[PortCounters, ...]] | None = None

    def read(self, sys_root: Path) -> tuple[PortCounters, ...]:
        """Return all ports with traffic counters; empty if there are none, or a driver did not respond in time."""
        if not self._lock.acquire(timeout=self._deadline_seconds):
            return ()
        try:
            if self._reading is not None and not self._reading.done():
                return ()
            self._reading = background.start(lambda: tuple(_port_counters(sys_root)), "infiniband")
            return self._reading.result(self._deadline_seconds)
        except (FutureTimeoutError, RuntimeError):  # RuntimeError: TasksMax or ulimit -u allows no more threads
            return ()
        finally:
            self._lock.release()


def _port_counters(sys_root: Path) -> Iterator[PortCounters]:
    root = sys_root / "class" / "infiniband"
    for device, number, folder in _port_folders(root, pseudo_files.names_or_empty(root)):
        files = (pseudo_files.read(folder / "counters" / name, name) for name in TRAFFIC_COUNTERS)
        counts = [count for count in map(pseudo_files.number, files) if count is not None]
        if len(counts) == len(TRAFFIC_COUNTERS):
            errors = tuple(_counters(folder))
            yield PortCounters(name=f"{device}/{number}", carried_bytes=4 * sum(counts), errors=errors)


TRAFFIC = Traffic()


def read(sys_root: Path) -> Ports | Fault | None:
    """Return all ports; None if the node has no InfiniBand or RoCE adapter."""
    root = sys_root / "class" / "infiniband"
    devices = pseudo_files.names(root, "infiniband")
    if isinstance(devices, Fault):
        return devices
    if not devices:
        return None
    read_ports = [_read_port(folder, device, number) for device, number, folder in _port_folders(root, devices)]
    return Ports(
        ports=tuple(port for port in read_ports if isinstance(port, Port)),
        faults=tuple(port for port in read_ports if isinstance(port, Fault)),
    )


def adapters(sys_root: Path) -> tuple[Adapter, ...]:
    """Return all adapters with their firmware, sorted by name."""
    root = sys_root / "class" / "infiniband"
    return tuple(
        Adapter(
            device=device,
            firmware=pseudo_files.read_or_empty(root / device / "fw_ver").strip(),
            kind=" ".join(
                " ".join(pseudo_files.read_or_empty(root / device / name) for name in ("hca_type", "board_id")).split()
            ),
        )
        for device in pseudo_files.names_or_empty(root)
    )


def _port_folders(root: Path, devices: tuple[str, ...]) -> Iterator[tuple[str, int, Path]]:
    """Yield device, number and folder of each port."""
    for device in devices:
        names = pseudo_files.names_or_empty(root / device / "ports")
        numbers = [int(name) for name in names if name.isdecimal()]
        yield from ((device, number, root / device / "ports" / str(number)) for number in sorted(numbers))


def _read_port(folder: Path, device: str, number: int) -> Port | Fault | None:
    subject = f"{device}/{number}"
    texts = {}
    for name in ("state", "phys_state", "rate", "link_layer"):
        text = pseudo_files.read(folder / name, subject)
        if isinstance(text, Fault):
            return text
        texts[name] = (text or "").strip()
    if not texts["state"]:  # the adapter was removed after the listing
        return None
    rate, lanes = parse_rate(texts["rate"])
    return Port(
        device=device,
        port=number,
        link_layer=texts["link_layer"] or "unknown",
        state=parse_state(texts["state"]),
        physical_state=parse_state(texts["phys_state"]),
        rate=texts["rate"],
        rate_bytes_per_second=rate,
        lanes=lanes,
        counters=tuple(_counters(folder)),
    )


def _counters(folder: Path) -> Iterator[tuple[str, int]]:
    for group, names in (("counters", COUNTERS), ("hw_counters", HARDWARE_COUNTERS)):
        for name in names:
            # An adapter that lacks a counter has no file, or returns EINVAL or "N/A (no PMA)". That is not a fault.
            count = pseudo_files.number(pseudo_files.read(folder / group / name, name))
            if count is not None:
                yield name, count


def parse_state(text: str) -> str:
    """Return the word of a state: `ACTIVE` for `4: ACTIVE`."""
    return text.partition(":")[2].strip() or text.strip() or "unknown"


def parse_rate(text: str) -> tuple[float | None, int | None]:
    """Return bytes per second and lanes of `400 Gb/sec (4X NDR)`; None for missing parts."""
    found = _RATE.match(text)
    if found is None:
        return None, None
    lanes = found.group(2)
    return float(found.group(1)) * 1e9 / 8, int(lanes) if lanes else None
