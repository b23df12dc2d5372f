#!/usr/bin/env bash
# tool: jax 0.10.2 (CPU)
# finding: a process that has called jax.distributed.initialize() runs on after SIGTERM
# last run: 2026-11-28
#
# The preemption service catches the signal for good, also in a program that never asks for preemption notices. A
# scheduler that sends SIGTERM waits for its whole grace period.
. "$(dirname "$0")/lib.sh"
install "jax[cpu]==0.10.2"
"$python" - <<'PY' 2>&1 | expect 'still running after SIGTERM'
import os, signal, socket, time

import jax

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(3)
print("still running after SIGTERM", flush=True)
PY
