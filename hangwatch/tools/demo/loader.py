"""A data loader in a process that its rank has forked, as in torch. Standard library only: ranks import it."""

import os
from pathlib import Path
from typing import NamedTuple, NoReturn

from hangwatch.tools.demo.process_setup import set_identity

BATCH_BYTES = 1 << 16
GOOD_SHARD = "/dev/zero"
_UP = b"."


class Loader(NamedTuple):
    """The pipes between a rank and its loader. The rank sends names of shards and receives batches."""

    requests: int
    batches: int


def start(folder: Path) -> Loader:
    """Fork the loader and wait until it has started. The kernel kills the loader when its rank dies."""
    request_read, request_write = os.pipe()
    batch_read, batch_write = os.pipe()
    rank = os.getpid()
    if os.fork() == 0:
        set_identity("pt_data_worker", rank, folder)
        os.close(request_write)
        os.close(batch_read)
        os.write(batch_write, _UP)
        _worker_loop(request_read, batch_write)
    os.close(request_read)
    os.close(batch_write)
    os.read(batch_read, len(_UP))
    return Loader(request_write, batch_read)


def next_batch(loader: Loader, shard: str = GOOD_SHARD) -> bytes:
    """Request a batch of a shard from the loader. Wait for it and return it."""
    os.write(loader.requests, f"{shard}\n".encode())
    batch = b""
    while len(batch) < BATCH_BYTES:
        part = os.read(loader.batches, BATCH_BYTES - len(batch))
        if not part:
            raise EOFError("the loader is gone")
        batch += part
    return batch


def read_shard(shard: str) -> bytes:
    """Read one batch of a shard. Stuck storage, here a FIFO, blocks the reader as a hung mount does."""
    with open(shard, "rb") as file:  # noqa: PTH123 - pathlib's frame would hide this one
        return file.read(BATCH_BYTES)


def _worker_loop(requests: int, batches: int) -> NoReturn:
    while shard := os.read(requests, 4096).decode().strip():
        os.write(batches, read_shard(shard))
    os._exit(0)
