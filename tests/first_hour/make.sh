#!/bin/sh
# Boots a Debian machine and plays the first hour with hangwatch in it. The transcript is FOLDER/first-hour.md, the results are
# a table of docs/benchmarks.md.
#
#   apt-get install debootstrap systemd-container gcc python3-venv
#   tests/first_hour/make.sh [FOLDER]
#
# FOLDER (default: a temporary one) keeps the Debian tree and the wheels of torch for the next run. What happens inside is
# inside.py. Nothing outside FOLDER but docs/benchmarks.md is changed, and the machine has no network.
set -eu
. "$(dirname "$0")/../../deploy/debian-machine.sh"

start_work "${1-}"
make_tree debian-prometheus prometheus prometheus-alertmanager sudo
give_hangwatch
if [ ! -d "$work/torch" ]; then
  echo "==> wheels of torch, for the job"
  python3 -m pip --disable-pip-version-check --quiet download --dest "$work/torch.part" torch==2.13.0 numpy
  mv "$work/torch.part" "$work/torch"
fi
mkdir "$work/given/torch" "$work/given/checkout/tests"
cp -R "$checkout/tests/first_hour" "$work/given/checkout/tests"
ln "$work"/torch/*.whl "$work/given/torch/"
run_machine debian-prometheus 1800 tests/first_hour/inside.py --hostname=gpu-07
mv "$work/out/first-hour.md" "$work/first-hour.md"
echo "==> $work/first-hour.md"
(cd "$checkout" && .venv/bin/python -m benchmarks.results first-hour "make first-hour" < "$work/out/first-hour.table")
