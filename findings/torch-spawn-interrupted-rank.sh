#!/usr/bin/env bash
# tool: torch 2.13.0, torch.multiprocessing.spawn
# finding: a rank that ends by SIGINT counts as a rank that has succeeded: spawn() returns without an exception
# last run: 2026-11-28
#
# A rank that any other signal ends makes spawn() raise ProcessExitedException. After SIGINT (also sent to one rank alone)
# the launcher goes on as if all work was done.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/job.py" <<'PY'
import os, signal

import torch.multiprocessing as multiprocessing


def train(rank, number):
    if rank == 1:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            multiprocessing.spawn(train, (number,), nprocs=2)
            print(f"rank 1 ended by {number.name}: spawn returned")
        except multiprocessing.ProcessExitedException as error:
            print(f"rank 1 ended by {number.name}: {error}")
PY
"$python" "$folder/job.py" 2>/dev/null | expect 'rank 1 ended by SIGINT: spawn returned'
