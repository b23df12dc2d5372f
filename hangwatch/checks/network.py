"""Network interfaces that jobs use, and the response of each job's master (MASTER_ADDR:MASTER_PORT).

NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the interface, else the route to MASTER_ADDR, else the default
route. The interface must exist, be up, have an address and lose no packets. A job with ranks on other nodes cannot
reach them through `lo` or `docker0`.

The check reads the state of the master from the connections of the ranks. If no rank has a connection, hangwatch
opens one and closes it without sending a byte. If MASTER_ADDR is an address of the rank's own network namespace,
the check reads the listening sockets there instead.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from hangwatch import words
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, counter_growth, critical, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Value, is_loopback
from hangwatch.probes.base import procfs
from hangwatch.probes.network import interfaces as network
from hangwatch.probes.network import sockets
from hangwatch.probes.network.interfaces import Interface
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import main_thread, proc_pid

MasterState: TypeAlias = Literal["answers", "silent", "refused", "unknown"]
VARIABLES = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"})
CONNECT_SECONDS = 2.0
REFUSED_SECONDS = 300.0  # of a master that never responded
_MOST_RANKS = 8
REMEDY_INTERFACE = (
    "set MASTER_ADDR to the address of the first node, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface "
    "between the nodes; if gloo chose the interface, /etc/hosts maps the host name of this node to loopback"
)
# About 3 s without a response: the kernel doubles its retransmission timeout
RETRANSMITS_OF_A_DEAD_PEER = 4


class Settings(contract.Settings, frozen=True):
    """Required interfaces, the limit on errors, and permission to connect to masters."""

    interfaces: Annotated[
        str, describe("interfaces that must work, written as in NCCL_SOCKET_IFNAME; empty: those that jobs use")
    ] = ""
    errors: Annotated[int, describe("warning if an interface has more bad packets than this within ten minutes", 0)] = (
        100
    )
    connect: Annotated[bool, describe("open a connection to the master if no rank has one; false: never")] = True


class Use(Value, frozen=True):
    """The interfaces that a job, the node or a section of the configuration uses. `source` is what selects them.

    `needs_other_nodes` is true if a job must reach other nodes through these interfaces.
    """

    user: str
    source: str
    interfaces: tuple[Interface, ...]
    needs_other_nodes: bool = False


class Master(Value, frozen=True):
    """The master of a job. `address` is `host:port`.

    `silent`: the master does not respond. `refused`: no process listens on the port, perhaps not yet. `unknown`: no
    rank has a connection, and hangwatch cannot or may not connect. `retrying` counts ranks that seem to retry a
    refused connection: they have no socket of that port, and their main thread sleeps. Only the first 8 ranks on
    this node are counted.
    """

    job: JobName
    address: str
    state: MasterState
    detail: str = ""
    retrying: int = 0

    @property
    def key(self) -> tuple[JobName, str]:
        """Job and address: jobs in different network namespaces may have the same address."""
        return self.job, self.address


class Enclosed(Value, frozen=True):
    """A rank of a job on several nodes that listens only at `address`. Other nodes cannot reach this address."""

    rank: contract.RankName
    address: str


class Sample(contract.Sample, frozen=True):
    """Interfaces in use, masters, and ranks that other nodes cannot reach, at one time."""

    uses: tuple[Use, ...]
    masters: tuple[Master, ...]
    monotonic_seconds: float
    enclosed: tuple[Enclosed, ...] = ()


def observe(node: Node, settings: Settings) -> Sample | Fault | None:
    """Read the network tables of this node, and of each job that is in another network namespace."""
    node_interfaces = network.interfaces(node.proc_root / "self" / "net", node.sys_root)
    if not isinstance(node_interfaces, tuple):
        return node_interfaces
    answers = [_job(node, job, node_interfaces, settings) for job in node.jobs]
    faults = tuple(answer for answer in answers if isinstance(answer, Fault))
    of_jobs = [answer for answer in answers if isinstance(answer, _JobNetwork)]
    masters = tuple(each.master for each in of_jobs if each.master)
    uses = [use for each in of_jobs for use in each.uses]
    if settings.interfaces:
        selected = select_interfaces(settings.interfaces, node_interfaces)
        uses.append(Use(user="[checks.network]", source=settings.interfaces, interfaces=selected))
    if not uses:
        net_root = node.proc_root / "self" / "net"
        default = network.default_interface(network.routes(net_root)) or network.default_interface_v6(net_root)
        selected = tuple(interface for interface in node_interfaces if interface.name == default)
        uses = [Use(user="the node", source="the default route", interfaces=selected)] if selected else []
    if not uses and not masters and not faults:
        return None
    return Sample(
        uses=tuple(uses),
        masters=masters,
        enclosed=tuple(enclosed for each in of_jobs for enclosed in each.enclosed),
        monotonic_seconds=node.clock.monotonic(),
        faults=faults,
    )


class _JobNetwork(NamedTuple):
    """The interfaces and the master of one job, and its ranks that other nodes cannot reach."""

    uses: list[Use]
    master: Master | None
    enclosed: list[Enclosed]


def _job(
    node: Node, job: Job, node_interfaces: tuple[Interface, ...], settings: Settings
) -> _JobNetwork | Fault | None:
    """Read the network of a job from the environment of its first rank. Return None if that rank has ended."""
    if not job.ranks:
        return None
    pid = job.ranks[0].id.pid
    environ = proc_pid.variables(node.proc_root, pid, VARIABLES)
    if not isinstance(environ, dict):
        return environ
    is_same_namespace = len({procfs.namespace(node.proc_root, view, "net") for view in (pid, "self")}) == 1
    net_root = node.proc_root / str(pid) / "net"
    interfaces = node_interfaces if is_same_namespace else network.interfaces(net_root, None)
    if not isinstance(interfaces, tuple):
        return interfaces
    host, port_text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    addresses = network.resolve(host) if host else ()
    uses = _uses(job, environ, interfaces, net_root, addresses if isinstance(addresses, tuple) else ())
    port = int(port_text) if port_text.isdecimal() else None
    enclosed = _enclosed(node, job, interfaces, port) if job.has_ranks_on_other_nodes else []
    if not host or port is None:
        return _JobNetwork(uses, None, enclosed)
    master = Master(job=job.name, address=f"{host}:{port_text}", state="unknown")
    if isinstance(addresses, Fault):
        return _JobNetwork(uses, replace(master, detail=addresses.detail), enclosed)
    local = {address for interface in interfaces for address in interface.addresses}
    is_deaf = bool(addresses) and local.issuperset(addresses)
    is_deaf = is_deaf and sockets.classify_port_use(port, sockets.list_connections(net_root, port)) != "serving"
    may_connect = is_same_namespace and settings.connect
    state, detail = _master_state(addresses, port, net_root, is_deaf=is_deaf, may_connect=may_connect)
    tables, ranks = sockets.Tables(node.proc_root), job.ranks[:_MOST_RANKS] if state == "refused" else ()
    retrying = sum(_retries(node, rank.id.pid, port, tables) for rank in ranks)
    return _JobNetwork(uses, replace(master, state=state, detail=detail, retrying=retrying), enclosed)


def _retries(node: Node, pid: int, port: int, tables: sockets.Tables) -> bool:
    """True if a rank seems to retry a refused connection: it has no socket of `port`, and its main thread sleeps."""
    call = main_thread.read_call(pid, node.proc_root)
    if call is None or call.kind != "sleeps":
        return False
    return sockets.sockets_at_port(port, pid, tables) == []


def _enclosed(node: Node, job: Job, interfaces: tuple[Interface, ...], port: int | None) -> list[Enclosed]:
    """Return a list with the first rank that listens only at addresses which other nodes cannot reach; else empty."""
    addresses = {address for interface in interfaces if interface.is_of_one_node for address in interface.addresses}
    tables = sockets.Tables(node.proc_root)
    for rank in job.ranks[:_MOST_RANKS]:
        address = sockets.find_unreachable_listener(addresses, port, tables.read_held(rank.id.pid))
        if address is not None:
            return [Enclosed(rank=contract.RankName.of_rank(job, rank), address=address)]
    return []


def _uses(
    job: Job, environ: dict[str, str], interfaces: tuple[Interface, ...], net_root: Path, addresses: tuple[str, ...]
) -> list[Use]:
    """Return the interfaces that the job's variables select, else the interfaces of the route to its master."""
    user, has_other_nodes = f"job {job.name}", job.has_ranks_on_other_nodes
    variables = [(name, environ[name]) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(name)]
    if variables:
        return [
            Use(user, f"{name}={value}", select_interfaces(value, interfaces), has_other_nodes)
            for name, value in variables
        ]
    routes = network.routes(net_root)
    towards = {network.interface_to(address, routes) for address in addresses}
    local = {interface.name for interface in interfaces if set(interface.addresses) & set(addresses)}
    host = environ.get("MASTER_ADDR", "")
    selected = tuple(interface for interface in interfaces if interface.name in (local or towards))
    # A host name may be loopback on this node and an external address on others. A literal loopback address is not.
    return [Use(user, f"the route to {host}", selected, has_other_nodes and is_loopback(host))] if selected else []


