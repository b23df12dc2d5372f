# Sourced by scripts that test hangwatch in a Debian machine: a container with a real systemd, without a network.
# Sets `checkout` and `work`. Nothing outside the work folder is changed.
#
#   start_work FOLDER                                  FOLDER keeps the Debian tree for the next run; '': a temporary folder
#   make_tree NAME PACKAGE...                          makes a Debian tree with these packages in $work/NAME
#   give_hangwatch                                     puts wheels, the fake driver and the checkout into $work/given
#   run_machine NAME SECONDS SCRIPT [NSPAWN OPTION...] boots the tree; /given/checkout/SCRIPT runs there as a service, prints to $work/out/log
#                                                      and ends the machine by `systemctl exit STATUS`

checkout=$(cd "$(dirname "$0")" && git rev-parse --show-toplevel)
program=$(basename "$0")

fail() {
  echo "$program: $*" >&2
  exit 2
}

start_work() {
  [ "$(id -u)" = 0 ] || fail "must run as root: it makes a Debian tree and boots it"
  for needed in debootstrap systemd-nspawn cc python3 unshare; do
    command -v "$needed" >/dev/null || fail "$needed: not found; apt-get install debootstrap systemd-container gcc python3-venv"
  done
  if [ -n "$1" ]; then
    mkdir -p "$1"
    work=$(cd "$1" && pwd)
  else
    work=$(mktemp -d /var/tmp/hangwatch-nspawn.XXXXXX)
    trap 'rm -rf "$work"' EXIT
  fi
  rm -rf "$work/given" "$work/out"
  mkdir -p "$work/given/wheels" "$work/out"
}

make_tree() {
  tree=$work/$1
  shift
  [ -e "$tree/.complete" ] && return
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?this is no Debian}")
  echo "==> a Debian tree ($suite) in $tree"
  rm -rf "$tree"
  # No service starts while the tree is made. The services start at boot.
  debootstrap --variant=minbase --include="$(echo "systemd systemd-sysv python3 python3-venv procps $*" | tr ' ' ,)" \
    "$suite" "$tree" >"$work/debootstrap.log" || fail "debootstrap failed, see $work/debootstrap.log"
  touch "$tree/.complete"
}

give_hangwatch() {
  version='import sys; print("%d.%d" % sys.version_info[:2])'
  ours=$(python3 -c "$version") theirs=$(chroot "$tree" python3 -c "$version")
  [ "$ours" = "$theirs" ] || fail "wheels are made by python3 $ours for python3 $theirs in the tree; put $theirs first in PATH"
  echo "==> wheels, the fake driver, the checkout"
  mkdir "$work/given/checkout"
  (cd "$checkout" && git ls-files -z --cached --others --exclude-standard | grep -zv '^tests/' | xargs -0 cp --archive --parents -t "$work/given/checkout")
  cp -R "$work/given/checkout" "$work/given/source"
  python3 -m pip --disable-pip-version-check --quiet --quiet wheel --wheel-dir "$work/given/wheels" "$work/given/source"
  cc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o "$work/given/libnvidia-ml.so.1" "$checkout/tests/fake_nvml/nvml.c"
}

run_machine() {
  booted_tree=$work/$1 seconds=$2 script=$3
  shift 3
  cat >"$work/given/inside.service" <<UNIT
[Unit]
After=basic.target
[Service]
Type=exec
StandardOutput=file:/out/log
StandardError=inherit
ExecStart=/given/checkout/$script
UNIT
  echo "==> boot"
  # systemd-nspawn needs a separate file system at /run and expects systemd outside: hence the private mount and three of
  # the options. A container has no CAP_SYSLOG, no clock calls and no bpf (needed for device rights): the host gives them.
  status=0
  SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 timeout "$seconds" unshare --mount sh -c '
    mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && exec systemd-nspawn "$@"' nspawn \
    --quiet --register=no --keep-unit --console=read-only --directory="$booted_tree" --volatile=overlay --private-network \
    --capability=CAP_SYSLOG --system-call-filter="adjtimex clock_adjtime bpf" \
    --bind-ro="$work/given:/given" --bind="$work/out:/out" --bind=/dev/kmsg --bind=/dev/loop-control \
    --bind-ro="$work/given/inside.service:/etc/systemd/system/hangwatch-test.service" "$@" \
    --boot -- systemd.wants=hangwatch-test.service systemd.show_status=no >"$work/console.log" 2>&1 </dev/null || status=$?
  cat "$work/out/log" 2>/dev/null || cat "$work/console.log"
  [ "$status" = 0 ] || fail "failed with status $status"
}
