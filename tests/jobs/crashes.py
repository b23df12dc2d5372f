"""A job that crashes on request, started by torchrun: `crashes.py FOLDER HOW`.

Each rank writes its pid to FOLDER/pid-<rank>. When FOLDER/go exists, rank 1 crashes. The other ranks wait in
all_reduce or keep running.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = FOLDER / f"pid-{rank}.new"
    path.write_text(str(os.getpid()))
    path.rename(FOLDER / f"pid-{rank}")
    while not (FOLDER / "go").exists():
        time.sleep(0.05)
    if rank == 1 and HOW == "raises":
        raise ValueError(f"the shard of rank {rank} is empty")
    if rank == 1 and HOW in ("segfaults", "caught", "lingers"):
        ctypes.memset(0, 0, 1)
    if HOW == "lingers":
        time.sleep(600)
    elif HOW != "ends":
        dist.all_reduce(torch.ones(2))


# torchelastic's decorator catches SIGSEGV by faulthandler. The kernel does not log a segfault that is caught.
main = main if HOW in ("segfaults", "lingers") else record(main)
main()
