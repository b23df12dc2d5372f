#!/usr/bin/env bash
# tool: torch 2.13.0, flight recorder of the gloo backend
# finding: a collective that timed out is counted as completed, and its record becomes `retired` like that of a success
# last run: 2026-11-28
#
# The process still lives and may go on after the exception. Its dump then says that everything it has enqueued is done,
# although its peer never joined. A rule "behind is what has completed less" sees no rank behind.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import datetime, json, os, sys, time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._C._distributed_c10d import _dump_fr_trace_json


def train(rank, folder):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    seconds = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=seconds)
    dist.barrier()
    if rank == 1:  # never joins the all_reduce of rank 0
        while not os.path.exists(f"{folder}/done"):
            time.sleep(0.1)
    else:
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            print("all_reduce raised RuntimeError;", end=" ")
        for _ in range(100):  # the thread that completes records is a moment later
            dump = json.loads(_dump_fr_trace_json())
            if dump["entries"][-1]["retired"]:
                break
            time.sleep(0.1)
        status = dump["pg_status"]["0"]
        print("retired", dump["entries"][-1]["retired"], "enqueued", status["last_enqueued_collective"], end=" ")
        print("completed", status["last_completed_collective"], flush=True)
        open(f"{folder}/done", "w").close()
    os._exit(0)


if __name__ == "__main__":
    multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)
PY
"$python" "$folder/job.py" "$folder" 2>/dev/null |
  expect 'all_reduce raised RuntimeError; retired True enqueued 2 completed 2'
