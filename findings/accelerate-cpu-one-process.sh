#!/usr/bin/env bash
# tool: accelerate 1.15.0
# finding: `accelerate launch --cpu --num_processes 3` starts one process, without a rank, and says nothing about it
# last run: 2026-11-30
#
# The option counts only with GPUs, or with a configuration file for several CPU processes. The process gets MASTER_ADDR
# and MASTER_PORT, and neither RANK nor WORLD_SIZE. So MASTER_ADDR in an environment does not prove a job of several
# ranks, and a trial run on CPUs does not show how the job hangs.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
cat > "$folder/train.py" <<'PY'
import os

names = ("MASTER_ADDR", "RANK", "WORLD_SIZE")
print("process with", ", ".join(name for name in names if name in os.environ), flush=True)
PY
HF_HOME="$folder/home" "$folder/venv/bin/accelerate" launch --cpu --num_processes 3 --num_machines 1 --mixed_precision no \
  --dynamo_backend no "$folder/train.py" >"$folder/log" 2>&1
cat "$folder/log"
echo "processes: $(grep -c '^process with' "$folder/log"), lines about num_processes: $(grep -c num_processes "$folder/log" || true)" |
  expect 'processes: 1, lines about num_processes: 0'
grep '^process' "$folder/log" | expect 'process with MASTER_ADDR'
