"""A rank of the simulated job that also reduces with torch over gloo, so that it has a flight recorder."""

import os
import site
import socket
import sys
from functools import cache
from types import ModuleType

from hangwatch.tools.demo import worker
from hangwatch.tools.demo.unix_collectives import ReduceResult
from hangwatch.tools.demo.unix_collectives import all_reduce as all_reduce_by_launcher


@cache
def joined_torch() -> ModuleType:
    """Join the process group of the job. Return torch."""
    site.main()  # a rank is started with -S
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[1]}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return torch


def all_reduce(peers: socket.socket, value: float) -> ReduceResult:
    """Reduce with torch first, then as the demo's rank does."""
    torch = joined_torch()
    torch.distributed.all_reduce(torch.tensor(value))
    return all_reduce_by_launcher(peers, value)


if __name__ == "__main__":
    worker.all_reduce = all_reduce
    worker.main()
