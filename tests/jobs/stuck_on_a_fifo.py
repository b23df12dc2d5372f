"""A real job over gloo. Every step is an all_reduce; on request rank 2 does not join until a FIFO is written.

usage: torchrun ... stuck_on_a_fifo.py FOLDER

FOLDER/shard is the FIFO. FOLDER/stop-at-shard makes rank 2 read it. Each rank writes its finished steps to
FOLDER/steps-<rank>.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ODD_RANK = 2


def read_shard(folder: Path) -> bytes:
    with open(folder / "shard", "rb") as shard:  # noqa: PTH123 - a builtin: the innermost frame is this function
        return shard.read()


def train(folder: Path) -> None:
    step = 0
    go_on = torch.ones(1)
    while go_on.item():
        if dist.get_rank() == ODD_RANK and (folder / "stop-at-shard").exists():
            (folder / "stop-at-shard").unlink()
            read_shard(folder)
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        step += 1
        (folder / f"steps-{dist.get_rank()}").write_text(str(step))
        time.sleep(0.01)  # replaces work on the GPU, which uses no core
        go_on[0] = 0.0 if (folder / "finish").exists() else 1.0
        dist.broadcast(go_on, 0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
