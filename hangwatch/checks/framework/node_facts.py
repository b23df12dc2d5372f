"""Facts that should be the same on all nodes of a job: versions, firmware, limits. `check --nodes` compares them.

A fact that cannot be read is omitted. The check that uses the same probe reports the fault.
"""

import logging
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError

from hangwatch import __version__
from hangwatch.checks import environment, fd_limit
from hangwatch.model import Fault, Value
from hangwatch.probes.base import background, procfs, pseudo_files
from hangwatch.probes.gpu import query
from hangwatch.probes.gpu.details import Details, GpuFirmware
from hangwatch.probes.network import infiniband
from hangwatch.probes.node.machine import Node

log = logging.getLogger(__name__)

_LIMIT = re.compile(r"^(Max open files|Max locked memory) +(\S+) +(\S+)", re.MULTILINE)
_NAMES = {"Max open files": "open_files_limit", "Max locked memory": "locked_memory_limit_bytes"}


class JobVersions(Value, frozen=True):
    """The library versions of a job on this node, read from its first rank. `key` is equal on all nodes of the job."""

    job: str
    key: str
    versions: dict[str, str]


class Facts(Value, frozen=True):
    """The facts of a node (hardware, software, limits) by name, and the library versions of each job on it."""

    node: dict[str, str] = {}  # noqa: RUF012 - msgspec copies an empty default
    jobs: tuple[JobVersions, ...] = ()


def start_reading(node: Node) -> Callable[[float], Facts]:
    """Start a thread that reads the facts of a node. Return a function that waits for the result.

    The function takes a timeout in seconds. After the timeout it returns empty Facts. The thread does not keep the
    process alive.
    """
    future = background.start(lambda: read_facts(node), "facts")

    def wait(seconds: float) -> Facts:
        try:
            return future.result(max(0.0, seconds))
        except FutureTimeoutError:
            return Facts()
        except Exception:  # a bug in a probe must not stop the report
            log.exception("cannot read the facts of this node; please report this bug")
            return Facts()

    return wait


def read_facts(node: Node) -> Facts:
    """Read all facts of a node and return them."""
    return Facts(
        node={"hangwatch": __version__, "kernel": platform.release(), **dict(_gpus(node)), **dict(_others(node))},
        jobs=tuple(_jobs(node)),
    )


def _gpus(node: Node) -> Iterator[tuple[str, str]]:
    sweep, details = query.sweep(node), query.details(node, Details[GpuFirmware])
    if sweep is not None and not isinstance(sweep, Fault) and sweep.driver_version:
        yield "driver", sweep.driver_version
    if details is None or isinstance(details, Fault):
        return
    fields: dict[str, Callable[[GpuFirmware], str | None]] = {
        "gpus": lambda gpu: gpu.name,
        "cuda_of_driver": lambda gpu: gpu.cuda_version,
        "vbios": lambda gpu: gpu.vbios,
        "inforom": lambda gpu: gpu.inforom,
    }
    for name, field in fields.items():
        values = [value for value in map(field, details.gpus) if value]
        if values:
            yield name, _count_values(values) if name == "gpus" else ", ".join(sorted(set(values)))


def _others(node: Node) -> Iterator[tuple[str, str]]:
    adapters = infiniband.adapters(node.sys_root)
    kinds = [adapter.kind for adapter in adapters if adapter.kind]
    firmware = {adapter.firmware for adapter in adapters if adapter.firmware}
    if kinds:
        yield "infiniband_adapters", _count_values(kinds)
    if firmware:
        yield "infiniband_firmware", ", ".join(sorted(firmware))
    limits = pseudo_files.read(node.proc_root / "self" / "limits", "limits")
    for row, soft, hard in _LIMIT.findall(limits) if isinstance(limits, str) else ():
        yield _NAMES[row], f"{soft}, hard {hard}"
    files = fd_limit.observe(node, fd_limit.Settings())
    for holder in files.holders if isinstance(files, fd_limit.Sample) else ():
        if holder.role == "launcher" and procfs.read_user_id(holder.pid, node.proc_root) == 0:
            yield f"open_files_limit_of_{holder.comm}", f"{holder.soft:.0f}, hard {holder.hard:.0f}"


def _jobs(node: Node) -> Iterator[JobVersions]:
    sample = environment.observe(node, environment.Settings())
    for job in sample.jobs if isinstance(sample, environment.Sample) else ():
        versions = {"NCCL": job.nccl, "torch": job.torch}
        yield JobVersions(
            job=job.job.job_id,
            key=job.job.job_key,
            versions={name: version for name, version in versions.items() if version},
        )


def _count_values(values: Iterable[str]) -> str:
    """Return each different value with its count, the most frequent first: `8 NVIDIA H100`."""
    return ", ".join(f"{count} {value}" for value, count in Counter(values).most_common())
