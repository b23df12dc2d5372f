# Sourced by each finding: a temporary folder that is removed at the end, and the steps of a finding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$folder/venv/bin/python

# install PACKAGE==VERSION...: into an environment of its own.
install() {
  python3 -m venv "$folder/venv"
  "$python" -m pip --disable-pip-version-check --quiet install "$@" 2>"$folder/pip.txt" || { cat "$folder/pip.txt"; exit 2; }
}

# start FILE: runs a Python file in a process group of its own until it has printed a line; its pid is in $target.
start() {
  mkfifo "$folder/ready"
  setsid "$python" "$1" > "$folder/ready" &
  target=$!
  read -r _ < "$folder/ready"
}

# stop: ends what start has started, with its children.
stop() {
  kill -- "-$target"
}

# start_subinterpreter: a process of two interpreters; a thread runs frames of the second one.
start_subinterpreter() {
  cat > "$folder/target.py" <<'PY'
import threading, time

try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string

inner = interpreters.create()
threading.Thread(target=run, args=(inner, "import time\ntime.sleep(60)"), daemon=True).start()


def wait_in_main_thread():
    print("ready", flush=True)
    time.sleep(60)


wait_in_main_thread()
PY
  start "$folder/target.py"
}

# expect TEXT: prints what standard input holds; ends with 1 unless TEXT stands in it.
expect() {
  local seen
  seen=$(cat)
  printf '%s\n' "$seen"
  case $seen in
    *"$1"*) echo "as described" ;;
    *) echo "changed: this was not printed: $1"; exit 1 ;;
  esac
}
