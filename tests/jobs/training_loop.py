"""A real job over gloo that trains a small model until it is ended.

usage: torchrun ... training_loop.py FOLDER PAUSE_SECONDS

A step is a forward and backward pass, an all_reduce of the gradients in each of four groups, and a pause that replaces
work on the GPU. Rank 0 writes its finished steps to FOLDER/steps-0, and the number and time of the newest one to
FOLDER/newest-step.
"""

import os
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

NEWEST_STEP = struct.Struct("=qd")
"""The number of a step, and the seconds of the monotonic clock at which it ended."""


def main() -> None:
    folder, pause_seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
    model = torch.nn.Linear(128, 128)
    batch = torch.ones(32, 128)
    newest = os.open(folder / "newest-step", os.O_CREAT | os.O_WRONLY)
    for step in range(1, sys.maxsize):
        model(batch).sum().backward()
        for group in groups:
            dist.all_reduce(model.weight.grad, group=group)
        time.sleep(pause_seconds)
        if dist.get_rank() == 0:
            os.pwrite(newest, NEWEST_STEP.pack(step, time.monotonic()), 0)
            (folder / "steps-0").write_text(str(step))


if __name__ == "__main__":
    main()
