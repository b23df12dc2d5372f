"""The processes of a job by their sockets, for the sockets that several libraries open."""

from hangwatch.capture.store_clients import match_hosts
from hangwatch.model import Process, ProcessId
from hangwatch.probes.network.sockets import Connection

ESTABLISHED, LISTEN = 1, 10
HERE = bytes((127, 0, 0, 1))


def process(pid: int, uid: int = 1004, libraries: tuple[str, ...] = ("torch",)) -> Process:
    return Process(
        id=ProcessId(pid=pid, start_ticks=pid), parent_pid=1, comm="python", state="S", uid=uid, libraries=libraries
    )


class Sockets:
    """The sockets of processes, in the order in which they are opened."""

    def __init__(self) -> None:
        self.held: list[tuple[Process, Connection]] = []

    def listen(self, server: Process, port: int) -> None:
        self._add(server, LISTEN, port, 0)

    def connect(self, client: Process, server: Process, port: int) -> None:
        from_port = 40000 + len(self.held)
        self._add(client, ESTABLISHED, from_port, port)
        self._add(server, ESTABLISHED, port, from_port)

    def _add(self, holder: Process, state: int, local: int, remote: int) -> None:
        inode = len(self.held) + 1
        self.held.append((holder, Connection(inode, state, (HERE, local), (HERE, remote), None, 0, 0)))

    def hosts(self) -> dict[int, int]:
        return {rank.pid: host.pid for rank, host in match_hosts(self.held).items()}


def store(ranks: list[Process], port: int = 29500) -> Sockets:
    sockets = Sockets()
    sockets.listen(ranks[0], port)
    for rank in ranks:
        sockets.connect(rank, ranks[0], port)
    return sockets


def test_all_clients_of_the_store_are_ranks_and_its_host_is_one_of_them() -> None:
    assert store([process(7), process(5), process(6)]).hosts() == {7: 7, 5: 7, 6: 7}


def test_pairs_without_a_store_are_no_job() -> None:
    """Pairs of gloo: no process connects to itself."""
    ranks, sockets = [process(pid) for pid in (5, 6, 7)], Sockets()
    for number, rank in enumerate(ranks):
        sockets.listen(rank, 50000 + number)
        for other in ranks[number + 1 :]:
            sockets.connect(other, rank, 50000 + number)
    assert sockets.hosts() == {}


def test_oldest_listener_with_most_clients_is_the_store() -> None:
    """Each NCCL proxy has its rank and its neighbour as clients."""
    ranks = [process(5), process(6)]
    sockets = store(ranks)
    for number, rank in enumerate(ranks):
        sockets.listen(rank, 50000 + number)
        for other in ranks:
            sockets.connect(other, rank, 50000 + number)
    assert sockets.hosts() == {5: 5, 6: 5}


def test_processes_of_another_owner_or_library_are_no_ranks() -> None:
    assert store([process(5), process(6), process(7, uid=1005)]).hosts() == {5: 5, 6: 5}
    assert store([process(5), process(6), process(7, libraries=("jax",))]).hosts() == {5: 5, 6: 5}
    assert store([process(5), process(6, uid=1005)]).hosts() == {}


def test_two_stores_are_two_jobs() -> None:
    first, second = store([process(5), process(6)]), store([process(8), process(9)], port=29501)
    both = Sockets()
    both.held = [*first.held, *second.held]
    assert both.hosts() == {5: 5, 6: 5, 8: 8, 9: 8}
