"""network: the interface of a job and its master, on fixture trees and in real network namespaces."""

import os
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.checks.network import select_interfaces
from hangwatch.model import Fault, SystemCall
from hangwatch.probes.network import interfaces, sockets
from hangwatch.probes.network.interfaces import Interface, Route
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import main_thread
from tests.commands import finished, spawn
from tests.conftest import wait_for
from tests.node_tree import Checked, FakeClock, NodeTree, expect, job, rank, run, status_and_reason, values

needs_localhost = pytest.mark.skipif(
    isinstance(interfaces.resolve("localhost"), Fault), reason="this machine has no /etc/hosts with localhost"
)

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
  eth0: 100 1 {errors} 7 0 0 0 0 100 1 0 0 0 0 0 0
   ib0: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
docker0:100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
"""
ROUTE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
ib0\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
docker0\t000011AC\t00000000\t0000\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
FIB_TRIE = """Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 10.0.0.5
        /32 host LOCAL
     |-- 10.0.0.255
        /32 link BROADCAST
     |-- 192.168.7.9
        /32 host LOCAL
"""
TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
IDLE = SystemCall(number=-1)
MASTER = {"MASTER_ADDR": "192.168.7.1", "MASTER_PORT": "29500"}
TO_MASTER = "   0: 0907A8C0:D431 0107A8C0:733C {state} 00000000:00000000 00:00000000 {retransmits:08X} 0 0 1\n"


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    for view in ("self", "10"):
        home = f"proc/{view}/net"
        tree.write(f"{home}/dev", DEV.format(errors=0))
        tree.write(f"{home}/route", ROUTE)
        tree.write(f"{home}/fib_trie", FIB_TRIE)
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("ib0", "up"), ("docker0", "down")):
        tree.write(f"sys/class/net/{name}/operstate", state + "\n")
    return tree


def process(tree: NodeTree, **environ: str) -> None:
    tree.process(10, environ=environ)


def connection(tree: NodeTree, state: str = "01", retransmits: int = 0) -> None:
    tree.write("proc/10/net/tcp", TCP + TO_MASTER.format(state=state, retransmits=retransmits))


def test_without_a_job_the_default_route_counts(tree: NodeTree) -> None:
    result = expect(("OK", "NetworkUp"), "network", tree.node())
    assert values(result, "network_interface_up") == {("eth0",): 1}
    tree.write("sys/class/net/eth0/operstate", "lowerlayerdown\n")
    expect(("CRITICAL", "InterfaceDown"), "network", tree.node())


def test_the_route_to_the_master(tree: NodeTree) -> None:
    process(tree, **MASTER)
    connection(tree)
    result = expect(("OK", "NetworkUp"), "network", tree.node(job(rank(10))))
    assert "ib0 up, masters that respond: 192.168.7.1:29500" in result.verdict.message
    assert values(result, "network_master_answers") == {("77",): 1}
    assert ("job 77", "the route to 192.168.7.1", "ib0", "up", "192.168.7.9") in result.table


@pytest.mark.parametrize(
    ("value", "expected", "reason"),
    [
        ("eth", ["eth0"], "NetworkUp"),
        ("=eth0,ib0", ["eth0", "ib0"], "NetworkUp"),
        ("^docker,eth", ["ib0"], "NetworkUp"),
        ("docker0", ["docker0"], "InterfaceDown"),
        ("docker0,ib", ["docker0", "ib0"], "NetworkUp"),
        ("enp", [], "NoInterface"),
        ("=eth", [], "NoInterface"),
    ],
)
def test_nccl_socket_ifname(tree: NodeTree, value: str, expected: list[str], reason: str) -> None:
    process(tree, NCCL_SOCKET_IFNAME=value)
    result = run("network", tree.node(job(rank(10))))
    assert result.verdict.reason == reason
    assert sorted(row[2] for row in result.table[1:]) == sorted(expected)
    if reason != "NetworkUp":
        assert value in result.verdict.message


def test_an_interface_without_an_address(tree: NodeTree) -> None:
    tree.write("proc/self/net/fib_trie", "")
    process(tree, NCCL_SOCKET_IFNAME="ib0")
    result = expect(("CRITICAL", "InterfaceDown"), "network", tree.node(job(rank(10))))
    assert "ib0 is up and has no address" in result.verdict.message


ROUTE_OF_A_32 = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0100000A\t00000000\t0005\t0\t0\t100\tFFFFFFFF\t0\t0\t0
"""


