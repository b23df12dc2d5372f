"""Pure: how long a job waits in a collective before torch.distributed ends it, and its stacks with it.

It stands on the ground since two rooms ask: `checks`, whether that is longer than a look takes, and `hang`, which pages
before it. It is read from the environment that the ranks were started with, and from PyTorch's defaults: 600 s for NCCL
(1800 s before PyTorch 2.2), 1800 s for gloo, 480 s for the watchdog's heartbeat. A time-out that the job's own code
passes to `init_process_group` stands in what its ranks have recorded, where that can be read, and then above this.
"""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.model import Job, JobName, Value

NCCL_DEFAULT_SECONDS = 600.0
OTHER_DEFAULT_SECONDS = 1800.0
HEARTBEAT_DEFAULT_SECONDS = 480.0
MOST = 1e9  # seconds or minutes that count; a variable may hold hundreds of digits
VARIABLES = frozenset(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "DEEPSPEED_TIMEOUT",
        "NCCL_TIMEOUT",
    }
)


class Patience(Value, frozen=True):
    """How long a job waits. `collective_seconds` is None when it waits for ever, `heartbeat_seconds` without monitor.

    `source` says where the first one comes from. `ignored` are variables that are set and that nothing reads.
    """

    job: JobName
    collective_seconds: float | None
    source: str
    heartbeat_seconds: float | None
    ignored: tuple[str, ...] = ()


def patience(job: Job, environ: Mapping[str, str]) -> Patience:
    """What PyTorch and DeepSpeed make of these variables."""
    uses_nccl = bool(job.gpu_uuids)
    seconds: float | None = NCCL_DEFAULT_SECONDS if uses_nccl else OTHER_DEFAULT_SECONDS
    source = f"PyTorch's default for {'NCCL' if uses_nccl else 'gloo'}"
    minutes = _number(environ.get("DEEPSPEED_TIMEOUT"))
    if minutes is not None:
        seconds, source = minutes * 60, "DEEPSPEED_TIMEOUT"
    handling = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", environ.get("NCCL_ASYNC_ERROR_HANDLING"))
    blocking = environ.get("TORCH_NCCL_BLOCKING_WAIT", environ.get("NCCL_BLOCKING_WAIT", "0"))
    if uses_nccl and handling == "0" and blocking == "0":
        seconds, source = None, "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"
    heartbeat = None
    if uses_nccl and environ.get("TORCH_NCCL_ENABLE_MONITORING") != "0":
        heartbeat = _number(environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")) or HEARTBEAT_DEFAULT_SECONDS
    # A widespread myth: neither NCCL nor PyTorch reads it.
    ignored = tuple(name for name in ("NCCL_TIMEOUT",) if name in environ)
    return Patience(
        job=job.name, collective_seconds=seconds, source=source, heartbeat_seconds=heartbeat, ignored=ignored
    )


def _number(text: str | None) -> float | None:
    return min(float(text), MOST) if text is not None and text.strip().isdecimal() else None
