"""The job of `make first-hour`: a small model on some ranks, with data from one file for each rank.

usage: torchrun --nproc-per-node RANKS train.py FOLDER

Rank N reads the file FOLDER/shard-N in each step.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


def read_shard(path: str) -> bytes:
    with open(path, "rb") as shard:  # noqa: PTH123 - a builtin: the innermost frame is this function
        return shard.read()


class Shards(IterableDataset):
    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.frombuffer(bytearray(read_shard(self.path)), dtype=torch.uint8).float()


def train(batches: DataLoader) -> None:
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.1)  # instead of a GPU's work
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard = Path(sys.argv[1]) / f"shard-{os.environ['RANK']}"
    train(DataLoader(Shards(str(shard)), batch_size=4, num_workers=1))


if __name__ == "__main__":
    main()
