"""Test TCP ports of other hosts: open one connection to each, and close it without sending."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial

from hangwatch.model import Fault, Value
from hangwatch.probes.base import background
from hangwatch.probes.network import interfaces

CONNECT_SECONDS = 3.0
ADDRESSES_TRIED = 2  # of a name: usually one per address family
MOST_PORTS = 256
_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9][A-Za-z0-9._-]*)?):([0-9]{1,5})")


class Port(Value, frozen=True):
    """A port of a host. `host` is a name or an address. If it is empty, the port is tested on every node of a set."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Port | None:
    """Parse `host:29500`, `[::1]:29500` or `:29500`; None for any other text."""
    found = _PLACE.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return None
    return Port(host=found[1] or found[2] or "", port=int(found[3]))


def connect_all(
    ports: Sequence[Port],
    deadline_seconds: float,
    resolve: Callable[[str], tuple[str, ...] | Fault] = interfaces.resolve,
) -> dict[Port, Fault | None]:
    """Connect to all ports at the same time. Return, by port, None if the host accepts the connection, else a fault.

    Returns within the deadline. Unfinished tries continue in daemon threads, because a name look-up has no time limit.
    """
    tries = {port: background.start(partial(_try, port, resolve), f"port {port}") for port in ports}
    wait(tries.values(), deadline_seconds)
    detail = f"its name was not resolved within {deadline_seconds:g} s"
    return {
        port: done.result() if done.done() else _fault(port, "ResolverSilent", detail) for port, done in tries.items()
    }


def _try(port: Port, resolve: Callable[[str], tuple[str, ...] | Fault]) -> Fault | None:
    addresses = resolve(port.host)
    if isinstance(addresses, Fault):
        return _fault(port, addresses.reason, addresses.detail)
    faults = []
    for address in addresses[:ADDRESSES_TRIED]:
        fault = interfaces.connect(address, port.port, CONNECT_SECONDS)
        if fault is None:
            return None
        faults.append(fault)
    last = faults[-1]
    tried_addresses = "" if addresses[0] == port.host else f" ({', '.join(addresses[:ADDRESSES_TRIED])})"
    return _fault(port, faults[0].reason, f"{last.detail}{tried_addresses}")


def _fault(port: Port, reason: str, detail: str) -> Fault:
    remedy = _REMEDIES.get(reason, "run `ip route get {host}`").format(host=port.host, port=port.port)
    return Fault(subject=str(port), reason=reason, detail=detail, remedy=remedy)


_REMEDIES = {
    "Refused": "no process listens there, or a firewall rejects: run `ss -ltnp 'sport = :{port}'` on {host}",
    "NoAnswer": "run `ping {host}`; if it responds, a firewall drops packets: run `nft list ruleset` on {host}",
    "NoRoute": "run `ip route get {host}`; a firewall on the way may also reject",
    "NotAllowed": "the firewall of this node forbids it: run `nft list ruleset` and `iptables -S OUTPUT`",
    "UnknownHost": "run `getent hosts {host}`; correct the name, or add it to DNS or /etc/hosts",
    "ResolverSilent": "run `getent hosts {host}`, and check the name server in /etc/resolv.conf",
}
