#!/usr/bin/env bash
# tool: py-spy 0.4.3 on CPython 3.8 to 3.10 (python3.10, 3.9 or 3.8 in PATH)
# finding: `py-spy dump --nonblocking` reports a sleeping thread as active there, without its os_thread_id; without the
#   option, and from Python 3.11 on, it is idle
# last run: 2026-12-01
#
# A monitor that must not pause a process, and takes "idle" for a wait, believes that every thread of it works.
. "$(dirname "$0")/lib.sh"
install py-spy==0.4.3
for old in python3.10 python3.9 python3.8 none; do # a name in PATH can be that of a tool for versions not installed
  "$old" -c '' 2>/dev/null && break
done
[ "$old" = none ] && { echo "needs python3.10, python3.9 or python3.8"; exit 2; }
cat > "$folder/target.py" <<'PY'
import threading, time

threading.Thread(target=time.sleep, args=(60,), name="sleeper", daemon=True).start()
print("ready", flush=True)
while True:
    sum(range(1000))
PY
python=$old
start "$folder/target.py"
for option in --nonblocking ""; do
  "$folder/venv/bin/py-spy" dump $option --json --pid "$target" |
    "$folder/venv/bin/python" -c 'import json, sys
for thread in json.load(sys.stdin):
    if thread["thread_name"] == "sleeper":
        numbered = "unknown" if thread["os_thread_id"] is None else "known"
        print("active" if thread["active"] else "idle", "os_thread_id", numbered, end="; ")'
done > "$folder/seen.txt"
stop
expect 'active os_thread_id unknown; idle os_thread_id known' < "$folder/seen.txt"