def test_an_address_that_lies_in_no_route_of_its_interface(tree: NodeTree) -> None:
    # The address has a /32 mask and only the gateway has a route, as on GCE and with Calico or Cilium.
    tree.write("proc/self/net/route", ROUTE_OF_A_32)
    tree.write(
        "proc/self/net/fib_trie",
        "     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.5\n        /32 host LOCAL\n",
    )
    result = expect(("OK", "NetworkUp"), "network", tree.node())
    assert result.table[1][2:] == ("eth0", "up", "10.0.0.5")


def test_a_master_on_this_node_is_behind_lo(tree: NodeTree) -> None:
    process(tree, MASTER_ADDR="127.0.0.1")
    result = expect(("OK", "NetworkUp"), "network", tree.node(job(rank(10))))
    assert result.table[1][2] == "lo"


DEFAULT_V6 = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000064 00000001 00000000 00000003     eth0\n"
UNREACHABLE_V6 = (
    f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} 00000001 00000001 00000000 00000201     eth9\n"
    + f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200       lo\n"
)


def test_a_node_with_ipv6_only(tree: NodeTree) -> None:
    for view in ("self", "10"):
        tree.write(f"proc/{view}/net/route", "Iface\n")
        tree.write(f"proc/{view}/net/fib_trie", "")
        tree.write(f"proc/{view}/net/if_inet6", f"fd{'0' * 29}5 02 40 00 80     eth0\n")
    tree.write("proc/self/net/ipv6_route", UNREACHABLE_V6)
    expect(("OK", "NotPresent"), "network", tree.node())
    tree.write("proc/self/net/ipv6_route", UNREACHABLE_V6 + DEFAULT_V6)
    result = expect(("OK", "NetworkUp"), "network", tree.node())
    assert values(result, "network_interface_up") == {("eth0",): 1}


def test_a_dead_master_counts_even_where_no_interface_is_known(tree: NodeTree) -> None:
    for view in ("self", "10"):
        tree.write(f"proc/{view}/net/route", "Iface\n")
    process(tree, MASTER_ADDR="fd00::1", MASTER_PORT="29500")
    remote = "000000FD000000000000000001000000"
    tree.write(
        "proc/10/net/tcp6", TCP + f"   0: {remote}:D431 {remote}:733C 01 00000000:00000000 00:00000000 00000009 0 0 1\n"
    )
    expect(("WARNING", "MasterSilent"), "network", tree.node(job(rank(10))))


def test_a_setting_names_interfaces_too(tree: NodeTree) -> None:
    expect(("OK", "NetworkUp"), "network", tree.node(), interfaces="ib,enp")
    expect(("CRITICAL", "NoInterface"), "network", tree.node(), interfaces="enp")


@pytest.mark.parametrize(
    ("state", "retransmits", "expected"),
    [
        ("01", 0, ("OK", "NetworkUp")),
        ("01", 3, ("OK", "NetworkUp")),
        ("01", 4, ("WARNING", "MasterSilent")),
        ("08", 0, ("OK", "NetworkUp")),
    ],
)
def test_connections_that_ranks_hold(tree: NodeTree, state: str, retransmits: int, expected: tuple[str, str]) -> None:
    process(tree, **MASTER)
    connection(tree, state, retransmits)
    expect(expected, "network", tree.node(job(rank(10))), connect=False)


def test_a_master_that_is_silent_twice_is_critical(tree: NodeTree) -> None:
    process(tree, **MASTER)
    connection(tree, retransmits=9)
    check, node = Checked("network"), tree.node(job(rank(10)))
    check.expect(("WARNING", "MasterSilent"), node)
    check.expect(("CRITICAL", "MasterSilent"), node)
    connection(tree)
    check.expect(("OK", "NetworkUp"), node)


