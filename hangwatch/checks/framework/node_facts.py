"""What should be the same on all nodes of a job: versions, firmware, limits. Facts are no check; nodes compare them.

Most are read by probes that checks have, too; what does not answer is left out, and the check that asks it says so.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from hangwatch import __version__
from hangwatch.checks import environment, fd_limit
from hangwatch.model import Fault, Value
from hangwatch.probes import pseudo_files
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import FirmwareDetails, GpuFirmware
from hangwatch.probes.network import infiniband
from hangwatch.probes.node import host
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import procfs

log = logging.getLogger(__name__)

_LIMIT = re.compile(r"^(Max open files|Max locked memory) +(\S+) +(\S+)", re.MULTILINE)
_NAMES = {"Max open files": "open_files_limit", "Max locked memory": "locked_memory_limit_bytes"}


class JobVersions(Value, frozen=True):
    """Which versions a job runs with here, by the libraries of its first rank; `key` is the same on all its nodes."""

    job: str
    key: str
    versions: dict[str, str]


class Facts(Value, frozen=True):
    """What the node is made of and set to, by name, and what each job on it runs with."""

    node: dict[str, str] = {}  # noqa: RUF012 - msgspec copies an empty one
    jobs: tuple[JobVersions, ...] = ()


def begin(node: Node) -> Callable[[float], Facts]:
    """Begin to read the facts of a node, beside its checks. What is returned waits for them, so many seconds at most.

    What does not come back in time leaves no facts; its thread does not keep the process alive.
    """
    came: queue.SimpleQueue[Facts] = queue.SimpleQueue()

    def read_all() -> None:
        try:
            came.put(read(node))
        except Exception:  # as for a check: what is a bug here costs the facts alone
            log.exception("the facts of this node could not be read; please report it as a bug")
            came.put(Facts())

    def wait(seconds: float) -> Facts:
        try:
            return came.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return Facts()

    threading.Thread(target=read_all, name="facts", daemon=True).start()
    return wait


def read(node: Node) -> Facts:
    """Read them all."""
    return Facts(
        node={"hangwatch": __version__, "kernel": host.kernel_release(), **dict(_gpus(node)), **dict(_others(node))},
        jobs=tuple(_jobs(node)),
    )


def _gpus(node: Node) -> Iterator[tuple[str, str]]:
    sweep, details = query.sweep(node), query.details(node, FirmwareDetails)
    if sweep is not None and not isinstance(sweep, Fault) and sweep.driver_version:
        yield "driver", sweep.driver_version
    if details is None or isinstance(details, Fault):
        return
    told: dict[str, Callable[[GpuFirmware], str | None]] = {
        "gpus": lambda gpu: gpu.name,
        "cuda_of_driver": lambda gpu: gpu.cuda_version,
        "vbios": lambda gpu: gpu.vbios,
        "inforom": lambda gpu: gpu.inforom,
    }
    for name, part in told.items():
        values = [value for value in map(part, details.gpus) if value]
        if values:
            yield name, _counted(values) if name == "gpus" else _each(values)


def _others(node: Node) -> Iterator[tuple[str, str]]:
    adapters = infiniband.adapters(node.sys_root)
    for name, values in (
        ("infiniband_adapters", [adapter.kind for adapter in adapters if adapter.kind]),
        ("infiniband_firmware", [adapter.firmware for adapter in adapters if adapter.firmware]),
    ):
        if values:
            yield name, _counted(values) if name == "infiniband_adapters" else _each(values)
    limits = pseudo_files.read(node.proc_root / "self" / "limits", "limits")
    for row, soft, hard in _LIMIT.findall(limits) if isinstance(limits, str) else ():
        yield _NAMES[row], f"{soft}, hard {hard}"
    files = fd_limit.observe(node, fd_limit.Settings())
    for holder in files.holders if isinstance(files, fd_limit.Sample) else ():
        if holder.role == "launcher" and procfs.read_user_id(holder.pid, node.proc_root) == 0:
            yield f"open_files_limit_of_{holder.comm}", f"{holder.soft:.0f}, hard {holder.hard:.0f}"


def _jobs(node: Node) -> Iterator[JobVersions]:
    sample = environment.observe(node, environment.Settings())
    for found in sample.jobs if isinstance(sample, environment.Sample) else ():
        versions = {"NCCL": found.nccl, "torch": found.torch}
        yield JobVersions(
            job=found.job.job_id,
            key=found.job.job_key,
            versions={name: version for name, version in versions.items() if version},
        )


def _counted(values: Iterable[str]) -> str:
    """`8 NVIDIA H100`, of several kinds the most frequent first."""
    return ", ".join(f"{number} {value}" for value, number in sorted(Counter(values).items(), key=lambda of: -of[1]))


def _each(values: Iterable[str]) -> str:
    """The value, where it is the same of all; else each."""
    return ", ".join(sorted(set(values)))
