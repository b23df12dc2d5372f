"""Read network interfaces and routes from /proc and /sys, resolve names, and open a test connection."""

import errno
import ipaddress
import re
import socket
from pathlib import Path

from hangwatch.model import INTERFACES_OF_ONE_NODE, Fault, Value, list_by_key
from hangwatch.probes.base import pseudo_files

TABLE_LIMIT_BYTES = 32 << 20
_COUNTER = re.compile(r"[0-9]{1,20}")
_HEX = "[0-9A-F]{8}"
_ROUTE = re.compile(rf"^(\S+)\t({_HEX})\t{_HEX}\t([0-9A-F]{{4}})\t\d+\t\d+\t(-?\d{{1,10}})\t({_HEX})\b", re.M)
_RTF_UP = 0x1
_RTF_REJECT = 0x200


class Interface(Value, frozen=True):
    """A network interface. `up` is None if unknown (another network namespace). Errors are totals since its start."""

    name: str
    up: bool | None
    state: str
    addresses: tuple[str, ...]
    receive_errors: int
    transmit_errors: int

    @property
    def is_of_one_node(self) -> bool:
        """True if the interface reaches no other node."""
        return self.name in INTERFACES_OF_ONE_NODE


class Route(Value, frozen=True):
    """A row of the IPv4 routing table."""

    interface: str
    network: ipaddress.IPv4Network
    metric: int


def interfaces(net_root: Path, sys_root: Path | None) -> tuple[Interface, ...] | Fault | None:
    """Return all interfaces of the network namespace with /proc/PID/net at `net_root`; None if the process is gone.

    Pass `sys_root` only for the daemon's own namespace: /sys shows only the interfaces of the reader.
    """
    dev = pseudo_files.read(net_root / "dev", "network interfaces")
    if not isinstance(dev, str):
        return dev
    known_routes = routes(net_root)
    by_interface = _parse_inet6(pseudo_files.read_or_empty(net_root / "if_inet6"))
    local = _local_addresses(net_root)
    routed = [route.network for route in known_routes if route.network.prefixlen]
    # A /32 address (GCE, Calico, Cilium) is in no route of its interface. Assign it to each interface with routes but
    # without another address.
    unrouted = [
        address for address in local if not address.is_loopback and not any(address in subnet for subnet in routed)
    ]
    described = []
    for name, counters in parse_dev(dev).items():
        subnets = [route.network for route in known_routes if route.interface == name and route.network.prefixlen]
        own_addresses = [address for address in local if any(address in subnet for subnet in subnets)]
        if name == "lo":
            own_addresses = [address for address in local if address.is_loopback]
        elif not own_addresses and any(route.interface == name for route in known_routes):
            own_addresses = unrouted
        v4 = [str(address) for address in own_addresses]
        state, up = _operational_state(sys_root, name)
        described.append(
            Interface(
                name=name,
                up=up,
                state=state,
                addresses=(*v4, *by_interface.get(name, ())),
                receive_errors=counters[2],
                transmit_errors=counters[10],
            )
        )
    return tuple(described)


def _operational_state(sys_root: Path | None, name: str) -> tuple[str, bool | None]:
    """Return `operstate` of an interface, and true if it is up; None if unknown, as of virtual interfaces that work."""
    text = pseudo_files.read_or_empty(sys_root / "class" / "net" / name / "operstate") if sys_root else ""
    state = text.strip() or "unknown"
    return state, {"up": True, "down": False, "lowerlayerdown": False, "notpresent": False}.get(state)


def parse_dev(text: str) -> dict[str, list[int]]:
    """Return the 16 counters of each interface in /proc/net/dev: 8 for receiving, then 8 for sending.

    The third of each eight is the number of errors.
    """
    found = {}
    for line in text.splitlines():
        name, colon, counters = line.rpartition(":")
        words = counters.split()
        if colon and len(words) >= 16 and all(_COUNTER.fullmatch(word) for word in words):
            found[name.strip()] = [int(word) for word in words]
    return found


def routes(net_root: Path) -> tuple[Route, ...]:
    """Return the IPv4 routes that are up, from /proc/PID/net/route."""
    return parse_routes(pseudo_files.read_or_empty(net_root / "route"))


