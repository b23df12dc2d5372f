#!/usr/bin/env bash
# tool: torch 2.13.0, its analyser torchfrtrace on dumps of its own gloo backend
# finding: torchfrtrace ends with KeyError on dumps of gloo: their `pg_config` holds one group, without a name
# last run: 2026-11-28
#
# gloo's recorder is on by default since torch 2.11 and writes the same format, so a folder of dumps looks analysable.
# A reader needs another source for the members of a group: the ranks that have records of it.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import os, pickle, sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._C._distributed_c10d import _dump_fr_trace


def train(rank, folder):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    dump = _dump_fr_trace()
    with open(f"{folder}/dumps/rank_{rank}", "wb") as file:
        file.write(dump)
    if rank == 0:
        print("pg_config", pickle.loads(dump)["pg_config"], flush=True)
    dist.barrier()


if __name__ == "__main__":
    multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)
PY
mkdir "$folder/dumps"
{
  "$python" "$folder/job.py" "$folder" 2>/dev/null
  "$folder/venv/bin/torchfrtrace" "$folder/dumps" --prefix rank_ 2>&1 | tail -n 1 || true
} | expect "KeyError: ('0', "
