"""A real job over gloo that dumps its flight recorder: `recorded.py FOLDER`. RANK etc. are environment variables.

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
from torch._C._distributed_c10d import _dump_fr_trace_json


def step(x, mine, world_size):
    dist.all_reduce(x, group=mine)
    dist.all_reduce(x)
    dist.barrier()
    dist.all_gather([torch.ones(2, 3) for _ in range(world_size)], torch.ones(2, 3), group=None)
    dist.broadcast(torch.ones(2, 0, 1, dtype=torch.int8), 0)
    dist.gather(torch.ones(4), [torch.ones(4) for _ in range(world_size)] if dist.get_rank() == 0 else None)
    dist.all_gather_object([None] * world_size, {"rank": dist.get_rank()}, group=mine if world_size == 2 else None)
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * world_size))


def read_own_dump(open_count):
    """Return the recorder's own dump after gloo's workers have completed all operations except `open_count`."""
    before, now = "", _dump_fr_trace_json().decode()
    while now != before or sum(not entry["retired"] for entry in json.loads(now)["entries"]) != open_count:
        time.sleep(0.005)
        before, now = now, _dump_fr_trace_json().decode()
    return now


def written(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1], group_desc="tp") for first in range(0, world_size, 2)]
    mine = pairs[rank // 2]
    written(folder / f"pid-{rank}", str(os.getpid()))
    gone, is_asked = "", torch.zeros(1)
    while True:
        step(torch.ones(1), mine, world_size)
        is_asked.fill_(float((folder / "ask").exists()))
        dist.broadcast(is_asked, 0)
        if not is_asked:
            continue
        early = dist.all_reduce(torch.ones(3, 1), async_op=True) if rank == 0 else None
        written(folder / f"dump-{rank}", read_own_dump(int(rank == 0)))
        while (go := (folder / "go").read_text() if (folder / "go").exists() else "") == gone:
            time.sleep(0.005)
        gone = go
        (early or dist.all_reduce(torch.ones(3, 1), async_op=True)).wait()


main(Path(sys.argv[1]))
