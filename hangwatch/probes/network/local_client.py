"""Find the user of a local TCP client with NETLINK_SOCK_DIAG, see sock_diag(7).

A local user may connect from every address of 127.0.0.0/8, and shares 127.0.0.1 with all other users. So an address
does not identify a local user. The kernel's user id of the socket does.
"""

import contextlib
import ipaddress
import itertools
import socket
import struct
from typing import NamedTuple

from hangwatch.probes.network import sock_diag
from hangwatch.probes.network.sock_diag import HEADER
from hangwatch.probes.network.sockets import LISTEN

_NLM_F_REQUEST = 0x1
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states; then the socket
_PORTS = struct.Struct("!HH")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
_STATE_AT = HEADER.size + 1  # in the answer: inet_diag_msg follows the header
_USER_AT = HEADER.size + 64
_USER_AND_INODE = struct.Struct("=II")
_ANSWER_BYTES = 4096
_ALL_STATES = 0xFFFFFFFF
_MOST_STALE = 8  # answers to earlier questions that are skipped


class LocalClient(NamedTuple):
    """The owner of the other end of a connection. If no process holds that end, `has_closed` is set and `uid` is 0."""

    uid: int
    has_closed: bool


class LocalClients:
    """A client of the kernel for connections to this process. It opens the netlink socket on first use."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._sequence = itertools.count(1)

    def find(self, connection: socket.socket) -> LocalClient | None:
        """Return the local client of an accepted TCP connection.

        None if the client is remote, or if the kernel does not find its end of the connection.
        """
        with contextlib.suppress(OSError, ValueError, struct.error):
            local, remote = connection.getsockname(), connection.getpeername()
            address, client = _address(local[0]), _address(remote[0])
            if client == address or client.is_loopback:
                return self._ask(address, local[1], client, remote[1])
        return None

    def close(self) -> None:
        """Close the netlink socket."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _ask(
        self,
        address: ipaddress.IPv4Address | ipaddress.IPv6Address,
        port: int,
        client: ipaddress.IPv4Address | ipaddress.IPv6Address,
        client_port: int,
    ) -> LocalClient | None:
        if self._channel is None:
            kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._channel = socket.socket(socket.AF_NETLINK, kind, sock_diag.PROTOCOL)
        family = socket.AF_INET if client.version == 4 else socket.AF_INET6
        wanted_ends = _PORTS.pack(client_port, port) + client.packed.ljust(16, b"\0") + address.packed.ljust(16, b"\0")
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + wanted_ends + _ANY
        sequence = next(self._sequence) & 0xFFFFFFFF
        length = HEADER.size + len(request)
        self._channel.send(HEADER.pack(length, sock_diag.BY_FAMILY, _NLM_F_REQUEST, sequence, 0) + request)
        for _ in range(_MOST_STALE):  # the kernel queues its answer during send(2)
            answer = self._channel.recv(_ANSWER_BYTES)
            _, kind, _, answer_sequence, _ = HEADER.unpack_from(answer)
            if answer_sequence == sequence:
                break
        else:
            return None
        if kind != sock_diag.BY_FAMILY or answer[_STATE_AT] == LISTEN:
            return None
        uid, inode = _USER_AND_INODE.unpack_from(answer, _USER_AT)
        return LocalClient(uid, has_closed=inode == 0)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address in the form of the kernel: an IPv4 address mapped into IPv6 as IPv4. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
