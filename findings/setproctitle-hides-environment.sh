#!/usr/bin/env bash
# tool: setproctitle 1.3.7 beside psutil 7.2.2
# finding: after setproctitle, psutil's environ() is an empty dictionary, without an error, for a process that has one
# last run: 2026-11-28
#
# The long title is written over the memory of /proc/PID/environ. RANK and WORLD_SIZE of a training process (titles are
# usual there: Ray, vLLM) are then not in environ(), and name() and cmdline() are parts of the title; exe() is right.
. "$(dirname "$0")/lib.sh"
install setproctitle==1.3.7 psutil==7.2.2
"$python" - <<'PY' | expect 'environ {} name trainer'
import os, subprocess, sys

import psutil

program = """
import setproctitle, sys
setproctitle.setproctitle("trainer: rank 3 of 8, step 1000, loss 0.25 " * 8)
print("ready", flush=True)
sys.stdin.read()
"""
environment = {"PATH": os.environ["PATH"], "RANK": "3", "WORLD_SIZE": "8"}
target = subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
target.stdout.readline()
process = psutil.Process(target.pid)
print("environ", process.environ(), "name", process.name(), "cmdline", process.cmdline()[:3])
target.stdin.close()
target.wait()
PY
