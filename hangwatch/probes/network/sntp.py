"""A small SNTP client (RFC 4330). It reads the clock offset of other nodes and time servers, and sets nothing."""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from hangwatch.model import Fault, Value

PORT = 123
UNIX_EPOCH = 2_208_988_800  # seconds from 1900, the epoch of NTP, to 1970
_PACKET = struct.Struct("!BBbb11I")
_CLIENT_VERSION_4 = 0x23
_SERVER_MODE = 4
_UNSYNCHRONIZED_LEAP = 3


class PeerOffset(Value, frozen=True):
    """An answer of a peer.

    `offset_seconds` is positive if the peer is ahead of this clock. `delay_seconds` is the round trip.
    """

    peer: str
    offset_seconds: float
    delay_seconds: float
    stratum: int


def parse_peer(peer: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `[v6 address]:port` or a bare v6 address. Raises ValueError."""
    if peer.startswith("["):
        host, _, port = peer[1:].partition("]")
        return host, int(port[1:]) if port else PORT
    host, colon, port = peer.partition(":")
    if not colon or ":" in port:
        return peer, PORT
    return host, int(port)


def query(
    peers: Sequence[str], deadline_seconds: float = 2.0, unix_clock: Callable[[], float] = time.time
) -> dict[str, PeerOffset | Fault]:
    """Ask all peers at once. Return, by peer, an answer or a Fault. The deadline excludes name look-ups."""
    answers: dict[str, PeerOffset | Fault] = {}
    waiting: dict[str, tuple[socket.socket, bytes]] = {}
    for peer in peers:
        opened = _send(peer, unix_clock)
        if isinstance(opened, Fault):
            answers[peer] = opened
        else:
            waiting[peer] = opened
    end = time.monotonic() + deadline_seconds
    with selectors.DefaultSelector() as selector:
        for peer, (sock, _) in waiting.items():
            selector.register(sock, selectors.EVENT_READ, peer)
        while waiting and (remaining_seconds := end - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_seconds):
                answering_peer: str = key.data
                sock, sent = waiting.pop(answering_peer)
                selector.unregister(sock)
                answers[answering_peer] = _receive(answering_peer, sock, sent, unix_clock)
    for peer, (sock, _) in waiting.items():
        sock.close()
        answers[peer] = _fault(peer, "NoAnswer", f"did not respond within {deadline_seconds:g} s")
    return {peer: answers[peer] for peer in peers}


def _send(peer: str, unix_clock: Callable[[], float]) -> tuple[socket.socket, bytes] | Fault:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*parse_peer(peer), type=socket.SOCK_DGRAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        return _fault(peer, "UnknownPeer", f"{error}")
    try:
        sock.setblocking(False)
        sock.connect(address)
        stamp = _to_ntp(unix_clock())
        sock.send(_PACKET.pack(_CLIENT_VERSION_4, 0, 0, 0, *([0] * 9), *stamp))
    except OSError as error:
        sock.close()
        return _fault(peer, "CannotSend", error.strerror or str(error))
    return sock, struct.pack("!II", *stamp)


def _receive(peer: str, sock: socket.socket, sent: bytes, unix_clock: Callable[[], float]) -> PeerOffset | Fault:
    try:
        packet = sock.recv(512)
    except OSError as error:  # a closed port responds by ICMP
        return _fault(peer, "NoAnswer", error.strerror or str(error))
    finally:
        sock.close()
    return parse_answer(peer, packet, sent, unix_clock())


def parse_answer(peer: str, packet: bytes, sent: bytes, received_unix_seconds: float) -> PeerOffset | Fault:
    """Compute offset and delay from an answer.

    `sent` is the 8-byte transmit time of the request, which the answer must repeat.
    """
    if len(packet) < _PACKET.size:
        return _fault(peer, "UnreadableAnswer", f"the answer has {len(packet)} bytes instead of {_PACKET.size}")
    first, stratum, *_ = fields = _PACKET.unpack_from(packet)
    if packet[24:32] != sent or first & 7 != _SERVER_MODE:
        return _fault(peer, "UnreadableAnswer", "the answer is not for this request")
    if stratum == 0 or first >> 6 == _UNSYNCHRONIZED_LEAP:
        return _fault(
            peer, "PeerUnsynchronized", "the peer reports that its clock is not synchronized, or refuses to answer"
        )
    asked_at, arrived_at, left_at = (_from_ntp(*fields[at : at + 2]) for at in (9, 11, 13))
    return PeerOffset(
        peer=peer,
        offset_seconds=((arrived_at - asked_at) + (left_at - received_unix_seconds)) / 2,
        delay_seconds=(received_unix_seconds - asked_at) - (left_at - arrived_at),
        stratum=stratum,
    )


def _to_ntp(unix_seconds: float) -> tuple[int, int]:
    whole = int(unix_seconds)
    return (whole + UNIX_EPOCH) & 0xFFFFFFFF, int((unix_seconds - whole) * 2**32)


def _from_ntp(seconds: int, fraction: int) -> float:
    # The counter of seconds overflows in 2036: small numbers are in the next era.
    era = 0 if seconds & 0x80000000 else 1 << 32
    return seconds + era - UNIX_EPOCH + fraction / 2**32


def _fault(peer: str, reason: str, detail: str) -> Fault:
    return Fault(subject=f"time peer {peer}", reason=reason, detail=detail, remedy=f"chronyc -n sources; ping {peer}")
