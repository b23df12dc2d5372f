"""The interface that a job talks through, and whether its MASTER_ADDR:MASTER_PORT answers.

The interface is the one that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME means, else the one of the route to MASTER_ADDR,
else that of the default route: it must exist, be up, have an address and lose nothing. Whether the master answers is
taken from the connections that the ranks hold already; a connection of our own is opened, and closed without a byte,
only where they hold none. Of an address of the rank's own network namespace the kernel tells that nobody listens.

A job with ranks on other nodes that talks through `lo` or `docker0` here reaches none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, critical, growth, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Point, Value, is_loopback
from hangwatch.probes.network import interfaces as network
from hangwatch.probes.network import sockets
from hangwatch.probes.network.interfaces import Interface
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import main_thread, proc_pid

UP = Metric(name="network_interface_up", help="1 while the interface is up", labels=("interface",))
ERRORS = Metric(
    name="network_interface_errors_total", help="packets with errors", labels=("interface", "direction"),
    kind="counter",
)  # fmt: skip
MASTER = Metric(name="network_master_answers", help="1 while MASTER_ADDR:MASTER_PORT answers", labels=contract.JOB)

VARIABLES = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"})
CONNECT_SECONDS = 2.0
_MOST_RANKS = 8
REMEDY_INTERFACE = (
    "set MASTER_ADDR to the address of the first node, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface "
    "between the nodes; where gloo chose, this node's host name is loopback in /etc/hosts"
)
RETRANSMITS_OF_A_DEAD_PEER = 4  # some 3 s without an answer, by the kernel's growing pauses


class Settings(contract.Settings, frozen=True):
    """What is asked beyond what jobs say, and how many errors are too many."""

    interfaces: Annotated[
        str, Meta(description="interfaces that must work, in NCCL_SOCKET_IFNAME's form; empty: what jobs use")
    ] = ""
    errors: Annotated[int, Meta(ge=0, description="more bad packets than this within ten minutes are a warning")] = 100
    connect: Annotated[
        bool, Meta(description="open a connection to the master where no rank holds one; false: never")
    ] = True
    refused_seconds: Annotated[
        float, Meta(ge=60.0, le=540.0, description="a master that has refused for so long, and never answered: warning")
    ] = 300.0


class Use(Value, frozen=True):
    """The interfaces that somebody means. `who` is a job or a setting, `meant` what it said.

    `is_elsewhere_too`: it is a job with ranks on other nodes.
    """

    who: str
    meant: str
    interfaces: tuple[Interface, ...]
    is_elsewhere_too: bool = False


class Master(Value, frozen=True):
    """The master of a job, as `host:port`.

    `silent` is one that lets its peers wait, `refused` a port on which nobody listens: the job may not have begun to,
    or never does. `unknown` where it lies in a network that we are not in. `retrying` are ranks of this node, of the
    first 8, that have no socket of that port while their main thread sleeps: so does one whose attempts are refused.
    """

    job: JobName
    place: str
    state: Literal["answers", "silent", "refused", "unknown"]
    detail: str = ""
    retrying: int = 0


class Enclosed(Value, frozen=True):
    """A rank of a job with ranks elsewhere that waits for others at `place` alone, which only this node reaches."""

    rank: contract.RankName
    place: str


class Sample(contract.Sample, frozen=True):
    """Interfaces in use and masters, at one moment."""

    uses: tuple[Use, ...]
    masters: tuple[Master, ...]
    monotonic_seconds: float
    enclosed: tuple[Enclosed, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Read the tables of this node's network, and those of jobs that have a network of their own."""
    own = network.interfaces(node.proc_root / "self" / "net", node.sys_root)
    if not isinstance(own, tuple):
        return own
    uses: list[Use] = []
    masters: list[Master] = []
    enclosed: list[Enclosed] = []
    faults = []
    for job in node.jobs:
        answer = _job(node, job, own, settings)
        if isinstance(answer, Fault):
            faults.append(answer)
        elif answer is not None:
            uses += answer.uses
            masters += [answer.master] if answer.master else []
            enclosed += answer.enclosed
    if settings.interfaces:
        uses.append(Use(who="[checks.network]", meant=settings.interfaces, interfaces=meant(settings.interfaces, own)))
    if not uses:
        net_root = node.proc_root / "self" / "net"
        default = network.default_interface(network.routes(net_root)) or network.default_interface_v6(net_root)
        found = tuple(interface for interface in own if interface.name == default)
        uses = [Use(who="the node", meant="the default route", interfaces=found)] if found else []
    if not uses and not masters and not faults:
        return None
    return Sample(
        uses=tuple(uses),
        masters=tuple(masters),
        enclosed=tuple(enclosed),
        monotonic_seconds=node.clock.monotonic(),
        faults=tuple(faults),
    )


