"""A real job over gloo with steps of 20 ms. Once FOLDER/slow-<rank> exists, this rank takes 10 % of a step longer.

usage: torchrun ... slow_rank.py FOLDER

Each rank writes its finished steps to FOLDER/steps-<rank>. A sleep replaces the work, so four ranks fit on two cores.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_SECONDS = 0.02


def main() -> None:
    folder, step = Path(sys.argv[1]), 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slow = folder / f"slow-{dist.get_rank()}"
    while True:
        time.sleep(STEP_SECONDS * (1.1 if slow.exists() else 1.0))
        for parameters in (1000, 2000):
            dist.all_reduce(torch.ones(parameters))
        step += 1
        (folder / f"steps-{dist.get_rank()}").write_text(str(step))


if __name__ == "__main__":
    main()
