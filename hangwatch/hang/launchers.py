"""Pure: what one process says of its place in a job: the launcher that it is, or the seat that a launcher gave it.

A seat is a rank and what goes with it, read from the variables that launchers set. Every process that descends from a
rank inherits the same variables, so a seat alone makes no rank: `jobs` decides who sits on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from hangwatch.model import Process

MAX_LOCAL_RANKS = 1024
_MAX_RANKS = 1 << 24

# What the process was asked to run, after `python` and its options: a script's name or a module.
_PROGRAMS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
}
_MPI_COMMS = frozenset(
    ("orted", "prted", "prterun", "mpirun", "mpiexec", "mpiexec.hydra", "mpirun.real", "hydra_pmi_proxy")
)
# Programs that hold GPUs in several processes and wait for requests, not for one another.
_SERVERS = (
    "vllm",
    "sglang",
    "tritonserver",
    "text-generation",
    "lmdeploy",
    "jupyter",
    "ipykernel",
    "uvicorn",
    "gunicorn",
)
_STEP = re.compile(r"slurmstepd: \[\d+(?:\+\d+)?\.\d+\]")  # not [7.batch], [7.extern], [7.interactive]
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class Seat(NamedTuple):
    """A rank as the environment of a process states it; `family` says by which launcher's variables."""

    family: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    attempt: int = 0


def launcher_kind(process: Process) -> str | None:
    """Which launcher this process is: torchrun, accelerate, deepspeed, srun, mpirun; None when it is none."""
    if process.comm in _MPI_COMMS:
        return "mpirun"
    if process.comm == "slurmstepd":
        return "srun" if _STEP.match(" ".join(process.cmdline)) else None
    named = _PROGRAMS.get(program(process.cmdline))
    return named or ("torchrun" if process.comm == "pt_elastic" else None)


def program(cmdline: Sequence[str]) -> str:
    """What a command line runs: the module after -m, "-c", the script's name, or the program itself."""
    if not cmdline:
        return ""
    name = PurePosixPath(cmdline[0]).name
    if not name.startswith(("python", "pypy")):
        return name
    arguments = iter(cmdline[1:])
    for argument in arguments:
        if argument == "-m":
            return next(arguments, "")
        if argument in _OPTIONS_WITH_VALUE:
            next(arguments, "")
        elif argument == "-c" or not argument.startswith("-"):
            return PurePosixPath(argument).name
    return name


def seat(process: Process, launcher: str | None) -> Seat | None:
    """The rank that this process's environment states; `launcher` is the kind of the nearest launcher above it.

    RANK and WORLD_SIZE win: with torchrun under srun, the variables of Slurm are the agent's. Those of Slurm count only
    under the step that set them, because a batch script has them too (as rank 0 of all).
    """
    environ = process.environ
    found = _seat(
        environ,
        "torch",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    )
    if found is not None:
        return found._replace(attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0)
    found = _seat(
        environ,
        "mpi",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    )
    if found is None and launcher == "srun":
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        found = _seat(environ, "slurm", rank="SLURM_PROCID", size=size, local_rank=("SLURM_LOCALID",))
        found = found and found._replace(local_world_size=_slurm_local_tasks(environ))
    if found is None and launcher == "mpirun":
        found = _seat(
            environ,
            "mpi",
            rank="PMI_RANK",
            size="PMI_SIZE",
            local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
            local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        )
    # One process alone under srun or mpirun is a program that was started so, a notebook for instance.
    return found if found is not None and found.world_size > 1 else None


def is_python(process: Process) -> bool:
    """Whether the process looks like a Python interpreter, by its name or by what started it."""
    if process.comm.startswith(("python", "pypy", "ipython", "pt_")):
        return True
    return bool(process.cmdline) and PurePosixPath(process.cmdline[0]).name.startswith(("python", "pypy"))


def is_loader_worker(process: Process) -> bool:
    """Whether this is a DataLoader worker, which has its rank's command line and environment."""
    return process.comm == "pt_data_worker"


def is_resource_tracker(process: Process) -> bool:
    """Whether this is multiprocessing's bookkeeper, which works for nobody's progress."""
    return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline)


def is_spawned(process: Process) -> bool:
    """Whether multiprocessing started this process with its spawn method, as mp.spawn does."""
    return not is_loader_worker(process) and any("multiprocessing.spawn" in argument for argument in process.cmdline)


def is_server(process: Process) -> bool:
    """Whether the command line names a program that serves requests or a notebook."""
    return any(word in argument.lower() for argument in process.cmdline[:4] for word in _SERVERS)


def _seat(
    environ: Mapping[str, str],
    family: str,
    *,
    rank: str,
    size: str,
    local_rank: Sequence[str],
    local_size: Sequence[str] = (),
) -> Seat | None:
    number, world_size = _number(environ, rank), _number(environ, size)
    if number is None or world_size is None or number >= world_size:
        return None
    local_world_size = _number(environ, *local_size)
    if local_world_size is not None and not 0 < local_world_size <= min(world_size, MAX_LOCAL_RANKS):
        local_world_size = None
    return Seat(family, number, world_size, _number(environ, *local_rank), local_world_size)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that holds a number of a believable size."""
    for name in names:
        value = environ.get(name, "")
        if value.isascii() and value.isdecimal() and len(value) < 10 and int(value) <= _MAX_RANKS:
            return int(value)
    return None


def _slurm_local_tasks(environ: Mapping[str, str]) -> int | None:
    """How many tasks the step has on this node: "8(x2),4" and node 2 give 4."""
    node = _number(environ, "SLURM_NODEID")
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    if node is None:
        return None
    for part in layout.split(","):
        found = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,7})\))?", part)
        if found is None:
            return None
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1]) if 0 < int(found[1]) <= MAX_LOCAL_RANKS else None
    return None
