"""A launcher like that of the demo, and beside its ranks a driver to which each of them connects, as actors do.

FOLDER/driver is the driver's Unix socket, FOLDER/driver-port has its TCP port. Each rank sends it `RANK TASK`.
"""

import os
import select
import socket
import sys
import time
from pathlib import Path

from hangwatch.tools.demo.launcher import main
from hangwatch.tools.demo.process_setup import set_identity
from tests.scenarios.long_waits import SERVER
from tests.simulated.launcher import Launcher

WORK_SECONDS = 12.0


def drive(folder: Path, ranks: int) -> None:
    """Accept all ranks. Compute, wait for rank 2, or send heartbeats for good, as they ask. Then answer them."""
    ends, task = {}, ""
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server((SERVER, 0)) as tcp:
        unix.bind(str(folder / "driver"))
        unix.listen()
        (folder / "driver-port").write_text(str(tcp.getsockname()[1]))
        while len(ends) < ranks:
            end, _ = select.select([unix, tcp], [], [])[0][0].accept()
            rank, task = end.recv(64).decode().split()
            ends[rank] = end
    if task == "waits":
        ends["2"].recv(1)
    while task == "pings":
        time.sleep(0.3)
        ends["0"].sendall(b".")
    if task == "computes":
        os.nice(19)
        work_end = time.monotonic() + WORK_SECONDS
        while time.monotonic() < work_end:
            pass
    for end in ends.values():
        end.sendall(b".")


if __name__ == "__main__":
    parent = os.getpid()
    if os.fork() == 0:
        set_identity("python", parent, Path(sys.argv[1]))
        drive(Path(sys.argv[1]), int(sys.argv[3]))
        os._exit(0)
    main(Launcher)
