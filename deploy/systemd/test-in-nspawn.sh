#!/bin/sh
# Boots a real systemd in a container, installs this checkout there, and sees the service live through what it must:
# a hung job of another user, a daemon that freezes, a wrong configuration, a stop, an upgrade, an uninstallation.
#
#   apt-get install debootstrap systemd-container gcc python3-venv
#   deploy/systemd/test-in-nspawn.sh [FOLDER]
#
# FOLDER (default: a temporary one) keeps the Debian tree for the next run. What happens inside is
# test-in-nspawn-inside.sh. Nothing outside FOLDER is changed, and the machine has no network.
set -eu

fail() {
  echo "test-in-nspawn.sh: $*" >&2
  exit 2
}

[ "$(id -u)" = 0 ] || fail "must run as root: it makes a Debian tree and boots it"
for program in debootstrap systemd-nspawn cc python3 unshare; do
  command -v "$program" >/dev/null || fail "$program: not found; apt-get install debootstrap systemd-container gcc python3-venv"
done

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
if [ $# -gt 0 ]; then
  mkdir -p "$1"
  work=$(cd "$1" && pwd)
else
  work=$(mktemp -d /var/tmp/hangwatch-nspawn.XXXXXX)
  trap 'rm -rf "$work"' EXIT
fi
tree=$work/debian
rm -rf "$work/given" "$work/out"
mkdir -p "$work/given/wheels" "$work/out"

if [ ! -e "$tree/.complete" ]; then
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?this is no Debian}")
  echo "==> a Debian tree ($suite) in $tree"
  rm -rf "$tree"
  debootstrap --variant=minbase --include=systemd,systemd-sysv,python3,python3-venv,procps "$suite" "$tree" >"$work/debootstrap.log" ||
    fail "debootstrap failed, see $work/debootstrap.log"
  touch "$tree/.complete"
fi

version='import sys; print("%d.%d" % sys.version_info[:2])'
ours=$(python3 -c "$version") theirs=$(chroot "$tree" python3 -c "$version")
[ "$ours" = "$theirs" ] || fail "wheels are made by python3 $ours for python3 $theirs in the tree; put $theirs first in PATH"

echo "==> wheels, the fake driver, the checkout"
mkdir "$work/given/checkout"
for part in hangwatch deploy pyproject.toml README.md LICENSE; do cp -R "$checkout/$part" "$work/given/checkout"; done
cp -R "$work/given/checkout" "$work/given/source"
python3 -m pip --disable-pip-version-check --quiet --quiet wheel --wheel-dir "$work/given/wheels" "$work/given/source"
cc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o "$work/given/libnvidia-ml.so.1" "$checkout/tests/fake_nvml/nvml.c"
cat >"$work/given/inside.service" <<UNIT
[Unit]
After=basic.target
[Service]
Type=exec
StandardOutput=file:/out/log
StandardError=inherit
ExecStart=/bin/bash /given/checkout/deploy/systemd/test-in-nspawn-inside.sh
UNIT

echo "==> boot"
# systemd-nspawn wants /run on a file system of its own, and expects systemd outside; hence the private mount and the
# three options. CAP_SYSLOG, the clock and bpf (by which device rights work) are a host's, not a container's.
status=0
SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 timeout 600 unshare --mount sh -c '
  mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && exec systemd-nspawn "$@"' nspawn \
  --quiet --register=no --keep-unit --console=read-only --directory="$tree" --volatile=overlay --private-network \
  --capability=CAP_SYSLOG --system-call-filter="adjtimex clock_adjtime bpf" \
  --bind-ro="$work/given:/given" --bind="$work/out:/out" --bind=/dev/kmsg --bind=/dev/loop-control \
  --bind-ro="$work/given/inside.service:/etc/systemd/system/hangwatch-test.service" \
  --boot -- systemd.wants=hangwatch-test.service systemd.show_status=no >"$work/console.log" 2>&1 </dev/null || status=$?
cat "$work/out/log" 2>/dev/null || cat "$work/console.log"
[ "$status" = 0 ] || fail "failed with status $status"
echo "==> all green"
