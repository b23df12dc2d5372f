#!/usr/bin/env bash
# tool: torch 2.13.0, the gloo backend
# finding: a broadcast ends without error if root and receivers have tensors of other types, but of equal size in bytes
# last run: 2026-11-30
#
# Rank 0 sends four numbers of float32, rank 1 receives them into 16 numbers of uint8: both calls return, and rank 1 has
# the bytes of rank 0. So different types in the flight recorders of two ranks do not prove that a collective cannot end.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensor = torch.arange(4, dtype=torch.float32) if rank == 0 else torch.zeros(16, dtype=torch.uint8)
    dist.broadcast(tensor, src=0)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{tensor.dtype} {tensor.view(torch.float32).tolist()}")


if __name__ == "__main__":
    folder = sys.argv[1]
    multiprocessing.spawn(train, (folder,), nprocs=2)
    print(open(f"{folder}/0").read(), "->", open(f"{folder}/1").read())
PY
"$python" "$folder/job.py" "$folder" 2>/dev/null | expect 'torch.float32 [0.0, 1.0, 2.0, 3.0] -> torch.uint8 [0.0, 1.0, 2.0, 3.0]'
