# Sourced by the scripts in the machine that debian-machine.sh boots. Each step prints its description. The first step
# that fails ends the machine with status 1.
set -uo pipefail

finish() {
  systemctl exit "$1"
  sleep infinity
}

fail() {
  echo "FAILED: $*"
  systemctl status hangwatch --no-pager --lines=0
  journalctl --unit=hangwatch --no-pager --lines=60 --output=short-precise
  finish 1
}

# A step: its description, and the command that must succeed.
see() {
  local what=$1
  shift
  "$@" || fail "$what"
  printf '%4d s  ok: %s\n' "$SECONDS" "$what"
}

within() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.2
  done
}

property() { systemctl show hangwatch --value --property="$1"; }
is() { [ "$(property "$1")" = "$2" ]; }
logged() { journalctl --unit=hangwatch --no-pager --output=cat | grep -q -- "$1"; }
metric() { python3 -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:9836/metrics", timeout=2).read().decode())' 2>/dev/null | grep -Eq "$1"; }
gone() { local path; for path in "$@"; do [ ! -e "$path" ] || return 1; done; }
