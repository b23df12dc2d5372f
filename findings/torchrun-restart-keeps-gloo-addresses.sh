#!/usr/bin/env bash
# tool: torch 2.13.0, torchrun, gloo
# finding: after a restart by torchrun, three ranks of gloo connect to addresses of the previous attempt; none joins
# last run: 2026-12-01
#
# torchrun's agent keeps its store over restarts (TORCHELASTIC_USE_AGENT_STORE), and init_process_group adds no prefix for
# an attempt. So a rank that is ahead of another one reads the address that the dead process has left under the same key.
# "Gloo connectFullMesh failed ... Connection refused" in the last attempt is then no sign of a network problem. Two ranks
# recover in most runs; three end with that error or wait.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/train.py" <<'PY'
import os, sys, time

import torch.distributed as dist

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 1 and rank == 1:
    time.sleep(5)  # any difference between two starts
dist.init_process_group("gloo")
print(f"attempt {attempt}: rank {rank} has joined", flush=True)
if attempt == 0:
    dist.barrier()
    os._exit(3)
PY
timeout 60 "$folder/venv/bin/torchrun" --nproc-per-node 3 --max-restarts 1 "$folder/train.py" >"$folder/log" 2>&1 || true
first=$(grep -c 'attempt 0: rank . has joined' "$folder/log")
second=$(grep -c 'attempt 1: rank . has joined' "$folder/log" || true)
echo "joined in the first attempt $first, in the second $second within a minute" |
  expect 'joined in the first attempt 3, in the second 0 within a minute'
