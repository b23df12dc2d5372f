"""TCP ports of other hosts: does somebody answer there? Each is tried once, and closed without a byte."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence

from hangwatch.model import Fault, Value
from hangwatch.probes.network import interfaces

CONNECT_SECONDS = 3.0
ADDRESSES_TRIED = 2  # of a name: usually one of each family
MOST_PORTS = 256
_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9][A-Za-z0-9._-]*)?):([0-9]{1,5})")


class Port(Value, frozen=True):
    """A port of a host; `host` is a name or an address, empty where each node of a set is meant."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Port | None:
    """`host:29500`, `[::1]:29500` or `:29500`; None for what is none."""
    found = _PLACE.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return None
    return Port(host=found[1] or found[2] or "", port=int(found[3]))


def try_all(
    ports: Sequence[Port],
    deadline_seconds: float,
    resolve: Callable[[str], tuple[str, ...] | Fault] = interfaces.resolve,
) -> dict[Port, Fault | None]:
    """Try all ports at the same time; None for each that answers, else why it does not.

    Returns within the deadline. What is still tried then goes on in threads that do not keep the process alive: nothing
    bounds a look-up of a name.
    """
    came: queue.SimpleQueue[tuple[Port, Fault | None]] = queue.SimpleQueue()
    for port in ports:
        threading.Thread(target=lambda one=port: came.put((one, _try(one, resolve))), daemon=True).start()
    found: dict[Port, Fault | None] = {}
    end = time.monotonic() + deadline_seconds
    while len(found) < len(set(ports)):
        try:
            port, fault = came.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[port] = fault
    return {port: found[port] if port in found else _unresolved(port, deadline_seconds) for port in ports}


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
    tried = "" if addresses[0] == port.host else f" ({', '.join(addresses[:ADDRESSES_TRIED])})"
    return _fault(port, faults[0].reason, f"{last.detail}{tried}")


def _unresolved(port: Port, seconds: float) -> Fault:
    return _fault(port, "ResolverSilent", f"its name is not resolved within {seconds:g} s")


def _fault(port: Port, reason: str, detail: str) -> Fault:
    remedy = _REMEDIES.get(reason, "`ip route get {host}`").format(host=port.host, port=port.port)
    return Fault(subject=str(port), reason=reason, detail=detail, remedy=remedy)


_REMEDIES = {
    "Refused": "nobody listens there yet, or a firewall rejects: on {host}, `ss -ltnp 'sport = :{port}'`",
    "NoAnswer": "is {host} up: `ping {host}`? Else packets are dropped: on {host}, `nft list ruleset`, security groups",
    "NoRoute": "`ip route get {host}`; a firewall on the way may reject, too",
    "NotAllowed": "this node's own firewall forbids it: `nft list ruleset`, `iptables -S OUTPUT`",
    "UnknownHost": "`getent hosts {host}`: correct the name, or add it to DNS or /etc/hosts",
    "ResolverSilent": "`getent hosts {host}`; does the name server of /etc/resolv.conf answer?",
}
