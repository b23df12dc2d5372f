#!/usr/bin/env bash
# tool: py-spy 0.4.3
# finding: `py-spy dump --json --subprocesses` prints the parent alone, and ends with 0; without --json it prints all
# last run: 2026-11-28
#
# A script that collects the loader workers of a rank in this way believes that there are none.
. "$(dirname "$0")/lib.sh"
install py-spy==0.4.3
cat > "$folder/target.py" <<'PY'
import multiprocessing, time


def work(is_ready):
    is_ready.set()
    time.sleep(60)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    events = [context.Event() for _ in range(2)]
    for event in events:
        context.Process(target=work, args=(event,), daemon=True).start()
    for event in events:
        event.wait()
    print("ready", flush=True)
    time.sleep(60)
PY
start "$folder/target.py"
text=$("$folder/venv/bin/py-spy" dump --subprocesses --pid "$target" | grep -c '^Process ')
json=$("$folder/venv/bin/py-spy" dump --json --subprocesses --pid "$target" |
  "$python" -c 'import json, sys; print(len({thread["pid"] for thread in json.load(sys.stdin)}))') && status=0 || status=$?
stop
[ "$text" -gt 1 ] && more="more than one process" || more="$text process"
echo "text: $more; json: $json process, exit code $status" |
  expect 'text: more than one process; json: 1 process, exit code 0'
