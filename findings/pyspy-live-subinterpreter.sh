#!/usr/bin/env bash
# tool: py-spy 0.4.3 on CPython 3.9 to 3.12
# finding: while a sub-interpreter lives, py-spy lists the threads of the newest interpreter only, and exits with 0
# last run: 2026-11-28
#
# The main thread of the main interpreter is missing. A reader that takes the first thread for the main one reports the
# stack of another program part. (From 3.13 on the module has another name; the script uses what there is.)
. "$(dirname "$0")/lib.sh"
install py-spy==0.4.3
start_subinterpreter
for _ in 1 2 3 4 5 6 7 8 9 10; do # the other thread begins within a moment
  "$folder/venv/bin/py-spy" dump --pid "$target" > "$folder/dump.txt" && status=0 || status=$?
  grep -q '<string>:2' "$folder/dump.txt" && break
  sleep 0.2
done
stop
{ cat "$folder/dump.txt"; grep -q wait_in_main_thread "$folder/dump.txt" || echo "main thread missing, exit code $status"; } |
  expect 'main thread missing, exit code 0'