def parse_routes(text: str) -> tuple[Route, ...]:
    """Return the routes of /proc/net/route that are up: interface, destination, gateway, flags, ..., metric, mask."""
    found = []
    for interface, destination, flags, metric, mask in _ROUTE.findall(text):
        if int(flags, 16) & _RTF_UP:
            address = socket.ntohl(int(destination, 16))  # written in the byte order of the host
            network = ipaddress.IPv4Network((address, int(mask, 16).bit_count()), strict=False)
            found.append(Route(interface=interface, network=network, metric=int(metric)))
    return tuple(found)


def interface_to(address: str, known_routes: tuple[Route, ...]) -> str | None:
    """Return the interface towards an IPv4 address, by longest prefix, then lowest metric; None without a route."""
    try:
        target = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    fitting = [route for route in known_routes if target in route.network]
    best = max(fitting, key=lambda route: (route.network.prefixlen, -route.metric), default=None)
    return best.interface if best else None


def default_interface(known_routes: tuple[Route, ...]) -> str | None:
    """Return the interface of the default route; None without a default route."""
    defaults = [route for route in known_routes if not route.network.prefixlen]
    best = min(defaults, key=lambda route: route.metric, default=None)
    return best.interface if best else None


def default_interface_v6(net_root: Path) -> str | None:
    """Return the interface of the IPv6 default route, from /proc/PID/net/ipv6_route; None without one."""
    return parse_default_v6(pseudo_files.read_or_empty(net_root / "ipv6_route", TABLE_LIMIT_BYTES))


def parse_default_v6(text: str) -> str | None:
    """Return the interface of the default route in an ipv6_route text; None without one.

    The columns are destination and source with their prefix lengths, gateway, metric, ..., flags, interface.
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 10 and words[1] == "00" and int(words[8], 16) & (_RTF_UP | _RTF_REJECT) == _RTF_UP:
            found.append((int(words[5], 16), words[9]))
    return min(found)[1] if found else None


def resolve(host: str) -> tuple[str, ...] | Fault:
    """Return the addresses of a host name, IPv4 first."""
    try:
        name = host.encode() if host.isascii() else host  # text would load the codec for international names
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Fault(
            subject=host,
            reason="UnknownHost",
            detail=f"the name does not resolve: {error}",
            remedy=f"getent hosts {host}",
        )
    addresses = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return tuple(sorted(addresses, key=lambda address: ":" in address))


_REASONS = {
    errno.ECONNREFUSED: "Refused",
    errno.EHOSTUNREACH: "NoRoute",
    errno.ENETUNREACH: "NoRoute",
    errno.EACCES: "NotAllowed",
    errno.EPERM: "NotAllowed",
}


def connect(address: str, port: int, deadline_seconds: float) -> Fault | None:
    """Open a TCP connection and close it without sending. Return None if the other end accepts, else a fault."""
    try:
        socket.create_connection((address, port), timeout=deadline_seconds).close()
    except OSError as error:
        detail = f"did not respond within {deadline_seconds:g} s" if isinstance(error, TimeoutError) else str(error)
        reason = _REASONS.get(error.errno or 0, "NoAnswer")
        return Fault(subject=f"{address} port {port}", reason=reason, detail=detail)
    return None


def _local_addresses(net_root: Path) -> tuple[ipaddress.IPv4Address, ...]:
    """Return the IPv4 addresses of a namespace: the leaves marked `host LOCAL` of /proc/PID/net/fib_trie."""
    found: dict[ipaddress.IPv4Address, None] = {}
    leaf = ""
    for line in pseudo_files.read_or_empty(net_root / "fib_trie").splitlines():
        _, dashes, address = line.partition("|-- ")
        if dashes:
            leaf = address.strip()
        elif "host LOCAL" in line and leaf:
            found[ipaddress.IPv4Address(leaf)] = None
    return tuple(found)


def _parse_inet6(text: str) -> dict[str, list[str]]:
    """Return the IPv6 addresses in /proc/net/if_inet6 by interface, without link-local ones."""
    rows = (words for line in text.splitlines() if len(words := line.split()) == 6 and len(words[0]) == 32)
    addresses = ((words[5], ipaddress.IPv6Address(int(words[0], 16))) for words in rows)
    return list_by_key((name, str(address)) for name, address in addresses if not address.is_link_local)
