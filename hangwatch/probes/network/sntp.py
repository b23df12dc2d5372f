"""A small SNTP client (RFC 4330): how far this clock is from other nodes' or time servers' clocks. Sets nothing."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from hangwatch.model import Fault, Value

PORT = 123
UNIX_EPOCH = 2_208_988_800  # seconds from 1900, where NTP counts from, to 1970
_PACKET = struct.Struct("!BBbb11I")
_CLIENT_VERSION_4 = 0x23
_SERVER_MODE = 4
_UNSYNCHRONIZED_LEAP = 3


class PeerOffset(Value, frozen=True):
    """One answer. `offset_seconds` is how far the peer is ahead of this clock, `delay_seconds` the round trip."""

    peer: str
    offset_seconds: float
    delay_seconds: float
    stratum: int


def parse_peer(peer: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[v6 address]:port` or a bare v6 address. Raises ValueError."""
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
    """Ask all peers at once; one answer or Fault for each, in their order, within the deadline and name look-ups."""
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
        while waiting and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                answered: str = key.data
                sock, sent = waiting.pop(answered)
                selector.unregister(sock)
                answers[answered] = _receive(answered, sock, sent, unix_clock)
    for peer, (sock, _) in waiting.items():
        sock.close()
        answers[peer] = _fault(peer, "NoAnswer", f"no answer within {deadline_seconds:g} s")
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
    except OSError as error:  # a port that nobody listens on answers by ICMP
        return _fault(peer, "NoAnswer", error.strerror or str(error))
    finally:
        sock.close()
    return parse_answer(peer, packet, sent, unix_clock())


def parse_answer(peer: str, packet: bytes, sent: bytes, received_unix_seconds: float) -> PeerOffset | Fault:
    """Offset and delay of one answer; `sent` are the 8 bytes of the request's transmit time, which it must repeat."""
    if len(packet) < _PACKET.size:
        return _fault(peer, "UnreadableAnswer", f"{len(packet)} bytes, an answer has {_PACKET.size}")
    first, stratum, *_ = fields = _PACKET.unpack_from(packet)
    if packet[24:32] != sent or first & 7 != _SERVER_MODE:
        return _fault(peer, "UnreadableAnswer", "it is not the answer to this question")
    if stratum == 0 or first >> 6 == _UNSYNCHRONIZED_LEAP:
        return _fault(peer, "PeerUnsynchronized", "the peer says that its own clock is not synchronised, or denies us")
    asked, arrived, left = (_from_ntp(*fields[at : at + 2]) for at in (9, 11, 13))
    return PeerOffset(
        peer=peer,
        offset_seconds=((arrived - asked) + (left - received_unix_seconds)) / 2,
        delay_seconds=(received_unix_seconds - asked) - (left - arrived),
        stratum=stratum,
    )


def _to_ntp(unix_seconds: float) -> tuple[int, int]:
    whole = int(unix_seconds)
    return (whole + UNIX_EPOCH) & 0xFFFFFFFF, int((unix_seconds - whole) * 2**32)


def _from_ntp(seconds: int, fraction: int) -> float:
    # The counter of seconds starts again in 2036: small numbers are of the next era.
    era = 0 if seconds & 0x80000000 else 1 << 32
    return seconds + era - UNIX_EPOCH + fraction / 2**32


def _fault(peer: str, reason: str, detail: str) -> Fault:
    return Fault(subject=f"time peer {peer}", reason=reason, detail=detail, remedy=f"chronyc -n sources; ping {peer}")