def select_interfaces(names: str, interfaces: tuple[Interface, ...]) -> tuple[Interface, ...]:
    """Return the interfaces that `names` selects, a value of NCCL_SOCKET_IFNAME.

    The value is a list of prefixes. With a leading `^` it selects all other interfaces. With a leading `=` it is a
    list of exact names.
    """
    exclude, exact = names.startswith("^"), names.lstrip("^").startswith("=")
    named = [word.strip() for word in names.lstrip("^").lstrip("=").split(",") if word.strip()]

    def is_named(interface: Interface) -> bool:
        return interface.name in named if exact else interface.name.startswith(tuple(named))

    if exclude:
        return tuple(interface for interface in interfaces if not is_named(interface) and interface.name != "lo")
    return tuple(interface for interface in interfaces if is_named(interface))


def _master_state(
    addresses: tuple[str, ...], port: int, net_root: Path, *, is_deaf: bool, may_connect: bool
) -> tuple[MasterState, str]:
    """Return the state of a master, and the cause if it is not `answers`.

    `is_deaf`: the addresses of the master are on this node, and no process listens on the port.
    """
    connections = sockets.connections_to(addresses, port, net_root)
    retransmits = [connection.retransmits for connection in connections if connection.state == sockets.ESTABLISHED]
    if any(count < RETRANSMITS_OF_A_DEAD_PEER for count in retransmits):
        return "answers", ""
    if retransmits:
        return "silent", f"the connections of its ranks have retransmitted {max(retransmits)} times"
    if is_deaf:
        return "refused", "refused, no process listens on the port"
    if not may_connect:
        return "unknown", "no rank has a connection to it"
    answers = [network.connect(address, port, CONNECT_SECONDS) for address in addresses[:2]]
    faults = [answer for answer in answers if answer is not None]
    if len(faults) < len(answers):
        return "answers", ""
    is_refused = any(fault.reason == "Refused" for fault in faults)
    return "refused" if is_refused else "silent", "; ".join(fault.detail for fault in faults)


