"""A rank of a DeepSpeed job with ZeRO-2 over gloo. Rank 1 leaves at step 30.

usage: deepspeed deepspeed_zero.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch


def read_calibration():
    time.sleep(3600)


if __name__ == "__main__":
    folder, rank = Path(next(word for word in sys.argv[1:] if not word.startswith("--"))), int(os.environ["RANK"])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    new = folder / f"new-{rank}"
    new.write_text(str(os.getpid()))
    new.rename(folder / f"pid-{rank}")
    for step in range(1_000_000):
        if (rank, step) == (1, 30):
            read_calibration()
        engine.backward(engine(torch.ones(1, 16)).sum())
        engine.step()
