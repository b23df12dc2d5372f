#!/usr/bin/env bash
# tool: torch 2.13.0, flight recorder of the gloo backend
# finding: send, recv and monitored_barrier leave no record; reduce_scatter is recorded as all_reduce, gather_object as
#          all_gather and gather; the state of a finished operation stays "scheduled"
# last run: 2026-11-28
#
# The number op_id of the first record shows that an earlier operation was counted and left none. Only the field
# `retired` tells that an operation has ended.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import json, os, socket

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._C._distributed_c10d import _dump_fr_trace_json


def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_FR_BUFFER_SIZE="200")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    values = torch.ones(4)
    dist.send(values, 1) if rank == 0 else dist.recv(values, 0)
    dist.monitored_barrier()
    dist.reduce_scatter_tensor(torch.zeros(2), values)
    dist.gather_object({"rank": rank}, [None, None] if rank == 0 else None)
    if rank == 0:
        for entry in json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))["entries"]:
            print(entry["profiling_name"], "op_id", entry["op_id"], entry["state"], "retired", entry["retired"], end="; ")
        print()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(train, (port,), nprocs=2)
PY
"$python" "$folder/job.py" 2>/dev/null |
  expect 'gloo:all_reduce op_id 4 scheduled retired True; gloo:all_gather op_id 5 scheduled retired True; gloo:gather op_id 6'
