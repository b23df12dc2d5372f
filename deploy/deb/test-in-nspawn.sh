#!/bin/sh
# Boots a real systemd in a container without a network and tests the whole life of the Debian package there: installed
# (with and without a policy-rc.d that forbids services), upgraded, removed, purged, and in conflict with install.sh.
#
#   apt-get install debootstrap systemd-container gcc python3-venv
#   make deb && deploy/deb/test-in-nspawn.sh dist/hangwatch_VERSION_ARCHITECTURE.deb [FOLDER]
#
# FOLDER (default: a temporary one) keeps the Debian tree for the next run.
set -eu
. "$(dirname "$0")/../debian-machine.sh"

[ -f "${1-}" ] || fail "${1:-no package}: no such file. Make it with: make deb"
start_work "${2-}"
make_tree debian
mkdir -p "$work/given/checkout"
cp -R "$checkout/deploy" "$work/given/checkout"
cp "$1" "$work/given/hangwatch.deb"
run_machine debian 300 deploy/deb/test-in-nspawn-inside.sh
echo "==> all green"
