"""The launcher of the simulated job: starts the ranks as torchrun's agent does, and serves their collectives.

`demo.simulated_node` starts it and sends one line per order on standard input: `RANK ORDER`. The launcher writes one
line per event on standard output: `ready PID...` when all ranks have joined, `given` when a rank has received an
order. The end of standard input ends the job. Like the ranks, it uses only the standard library.
"""

import ctypes
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hangwatch.tools.demo.process_setup import set_identity
from hangwatch.tools.demo.unix_collectives import LONGEST_MESSAGE_BYTES

_PR_SET_CHILD_SUBREAPER = 36


class Launcher:
    """The launcher of the ranks of this node. It also completes their collectives and passes orders to them.

    `arrived` are the ranks that have called the current collective, `orders` the next order for each rank.
    """

    worker = "hangwatch.tools.demo.worker"

    def __init__(self, folder: str, run_id: str, ranks: int) -> None:
        self.folder = folder
        self.run_id = run_id
        self.ranks = ranks
        self.pids: dict[int, int] = {}
        self.peers: dict[int, socket.socket] = {}
        self.arrived: dict[int, tuple[str, float]] = {}
        self.orders: dict[int, str] = {}
        self.readers = selectors.DefaultSelector()
        self.readers.register(sys.stdin.fileno(), selectors.EVENT_READ, self.read_orders)
        self.unread = ""
        self.ended = False

    def start(self) -> None:
        """Start all ranks of this node."""
        for local_rank in range(self.ranks):
            self.start_rank(local_rank)

    def start_rank(self, local_rank: int) -> None:
        """Start one rank."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.set_inheritable(True)
        command = [sys.executable, "-SE", "-m", self.worker, self.folder, str(theirs.fileno())]
        environ = os.environ | self.torchrun_environ(local_rank)
        self.pids[local_rank] = os.posix_spawn(sys.executable, command, environ)
        theirs.close()
        self.peers[local_rank] = ours
        self.readers.register(ours, selectors.EVENT_READ, partial(self.read_message, local_rank))

    def torchrun_environ(self, local_rank: int) -> dict[str, str]:
        """Return the environment that torchrun's agent gives to a rank of the first node."""
        numbers = {
            "RANK": local_rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": 0,
            "ROLE_RANK": local_rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_WORLD_SIZE": self.ranks,
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            "OMP_NUM_THREADS": 1,
        }
        names = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": self.run_id}
        return names | {name: str(number) for name, number in numbers.items()}

    def serve(self) -> None:
        """Complete collectives and obey orders until standard input ends."""
        while not self.ended:
            for key, _ in self.readers.select():
                read: Callable[[], None] = key.data
                read()

    def read_orders(self) -> None:
        """Read the available orders from standard input and obey them."""
        text = os.read(sys.stdin.fileno(), LONGEST_MESSAGE_BYTES).decode()
        self.ended = not text
        *lines, self.unread = (self.unread + text).split("\n")
        for line in lines:
            self.obey(line)

    def obey(self, line: str) -> None:
        """Obey one order, `RANK ORDER`. The rank receives it with the result of the next collective."""
        rank, _, order = line.partition(" ")
        self.orders[int(rank)] = order

    def read_message(self, local_rank: int) -> None:
        """Handle a message of a rank. An empty message means that the rank has ended."""
        message = self.peers[local_rank].recv(LONGEST_MESSAGE_BYTES).decode()
        if message:
            operation, _, value = message.partition(" ")
            self.arrived[local_rank] = (operation, float(value))
            self.complete_collective()
            return
        # Like torchrun, reap it and wait for the other ranks, because it ended without an error.
        self.readers.unregister(self.peers[local_rank])
        self.peers.pop(local_rank).close()
        os.waitpid(self.pids[local_rank], 0)
        self.ended = not self.peers

    def complete_collective(self) -> None:
        """If all ranks of the job have called the same collective, send them the result."""
        operations = {operation for operation, _ in self.arrived.values()}
        if len(self.arrived) == self.ranks and len(operations) == 1:
            total = sum(value for _, value in self.arrived.values())
            self.arrived.clear()
            self.send_results(operations.pop(), total)

    def send_results(self, operation: str, total: float) -> None:
        """Send the result of a collective to all ranks, and with it their orders."""
        orders, self.orders = self.orders, {}
        for local_rank, peer in self.peers.items():
            peer.send(f"{total} {orders.get(local_rank, 'go')}".encode())
        if operation == "join":
            say(" ".join(["ready", *map(str, self.pids.values())]))
        elif orders:
            say("given")

    def end(self) -> None:
        """Kill the remaining ranks. Reap them and their loaders."""
        for local_rank in self.peers:
            os.kill(self.pids[local_rank], signal.SIGKILL)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            return


def say(event: str) -> None:
    """Print an event, which the simulated node reads."""
    sys.stdout.write(f"{event}\n")
    sys.stdout.flush()


def main(kind: Callable[..., Launcher] = Launcher) -> None:
    """Run as `launcher FOLDER RUN_ID RANKS`. Further arguments are those of another `kind` of launcher."""
    folder, run_id, ranks, *more = sys.argv[1:]
    set_identity("pt_elastic", os.getppid(), Path(folder))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # `end` can then wait for loaders of dead ranks
    launcher = kind(folder, run_id, int(ranks), *more)
    try:
        launcher.start()
        launcher.serve()
    finally:
        launcher.end()


if __name__ == "__main__":
    main()
