"""A real DDP job over gloo that computes. A part of each step of rank 2 takes some milliseconds longer.

usage: torchrun ... slow_part.py FOLDER PART SECONDS

PART is loader, forward, backward, contention or rotating. With contention, rank 2 computes for SECONDS on a core that it
shares with a process that takes half of the time. With rotating, the loader of a random rank is slow in each step.
Each rank writes its finished steps to FOLDER/steps-<rank>.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

SLOW_RANK = 2


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def share_core(is_slow: bool) -> None:
    """Move the slow rank to a core with another process, and the other ranks to the other cores.

    The other process works half a millisecond and sleeps half a millisecond. It has a higher priority than the ranks, so
    the scheduler gives it each of its turns at once: a process of equal priority would wait for several milliseconds.
    """
    *cores, shared = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {shared} if is_slow else cores or {shared})
    if is_slow:
        loop = (
            "while os.getppid() == parent:\n end = time.thread_time() + 0.0005\n while time.thread_time() < end: pass\n"
        )
        code = f"import os, time; parent = os.getppid()\n{loop} time.sleep(0.0005)"
        subprocess.Popen([sys.executable, "-c", code])
    os.nice(10)


def contend(is_slow: bool, seconds: float) -> Iterator[None]:
    """Do the same work in each step as the other ranks, which sleep for as long as the slow rank computes."""
    share_core(is_slow)
    while True:
        time.sleep(0.012 + seconds * (not is_slow))
        compute(seconds * is_slow)
        dist.all_reduce(torch.ones(1000))
        yield


def train(part: str, seconds: float) -> Iterator[None]:
    """Train a small model by DDP."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch, turns = torch.randn(64, 256), random.Random(1)
    while True:
        slow_rank = turns.randrange(dist.get_world_size()) if part == "rotating" else SLOW_RANK
        slow = part if dist.get_rank() == slow_rank else ""
        time.sleep(0.012 + seconds * (slow in ("loader", "rotating")))
        if slow == "forward":
            compute(seconds)
        optimizer.zero_grad()
        loss = model(batch).sum()
        if slow == "backward":
            loss.register_hook(lambda _: compute(seconds))
        loss.backward()
        optimizer.step()
        yield


def main() -> None:
    folder, part, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = contend(rank == SLOW_RANK, seconds) if part == "contention" else train(part, seconds)
    for step, _ in enumerate(steps, 1):
        (folder / f"steps-{rank}").write_text(str(step))


if __name__ == "__main__":
    main()
