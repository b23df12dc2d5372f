"""The collective timeout of a job: after this time torch.distributed ends the ranks, and their stacks are lost. Pure.

`checks` compares it with the duration of a capture, and the detector pages before it. It is read from the
environment of the ranks. Without such a variable it is PyTorch's default: 600 s for NCCL (1800 s before PyTorch
2.2), 1800 s for gloo. The default of the watchdog's heartbeat is 480 s. The job's code can pass another timeout to
`init_process_group`, which is in the flight recorder of its ranks. If the recorder can be read, its timeout
overrides the one from the environment.
"""

from collections.abc import Mapping

from hangwatch.model import Job, JobName, Value

NCCL_DEFAULT_SECONDS = 600.0
OTHER_DEFAULT_SECONDS = 1800.0
# torch/distributed/elastic/rendezvous: `join` if dynamic, `timeout` if static
RENDEZVOUS_SECONDS = 600.0
HEARTBEAT_DEFAULT_SECONDS = 480.0
# Larger numbers (seconds or minutes) are cut to this; a variable may hold hundreds of digits
MOST = 1e9
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


class TimeoutSettings(Value, frozen=True):
    """The timeouts of a job in seconds.

    * `collective_seconds`: None if there is no timeout. `source`: a text that says where it is set.
    * `heartbeat_seconds`: None if the job has no heartbeat monitor.
    * `ignored`: variables that are set although no library reads them.
    """

    job: JobName
    collective_seconds: float | None
    source: str
    heartbeat_seconds: float | None
    ignored: tuple[str, ...] = ()


def read_timeouts(job: Job, environ: Mapping[str, str]) -> TimeoutSettings:
    """Return the timeouts that PyTorch and DeepSpeed read from these variables. A job without PyTorch has none.

    A launcher that has no ranks has the timeout of its rendezvous.
    """
    if job.waiting is not None:
        meets = RENDEZVOUS_SECONDS if job.waiting.needs_several_nodes else None
        source = "torchrun's default for the rendezvous"
        return TimeoutSettings(job=job.name, collective_seconds=meets, source=source, heartbeat_seconds=None)
    if job.libraries is not None and "torch" not in job.libraries:
        source = "it does not use PyTorch" if job.libraries else "it has not loaded PyTorch"
        return TimeoutSettings(job=job.name, collective_seconds=None, source=source, heartbeat_seconds=None)
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
    # often recommended, but neither NCCL nor PyTorch reads it
    ignored = tuple(name for name in ("NCCL_TIMEOUT",) if name in environ)
    return TimeoutSettings(
        job=job.name, collective_seconds=seconds, source=source, heartbeat_seconds=heartbeat, ignored=ignored
    )


def _number(text: str | None) -> float | None:
    return min(float(text), MOST) if text is not None and text.strip().isdecimal() else None
