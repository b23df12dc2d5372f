"""A real job that trains a model until it is ended.

usage: torchrun ... training_loop.py FOLDER PAUSE_SECONDS [DEVICE]

A step is a forward and backward pass, an all_reduce of the gradients in each of four groups, and a pause. On "cpu", the
default, the model is small, the groups use gloo, and the pause replaces work on the GPU. On "cuda", the model keeps the
GPU of the local rank busy, and the groups use NCCL. Rank 0 writes its finished steps to FOLDER/steps-0, and the number
and time of the newest one to FOLDER/newest-step.
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
    kind = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    torch.set_num_threads(1)
    is_gpu = kind == "cuda"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if is_gpu else 0)
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
    size = 8192 if is_gpu else 128
    model = torch.nn.Linear(size, size, device=device, dtype=torch.bfloat16 if is_gpu else torch.float32)
    batch = torch.randn(size, size, device=device, dtype=model.weight.dtype)
    newest = os.open(folder / "newest-step", os.O_CREAT | os.O_WRONLY)
    for step in range(1, sys.maxsize):
        model(batch).sum().backward()
        for group in groups:
            dist.all_reduce(model.weight.grad, group=group)
        model.zero_grad(set_to_none=False)
        if is_gpu:
            torch.cuda.synchronize()
        time.sleep(pause_seconds)
        if dist.get_rank() == 0:
            os.pwrite(newest, NEWEST_STEP.pack(step, time.monotonic()), 0)
            (folder / "steps-0").write_text(str(step))


if __name__ == "__main__":
    main()
