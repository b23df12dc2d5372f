#!/usr/bin/env bash
# tool: torch 2.13.0, DataLoader(multiprocessing_context="forkserver"), CPython's default from 3.14 on
# finding: after SIGKILL of the training process its fork server, its resource tracker and loader workers live on
# last run: 2026-11-28
#
# Under "fork" and "spawn" nothing is left. Under "forkserver" processes with RANK of the dead rank in their environment
# remain: who looks for a rank by its environment finds one that is none. The script waits 12 s, since workers look every
# 5 s for their parent.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/rank.py" <<'PY'
import sys, time

from torch.utils.data import DataLoader

if __name__ == "__main__":
    batches = iter(DataLoader(range(100000), num_workers=2, multiprocessing_context=sys.argv[1]))
    next(batches)
    print("ready", flush=True)
    time.sleep(120)
PY
cat > "$folder/look.py" <<'PY'
import os, subprocess, sys, time


def marked(mark):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as environ, open(f"/proc/{pid}/stat") as stat:
                if mark in environ.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    yield int(pid)
        except OSError:
            pass


for context in ("fork", "spawn", "forkserver"):
    mark = f"FINDING={os.getpid()}-{context}."
    environment = dict(os.environ, RANK="3", FINDING=mark.split("=")[1])
    rank = subprocess.Popen([sys.executable, sys.argv[1], context], stdout=subprocess.PIPE, env=environment)
    rank.stdout.readline()
    rank.kill()
    rank.wait()
    time.sleep(12)
    remaining = list(marked(mark))
    print(f"{context}: {'processes live on' if remaining else 'nothing is left'}")
    for pid in remaining:
        os.kill(pid, 9)
PY
"$python" "$folder/look.py" "$folder/rank.py" 2>/dev/null | expect 'forkserver: processes live on'
