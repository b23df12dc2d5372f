#!/usr/bin/env bash
# tool: torch 2.13.0, torchrun
# finding: SIGUSR1 ends torchrun at once, and its ranks run on without a parent
# last run: 2026-11-28
#
# torchrun handles SIGTERM, SIGINT, SIGHUP and SIGQUIT (TORCHELASTIC_SIGNALS_TO_HANDLE). Slurm's `--signal=USR1@60`, in
# use for checkpoints before the time limit, goes to every process of a step: where the ranks handle it, they train on
# as orphans of a job step whose launcher has failed.
. "$(dirname "$0")/lib.sh"
install torch==2.13.0 numpy==2.2.6
cat > "$folder/train.py" <<'PY'
import os, signal, sys, time

with open(f"{sys.argv[1]}/pid-{os.environ['RANK']}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".new"))
signal.signal(signal.SIGUSR1, lambda *_: print("checkpoint", flush=True))
time.sleep(100)
PY
"$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/train.py" "$folder" >/dev/null 2>&1 &
launcher=$!
for _ in $(seq 600); do
  [ -e "$folder/pid-0" ] && [ -e "$folder/pid-1" ] && break
  sleep 0.2
done
kill -USR1 "$launcher"
wait "$launcher" 2>/dev/null && status=0 || status=$?
sleep 2
alive=0
for pid in $(cat "$folder/pid-0") $(cat "$folder/pid-1"); do kill -0 "$pid" && alive=$((alive + 1)); done
kill $(cat "$folder/pid-0") $(cat "$folder/pid-1")
echo "exit code of torchrun $status, ranks alive $alive" | expect 'exit code of torchrun 138, ranks alive 2'