class _Found(NamedTuple):
    """What is found of one job."""

    uses: list[Use]
    master: Master | None
    enclosed: list[Enclosed]


def _job(node: Node, job: Job, own: tuple[Interface, ...], settings: Settings) -> _Found | Fault | None:
    """What a job uses, by the environment of its first rank; None when that rank is gone."""
    if not job.ranks:
        return None
    pid = job.ranks[0].id.pid
    environ = proc_pid.variables(node.proc_root, pid, VARIABLES)
    if not isinstance(environ, dict):
        return environ
    same = _same_namespace(node.proc_root, pid)
    net_root = node.proc_root / str(pid) / "net"
    seen = own if same else network.interfaces(net_root, None)
    if not isinstance(seen, tuple):
        return seen
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    addresses = network.resolve(host) if host else ()
    uses = _uses(job, environ, seen, net_root, addresses if isinstance(addresses, tuple) else ())
    number = int(port) if port.isdecimal() else None
    enclosed = _enclosed(node, job, seen, number) if job.is_elsewhere_too else []
    if not host or number is None:
        return _Found(uses, None, enclosed)
    place = f"{host}:{port}"
    if isinstance(addresses, Fault):
        return _Found(uses, Master(job=job.name, place=place, state="unknown", detail=addresses.detail), enclosed)
    local = {address for interface in seen for address in interface.addresses}
    is_deaf = bool(addresses) and local.issuperset(addresses) and not sockets.is_listened_to(number, net_root)
    may_connect = same and settings.connect
    master = _master(job, place, addresses, number, net_root, is_deaf=is_deaf, may_connect=may_connect)
    retrying = sum(_retries(node, rank.id.pid, number) for rank in job.ranks[:_MOST_RANKS])
    return _Found(uses, replace(master, retrying=retrying) if master.state == "refused" else master, enclosed)


def _retries(node: Node, pid: int, port: int) -> bool:
    """Whether a rank has no socket of that port while its main thread sleeps."""
    call = main_thread.read_call(pid, node.proc_root)
    return call is not None and call.kind == "sleeps" and sockets.held_at(port, pid, node.proc_root) == []


def _enclosed(node: Node, job: Job, seen: tuple[Interface, ...], port: int | None) -> list[Enclosed]:
    """The first of its ranks that others can reach from this node alone, by where it listens."""
    addresses = {address for interface in seen if interface.is_of_one_node for address in interface.addresses}
    table = sockets.read(job.ranks[0].id.pid, node.proc_root) or {}
    for rank in job.ranks[:_MOST_RANKS]:
        inodes = (sockets.held_by(rank.id.pid, node.proc_root) or {}).values()
        place = sockets.only_at(addresses, port, [table[inode] for inode in inodes if inode in table])
        if place is not None:
            return [Enclosed(rank=contract.RankName.of(job, rank), place=place)]
    return []


def _same_namespace(proc_root: Path, pid: int) -> bool:
    return proc_pid.namespace(proc_root, pid, "net") == proc_pid.namespace(proc_root, "self", "net")


def _uses(
    job: Job, environ: dict[str, str], seen: tuple[Interface, ...], net_root: Path, addresses: tuple[str, ...]
) -> list[Use]:
    """What the job says, else where its master lies; nothing where neither tells."""
    who, elsewhere = f"job {job.name}", job.is_elsewhere_too
    said = [(name, environ[name]) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(name)]
    if said:
        return [Use(who, f"{name}={names}", meant(names, seen), elsewhere) for name, names in said]
    routes = network.routes(net_root)
    towards = {network.interface_to(address, routes) for address in addresses}
    local = {interface.name for interface in seen if set(interface.addresses) & set(addresses)}
    host = environ.get("MASTER_ADDR", "")
    found = tuple(interface for interface in seen if interface.name in (local or towards))
    # A name of this node may be loopback here and its address on others: only what is written so is so everywhere.
    return [Use(who, f"the route to {host}", found, elsewhere and is_loopback(host))] if found else []


