"""A real job over gloo that hangs with equal stacks: on request rank 1 calls all_reduce in its tp group.

usage: torchrun ... wrong_group.py FOLDER

FOLDER/part requests the hang. Each rank writes its steps to FOLDER/steps-<rank>.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist


def sync(group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(torch.ones(4), group=group)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1], group_desc="tp") for first in range(0, dist.get_world_size(), 2)]
    mine = pairs[rank // 2]
    for step in count(1):
        sync(mine)
        parts = rank == 1 and (folder / "part").exists()
        sync(mine if parts else None)
        (folder / f"steps-{rank}").write_text(str(step))
        time.sleep(0.01)  # replaces work on the GPU, which uses no core


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
