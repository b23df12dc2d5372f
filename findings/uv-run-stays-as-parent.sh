#!/usr/bin/env bash
# tool: uv 0.9.13
# finding: `uv run` does not replace itself by the command: it stays as a parent with the whole environment of the rank
# last run: 2026-11-28
#
# With `RANK=3 uv run train.py`, two processes have RANK=3, and the one on top never uses a GPU. A monitor that takes the
# topmost process with a rank number for the rank watches a process that only waits.
. "$(dirname "$0")/lib.sh"
install uv==0.9.13
cat > "$folder/rank.py" <<'PY'
import os
from pathlib import Path

parent = Path(f"/proc/{os.getppid()}")
name = Path(parent.joinpath("cmdline").read_text().split("\0")[0]).name
ranks = [pair for pair in parent.joinpath("environ").read_text().split("\0") if pair.startswith("RANK=")]
print(f"parent {name} with {ranks[0] if ranks else 'no RANK'}")
PY
RANK=3 "$folder/venv/bin/uv" run --no-project --python "$python" "$folder/rank.py" 2>/dev/null | expect 'parent uv with RANK=3'
