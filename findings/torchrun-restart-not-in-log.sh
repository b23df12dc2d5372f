#!/usr/bin/env bash
# tool: torch 2.13.0, torchrun
# finding: at the default log level torchrun does not say that it restarted the job, and its summary omits the first try
# last run: 2026-11-29
#
# With --max-restarts, the output of all attempts stands in one log. The line "will restart worker group" is of level
# INFO, which is not shown. The summary at the end lists the processes of the last attempt only. What remains of a
# restart are two lines "failed (exitcode: ...)" with different pids, of which the summary lists one.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/train.py" <<'PY'
import os, sys, time

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if attempt == rank:
    sys.exit(3 + int(rank))
time.sleep(100)
PY
"$folder/venv/bin/torchrun" --nproc-per-node 2 --max-restarts 1 "$folder/train.py" >"$folder/log" 2>&1 || true
restarts=$(grep -c -i 'restart' "$folder/log" || true)
reports=$(grep -c 'failed (exitcode: ' "$folder/log")
listed=$(grep '^  exitcode' "$folder/log" | grep -c ': 3 ' || true)
echo "lines with the word restart $restarts, failures reported $reports, of the first attempt listed $listed" |
  expect 'lines with the word restart 0, failures reported 2, of the first attempt listed 0'