def test_bad_packets_are_judged_by_their_growth(tree: NodeTree) -> None:
    check, node = Checked("network"), tree.node()
    tree.write("proc/self/net/dev", DEV.format(errors=4_000_000))
    check.expect(("OK", "NetworkUp"), node)
    tree.time.pass_seconds(60)
    tree.write("proc/self/net/dev", DEV.format(errors=4_000_101))
    result = check.expect(("WARNING", "InterfaceErrors"), node)
    assert "eth0 had 101 bad packets within 60 s" in result.verdict.message
    assert values(result, "network_interface_errors_total")["eth0", "receive"] == 4_000_101


def test_a_job_in_a_network_of_its_own_is_not_connected_to(tree: NodeTree) -> None:
    process(tree, **MASTER)
    tree.put_in_namespace("self", "net", 1)
    tree.put_in_namespace(10, "net", 2)
    result = expect(("OK", "NetworkUp"), "network", tree.node(job(rank(10))))
    assert values(result, "network_master_answers") == {}
    assert values(result, "network_interface_up") == {}, "/sys shows only our own namespace"


def test_master_with_unresolvable_name_is_no_finding(tree: NodeTree) -> None:
    process(tree, MASTER_ADDR="n" * 70, MASTER_PORT="29500")
    result = expect(("OK", "NetworkUp"), "network", tree.node(job(rank(10))))
    assert values(result, "network_master_answers") == {}


def test_a_rank_that_vanished(tree: NodeTree) -> None:
    expect(("OK", "NetworkUp"), "network", tree.node(job(rank(11))))


def test_an_environment_that_may_not_be_read(tree: NodeTree) -> None:
    process(tree, **MASTER)
    tree.make_unreadable("proc/10/environ")
    result = expect(("UNKNOWN", "CannotRead"), "network", tree.node(job(rank(10))))
    assert result.faults[0].subject == "pid 10"


def test_an_interface_that_has_only_ipv6(tree: NodeTree) -> None:
    tree.write("proc/self/net/fib_trie", "")
    row = "{address} 05 40 {scope} 80      ib0\n"
    link_local = row.format(address="fe800000000000000000000000000002", scope="20")
    tree.write("proc/self/net/if_inet6", "short row\n" + link_local)
    process(tree, NCCL_SOCKET_IFNAME="ib0")
    node = tree.node(job(rank(10)))
    expect(("CRITICAL", "InterfaceDown"), "network", node)
    tree.write("proc/self/net/if_inet6", link_local + row.format(address="fd" + "0" * 29 + "2", scope="00"))
    result = expect(("OK", "NetworkUp"), "network", node)
    assert result.table[1][4] == "fd00::2"


def test_tables_that_may_not_be_read(tree: NodeTree) -> None:
    tree.make_unreadable("proc/self/net/dev")
    expect(("UNKNOWN", "CannotRead"), "network", tree.node())


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"NCCL_SOCKET_IFNAME": "lo"}, "WrongInterface"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "lo"}, "WrongInterface"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, "NetworkUp"),
        ({"MASTER_ADDR": "127.0.0.1"}, "WrongInterface"),
        pytest.param({"MASTER_ADDR": "localhost"}, "WrongInterface", marks=needs_localhost),
        ({"MASTER_ADDR": "192.168.7.9"}, "NetworkUp"),
    ],
)
def test_a_job_of_several_nodes_that_talks_over_loopback(tree: NodeTree, environ: dict[str, str], reason: str) -> None:
    process(tree, **environ)
    result = run("network", tree.node(job(rank(10), world_size=16, local_world_size=8)))
    assert result.verdict.reason == reason
    whole = run("network", tree.node(job(rank(10), world_size=8, local_world_size=8)))
    assert status_and_reason(whole) == ("OK", "NetworkUp"), "all of its ranks are here"


def test_docker_s_bridge_leads_to_no_other_node(tree: NodeTree) -> None:
    tree.write(
        "proc/self/net/route", ROUTE.replace("docker0\t000011AC\t00000000\t0000", "docker0\t000011AC\t00000000\t0001")
    )
    tree.write("proc/self/net/fib_trie", FIB_TRIE + "     |-- 172.17.0.1\n        /32 host LOCAL\n")
    tree.write("sys/class/net/docker0/operstate", "up\n")
    process(tree, GLOO_SOCKET_IFNAME="docker0")
    result = expect(
        ("WARNING", "WrongInterface"), "network", tree.node(job(rank(10), world_size=16, local_world_size=8))
    )
    assert "GLOO_SOCKET_IFNAME=docker0 selects docker0, which reaches no other node" in result.verdict.message


