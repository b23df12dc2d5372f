#!/usr/bin/env bash
# tool: torch 2.13.0, monitored_barrier of a process group
# finding: the message names members of the group by their number in it, and calls them ranks: "Rank 1" may be rank 3
# last run: 2026-11-30
#
# In the group of ranks 2 and 3, rank 3 is late. The exception of rank 2 begins with "[Rank 0]" and accuses "Rank 1", of
# a group that it does not name. The prefix in front of an uncaught exception, "[rank2]:", is the rank of the job: one
# line then has two ranks for one process. With TORCH_DISTRIBUTED_DEBUG=DETAIL, every collective can end in this message.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import datetime, os, time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
if rank == 3:
    time.sleep(100)
dist.monitored_barrier(groups[rank // 2], timeout=datetime.timedelta(seconds=3))
time.sleep(100)
PY
"$folder/venv/bin/torchrun" --nproc-per-node 4 "$folder/job.py" >"$folder/log" 2>&1 || true
grep -m1 'RuntimeError: .*failed to pass' "$folder/log" | expect '[rank2]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms'
