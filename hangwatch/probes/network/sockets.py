"""Read state and traffic of the TCP connections of processes with NETLINK_SOCK_DIAG, see sock_diag(7).

/proc/PID/io counts read(2) and write(2), but not recv(2) and send(2). The kernel counts the bytes of these calls per
connection, in tcp_info. One request returns all connections of a network namespace. No process is paused.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hangwatch.model import PortUse
from hangwatch.probes.base import procfs, pseudo_files
from hangwatch.probes.network import sock_diag

MOST_CONNECTIONS = 1 << 15  # of one namespace: any user may open 100,000
MOST_DESCRIPTORS = 4096  # of one process
MOST_NAMESPACES = 64  # of one scan

# Both families in one walk through the kernel's table, which takes a millisecond
_TCPDIAG_GETSOCK = 18
_INET_DIAG_INFO = 2
_MESSAGE_BYTES = 72  # inet_diag_msg
_RETRANSMITS_AT, _UNACKED_AT, _AGES_AT, _BYTES_AT, _INFO_BYTES = 2, 24, 44, 120, 136  # in tcp_info
_LONGEST_ANSWER_MS = 3_600_000
# Between an answer and the next question; the kernel counts in steps of up to 10 ms
_SHORTEST_PAUSE_MS = 20
_LISTED_BYTES = 32 << 20
_MAPPED = bytes(10) + b"\xff\xff"

ESTABLISHED, SYN_SENT, _CLOSE_WAIT = 1, 2, 8
LISTEN = 10
STATE_NAMES = (
    *("", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT"),
    *("LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
"""The names of the states of a TCP connection by number, see the kernel's include/net/tcp_states.h."""

_WANTED_STATES = 0xFFF & ~(1 << 6)  # all except TIME_WAIT, which no process holds
_REQUEST = struct.pack("=xxxB48xII", 1 << (_INET_DIAG_INFO - 1), _WANTED_STATES, 0)  # inet_diag_req: of any socket
_UNIX_REQUEST = struct.Struct("=BBHIIIII")  # unix_diag_req: family, protocol, pad, states, inode, attributes, cookie
_UNIX_MESSAGE_BYTES = 16  # unix_diag_msg
_UNIX_SHOW_PEER, _UNIX_SHOW_PENDING = 0x4, 0x8
_UNIX_PEER, _UNIX_PENDING = 2, 3
_CONNECTED = frozenset({ESTABLISHED, SYN_SENT, 4, 5, _CLOSE_WAIT})
_RETRANSMITS_OF_A_LOST_PEER = 2

End = tuple[bytes, int]
"""The address (packed) and port of one end of a connection."""


class Connection(NamedTuple):
    """A TCP connection by its two ends, or a listening socket.

    `carried_bytes` is the number of bytes received or acknowledged since the connection began. It is None if the
    connection was read from /proc/PID/net/tcp. `awaits_answer` is true if this end sent data within the last hour and
    has received none since; false if unknown.
    """

    inode: int
    state: int
    local: End
    remote: End
    carried_bytes: int | None
    unacknowledged: int
    retransmits: int
    awaits_answer: bool = False

    @property
    def is_open(self) -> bool:
        """True if data may still arrive or is still in transit."""
        return self.state in _CONNECTED

    @property
    def listens(self) -> bool:
        """True if this is a listening socket, not a connection."""
        return self.state == LISTEN

    @property
    def is_lost(self) -> bool:
        """True if the other end has closed the connection, or has not acknowledged repeated segments."""
        repeated = self.unacknowledged > 0 and self.retransmits >= _RETRANSMITS_OF_A_LOST_PEER
        return self.state == _CLOSE_WAIT or repeated


class UnixSocket(NamedTuple):
    """A Unix socket. `peer` is the inode of the socket at its other end; None without one.

    If that process has not accepted the connection yet, it is the inode of its listening socket.
    """

    listens: bool
    peer: int | None


Connections = Mapping[int, Connection]
"""The connections of one network namespace, by inode."""


