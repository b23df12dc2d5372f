"""Names that a server and its client share. A command that asks the daemon does not import the server."""

import contextlib
import socket
import struct
from typing import NamedTuple

AGAIN_SECONDS = 10  # for a client that was refused, or that got no answer
MOST_ROUNDS = 3  # of a dump over the user socket


_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
# Python's limit; a user with more than 256 groups counts as a member of none
_MOST_GROUPS_BYTES = 1024


class Peer(NamedTuple):
    """The process that connected to a unix socket, as the kernel reports it: SO_PEERCRED of unix(7)."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()


def peer_of(connection: socket.socket) -> Peer | None:
    """Return the client of a unix socket; None for another kind of socket, or if the client is gone."""
    if connection.family != socket.AF_UNIX:
        return None
    try:
        pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return None
    others = b""
    with contextlib.suppress(OSError):
        others = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES)
    return Peer(pid, uid, gid, frozenset((gid, *struct.unpack(f"{len(others) // 4}I", others))))