SOCKET = "   {row}: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 0 0 {inode}\n"
EVERYWHERE = "00000000:0000"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([("0101007F:A001", EVERYWHERE, "0A")], "WrongInterface"),  # 127.0.1.1, Debian's entry in /etc/hosts
        ([("0101007F:A001", EVERYWHERE, "0A"), ("0907A8C0:D431", "0107A8C0:733C", "01")], "WrongInterface"),
        ([("0101007F:A001", EVERYWHERE, "0A"), ("0907A8C0:D431", "0107A8C0:1F90", "01")], "NetworkUp"),
        ([("0101007F:A001", EVERYWHERE, "0A"), ("0907A8C0:A002", EVERYWHERE, "0A")], "NetworkUp"),
        ([("0101007F:A001", EVERYWHERE, "0A"), ("00000000:A002", EVERYWHERE, "0A")], "NetworkUp"),
        ([("0907A8C0:D431", "0107A8C0:733C", "01")], "NetworkUp"),
    ],
)
def test_a_rank_that_listens_on_loopback_alone(tree: NodeTree, rows: list[tuple[str, str, str]], reason: str) -> None:
    process(tree, **MASTER)
    text = TCP
    for row, (local, remote, state) in enumerate(rows):
        text += SOCKET.format(row=row, local=local, remote=remote, state=state, inode=100 + row)
        (tree.proc / "10" / "fd" / str(20 + row)).symlink_to(f"socket:[{100 + row}]")
    tree.write("proc/10/net/tcp", text)
    several = tree.node(job(rank(10), world_size=16, local_world_size=8))
    check = Checked("network", connect=False)
    assert check.run(several).verdict.reason == "NetworkUp", "it may have begun a moment ago"
    second = check.run(several)
    assert second.verdict.reason == reason
    if reason == "WrongInterface":
        assert "rank 0 of job 77 listens only at 127.0.1.1 port 40961" in second.verdict.message
    whole = tree.node(job(rank(10), world_size=8, local_world_size=8))
    check = Checked("network", connect=False)
    assert [check.run(whole).verdict.reason for _ in range(2)] == ["NetworkUp"] * 2


@contextmanager
def sleeping_rank(program: str = "import sys; sys.stdin.read()", **environ: str) -> Iterator[int]:
    with spawn(sys.executable, "-c", program, env={**os.environ, **environ}, text=False) as child:
        wait_for(Path(f"/proc/{child.pid}/environ").read_bytes, "its environment: execve(2) sets it late")
        yield child.pid


def test_silent_master_without_connections_becomes_critical() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with sleeping_rank(MASTER_ADDR="127.0.0.1", MASTER_PORT=port) as pid:
            node = Node(jobs=(job(rank(pid)),))
            assert values(run("network", node), "network_master_answers") == {("77",): 1}
            assert run("network", node, connect=False).table[-1][3] == "unknown"
            check = Checked("network")
            check.run(node)
            server.close()
            before = run("network", node)
            assert status_and_reason(before) == ("OK", "NetworkUp"), (
                "no process listens, and perhaps none ever did: no finding"
            )
            assert before.table[-1][3] == "refused"
            check.expect(("WARNING", "MasterSilent"), node)
            second = check.expect(("CRITICAL", "MasterSilent"), node)
            assert "refused" in second.verdict.message
            assert values(second, "network_master_answers") == {("77",): 0}