def read(pid: int, proc_root: Path) -> Connections | None:
    """Return the TCP connections in the network namespace of a process.

    Another namespace requires CAP_SYS_ADMIN. If that is not permitted, read /proc/PID/net/tcp, which has no byte
    counts. None if the process is gone, if there are more than `MOST_CONNECTIONS`, or if it takes more CPU time
    than `sock_diag.CPU_SECONDS`.
    """
    try:
        channel = sock_diag.open_channel(pid, proc_root)
    except OSError:
        return _listed(pid, proc_root)
    with channel:
        by_inode: dict[int, Connection] = {}
        try:
            for answer, at, size in sock_diag.read_messages(channel, _TCPDIAG_GETSOCK, _REQUEST):
                if size - at >= _MESSAGE_BYTES:
                    connection = _connection(answer, at, size)
                    by_inode[connection.inode] = connection
                if len(by_inode) > MOST_CONNECTIONS:
                    return None
        except (OSError, struct.error):
            return None
    return by_inode


def read_unix(pid: int, proc_root: Path) -> dict[int, UnixSocket] | None:
    """Return the Unix sockets in the network namespace of a process, by inode, see sock_diag(7).

    Datagram sockets without a peer are left out: any process may send to them.
    None if the process is gone, if that is not permitted, or if a limit of `read` is exceeded.
    """
    by_inode, pending = dict[int, UnixSocket](), dict[int, UnixSocket]()
    request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UNIX_SHOW_PEER | _UNIX_SHOW_PENDING, 0, 0)
    try:
        with sock_diag.open_channel(pid, proc_root) as channel:
            for answer, at, size in sock_diag.read_messages(channel, sock_diag.BY_FAMILY, request):
                (inode,) = struct.unpack_from("=I", answer, at + 4)
                attributes = at + _UNIX_MESSAGE_BYTES, size
                peer = int.from_bytes(sock_diag.find_attribute(answer, *attributes, _UNIX_PEER)[:4], sys.byteorder)
                if peer or answer[at + 1] != socket.SOCK_DGRAM:
                    by_inode[inode] = UnixSocket(answer[at + 2] == LISTEN, peer or None)
                clients = struct.iter_unpack("=I", sock_diag.find_attribute(answer, *attributes, _UNIX_PENDING))
                pending |= {client: UnixSocket(listens=False, peer=inode) for (client,) in clients}
                if len(by_inode) > MOST_CONNECTIONS:
                    return None
    except (OSError, struct.error, IndexError):
        return None
    return {inode: each for inode, each in (by_inode | pending).items() if inode}


def list_connections(
    net_root: Path, port: int | None = None, *, tables: Sequence[str] = ("tcp", "tcp6")
) -> Iterator[Connection]:
    """Yield the sockets in these tables of proc_pid_net(5), TCP connections by default, without byte counts.

    With `port`, yield only connections that have this port at one end. The function works for every network namespace.
    A table that cannot be read is empty.
    """
    ending = "" if port is None else f":{port:04X}"
    for table in tables:
        for row in pseudo_files.read_or_empty(net_root / table, _LISTED_BYTES).splitlines()[1:]:
            fields = row.split(maxsplit=10)
            if len(fields) > 9 and (fields[1].endswith(ending) or fields[2].endswith(ending)):
                inode, waiting = int(fields[9]), int(fields[4].partition(":")[0], 16)
                ends = _listed_end(fields[1]), _listed_end(fields[2])
                yield Connection(inode, int(fields[3], 16), *ends, None, waiting, int(fields[6], 16))


def _listed(pid: int, proc_root: Path) -> Connections | None:
    net_root = proc_root / str(pid) / "net"
    rows = list(itertools.islice(list_connections(net_root), MOST_CONNECTIONS + 1))
    if len(rows) > MOST_CONNECTIONS or not (net_root / "tcp").exists():  # too many, or the process is gone
        return None
    return {row.inode: row for row in rows}


def _listed_end(field: str) -> End:
    """Parse an address and port in hex. The address is in words of four bytes, in the byte order of the host."""
    address, _, port = field.partition(":")
    parts = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
    return _plain(b"".join(parts)), int(port, 16)


