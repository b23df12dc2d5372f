"""One rank of the self-test: a script that `hangwatch selftest` or torchrun starts.

It runs under the interpreter of the job, which has torch but may not have hangwatch. So it imports only the
standard library and torch. Each rank reports the begin and end of each step on its standard output and in the
store. So a stuck rank can be found from outside and by the other ranks.
"""

import argparse
import importlib
import json
import os
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

NO_TORCH = 97
FAILED = 1
REPEATS = 5
LARGE_NUMBERS = 1 << 20
GPU_NUMBERS = 1 << 26
_SIOCGIFADDR = 0x8915  # netdevice(7)
_PR_SET_PDEATHSIG = 1
# In which ranks that began a step later report, too; a launcher ends them with this rank
_OTHERS_SECONDS = 2.0
# torch's timeout, in timeouts of the test: missing ranks are reported before torch ends the ranks
_TORCH_TIMEOUTS = 2


def groups_of(world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups to test: pairs of neighbours, pairs shifted by one, then larger groups, then all ranks."""
    ranks = range(world_size)
    groups = [tuple(ranks[first : first + 2]) for first in range(0, world_size - 1, 2)]
    groups += [tuple(ranks[first : first + 2]) for first in range(1, world_size - 1, 2)]
    size = 4
    while size < world_size:
        groups += [tuple(ranks[first : first + size]) for first in range(0, world_size - size + 1, size)]
        size *= 2
    return tuple(dict.fromkeys([*groups, tuple(ranks)]))


def late(waits: Sequence[Mapping[int, float]], seconds: float) -> dict[int, float]:
    """Return the ranks that joined a repeated collective late, each with its delay in seconds.

    `waits` has for each repeat the seconds that each rank spent in it. The last rank to join waits the shortest
    time. A rank is late if it is last in all repeats except at most one, by `seconds` more than the median of the
    others.
    """
    delays: dict[int, list[float]] = {}
    for repeat in waits:
        if len(repeat) < 2:
            continue
        rank = min(repeat, key=lambda other: repeat[other])
        delay = statistics.median(wait for other, wait in repeat.items() if other != rank) - repeat[rank]
        if delay > seconds:
            delays.setdefault(rank, []).append(delay)
    return {rank: statistics.median(by) for rank, by in delays.items() if len(by) >= max(2, len(waits) - 1)}


class Rank:
    """One rank of the test. It reports its steps, and ends itself if a step takes too long."""

    def __init__(self, options: argparse.Namespace, torch: Any) -> None:
        self.options, self.torch, self.dist = options, torch, importlib.import_module("torch.distributed")
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = socket.gethostname()
        self.store: Any = None
        self.step = 0

    def say(self, event: str, **facts: object) -> None:
        """Print an event: as JSON with --events, else for people."""
        if self.options.events:
            line = json.dumps({"event": event, "rank": self.rank, **facts})
        else:
            line = f"[{self.host}:{self.rank}] {event} {' '.join(f'{name}={fact}' for name, fact in facts.items())}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    @contextmanager
    def doing(self, what: str, group: Sequence[int] = ()) -> Iterator[None]:
        """Report the begin and the end of a step, which is the `with` block. End the rank if the step times out."""
        self.step += 1
        mark = f"selftest/{what}/{self.step if not group else ','.join(map(str, group))}"
        self.say("begin", what=what, group=list(group))
        if has_store := self.store is not None:
            self.store.set(f"{mark}/{self.rank}", "begun")
        arguments = (what, tuple(group), mark if has_store else "")
        timer = threading.Timer(self.options.timeout_seconds, self._stuck, arguments)
        timer.daemon = True
        timer.start()
        began = time.monotonic()
        try:
            yield
        finally:
            timer.cancel()
        self.say("end", what=what, group=list(group), seconds=round(time.monotonic() - began, 6))

    def _stuck(self, what: str, group: tuple[int, ...], mark: str) -> None:
        if mark:
            report = threading.Thread(target=lambda: self._say_missing(what, group, mark), daemon=True)
            report.start()
            report.join(5.0)  # the store may be in the rank that is stuck
        if not mark or report.is_alive():
            self.say("timeout", what=what, group=list(group), missing=None)
        time.sleep(_OTHERS_SECONDS)
        os._exit(FAILED)

    def _say_missing(self, what: str, group: tuple[int, ...], mark: str) -> None:
        missing = [rank for rank in group if rank != self.rank and not self.store.check([f"{mark}/{rank}"])]
        self.say("timeout", what=what, group=list(group), missing=missing)

    def run(self) -> None:
        """Run all steps: report the data of this rank, compute, connect to the other ranks, and test all groups."""
        address, interface = _towards(os.environ["MASTER_ADDR"])
        backend, device = self._backend()
        self.say(
            "here",
            host=self.host,
            pid=os.getpid(),
            device=self.options.device,
            name=str(self.torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu",
            backend=backend,
            interface=interface,
            address=address,
        )
        self._compute(device)  # the first call loads libraries
        with self.doing("compute"):
            self._compute(device)
        with self.doing("rendezvous", range(self.world_size)):
            self._meet(backend)
        groups = groups_of(self.world_size)
        handles = {}
        for group in groups:
            with self.doing("new_group", range(self.world_size)):
                handles[group] = self.dist.new_group(list(group), timeout=self._torch_timeout())
        for group in groups:
            if self.rank in group:
                self._talk(group, handles[group], device)
            with self.doing("barrier", range(self.world_size)):
                self.dist.barrier(**({"device_ids": [device.index]} if device.type == "cuda" else {}))
        self.say("done")
        self.dist.destroy_process_group()

    def _backend(self) -> tuple[str, Any]:
        backend = self.options.backend
        if backend == "auto":
            backend = "nccl" if self.torch.cuda.is_available() else "gloo"
        if backend == "gloo":
            return backend, self.torch.device("cpu")
        count = self.torch.cuda.device_count()
        device = self.torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count if count else 0)
        self.torch.cuda.set_device(device)
        return backend, device

    def _compute(self, device: Any) -> None:
        size = 2048 if device.type == "cuda" else 256
        matrix = self.torch.ones((size, size), device=device)
        for _ in range(10):
            if float((matrix @ matrix)[0, 0]) != size:
                raise ValueError(f"the dot product of {size} ones is not {size}: this device computes wrong results")

    def _meet(self, backend: str) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torch/distributed/elastic/agent
        store = self.dist.TCPStore(
            host,
            port,
            None if of_agent else self.world_size,
            is_master=self.rank == 0 and not of_agent,
            timeout=self._torch_timeout(),
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = self.dist.PrefixStore(f"hangwatch-selftest-{attempt}", store)
        self.dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.world_size, timeout=self._torch_timeout()
        )

    def _torch_timeout(self) -> timedelta:
        return timedelta(seconds=_TORCH_TIMEOUTS * self.options.timeout_seconds)

    def _talk(self, group: tuple[int, ...], handle: Any, device: Any) -> None:
        """Test the communication of a group: sum the numbers of its ranks with all_reduce, and check the result.

        Each rank sends a single number, then many.
        """
        for what, count in (("all_reduce", 1), ("large all_reduce", _numbers(device))):
            for repeat in range(REPEATS):
                numbers = self.torch.full((count,), float(self.rank + 1), device=device)
                with self.doing(f"{what} {repeat + 1}", group):
                    self.dist.all_reduce(numbers, group=handle)
                    result = float(numbers[-1])  # waits for the GPU
                if result != (wanted := sum(rank + 1 for rank in group)):
                    self.say("wrong", what=what, group=list(group), result=result, wanted=wanted)


def _numbers(device: Any) -> int:
    return GPU_NUMBERS if device.type == "cuda" else LARGE_NUMBERS


def _towards(host: str) -> tuple[str, str]:
    """Return the local address on the route to a host, and the interface with this address; "" if unknown."""
    try:
        family, *_, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            address = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    return address, next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _address_of(interface: str) -> str:
    fcntl = importlib.import_module("fcntl")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank. The launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument("--timeout-seconds", type=float, default=30.0)
    parser.add_argument("--device", default=os.environ.get("LOCAL_RANK", ""), help="the device name in reports")
    parser.add_argument("--events", action="store_true", help="print one JSON object per line")
    options = parser.parse_args(arguments)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        parser.error(f"{', '.join(missing)} not set: start this by torchrun, or by `hangwatch selftest`")
    if options.events:
        importlib.import_module("ctypes").CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        if not options.events:  # else hangwatch says it once
            sys.stderr.write(f"{sys.executable} has no torch: {error}\n")
        return NO_TORCH
    rank = Rank(options, torch)
    try:
        rank.run()
    except Exception as error:  # any exception of torch is a result
        rank.say("error", what=f"{type(error).__name__}: {error}"[:2000])
        sys.stdout.flush()
        os._exit(FAILED)  # skip the clean-up of torch, which may wait for the other ranks
    return 0


if __name__ == "__main__":
    sys.exit(main())
