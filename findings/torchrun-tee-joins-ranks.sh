#!/usr/bin/env bash
# tool: torch 2.13.0, torchrun --tee
# finding: a progress bar ends each of its lines with the prefix of another rank, whose text follows in the same line
# last run: 2026-11-30
#
# A progress bar writes "\r" and its state, without a line end. torchrun follows the file of a rank in text mode, in
# which "\r" ends a line, and writes its prefix before the next piece. What a second rank writes then goes on in the
# line of the first one. So the rank at the beginning of a line is not the rank of its whole text, and the first line
# of a traceback may be the end of another rank's line. The file of a rank holds one line of the bar.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/train.py" <<'PY'
import os, sys, time

bar = os.fdopen(2, "w")
for step in range(4):
    bar.write(f"\rstep {step} of 4")
    bar.flush()
    time.sleep(0.5)
PY
"$folder/venv/bin/torchrun" --nproc-per-node 2 --tee 3 --log-dir "$folder/logs" "$folder/train.py" >"$folder/log" 2>&1
joined=$(grep -cE '^\[default[01]\]:step [0-3] of 4\[default[01]\]:' "$folder/log" || true)
cat "$folder"/logs/*/attempt_0/0/stderr.log | wc -l | xargs echo "lines in the file of rank 0:" >"$folder/lines"
echo "$(cat "$folder/lines"), lines of two ranks are $([ "$joined" -ge 3 ] && echo many || echo "few: $joined")" |
  expect 'lines in the file of rank 0: 0, lines of two ranks are many'
