"""Network interfaces, routes and TCP connections as /proc and /sys show them, and one bounded connect."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from hangwatch.model import Fault, Value
from hangwatch.probes import pseudofiles

TCP_ESTABLISHED = "01"
TCP_SYN_SENT = "02"
TCP_LISTEN = "0A"
TABLE_LIMIT_BYTES = 32 << 20
MOST_DESCRIPTORS = 4096  # of one process
_RTF_UP = 0x1
_RTF_REJECT = 0x200


class Interface(Value, frozen=True):
    """One interface. `up` is None where it cannot be told (another network namespace); errors and drops both ways."""

    name: str
    up: bool | None
    state: str
    addresses: tuple[str, ...]
    receive_errors: int
    transmit_errors: int
    receive_drops: int
    transmit_drops: int


class Route(Value, frozen=True):
    """One row of the IPv4 routing table."""

    interface: str
    network: ipaddress.IPv4Network
    metric: int


class Connection(Value, frozen=True):
    """A TCP connection by its remote end; `retransmits` counts unanswered repeats of the oldest segment."""

    state: str
    retransmits: int


class Socket(Value, frozen=True):
    """A TCP socket of one process: its state, as /proc/PID/net/tcp writes it, and both ends as (address, port)."""

    state: str
    local: tuple[str, int]
    remote: tuple[str, int]


def interfaces(net_root: Path, sys_root: Path | None) -> tuple[Interface, ...] | Fault | None:
    """All interfaces of the network namespace whose /proc/PID/net is `net_root`.

    `sys_root` is None for a namespace that is not ours: /sys shows only the interfaces of the reader.
    """
    dev = pseudofiles.read(net_root / "dev", "network interfaces")
    if not isinstance(dev, str):
        return dev
    known_routes = routes(net_root)
    v6 = pseudofiles.read(net_root / "if_inet6", "IPv6 addresses")
    by_interface = _parse_inet6(v6 if isinstance(v6, str) else "")
    local = _local_addresses(net_root)
    routed = [route.network for route in known_routes if route.network.prefixlen]
    # A /32 (GCE, Calico, Cilium) lies in no route of its interface: one that has routes and no other address has it.
    loose = [
        address for address in local if not address.is_loopback and not any(address in subnet for subnet in routed)
    ]
    found = []
    for name, counters in parse_dev(dev).items():
        subnets = [route.network for route in known_routes if route.interface == name and route.network.prefixlen]
        own = [address for address in local if any(address in subnet for subnet in subnets)]
        if name == "lo":
            own = [address for address in local if address.is_loopback]
        elif not own and any(route.interface == name for route in known_routes):
            own = loose
        v4 = [str(address) for address in own]
        state, up = _operational_state(sys_root, name)
        found.append(
            Interface(
                name=name,
                up=up,
                state=state,
                addresses=(*v4, *by_interface.get(name, ())),
                receive_errors=counters[2],
                receive_drops=counters[3],
                transmit_errors=counters[10],
                transmit_drops=counters[11],
            )
        )
    return tuple(found)


def _operational_state(sys_root: Path | None, name: str) -> tuple[str, bool | None]:
    """`operstate` of an interface; many virtual ones say "unknown" while they work."""
    text = pseudofiles.read(sys_root / "class" / "net" / name / "operstate", name) if sys_root else None
    state = text.strip() if isinstance(text, str) else "unknown"
    return state, {"up": True, "down": False, "lowerlayerdown": False, "notpresent": False}.get(state)


def parse_dev(text: str) -> dict[str, list[int]]:
    """The 16 counters of each interface in /proc/net/dev: 8 of receiving, 8 of sending; the third is errors."""
    found = {}
    for line in text.splitlines():
        name, colon, counters = line.rpartition(":")
        words = counters.split()
        if colon and len(words) >= 16 and all(word.isdecimal() for word in words):
            found[name.strip()] = [int(word) for word in words]
    return found


def routes(net_root: Path) -> tuple[Route, ...]:
    """The IPv4 routes that are up, /proc/PID/net/route; empty where there are none."""
    text = pseudofiles.read(net_root / "route", "routes")
    return parse_routes(text) if isinstance(text, str) else ()


def parse_routes(text: str) -> tuple[Route, ...]:
    """Rows of /proc/net/route that are up: interface, destination, gateway, flags, ..., metric, mask."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and int(words[3], 16) & _RTF_UP:
            prefix = bin(int(words[7], 16)).count("1")
            network = ipaddress.IPv4Network((int(_v4(words[1])), prefix), strict=False)
            found.append(Route(interface=words[0], network=network, metric=int(words[6])))
    return tuple(found)


