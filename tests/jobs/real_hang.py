"""A job that hangs in a chosen way: `real_hang.py HANG FOLDER [RANKS]`, under torchrun or with forked ranks.

Each rank writes its pid to FOLDER/at-<rank> right before its blocking call. Forked ranks share one import of torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from stages import parallel_state

FOLDER = Path(sys.argv[2])
FOREVER = 3600


def mark_arrival() -> None:
    path = FOLDER / f"at-{dist.get_rank()}.new"
    path.write_text(str(os.getpid()))
    path.rename(FOLDER / f"at-{dist.get_rank()}")


def one_batch_more() -> None:
    """Give rank 1 one batch more than the others. Its backward pass waits for gradients that no rank sends."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    batches = 3 if dist.get_rank() == 1 else 2
    for batch in range(batches):
        if batch == 2:
            mark_arrival()
        model(torch.ones(2, 4)).sum().backward()
    mark_arrival()
    dist.barrier()


def checkpoint_on_rank_0() -> None:
    import torch.distributed.checkpoint as dcp  # as expensive as torch itself, and no other hang needs it

    class SlowWriter(dcp.FileSystemWriter):
        def write_data(self, plan, planner):  # type: ignore[no-untyped-def]
            mark_arrival()
            if dist.get_rank() == 0:
                time.sleep(FOREVER)
            return super().write_data(plan, planner)

    state = {f"rank_{dist.get_rank()}": torch.ones(3)}
    dcp.save(state, storage_writer=SlowWriter(FOLDER / "checkpoint"))


def two_collectives() -> None:
    """Let rank 2 gather objects while the others reduce. All ranks wait, and no rank can be named."""
    mark_arrival()
    if dist.get_rank() == 2:
        dist.all_gather_object([None] * dist.get_world_size(), {"a": 1})
    else:
        dist.all_reduce(torch.ones(2))


class Dataset:
    """An object of the program that reads a file while it is pickled; the file is a FIFO without a writer."""

    def __getstate__(self) -> dict[str, str]:
        os.mkfifo(FOLDER / "index")
        mark_arrival()
        return {"index": (FOLDER / "index").read_text()}


def pickling() -> None:
    """Rank 0 pickles an object inside of the collective, which it has not joined yet."""
    if dist.get_rank():
        mark_arrival()
    dist.broadcast_object_list([Dataset() if dist.get_rank() == 0 else None])


def python_loop() -> None:
    mark_arrival()
    count = 0
    while dist.get_rank() == 2:
        count += 1
    dist.barrier()


LOCK = threading.Lock()


def reserve() -> None:
    """Take the lock in a thread of this rank. The thread ends without releasing the lock."""
    with LOCK:
        pass


def lock_in_user_code() -> None:
    """Block rank 2 in its own lock between two steps. The others wait for it in the backward pass."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    mark_arrival()
    if dist.get_rank() == 2:
        holder = threading.Thread(target=LOCK.acquire)
        holder.start()
        holder.join()
        reserve()
    model(torch.ones(2, 4)).sum().backward()


def another_line() -> None:
    """Let rank 3 take a different branch: the same collective from another line of the same function."""
    branch = dist.new_group()
    mark_arrival()
    if dist.get_rank() == 3:
        dist.all_reduce(torch.ones(2), group=branch)
    dist.all_reduce(torch.ones(2))


def wait_for_file() -> int:
    """Wait for a number from a pipe without a writer. All ranks do this, so no rank is late."""
    os.mkfifo(FOLDER / "number")
    mark_arrival()
    return int(os.read(os.open(FOLDER / "number", os.O_RDONLY), 8))


def pipeline() -> None:
    """Block rank 0, the first stage, in its input. The others wait in recv_object for the previous stage."""
    rank = dist.get_rank()
    if rank > 0:
        mark_arrival()
    value = wait_for_file() if rank == 0 else parallel_state.recv_object(rank - 1)
    if rank + 1 < dist.get_world_size():
        parallel_state.send_object(value, rank + 1)


def save_shard() -> None:
    """Block ranks 0 and 1 while they write their shards to a full pipe. The others wait for them."""
    rank = dist.get_rank()
    if rank < 2:
        os.mkfifo(FOLDER / f"shard-{rank}")
        os.open(FOLDER / f"shard-{rank}", os.O_RDWR)  # the writer then need not wait for a reader
        mark_arrival()
        torch.save(torch.ones(1 << 20), FOLDER / f"shard-{rank}")
    else:
        mark_arrival()
    dist.barrier()


def number_of_steps() -> int:
    """Read the number of steps from a pipe. The process at its other end never writes."""
    os.mkfifo(FOLDER / "steps")
    mark_arrival()
    return int(os.read(os.open(FOLDER / "steps", os.O_RDONLY), 8))


def two_ranks() -> None:
    """Block rank 1 in its own code. Rank 0 waits for it in a collective."""
    if dist.get_rank() == 1:
        number_of_steps()
    mark_arrival()
    dist.all_reduce(torch.ones(2))


def forked(ranks: int) -> bool:
    """Fork the ranks. Return True in each rank, and False in the parent after all have ended."""
    for rank in range(ranks):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            return True
    for _ in range(ranks):
        os.wait()
    return False


if __name__ == "__main__" and (len(sys.argv) < 4 or forked(int(sys.argv[3]))):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
