#!/usr/bin/env bash
# tool: torch 2.13.0, flight recorder of the gloo backend
# finding: two threads that use one process group record two collectives with one `collective_seq_id`; the number before is missing
# last run: 2026-12-01
#
# Saving in a background thread with the default group does this. Who compares numbers between ranks then believes that a
# rank has joined a collective that it has not. Each record still has an `op_id` of its own.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import collections, json, os, sys, threading

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

os.environ["TORCH_FR_BUFFER_SIZE"] = "200000"
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)


def reduce():
    for _ in range(1500):
        dist.all_reduce(torch.ones(1))


for _ in range(30):  # a race: in each turn a few of 3,000
    threads = [threading.Thread(target=reduce) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    entries = json.loads(_dump_fr_trace_json())["entries"]
    times = collections.Counter(entry["collective_seq_id"] for entry in entries)
    if len(times) < len(entries):
        break
missing = set(range(min(times), max(times) + 1)) - times.keys()
before = all(times[number + 1] == 2 for number in missing)
print("numbers used twice", any(count == 2 for count in times.values()), "the number before each is missing", before, end=" ")
print("op_id unique", len({entry["op_id"] for entry in entries}) == len(entries))
PY
"$python" "$folder/job.py" "$folder" 2>/dev/null |
  expect 'numbers used twice True the number before each is missing True op_id unique True'
