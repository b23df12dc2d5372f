#!/usr/bin/env bash
# tool: deepspeed 0.19.8, its launcher
# finding: the line "[...] exits with return code" names the rank that was started last, whichever rank failed
# last run: 2026-11-30
#
# sigkill_handler of deepspeed/launcher/launch.py prints `cmd`, a variable of the loop that started the processes. So
# --local_rank in that line is always the highest of the node. Only the return code is that of the rank that failed.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8
cat > "$folder/train.py" <<'PY'
import os, sys, time

if os.environ["LOCAL_RANK"] == "0":
    sys.exit(7)
time.sleep(100)
PY
world=$("$python" -c 'import base64, json; print(base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode())')
PATH="$folder/venv/bin:$PATH" DS_ACCELERATOR=cpu "$python" -m deepspeed.launcher.launch --world_info="$world" \
  --master_addr=127.0.0.1 --master_port=29731 "$folder/train.py" >"$folder/log" 2>&1 || true
line=$(grep 'exits with return code' "$folder/log" || tail -5 "$folder/log")
echo "rank 0 ends with 7; the launcher prints: $line" | sed "s#$folder/##g" |
  expect "'--local_rank=1'] exits with return code = 7"
