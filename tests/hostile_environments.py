"""Attacks through environments: any user of a node can start sleeping processes with arbitrary variables."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping

from tests.commands import spawn
from tests.conftest import open_folder

NOBODY = 65534
MEGABYTES_OF_NCCL = 3
_STACK_BYTES = 64 << 20  # execve(2) allows a quarter of it for arguments and environment, and at most 6 MB


def large_environments(count: int) -> list[dict[str, str]]:
    """Return environments of 3 MB each. All variable names start like those of NCCL."""
    words = {f"NCCL_NOISE_{number}": "x" * 100_000 for number in range(10 * MEGABYTES_OF_NCCL)}
    return [{**rank_variables(rank, count, port=29400), **words} for rank in range(count)]


def claim_world(size: int, gpus: str) -> list[dict[str, str]]:
    """Return the environments of two ranks of a job of `size` ranks, which claim the same `gpus`."""
    return [rank_variables(rank, size, port=29401) | {"CUDA_VISIBLE_DEVICES": gpus} for rank in range(2)]


def claim_jobs(count: int) -> list[dict[str, str]]:
    """Return the environments of `count` jobs. Each claims that 1,023 more ranks are on this node."""
    return [rank_variables(0, 4096, port=30000 + number) | {"LOCAL_WORLD_SIZE": "1024"} for number in range(count)]


def rank_variables(rank: int, size: int, *, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"run-{port}",
    }


@contextlib.contextmanager
def crowd(environs: Iterable[Mapping[str, str]]) -> Iterator[None]:
    """Run sleeping processes called `python3`, one for each environment, of user `nobody` under root."""
    with open_folder() as folder, contextlib.ExitStack() as stack:
        program = shutil.copy("/bin/sleep", folder / "python3")
        user = NOBODY if os.geteuid() == 0 else None
        options = {"user": user, "cwd": "/", "preexec_fn": _with_room, "stdin": None, "stdout": None}
        for environ in environs:
            stack.enter_context(spawn(program, "600", env=environ, **options))
        yield


def _with_room() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