def descriptors(pid: int, proc_root: Path) -> dict[int, str] | None:
    """Return the link of each of the first `MOST_DESCRIPTORS` descriptors of a process, see proc_pid_fd(5).

    None if that is not permitted or the process is gone.
    """
    links = {}
    try:
        entries = os.scandir(f"{proc_root}/{pid}/fd")
    except OSError:
        return None
    with entries:
        for entry in itertools.islice(entries, MOST_DESCRIPTORS):
            try:  # contextlib.suppress costs a fifth of the time
                links[int(entry.name)] = os.readlink(entry.path)  # noqa: PTH115 - a magic link, not a path
            except (OSError, ValueError):  # closed meanwhile
                continue
    return links


def sockets_of_process(pid: int, proc_root: Path) -> dict[int, int] | None:
    """Return the inodes of all sockets of a process by descriptor; None if not permitted or too many."""
    return sockets_among(descriptors(pid, proc_root))


def sockets_among(links: Mapping[int, str] | None) -> dict[int, int] | None:
    """Return the inodes of the sockets among the descriptors of a process; None if they are unknown or too many."""
    if links is None or len(links) >= MOST_DESCRIPTORS:
        return None
    return {number: int(link[8:-1]) for number, link in links.items() if link.startswith("socket:[")}


def connections_to(addresses: Collection[str], port: int, net_root: Path) -> list[Connection]:
    """Return the TCP connections of a network namespace to `port` at one of `addresses`."""
    return [
        connection
        for connection in list_connections(net_root, port)
        if connection.remote[1] == port and format_address(connection.remote) in addresses
    ]


def sockets_at_port(port: int, pid: int, tables: Tables) -> list[Connection] | None:
    """Return the TCP sockets of a process with `port` at one end; None if not permitted or too many."""
    held = sockets_of_process(pid, tables.proc_root)
    if not held:
        return None if held is None else []
    inodes = set(held.values())
    return [connection for connection in tables.read_port(port, pid) if connection.inode in inodes]


def classify_port_use(port: int, held: Iterable[Connection]) -> PortUse:
    """Return the use of a port by the sockets of one process.

    It is "serving", "connected", "silent" (SYN_SENT: the other end did not respond) or "none".
    """
    held = list(held)
    if any(connection.listens and connection.local[1] == port for connection in held):
        return "serving"
    states = {connection.state for connection in held if connection.remote[1] == port}
    return "connected" if ESTABLISHED in states else "silent" if SYN_SENT in states else "none"


def find_unreachable_listener(
    addresses: Collection[str], store_port: int | None, held: Iterable[Connection]
) -> str | None:
    """Return the address at which a process listens, if other nodes cannot reach it there; else None.

    Other nodes cannot reach loopback addresses and `addresses`. A process that also listens at another address, or is
    connected to one, can be reached there. Sockets of the store are ignored: the store is reached at the address of its
    server.
    """
    others = [each for each in held if store_port not in (each.local[1], each.remote[1])]
    listening = [each for each in others if each.listens]
    ends = [each.local for each in listening] + [each.remote for each in others if each.is_open]
    is_reachable = any(
        not ipaddress.ip_address(end[0]).is_loopback and format_address(end) not in addresses for end in ends
    )
    return format_end(listening[0].local) if listening and not is_reachable else None


class Tables:
    """The TCP connections of network namespaces. Each namespace is read once: for the duration of one scan."""

    def __init__(self, proc_root: Path) -> None:
        self.proc_root = proc_root
        self._by_space: dict[str, Connections] = {}
        self._at_port: dict[tuple[str, int], list[Connection]] = {}

    def read(self, pid: int) -> Connections:
        """Return the connections in the network namespace of a process; empty if they cannot be read."""
        space = self._find_space(pid)
        if space not in self._by_space and len(self._by_space) < MOST_NAMESPACES:
            self._by_space[space] = read(pid, self.proc_root) or {}
        return self._by_space.get(space, {})

    def read_held(self, pid: int) -> list[Connection]:
        """Return the connections and listening sockets of a process; empty if they cannot be read."""
        held = sockets_of_process(pid, self.proc_root)
        table = self.read(pid) if held else {}
        return [table[inode] for inode in (held or {}).values() if inode in table]

    def read_port(self, port: int, pid: int) -> list[Connection]:
        """Return the connections with `port` at one end in the network namespace of a process."""
        key = self._find_space(pid), port
        if key not in self._at_port:
            rows = self.read(pid).values() or list_connections(self.proc_root / str(pid) / "net", port)
            self._at_port[key] = [row for row in rows if port in (row.local[1], row.remote[1])]
        return self._at_port[key]

    def _find_space(self, pid: int) -> str:
        return procfs.namespace(self.proc_root, pid, "net") or f"unknown, of pid {pid}"