def meant(names: str, seen: tuple[Interface, ...]) -> tuple[Interface, ...]:
    """The interfaces that a value of NCCL_SOCKET_IFNAME means: prefixes by comma, `^` excludes, `=` is exact."""
    exclude, exact = names.startswith("^"), names.lstrip("^").startswith("=")
    named = [word.strip() for word in names.lstrip("^").lstrip("=").split(",") if word.strip()]

    def is_named(interface: Interface) -> bool:
        return interface.name in named if exact else interface.name.startswith(tuple(named))

    if exclude:
        return tuple(interface for interface in seen if not is_named(interface) and interface.name != "lo")
    return tuple(interface for interface in seen if is_named(interface))


def _master(
    job: Job,
    place: str,
    addresses: tuple[str, ...],
    port: int,
    net_root: Path,
    *,
    is_deaf: bool,
    may_connect: bool,
) -> Master:
    held = sockets.connections_to(addresses, port, net_root)
    repeats = [connection.retransmits for connection in held if connection.state == sockets.ESTABLISHED]
    if any(count < RETRANSMITS_OF_A_DEAD_PEER for count in repeats):
        return Master(job=job.name, place=place, state="answers")
    if repeats:
        detail = f"the connections of its ranks repeat what they sent for the {max(repeats)}th time"
        return Master(job=job.name, place=place, state="silent", detail=detail)
    if is_deaf:
        return Master(job=job.name, place=place, state="refused", detail="refused, nobody listens there")
    if not may_connect:
        return Master(job=job.name, place=place, state="unknown", detail="no rank holds a connection to it")
    answers = [network.connect(address, port, CONNECT_SECONDS) for address in addresses[:2]]
    faults = [answer for answer in answers if answer is not None]
    if len(faults) < len(answers):
        return Master(job=job.name, place=place, state="answers")
    state: Literal["refused", "silent"] = "refused" if any(fault.reason == "Refused" for fault in faults) else "silent"
    return Master(job=job.name, place=place, state=state, detail="; ".join(fault.detail for fault in faults))


def points(sample: Sample) -> Iterable[Point]:
    """State and errors of the interfaces in use, and whether masters answer."""
    for interface in _interfaces(sample).values():
        if interface.up is not None:
            yield UP.point(interface.up, interface=interface.name)
        yield ERRORS.point(interface.receive_errors, interface=interface.name, direction="receive")
        yield ERRORS.point(interface.transmit_errors, interface=interface.name, direction="transmit")
    for master in sample.masters:
        if master.state != "unknown":
            yield MASTER.point(master.state == "answers", **master.job.labels)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Interfaces that are missing, down or without address; masters that are silent; errors that grew."""
    sample = window[-1]
    findings = [finding for use in sample.uses for finding in _judge_use(use)]
    findings += [*_silent(window), *_never_answered(window, settings), *_only_here(window), *_errors(window, settings)]
    names = ", ".join(sorted(_interfaces(sample)))
    answering = ", ".join(master.place for master in sample.masters if master.state == "answers")
    summary = ", ".join([f"{names} up"] * bool(names) + [f"{answering} answers"] * bool(answering))
    return worst(findings, ok("NetworkUp", summary or "nothing is known to be wrong"))


def _interfaces(sample: Sample) -> dict[str, Interface]:
    """The interfaces in use, by name."""
    return {interface.name: interface for use in sample.uses for interface in use.interfaces}


def _judge_use(use: Use) -> Iterator[CheckVerdict]:
    remedy = "`ip -brief address`; correct NCCL_SOCKET_IFNAME in the job, or bring the interface up"
    if not use.interfaces:
        yield critical("NoInterface", f"{use.meant} of {use.who} means no interface of this node", remedy)
    elif not any(interface.up is not False and interface.addresses for interface in use.interfaces):
        states = ", ".join(
            f"{interface.name} is {interface.state}" + ("" if interface.addresses else " and has no address")
            for interface in use.interfaces
        )
        yield critical("InterfaceDown", f"{states} ({use.meant} of {use.who})", remedy)
    elif use.is_elsewhere_too and all(interface.is_of_one_node for interface in use.interfaces):
        names = ", ".join(interface.name for interface in use.interfaces)
        message = f"{use.meant} of {use.who} means {names}, which leads to no other node, and it has ranks on others"
        yield warning("WrongInterface", message, REMEDY_INTERFACE)


def _silent(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Silent once may be a job that starts or ends; twice in a row it is not. Refused counts only after an answer."""
    answered = {_place(master) for sample in window for master in sample.masters if master.state == "answers"}
    lost = [
        {_place(master): master for master in sample.masters if master.state == "silent" or _is_lost(master, answered)}
        for sample in window[-2:]
    ]
    for place, master in lost[-1].items():
        message = f"{master.place}, the master of job {master.job}, does not answer: {master.detail}"
        remedy = "is the first node of the job alive? `ping`, `ss -tnp`, firewalls between the nodes"
        level = critical if len(lost) > 1 and place in lost[0] else warning
        yield level("MasterSilent", message, remedy)


