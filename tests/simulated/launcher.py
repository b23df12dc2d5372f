"""The launcher of the demo, with more nodes, workers and orders.

An order is `TARGET ORDER`. TARGET is a rank, `all`, `peers` (the ranks of the other nodes) or `launcher`. The event
`resumed` follows at the first step after an order.
"""

from hangwatch.tools.demo import launcher
from hangwatch.tools.demo.launcher import say


class Launcher(launcher.Launcher):
    """A launcher of a job with `nodes` nodes. It obeys `first_order` before the first step."""

    def __init__(self, folder: str, run_id: str, ranks: int, nodes: str, worker: str, first_order: str) -> None:
        super().__init__(folder, run_id, ranks)
        self.nodes = int(nodes)
        self.worker = worker
        self.first_order = first_order
        self.others_arrive = True
        self.resumes = False
        self.restarts = 0

    def torchrun_environ(self, local_rank: int) -> dict[str, str]:
        """Return the environment of a rank on the first of all nodes."""
        numbers = {
            "WORLD_SIZE": self.ranks * self.nodes,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": self.ranks * self.nodes,
            "TORCHELASTIC_RESTART_COUNT": self.restarts,
        }
        return super().torchrun_environ(local_rank) | {name: str(number) for name, number in numbers.items()}

    def serve(self) -> None:
        """Obey the first order, then do as the demo's launcher."""
        if self.first_order:
            self.obey(self.first_order)
        super().serve()

    def obey(self, line: str) -> None:
        """Obey one order, `TARGET ORDER`."""
        target, _, order = line.partition(" ")
        if target == "peers":
            self.others_arrive = order != "stay-away"
            say("given")
        elif target == "launcher":
            self.restart()
        else:
            for rank in self.pids if target == "all" else [target]:
                super().obey(f"{rank} {order}")

    def complete_collective(self) -> None:
        """Complete the collective if the other nodes join it."""
        if self.others_arrive:
            super().complete_collective()

    def send_results(self, operation: str, total: float) -> None:
        """Send the results. A barrier delivers no orders."""
        self.restarts = 0
        if operation == "all_reduce" and self.resumes:
            say("resumed")
            self.resumes = False
        later, self.orders = (self.orders, {}) if operation == "barrier" else ({}, self.orders)
        self.resumes |= bool(self.orders)
        super().send_results(operation, total)
        self.orders = later

    def restart(self) -> None:
        """End all ranks and start new ones, as torchrun does after a failure."""
        for peer in self.peers.values():
            self.readers.unregister(peer)
        self.end()
        for peer in self.peers.values():
            peer.close()
        self.arrived.clear()
        self.restarts += 1
        self.start()


if __name__ == "__main__":
    launcher.main(Launcher)