def interface_to(address: str, known_routes: tuple[Route, ...]) -> str | None:
    """The interface that leads to an IPv4 address: the longest prefix, then the lowest metric; None without a route."""
    try:
        target = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    fitting = [route for route in known_routes if target in route.network]
    best = max(fitting, key=lambda route: (route.network.prefixlen, -route.metric), default=None)
    return best.interface if best else None


def default_interface(known_routes: tuple[Route, ...]) -> str | None:
    """The interface of the default route; None without one."""
    defaults = [route for route in known_routes if not route.network.prefixlen]
    best = min(defaults, key=lambda route: route.metric, default=None)
    return best.interface if best else None


def default_interface_v6(net_root: Path) -> str | None:
    """The interface of the IPv6 default route, /proc/PID/net/ipv6_route; None without one."""
    text = pseudofiles.read(net_root / "ipv6_route", "IPv6 routes", TABLE_LIMIT_BYTES)
    return parse_default_v6(text) if isinstance(text, str) else None


def parse_default_v6(text: str) -> str | None:
    """Rows of ipv6_route: destination and source with their prefix lengths, gateway, metric, ..., flags, interface."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 10 and words[1] == "00" and int(words[8], 16) & (_RTF_UP | _RTF_REJECT) == _RTF_UP:
            found.append((int(words[5], 16), words[9]))
    return min(found)[1] if found else None


def resolve(host: str) -> tuple[str, ...] | Fault:
    """The addresses of a host name, IPv4 first."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Fault(
            subject=host,
            reason="UnknownHost",
            detail=f"the name does not resolve: {error}",
            remedy=f"getent hosts {host}",
        )
    addresses = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return tuple(sorted(addresses, key=lambda address: ":" in address))


def connections(net_root: Path, addresses: tuple[str, ...], port: int) -> tuple[Connection, ...]:
    """The TCP connections whose remote end is `port` at one of `addresses`, by /proc/PID/net/tcp and tcp6."""
    found: list[Connection] = []
    for table in ("tcp", "tcp6"):
        text = pseudofiles.read(net_root / table, table, TABLE_LIMIT_BYTES)
        found += parse_connections(text if isinstance(text, str) else "", addresses, port)
    return tuple(found)


def own_sockets(pid: int, port: int, proc_root: Path) -> tuple[Socket, ...] | None:
    """This process's own TCP sockets with `port` at one end; None where its descriptors may not be read.

    See proc(5) for /proc/PID/net/tcp, which shows all of its network namespace, and /proc/PID/fd, which says whose.
    """
    rows: dict[str, Socket] = {}
    for table in ("tcp", "tcp6"):
        text = pseudofiles.read(proc_root / str(pid) / "net" / table, table, TABLE_LIMIT_BYTES)
        rows |= _sockets_at(text, port) if isinstance(text, str) else {}
    own = set(_descriptors(proc_root / str(pid) / "fd"))
    return tuple(socket for name, socket in rows.items() if name in own) if own else None


def store_endpoint(pid: int, port: int, proc_root: Path) -> str | None:
    """The other end of this process's own TCP connection to `port`, None where it holds none.

    What the environment says of an address is the user's word; a connection is the kernel's. A loopback address comes
    with its network namespace, since every one has its own. So does any address where the process is not in the user
    namespace of init: there a user may make a network of his own, with the addresses of others (user_namespaces(7)).
    See proc(5) for /proc/PID/net/tcp and /proc/PID/fd.
    """
    ends: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        text = pseudofiles.read(proc_root / str(pid) / "net" / table, table, TABLE_LIMIT_BYTES)
        ends |= _ends_at(text, port) if isinstance(text, str) else {}
    if not ends:
        return None
    address = next((ends[name] for name in _descriptors(proc_root / str(pid) / "fd") if name in ends), None)
    if address is None:
        return None
    is_everywhere_the_same = not ipaddress.ip_address(address).is_loopback and _is_in_first_user_space(pid, proc_root)
    space = "" if is_everywhere_the_same else _link(proc_root / str(pid) / "ns" / "net")
    return f"{address} port {port}{f' in {space}' if space else ''}"