def test_a_master_that_has_refused_since_the_job_began() -> None:
    # The port is bound, but no process listens on it. Only a job that tries to connect is reported, after 300 s.
    tries = "import time\nwhile True: time.sleep(60)"
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1])}
        time = FakeClock()
        with sleeping_rank(**at) as idle, sleeping_rank(tries, **at) as trying:
            wait_for(lambda: (main_thread.read_call(trying, Path("/proc")) or IDLE).kind == "sleeps", "it to sleep")
            told_of = {}
            for name, pid in (("idle", idle), ("trying", trying)):
                node = Node(jobs=(job(rank(pid), job_id=name),), clock=time.clock())
                check, said = Checked("network", connect=False), []
                for _ in range(7):
                    said.append(check.run(node))
                    time.pass_seconds(60)
                told_of[name] = said
    assert {status_and_reason(one) for one in told_of["idle"]} == {("OK", "NetworkUp")}
    reasons = [one.verdict.reason for one in told_of["trying"]]
    assert reasons == ["NetworkUp"] * 5 + ["MasterRefused"] * 2
    assert "has refused connections for 300 s and never responded; 1 rank" in told_of["trying"][5].verdict.message


def test_a_real_connection_is_enough_and_none_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)),
            sleeping_rank(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) as pid,
        ):
            accepted = server.accept()[0]
            server.setblocking(False)
            result = run("network", Node(jobs=(job(rank(pid)),)))
            with pytest.raises(BlockingIOError):
                server.accept()
            accepted.close()
    assert values(result, "network_master_answers") == {("77",): 1}


