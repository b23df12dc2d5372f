"""A real DDP job over gloo that computes. A part of each step of rank 2 takes some milliseconds longer.

usage: torchrun ... slow_part.py FOLDER PART SECONDS

PART is loader, forward or backward. Each rank writes its finished steps to FOLDER/steps-<rank>.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SLOW_RANK = 2


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def main() -> None:
    folder, part, seconds, step = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slow = part if dist.get_rank() == SLOW_RANK else ""
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(64, 256)
    while True:
        time.sleep(0.012 + seconds * (slow == "loader"))
        if slow == "forward":
            compute(seconds)
        optimizer.zero_grad()
        loss = model(batch).sum()
        if slow == "backward":
            loss.register_hook(lambda _: compute(seconds))
        loss.backward()
        optimizer.step()
        step += 1
        (folder / f"steps-{dist.get_rank()}").write_text(str(step))


if __name__ == "__main__":
    main()
