"""A real job over gloo that ends while its processes linger: `LAUNCHER ends.py FOLDER [ddp]`.

The job makes steps until FOLDER/end exists; with `ddp`, each is a step of a DistributedDataParallel model. Then all
ranks destroy the process group together, write FOLDER/over-RANK and sleep. FOLDER/pid-RANK has the pid,
FOLDER/step-RANK the last finished step.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder, model=""):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    step, is_wanted = 0, torch.ones(1)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) if model == "ddp" else None
    while is_wanted:
        time.sleep(0.01)
        is_wanted.fill_(float(not (folder / "end").exists()))
        dist.broadcast(is_wanted, 0)
        if wrapped is not None:
            wrapped(torch.ones(2, 4)).sum().backward()
        step += 1
        (folder / f"step-{rank}").write_text(str(step))
    dist.destroy_process_group()
    (folder / f"over-{rank}").write_text("")
    time.sleep(3600)


main(Path(sys.argv[1]), *sys.argv[2:])