def store_endpoint(pid: int, port: int, tables: Tables) -> str | None:
    """Return the other end of this process's TCP connection to `port`; None without a connection.

    An address in the environment can be forged; a connection comes from the kernel. A loopback address is returned with
    its network namespace, since every namespace has its own. The same holds for any address if the process is not in
    the initial user namespace. In another one a user may create a network with the addresses of other nodes
    (user_namespaces(7)).
    """
    proc_root = tables.proc_root
    links = descriptors(pid, proc_root) or {}
    inodes = [int(link[8:-1]) for link in links.values() if link.startswith("socket:[")]
    if not inodes:  # the kernel takes milliseconds for each table
        return None
    at_port = tables.read_port(port, pid)
    ends = {row.inode: row.remote for row in at_port if row.remote[1] == port and row.state == ESTABLISHED}
    end = next((ends[inode] for inode in inodes if inode in ends), None)
    if end is None:
        return None
    user_namespaces = {procfs.namespace(proc_root, each, "user") for each in (pid, 1)}
    is_initial = len(user_namespaces) == 1 and None not in user_namespaces  # None: it may not be read
    is_unique = not ipaddress.ip_address(end[0]).is_loopback and is_initial
    namespace = None if is_unique else procfs.namespace(proc_root, pid, "net")
    return f"{format_end(end)}{f' in {namespace}' if namespace else ''}"


def _connection(answer: bytes, at: int, end: int) -> Connection:
    family, state = answer[at], answer[at + 1]
    local_port, remote_port = struct.unpack_from("!HH", answer, at + 4)
    (inode,) = struct.unpack_from("=I", answer, at + 68)
    width = 4 if family == socket.AF_INET else 16
    ends = (
        (_plain(answer[at + 8 : at + 8 + width]), local_port),
        (_plain(answer[at + 24 : at + 24 + width]), remote_port),
    )
    carried_bytes = unacknowledged = retransmits = 0
    awaits_answer = False
    info = sock_diag.find_attribute(answer, at + _MESSAGE_BYTES, end, _INET_DIAG_INFO)
    if len(info) >= _INFO_BYTES:
        sent_bytes, received_bytes = struct.unpack_from("=QQ", info, _BYTES_AT)
        sent_ms, _, received_ms = struct.unpack_from("=III", info, _AGES_AT)
        is_question = sent_ms + _SHORTEST_PAUSE_MS < received_ms or (sent_bytes > 1 and not received_bytes)
        awaits_answer = is_question and sent_ms < _LONGEST_ANSWER_MS
        carried_bytes = sent_bytes + received_bytes
        retransmits = info[_RETRANSMITS_AT]
        (unacknowledged,) = struct.unpack_from("=I", info, _UNACKED_AT)
    return Connection(inode, state, *ends, carried_bytes, unacknowledged, retransmits, awaits_answer)


def _plain(packed: bytes) -> bytes:
    """Return an IPv4 address mapped into IPv6 as IPv4. Other addresses are unchanged."""
    return packed[12:] if packed.startswith(_MAPPED) else packed


def format_end(end: End) -> str:
    """Format an end: "10.0.0.7 port 8000"."""
    return f"{format_address(end)} port {end[1]}"


def format_address(end: End) -> str:
    """Format the address of an end."""
    return str(ipaddress.ip_address(end[0]))
