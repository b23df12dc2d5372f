"""Read the traffic of a job's GPU links and of its node's ports during the rounds of a capture."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from hangwatch.model import PortCounters, PortTraffic, TrafficSweep
from hangwatch.probes.network import infiniband
from hangwatch.stacks.link_traffic import port_traffic


class LinkCounters:
    """The traffic counters of one capture: of GPU links and of this node's network ports.

    GPU links are read in each round until a read fails, which is None in `traffic`. Ports are read twice: in the first
    round and at the end. Without `is_counting`, nothing is read.
    """

    def __init__(
        self, read_traffic: Callable[[], TrafficSweep | None] | None, sys_root: Path, *, is_counting: bool
    ) -> None:
        self._read_traffic, self._sys_root, self._is_counting = read_traffic, sys_root, is_counting
        self._since = time.monotonic()
        self.traffic: list[TrafficSweep | None] = []
        self._ports: tuple[PortCounters, ...] = ()

    @contextmanager
    def counting(self, number: int, pool: Executor) -> Iterator[None]:
        """Read the counters in threads of `pool` while the `with` block takes the dumps of round `number`, from 0."""
        reading = reading_ports = None
        if self._is_counting and self._read_traffic and None not in self.traffic:
            reading = pool.submit(self._read_traffic)
        if self._is_counting and number == 0:
            reading_ports = pool.submit(infiniband.TRAFFIC.read, self._sys_root)
        yield
        if reading is not None:
            self.traffic.append(reading.result())
        if reading_ports is not None:
            self._ports = reading_ports.result()

    def measure_ports(self) -> PortTraffic | None:
        """Return the traffic of the ports since counting began; None if no port was read twice."""
        if not self._ports:
            return None
        return port_traffic(self._ports, infiniband.TRAFFIC.read(self._sys_root), time.monotonic() - self._since)