METRICS = (
    Metrics[Sample, Interface](
        Metric("network_interface_up", "1 while the interface is up", lambda interface: interface.up),
        Metric(
            "network_interface_errors_total",
            "packets with errors",
            lambda interface: {"receive": interface.receive_errors, "transmit": interface.transmit_errors},
            by=("direction",),
        ),
        subjects=lambda sample: _interfaces(sample).values(),
        labels={"interface": lambda interface: interface.name},
    ),
    Metrics[Sample, Master](
        Metric(
            "network_master_answers",
            "1 while MASTER_ADDR:MASTER_PORT responds",
            lambda master: None if master.state == "unknown" else master.state == "answers",
        ),
        subjects=lambda sample: sample.masters,
        labels=contract.JOB,
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Find interfaces that are missing, down or without an address, masters that do not respond, and packet errors."""
    sample = window[-1]
    findings = [finding for use in sample.uses for finding in _judge_use(use)]
    findings += [*_silent(window), *_never_answered(window), *_unreachable(window), *_errors(window, settings)]
    names = ", ".join(sorted(_interfaces(sample)))
    answering = ", ".join(master.address for master in sample.masters if master.state == "answers")
    parts = [f"{names} up"] * bool(names) + [f"masters that respond: {answering}"] * bool(answering)
    return worst(findings, ok("NetworkUp", ", ".join(parts) or "no problem known"))


def _interfaces(sample: Sample) -> dict[str, Interface]:
    """Return the interfaces in use, by name."""
    return {interface.name: interface for use in sample.uses for interface in use.interfaces}


def _judge_use(use: Use) -> Iterator[CheckVerdict]:
    remedy = "`ip -brief address`; correct NCCL_SOCKET_IFNAME in the job, or bring the interface up"
    if not use.interfaces:
        yield critical("NoInterface", f"{use.source} of {use.user} matches no interface of this node", remedy)
    elif not any(interface.up is not False and interface.addresses for interface in use.interfaces):
        states = ", ".join(
            f"{interface.name} is {interface.state}" + ("" if interface.addresses else " and has no address")
            for interface in use.interfaces
        )
        yield critical("InterfaceDown", f"{states} ({use.source} of {use.user})", remedy)
    elif use.needs_other_nodes and all(interface.is_of_one_node for interface in use.interfaces):
        names = ", ".join(interface.name for interface in use.interfaces)
        message = f"{use.user} has ranks on other nodes, but {use.source} selects {names}, which reaches no other node"
        yield warning("WrongInterface", message, REMEDY_INTERFACE)


def _silent(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Find masters that do not respond: a warning after one sample, critical after two in a row.

    After one sample the job may just be starting or ending. A refused connection counts only if the master
    responded before.
    """
    answered = {master.key for sample in window for master in sample.masters if master.state == "answers"}
    lost = [
        {
            master.key: master
            for master in sample.masters
            if master.state == "silent" or (master.state == "refused" and master.key in answered)
        }
        for sample in window[-2:]
    ]
    for key, master in lost[-1].items():
        message = f"{master.address}, the master of job {master.job}, does not respond: {master.detail}"
        remedy = "check if the first node of the job is alive: `ping`, `ss -tnp`, firewalls between the nodes"
        level = critical if len(lost) > 1 and key in lost[0] else warning
        yield level("MasterSilent", message, remedy)


def _never_answered(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Find masters that refused connections in every sample while ranks retried: rank 0 may serve no store."""
    for master in window[-1].masters:
        seconds = _refused_seconds(window, master.key)
        if seconds >= REFUSED_SECONDS:
            message = (
                f"{master.address}, the master of job {master.job}, has refused connections for {seconds:.0f} s and "
                f"never responded; {words.count(master.retrying, 'rank')} on this node may be retrying"
            )
            remedy = "check if rank 0 is running and past its imports: `hangwatch dump` on its node"
            yield warning("MasterRefused", message, remedy)


def _refused_seconds(window: Sequence[Sample], key: tuple[JobName, str]) -> float:
    """Return for how many seconds a master has refused ranks that retry; 0 if any sample shows another state."""
    samples = [(sample, master) for sample in window for master in sample.masters if master.key == key]
    if not all(master.state == "refused" and master.retrying for _, master in samples):
        return 0.0
    return samples[-1][0].monotonic_seconds - samples[0][0].monotonic_seconds


def _unreachable(window: Sequence[Sample]) -> Iterator[CheckVerdict]:
    """Find ranks that other nodes could not reach in two samples: after one, a rank may still open its sockets."""
    before = {enclosed.rank for sample in window[-2:-1] for enclosed in sample.enclosed}
    for enclosed in window[-1].enclosed:
        if enclosed.rank in before:
            message = f"{enclosed.rank} listens only at {enclosed.address}, but its job has ranks on other nodes"
            yield warning("WrongInterface", message, REMEDY_INTERFACE)


def _errors(window: Sequence[Sample], settings: Settings) -> Iterator[CheckVerdict]:
    seconds = window[-1].monotonic_seconds - window[0].monotonic_seconds
    readings = [
        {name: interface.receive_errors + interface.transmit_errors for name, interface in _interfaces(sample).items()}
        for sample in window
    ]
    for name, growth in counter_growth(readings).items():
        if growth > settings.errors:
            message = f"{name} had {growth} bad packets within {seconds:.0f} s (limit {settings.errors})"
            yield warning("InterfaceErrors", message, f"`ethtool -S {name}`; check cable, transceiver and duplex")


def table(sample: Sample) -> contract.Rows:
    """Return one row per interface in use, then one row per master."""
    yield "used by", "selected by", "interface", "state", "addresses"
    for use in sample.uses:
        for interface in use.interfaces:
            yield use.user, use.source, interface.name, interface.state, " ".join(interface.addresses)
    for master in sample.masters:
        yield f"job {master.job}", "master", master.address, master.state, master.detail


CHECK = Check(
    observe,
    METRICS,
    judge,
    table,
    Settings,
    window=11,
    absent="no training job runs on this node, and it has no default route (IPv4 or IPv6)",
)
