#!/usr/bin/env bash
# tool: torch 2.13.0, TORCH_DISTRIBUTED_DEBUG=DETAIL
# finding: "Detected mismatch between collectives" can name an operation that the other rank did not call
# last run: 2026-11-30
#
# Each rank describes its call in a list of numbers. The ranks compare the lengths of these lists first. If the lengths
# differ (a barrier has no tensor, a scalar has no dimension), the message decodes the length itself as the operation,
# with sequence number 0. Here rank 0 calls all_reduce and rank 1 barrier: rank 0 reads "Rank 1 is running REDUCE", and
# rank 1 reads "Rank 0 is running GATHER". Only what a rank prints about its own call is true.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import re, sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.barrier()
    except RuntimeError as error:
        own, other = re.findall(r"Rank (\d) is running.*?OpType=(\w+)", str(error))
        with open(f"{folder}/{rank}", "w") as file:
            file.write(f"rank {own[0]} runs {own[1]} and says that rank {other[0]} runs {other[1]}")


if __name__ == "__main__":
    folder = sys.argv[1]
    multiprocessing.spawn(train, (folder,), nprocs=2)
    print("; ".join(open(f"{folder}/{rank}").read() for rank in (0, 1)))
PY
TORCH_DISTRIBUTED_DEBUG=DETAIL "$python" "$folder/job.py" "$folder" 2>/dev/null |
  expect 'rank 0 runs ALLREDUCE and says that rank 1 runs REDUCE; rank 1 runs BARRIER and says that rank 0 runs GATHER'