def _never_answered(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    """Refused in every sample since the job was there, while its ranks try: who is to serve the store never came."""
    for master in window[-1].masters:
        seconds = _refused_seconds(window, _place(master))
        if seconds >= settings.refused_seconds:
            tried = words.count(master.retrying, "rank")
            message = (
                f"{master.place}, the master of job {master.job}, has refused for {seconds:.0f} s and never answered: "
                f"no connection to it from {tried} here, which sleep as between attempts"
            )
            yield warning(
                "MasterRefused", message, "is rank 0 there, and past its imports? `hangwatch dump` on its node"
            )


def _refused_seconds(window: Sequence[Sample], place: tuple[JobName, str]) -> float:
    """For how long a master has refused ranks that try, since its job was first seen; 0 where it once did not."""
    samples = [(sample, one) for sample in window for one in sample.masters if _place(one) == place]
    if not all(one.state == "refused" and one.retrying for _, one in samples):
        return 0.0
    return samples[-1][0].monotonic_seconds - samples[0][0].monotonic_seconds


def _only_here(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Once may be a rank that has begun to listen a moment ago; twice in a row it is not."""
    before = {one.rank for sample in window[-2:-1] for one in sample.enclosed}
    for one in window[-1].enclosed:
        if one.rank in before:
            message = f"{one.rank} waits for the others at {one.place} alone, and its job has ranks on other nodes"
            yield warning("WrongInterface", message, REMEDY_INTERFACE)


def _place(master: Master) -> tuple[JobName, str]:
    """Jobs with a network of their own may each have a master at 127.0.0.1."""
    return master.job, master.place


def _is_lost(master: Master, answered: set[tuple[JobName, str]]) -> bool:
    return master.state == "refused" and _place(master) in answered


def _errors(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    seconds = window[-1].monotonic_seconds - window[0].monotonic_seconds
    readings = [
        {name: interface.receive_errors + interface.transmit_errors for name, interface in _interfaces(sample).items()}
        for sample in window
    ]
    for name, grown in growth(readings).items():
        if grown > settings.errors:
            message = f"{name} had {grown} bad packets within {seconds:.0f} s"
            yield warning("InterfaceErrors", message, f"`ethtool -S {name}`, cable, transceiver, duplex")


def table(sample: Sample) -> contract.Rows:
    """Who uses which interface, and the masters."""
    rows = [("who", "means", "interface", "state", "addresses")]
    for use in sample.uses:
        rows += [
            (use.who, use.meant, interface.name, interface.state, " ".join(interface.addresses))
            for interface in use.interfaces
        ]
    rows += [(f"job {master.job}", "master", master.place, master.state, master.detail) for master in sample.masters]
    return rows


CHECK = Check(
    name="network",
    every_seconds=60,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(UP, ERRORS, MASTER),
    table=table,
    absent="no training job runs on this node, and it has no default route, neither by IPv4 nor by IPv6",
    window=11,
)