def _is_in_first_user_space(pid: int, proc_root: Path) -> bool:
    """Whether init's user namespace is that of the process; false where one of them may not be read."""
    space = _link(proc_root / str(pid) / "ns" / "user")
    return bool(space) and space == _link(proc_root / "1" / "ns" / "user")


def _descriptors(folder: Path) -> Iterator[str]:
    """What the descriptors of a process are, as far as they may be read."""
    with contextlib.suppress(OSError):
        for path in itertools.islice(folder.iterdir(), MOST_DESCRIPTORS):
            yield _link(path)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _ends_at(text: str, port: int) -> dict[str, str]:
    """Established connections to this port: the name of the socket as /proc/PID/fd has it, and the remote address."""
    at_port = _sockets_at(text, port)
    return {
        name: socket.remote[0]
        for name, socket in at_port.items()
        if socket.remote[1] == port and socket.state == TCP_ESTABLISHED
    }


def _sockets_at(text: str, port: int) -> dict[str, Socket]:
    """Rows of /proc/net/tcp or tcp6 with this port at one end, by the name of the socket as /proc/PID/fd has it."""
    ending = f":{port:04X}"
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split(maxsplit=10)
        if len(words) > 9 and (words[1].endswith(ending) or words[2].endswith(ending)):
            found[f"socket:[{words[9]}]"] = Socket(state=words[3], local=_end(words[1]), remote=_end(words[2]))
    return found


def _end(words: str) -> tuple[str, int]:
    address, _, port = words.partition(":")
    return _address(address), int(port, 16)


def parse_connections(text: str, addresses: tuple[str, ...], port: int) -> list[Connection]:
    """Rows of /proc/net/tcp or tcp6: slot, local, remote, state, queues, timer, retransmits, ..."""
    ending = f":{port:04X}"
    found = []
    for line in text.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) >= 7 and words[2].endswith(ending) and _address(words[2].partition(":")[0]) in addresses:
            found.append(Connection(state=words[3], retransmits=int(words[6], 16)))
    return found


def connect(address: str, port: int, deadline_seconds: float) -> Fault | None:
    """Open a TCP connection and close it at once, sending nothing; None when the other end answers."""
    try:
        socket.create_connection((address, port), timeout=deadline_seconds).close()
    except OSError as error:
        detail = f"no answer within {deadline_seconds:g} s" if isinstance(error, TimeoutError) else str(error)
        reason = "Refused" if isinstance(error, ConnectionRefusedError) else "NoAnswer"
        return Fault(subject=f"{address} port {port}", reason=reason, detail=detail)
    return None


def _v4(word: str) -> ipaddress.IPv4Address:
    """An address in hex, in the byte order of the host."""
    return ipaddress.IPv4Address(struct.pack("=I", int(word, 16)))


def _address(word: str) -> str:
    """The address in a row of tcp or tcp6; an IPv4 address inside IPv6 is given as IPv4."""
    if len(word) == 8:
        return str(_v4(word))
    packed = b"".join(struct.pack("=I", int(word[at : at + 8], 16)) for at in range(0, 32, 8))
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def _local_addresses(net_root: Path) -> tuple[ipaddress.IPv4Address, ...]:
    """This namespace's own IPv4 addresses: the leaves marked `host LOCAL` of /proc/net/fib_trie."""
    text = pseudofiles.read(net_root / "fib_trie", "addresses")
    found: dict[ipaddress.IPv4Address, None] = {}
    leaf = ""
    for line in text.splitlines() if isinstance(text, str) else ():
        _, dashes, address = line.partition("|-- ")
        if dashes:
            leaf = address.strip()
        elif "host LOCAL" in line and leaf:
            found[ipaddress.IPv4Address(leaf)] = None
    return tuple(found)


def _parse_inet6(text: str) -> dict[str, list[str]]:
    """IPv6 addresses by interface, without link-local ones, from /proc/net/if_inet6."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 6 and len(words[0]) == 32:
            address = ipaddress.IPv6Address(int(words[0], 16))
            if not address.is_link_local:
                found.setdefault(words[5], []).append(str(address))
    return found
