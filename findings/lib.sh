# Sourced by each finding: a temporary folder that is removed at the end, and the three steps of a finding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$folder/venv/bin/python

# install PACKAGE==VERSION...: into an environment of its own.
install() {
  python3 -m venv "$folder/venv"
  "$python" -m pip --disable-pip-version-check --quiet install "$@" 2>"$folder/pip.txt" || { cat "$folder/pip.txt"; exit 2; }
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
