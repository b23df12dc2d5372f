#!/usr/bin/env bash
# tool: pystack 1.7.2 on CPython 3.11 and 3.12
# finding: a thread state counts for the thread that made it: frames that another thread runs in a sub-interpreter are
#          printed below the heading of the thread that created the sub-interpreter
# last run: 2026-11-28
#
# The main thread seems to run two stacks at once, "In the main interpreter" and "In interpreter 1". The thread that
# really runs the inner code shows only the frames from which it entered it.
. "$(dirname "$0")/lib.sh"
install pystack==1.7.2
start_subinterpreter
for _ in 1 2 3 4 5 6 7 8 9 10; do # the other thread begins within a moment
  "$folder/venv/bin/pystack" remote "$target" > "$folder/stacks.txt" 2>/dev/null || true
  grep -q '"<string>"' "$folder/stacks.txt" && break
  sleep 0.2
done
stop
awk -v main="$target" '
  /^Traceback for thread/ { under = $4 == main ? "main thread" : "other thread" }
  /wait_in_main_thread/ && !seen++ { printf "own frames under %s; ", under }
  /"<string>", line 2/ { printf "frames of the sub-interpreter under %s\n", under }
' "$folder/stacks.txt" | expect 'own frames under main thread; frames of the sub-interpreter under main thread'
