#!/usr/bin/env bash
# tool: torch 2.13.0, TORCH_DISTRIBUTED_DEBUG=DETAIL
# finding: ranks that broadcast from different roots, or reduce with different operators, pass the check of all collectives
# last run: 2026-11-30
#
# DETAIL compares the operation, its number, and the shape, type and device of the tensors. With different roots the
# ranks then wait until the timeout, and no message tells of a mismatch. With SUM on rank 0 and MAX on rank 1, no rank
# fails: half of the tensor is the sum, and half the maximum. So "DETAIL found nothing" does not mean that all ranks
# make the same call.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import datetime, sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def train(rank, folder):
    seconds = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=seconds)
    values = torch.full((4,), float(rank + 1))
    dist.all_reduce(values, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
    try:
        dist.broadcast(torch.ones(4), src=rank)
        text = "passed"
    except RuntimeError as error:
        text = "mismatch" if "mismatch" in str(error) else "timed out" if "Timed out" in str(error) else str(error)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"rank {rank}: all_reduce {values.tolist()}, broadcast {text}")


if __name__ == "__main__":
    folder = sys.argv[1]
    multiprocessing.spawn(train, (folder,), nprocs=2)
    print("; ".join(open(f"{folder}/{rank}").read() for rank in (0, 1)))
PY
TORCH_DISTRIBUTED_DEBUG=DETAIL "$python" "$folder/job.py" "$folder" 2>/dev/null |
  expect 'rank 0: all_reduce [3.0, 3.0, 2.0, 2.0], broadcast timed out; rank 1: all_reduce [3.0, 3.0, 2.0, 2.0], broadcast'
