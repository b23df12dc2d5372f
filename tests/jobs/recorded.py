"""A real job that dumps its flight recorder: `recorded.py FOLDER BACKEND`. RANK etc. are environment variables.

With the backend `fake`, each process is alone, and the recorder is that of a hook, as for nccl2 since torch 2.15.

Each step has collectives in two kinds of groups. When FOLDER/ask exists, all ranks finish the same step, and rank 0
alone starts one more operation. Then each rank writes its recorder's own dump to FOLDER/dump-RANK and waits until
the content of FOLDER/go changes. FOLDER/pid-RANK has the pid.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def step(x, mine, world_size):
    dist.all_reduce(x, group=mine)
    dist.all_reduce(x)
    dist.barrier()
    dist.all_gather([torch.ones(2, 3) for _ in range(world_size)], torch.ones(2, 3), group=None)
    dist.broadcast(torch.ones(2, 0, 1, dtype=torch.int8), 0)
    dist.gather(torch.ones(4), [torch.ones(4) for _ in range(world_size)] if dist.get_rank() == 0 else None)
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * world_size))
    if dist.get_backend() == "gloo":  # the fake backend delivers no objects
        dist.all_gather_object([None] * world_size, {"rank": dist.get_rank()}, group=mine if world_size == 2 else None)


def read_own_dump(open_count):
    """Return the recorder's own dump after its workers have completed all operations except `open_count`."""
    of_backend = {} if dist.get_backend() == "gloo" else {"backend": dist.get_backend()}
    before, now = "", c10d._dump_fr_trace_json(**of_backend).decode()
    while now != before or sum(not entry["retired"] for entry in json.loads(now)["entries"]) != open_count:
        time.sleep(0.005)
        before, now = now, c10d._dump_fr_trace_json(**of_backend).decode()
    return now


def connect(backend):
    """Connect the ranks. Return the group of this rank and its neighbour; with the fake backend None, and the hook."""
    if backend == "gloo":
        dist.init_process_group(backend)
        pairs = [dist.new_group([first, first + 1], group_desc="tp") for first in range(0, dist.get_world_size(), 2)]
        return pairs[dist.get_rank() // 2], None
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    return None, c10d.FlightRecorderHook.attach(dist.group.WORLD, list(range(world_size)))


def written(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def main(folder, backend):
    torch.set_num_threads(1)
    mine, _hook = connect(backend)  # the hook records while this reference lives
    rank, world_size = dist.get_rank(), dist.get_world_size()
    written(folder / f"pid-{rank}", str(os.getpid()))
    gone, is_asked = "", torch.zeros(1)
    while True:
        step(torch.ones(1), mine, world_size)
        is_asked.fill_(float((folder / "ask").exists()))
        dist.broadcast(is_asked, 0)
        if not is_asked:
            continue
        early = dist.all_reduce(torch.ones(3, 1), async_op=True) if rank == 0 else None
        written(folder / f"dump-{rank}", read_own_dump(int(rank == 0 and backend == "gloo")))
        while (go := (folder / "go").read_text() if (folder / "go").exists() else "") == gone:
            time.sleep(0.005)
        gone = go
        (early or dist.all_reduce(torch.ones(3, 1), async_op=True)).wait()


main(Path(sys.argv[1]), sys.argv[2])
