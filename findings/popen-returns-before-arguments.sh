#!/usr/bin/env bash
# tool: CPython 3.10 to 3.14, subprocess.Popen beside /proc of Linux
# finding: after Popen has returned, /proc/PID/cmdline and environ of the child can still be empty
# last run: 2026-11-28
#
# Popen waits until execve(2) closes a pipe. The kernel closes it before it sets the places of the new arguments and
# environment. A monitor that reads a process once, when it is new, must read an empty one again.
. "$(dirname "$0")/lib.sh"
cat > "$folder/start.py" <<'PY'
import subprocess
from pathlib import Path

empty_cmdline = empty_environ = 0
for _ in range(1000):
    child = subprocess.Popen(["sleep", "60"])
    empty_cmdline += not Path(f"/proc/{child.pid}/cmdline").read_bytes()
    empty_environ += not Path(f"/proc/{child.pid}/environ").read_bytes()
    child.kill()
    child.wait()
print(f"of 1000 starts: {empty_cmdline} without arguments, {empty_environ} without an environment")
print("some are empty" if empty_cmdline else "none is empty")
PY
python3 "$folder/start.py" | expect 'some are empty'