def test_a_master_on_a_network_that_drops_packets(tmp_path: Path) -> None:  # long: contains a program
    # In a new network namespace the master first responds. Then a blackhole route drops all packets to it.
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2: makes a network namespace")
    program = tmp_path / "inside.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, socket, subprocess, sys, time
            from hangwatch.probes.network import interfaces as network
            from hangwatch.probes.node.machine import Node
            from pathlib import Path
            from tests.node_tree import Checked, job, rank, values

            def ip(*words):
                subprocess.run(["ip", *words], check=True)

            ip("link", "set", "lo", "up")
            ip("link", "add", "ib0", "type", "veth", "peer", "name", "other")
            ip("link", "set", "other", "up")
            ip("address", "add", "192.168.7.9/24", "dev", "ib0")
            ip("link", "set", "ib0", "up")
            server = socket.create_server(("192.168.7.9", 0))
            port = str(server.getsockname()[1])
            environ = {**os.environ, "MASTER_ADDR": "192.168.7.9", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "ib0"}
            child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, env=environ)
            node = Node(jobs=(job(rank(child.pid)),))
            check = Checked("network")
            mounted = Path("/sys/class/net/ib0").exists()
            first = check.run(node)
            print("well", first.verdict.reason, values(first, "network_master_answers"), flush=True)
            ip("route", "add", "blackhole", "10.9.9.9/32")
            started = time.monotonic()
            fault = network.connect("10.9.9.9", 1, 0.5)
            print("blackhole", fault.reason, time.monotonic() - started < 5, flush=True)
            ip("link", "set", "ib0", "down")
            down = check.run(node)
            print("down", down.verdict.status.name, down.verdict.reason, flush=True)
            ip("link", "delete", "ib0")
            print("gone", check.run(node).verdict.reason, flush=True)
            child.stdin.close()
            child.wait(60)
            """
        )
    )
    root = Path(__file__).parents[2]
    # A new mount namespace as well: /sys then shows the interfaces of the new network namespace.
    inside = f"mount -t sysfs sysfs /sys && exec {sys.executable} {program}"
    answer = finished("unshare", "--net", "--mount", "sh", "-c", inside, env={**os.environ, "PYTHONPATH": str(root)})
    if "unshare failed" in answer.stderr or "mount:" in answer.stderr:
        pytest.skip(f"needs namespaces: {answer.stderr.strip()}")
    assert answer.stdout.splitlines() == [
        "well NetworkUp {('77',): 1.0}",
        "blackhole NoAnswer True",
        "down CRITICAL InterfaceDown",
        "gone NoInterface",
    ], answer.stderr


def test_routes_as_the_kernel_writes_them() -> None:
    routes = interfaces.parse_routes(ROUTE)
    assert routes == (
        Route(interface="eth0", network=IPv4Network("0.0.0.0/0"), metric=100),
        Route(interface="eth0", network=IPv4Network("10.0.0.0/24"), metric=100),
        Route(interface="ib0", network=IPv4Network("192.168.0.0/16"), metric=0),
    )
    assert interfaces.interface_to("10.0.0.77", routes) == "eth0"
    assert interfaces.interface_to("192.168.3.3", routes) == "ib0"
    assert interfaces.interface_to("8.8.8.8", routes) == "eth0"
    assert interfaces.interface_to("fd00::1", routes) is None
    assert interfaces.interface_to("8.8.8.8", ()) is None
    assert interfaces.default_interface(routes) == "eth0"
    assert interfaces.default_interface(()) is None
    assert interfaces.parse_default_v6(UNREACHABLE_V6 + "short row\n" + DEFAULT_V6) == "eth0"
    assert interfaces.parse_default_v6(UNREACHABLE_V6) is None


def test_connections_over_ipv6_and_mapped_ipv4(tmp_path: Path) -> None:
    mapped = (
        "0: 0000000000000000FFFF00000907A8C0:D431 0000000000000000FFFF00000107A8C0:733C 01 0:0 0:0 00000002 0 0 1\n"
    )
    v6 = "1: 000000FD000000000000000001000000:D431 000000FD000000000000000002000000:733C 02 0:0 0:0 00000000 0 0 1\n"
    other = "2: 0907A8C0:D431 0207A8C0:733C 01 0:0 0:0 00000000 0 0 1\n"
    (tmp_path / "tcp").write_text(TCP + other)
    (tmp_path / "tcp6").write_text(TCP + mapped + v6)
    found = sockets.connections_to(("192.168.7.1", "fd00::2"), 29500, tmp_path)
    assert [(one.state, one.retransmits) for one in found] == [(sockets.ESTABLISHED, 2), (sockets.SYN_SENT, 0)]
    assert sockets.connections_to(("192.168.7.1",), 29501, tmp_path) == []


NAMES = ["lo", "eth0", "eth1", "ib0", "docker0"]
ALL = tuple(
    Interface(
        name=name, up=True, state="up", addresses=("10.0.0.1",), receive_errors=0, transmit_errors=0,
    )
    for name in NAMES
)  # fmt: skip


@given(st.text(alphabet="^=,ethib0docker1 ", max_size=20))
def test_any_value_of_the_variable_means_some_interfaces(value: str) -> None:
    found = {one.name for one in select_interfaces(value, ALL)}
    assert found <= set(NAMES)
    if value.startswith("^"):
        plain = {one.name for one in select_interfaces(value[1:], ALL)}
        if not value[1:].startswith("^"):
            assert found == set(NAMES) - plain - {"lo"}


def test_a_name_that_does_not_resolve() -> None:
    answer = interfaces.resolve("n" * 70)
    assert isinstance(answer, Fault) and answer.reason == "UnknownHost"
    assert interfaces.resolve("localhost")


def test_the_store_to_which_a_process_is_connected_by_the_kernels_word() -> None:
    me, proc = os.getpid(), Path("/proc")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sockets.store_endpoint(me, port, sockets.Tables(proc)) is None, "to listen is not to be connected"
        with socket.create_connection(("127.0.0.1", port)):
            space = Path("/proc/self/ns/net").readlink()
            tables = sockets.Tables(proc)
            assert sockets.store_endpoint(me, port, tables) == f"127.0.0.1 port {port} in {space}"
            assert sockets.store_endpoint(1, port, tables) is None, (
                "a connection of another process in the same namespace"
            )


def test_of_one_network_namespace_the_connections_are_read_once_in_a_scan() -> None:
    me, proc = os.getpid(), Path("/proc")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before, now = sockets.Tables(proc), sockets.Tables(proc)
        assert not any(row.remote[1] == port for row in before.read_port(port, me))
        with socket.create_connection(("127.0.0.1", port)) as client:
            inode = os.fstat(client.fileno()).st_ino
            assert (bytes((127, 0, 0, 1)), port) in {
                row.remote for row in now.read_port(port, me) if row.inode == inode
            }
            first, own_rows = ({row[:4] for row in now.read_port(port, pid) if row.inode} for pid in (1, me))
            assert first == own_rows, "of whatever process in it"
            own = {row.inode for row in sockets.sockets_at_port(port, me, now) or ()}
            assert inode in own and sockets.sockets_at_port(port, me, before) != own
            assert sockets.store_endpoint(me, port, before) is None, "this scan has read it before"
            assert sockets.store_endpoint(me, port, now) is not None
