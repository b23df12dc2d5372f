"""A rank of a job without torch. It works in steps, hangs on request, and then waits like a culprit or a victim.

usage: rank.py FOLDER, with RANK in the environment. `FOLDER/hang` begins the hang, `FOLDER/end` ends the process.
Rank 2 blocks in `read_shard` on a FIFO without a writer. The others block in a function with the name and file of
c10d's.
"""

import os
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
namespace: dict[str, object] = {"time": time, "folder": folder}
source = "def all_reduce():\n    while (folder / 'hang').exists():\n        time.sleep(3600)\n"
exec(compile(source, "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", "exec"), namespace)


def read_shard() -> None:
    with (folder / "shard").open("rb") as shard:
        shard.read(1)


def train() -> None:
    while not (folder / "end").exists():
        if (folder / "hang").exists():
            read_shard() if rank == 2 else namespace["all_reduce"]()  # type: ignore[operator]
        sum(range(20_000))
        time.sleep(0.05)


train()
