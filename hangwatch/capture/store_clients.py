"""Find ranks that got their number as an argument: processes that are connected to a listening socket of one of them.

The store of torch.distributed and the coordinator of JAX listen in rank 0. Each rank, also rank 0, holds a connection
to it. Sockets of gloo and NCCL are opened later, so of several such sockets the oldest one is the store's.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from hangwatch.jobs import process_role
from hangwatch.jobs.owners import Owner, owner_of
from hangwatch.model import Process, ProcessId
from hangwatch.probes.base import procfs
from hangwatch.probes.base.owner_turns import GrowingPause, order_by_turns
from hangwatch.probes.network import sockets
from hangwatch.probes.network.sockets import ESTABLISHED, Connection, End, Tables
from hangwatch.tables.launchers import RANKS, TABLE

MOST_PROCESSES = 1024
MOST_FIRST_RANKS, MOST_MEETING_PLACES = 64, 8


class StoreClients:
    """The processes without a rank in their environment, each with the process that hosts the store of its job.

    The sockets are read again, with growing pauses that start anew when there are other processes.
    """

    def __init__(self) -> None:
        self._hosts: dict[ProcessId, ProcessId] = {}
        self._candidates: frozenset[ProcessId] = frozenset()
        self._pause = GrowingPause()

    def find_hosts(
        self, processes: Iterable[Process], tables: Tables, budget_seconds: float
    ) -> dict[ProcessId, ProcessId]:
        """Return the host of each rank that is found. Reading takes about `budget_seconds`."""
        candidates = _in_turn(filter(_may_be_rank, processes))[:MOST_PROCESSES]
        ids = frozenset(process.id for process in candidates)
        self._hosts = {process: host for process, host in self._hosts.items() if process in ids}
        now = time.monotonic()
        if ids != self._candidates:
            self._candidates, self._pause = ids, GrowingPause()
        if ids and now >= self._pause.due_monotonic_seconds:
            self._pause = self._pause.begin(now)
            self._hosts |= _read_hosts(candidates, tables, now + budget_seconds)
        return self._hosts


def _read_hosts(candidates: Sequence[Process], tables: Tables, end: float) -> dict[ProcessId, ProcessId]:
    held: dict[str | None, list[tuple[Process, Connection]] | None] = {}  # None: no store in this network namespace
    for process in candidates:
        if time.monotonic() > end:
            break
        space = procfs.namespace(tables.proc_root, process.id.pid, "net")
        if space not in held:
            held[space] = [] if _may_have_store(tables.read(process.id.pid).values()) else None
        if (connections := held[space]) is not None:
            connections += ((process, connection) for connection in tables.read_held(process.id.pid))
    hosts: dict[ProcessId, ProcessId] = {}
    for connections in filter(None, held.values()):
        hosts |= match_hosts(sorted(connections, key=lambda each: each[0].id.start_ticks))
    return hosts


class StoreAddresses:
    """The addresses of ranks 0 that have none in their environment, but listen where the other ranks meet.

    verl and code derived from it give MASTER_ADDR and MASTER_PORT only to the other ranks.
    """

    def __init__(self) -> None:
        self._known: dict[ProcessId, dict[str, str]] = {}

    def add_to(self, processes: Sequence[Process], tables: Tables) -> Sequence[Process]:
        """Return the processes, those of such ranks 0 with the address of the other ranks in their environment."""
        slots = {process.id: process_role.find_rank_slot(process) for process in filter(_lacks_address, processes)}
        self._known = {process: address for process, address in self._known.items() if process in slots}
        first = {process: slot for process, slot in slots.items() if slot is not None and slot.rank == 0}
        unknown = [process for process in processes if process.id in first and process.id not in self._known]
        if unknown:
            meeting_places = _meeting_places(processes)
            for process in _in_turn(unknown)[:MOST_FIRST_RANKS]:
                places = meeting_places.get((owner_of(process), first[process.id].world_size), ())
                for address, port in sorted(places):
                    held = sockets.sockets_at_port(int(port), process.id.pid, tables) or ()
                    if any(socket.listens and socket.local[1] == int(port) for socket in held):
                        self._known[process.id] = {TABLE.rendezvous.address: address, TABLE.rendezvous.port: port}
        if not self._known:
            return processes
        return [
            replace(process, environ=dict(process.environ) | self._known[process.id])
            if process.id in self._known
            else process
            for process in processes
        ]


def _lacks_address(process: Process) -> bool:
    environ = process.environ
    return bool(environ) and TABLE.rendezvous.address not in environ and not RANKS.isdisjoint(environ)


def _meeting_places(processes: Iterable[Process]) -> dict[tuple[Owner, int | None], set[tuple[str, str]]]:
    """Return the addresses and ports of ranks other than 0, by owner and world size: at most eight of each."""
    places: dict[tuple[Owner, int | None], set[tuple[str, str]]] = {}
    for process in processes:
        address, port = process_role.rendezvous(process.environ)
        slot = process_role.find_rank_slot(process) if address and port.isdecimal() and len(port) < 6 else None
        if slot is not None and slot.rank > 0:
            found = places.setdefault((owner_of(process), slot.world_size), set())
            if len(found) < MOST_MEETING_PLACES:
                found.add((address, port))
    return places


def _may_have_store(connections: Collection[Connection]) -> bool:
    """True if a listening socket has two connections, each with both ends in this network namespace.

    On most nodes there is none. Then the descriptors of the processes are not read, which costs most.
    """
    listening = {connection.local[1] for connection in connections if connection.listens}
    ends = {(connection.local, connection.remote) for connection in connections if connection.state == ESTABLISHED}
    clients = Counter(remote for local, remote in ends if remote[1] in listening and (remote, local) in ends)
    return any(count > 1 for count in clients.values())


def match_hosts(held: Sequence[tuple[Process, Connection]]) -> dict[ProcessId, ProcessId]:
    """Return the host of each process, by the sockets of a network namespace. The first holder of a socket counts."""
    listeners: dict[tuple[ProcessId, int], int] = {}
    ends: dict[tuple[End, End], Process] = {}
    for process, socket in held:
        if socket.listens:
            listeners.setdefault((process.id, socket.local[1]), socket.inode)
        elif socket.state == ESTABLISHED:
            ends.setdefault((socket.local, socket.remote), process)
    clients: dict[tuple[ProcessId, int], dict[ProcessId, Process]] = {}
    for (local, remote), process in ends.items():
        server = ends.get((remote, local))
        if server is None or (server.id, remote[1]) not in listeners or owner_of(process) != owner_of(server):
            continue
        if not set(process.libraries).isdisjoint(server.libraries):
            clients.setdefault((server.id, remote[1]), {})[process.id] = process
    hosts: dict[ProcessId, ProcessId] = {}
    stores = [store for store, ranks in clients.items() if store[0] in ranks and len(ranks) > 1]
    for store in sorted(stores, key=lambda store: (-len(clients[store]), listeners[store])):
        if not hosts.keys() & clients[store].keys():
            hosts |= dict.fromkeys(clients[store], store[0])
    return hosts


def _in_turn(processes: Iterable[Process]) -> list[Process]:
    """Return the processes with their owners in turn: no user can take the places of another one."""
    return [process for _, process in order_by_turns((owner_of(process).share, process) for process in processes)]


def _may_be_rank(process: Process) -> bool:
    return (
        bool(process.libraries)
        and process_role.find_launcher(process) is None
        and process_role.find_rank_slot(process) is None
        and not process_role.is_loader_worker(process)
    )
