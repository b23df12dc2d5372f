#!/bin/sh
# Boots a real systemd in a container, installs this checkout there, and tests that the service survives:
# a hung job of another user, a daemon that freezes, a wrong configuration, a stop, an upgrade, an uninstallation.
#
#   apt-get install debootstrap systemd-container gcc python3-venv
#   deploy/systemd/test-in-nspawn.sh [FOLDER]
#
# FOLDER (default: a temporary one) keeps the Debian tree for the next run. Inside the machine,
# test-in-nspawn-inside.sh runs. Nothing outside FOLDER is changed, and the machine has no network.
set -eu
. "$(dirname "$0")/../debian-machine.sh"

start_work "${1-}"
make_tree debian
give_hangwatch
run_machine debian 600 deploy/systemd/test-in-nspawn-inside.sh
echo "==> all green"
