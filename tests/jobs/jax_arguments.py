"""A process of a JAX job, with its number as an argument. Process 1 leaves at step 30.

usage: python jax_arguments.py FOLDER NUMBER PROCESSES PORT
"""

import os
import sys
from pathlib import Path

import jax
from jax.experimental import multihost_utils


def read_calibration(folder):
    os.mkfifo(folder / "calibration")
    (folder / "calibration").read_bytes()  # a FIFO without a writer


if __name__ == "__main__":
    folder, (number, processes, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)
    new = folder / f"new-{number}"
    new.write_text(str(os.getpid()))
    new.rename(folder / f"pid-{number}")
    for step in range(1_000_000):
        if (number, step) == (1, 30):
            read_calibration(folder)
        multihost_utils.sync_global_devices(f"step {step}")
