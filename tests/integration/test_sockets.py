"""Connections of real processes, and the calls of their main threads, as the kernel lists them."""

import contextlib
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.probes.base import procfs
from hangwatch.probes.network import sockets
from hangwatch.probes.process import main_thread
from tests.commands import finished
from tests.conftest import wait_for
from tests.integration import targets

NOBODY = 4_000_000


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection over loopback."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = stack.enter_context(socket.create_connection(listening.getsockname()))
        yield ours, stack.enter_context(listening.accept()[0])


def read_connection(ours: socket.socket) -> sockets.Connection:
    return sockets.read(os.getpid(), procfs.PROC)[os.fstat(ours.fileno()).st_ino]


def test_connection_closed_by_its_peer_is_lost() -> None:
    with connected() as (ours, theirs):
        assert not read_connection(ours).is_lost
        theirs.close()
        wait_for(lambda: read_connection(ours).is_lost, "the end to be seen")


def test_bytes_of_both_directions_are_counted() -> None:
    with connected() as (ours, theirs):
        ours.sendall(bytes(30_000))
        theirs.sendall(bytes(20_000))
        wait_for(lambda: read_connection(ours).carried_bytes >= 50_000, "both directions to be counted")
        assert read_connection(ours).local == read_connection(theirs).remote
        assert sockets.format_end(read_connection(ours).remote) == f"127.0.0.1 port {theirs.getsockname()[1]}"
        assert sockets.sockets_of_process(os.getpid(), procfs.PROC)[ours.fileno()] == read_connection(ours).inode


def test_a_socket_that_listens_is_told_from_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert read_connection(listening).listens
        assert not read_connection(listening).is_open
    with connected() as (ours, _):
        assert not read_connection(ours).listens


def test_a_unix_socket_tells_its_other_end_and_whether_it_listens(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        found = sockets.read_unix(os.getpid(), procfs.PROC)
        inodes = [os.fstat(one.fileno()).st_ino for one in (ours, theirs, listening)]
    assert [found[inode].listens for inode in inodes] == [False, False, True]
    assert [found[inode].peer for inode in inodes] == [inodes[1], inodes[0], None]


def test_other_end_of_a_unix_socket_that_was_not_accepted_is_the_listening_one(tmp_path: Path) -> None:
    """A loader worker that was stopped accepts no connection, over which it would send a tensor."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        client.connect(str(tmp_path / "socket"))
        found = sockets.read_unix(os.getpid(), procfs.PROC)
        ours, theirs = (os.fstat(one.fileno()).st_ino for one in (client, listening))
    assert found[ours] == sockets.UnixSocket(listens=False, peer=theirs)
    assert 0 not in found, "the socket that the kernel keeps for the connection belongs to no process"


def test_an_ipv4_address_inside_ipv6_is_one_address() -> None:
    """torch's store listens on IPv4 and IPv6, so one end may have its IPv4 address in IPv6 form."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        ours = stack.enter_context(socket.create_connection(("127.0.0.1", listening.getsockname()[1])))
        theirs = stack.enter_context(listening.accept()[0])
        assert read_connection(ours).local == read_connection(theirs).remote


def test_where_another_namespace_may_not_be_entered_its_connections_are_still_listed(tmp_path: Path) -> None:
    """Use a fake /proc that shows this process in a namespace that cannot be entered."""
    pid = os.getpid()
    (tmp_path / str(pid) / "ns").mkdir(parents=True)
    (tmp_path / str(pid) / "ns/net").symlink_to("net:[1]")
    (tmp_path / str(pid) / "net").symlink_to(f"/proc/{pid}/net")
    with connected() as (ours, theirs):
        asked, listed = sockets.read(pid, procfs.PROC), sockets.read(pid, tmp_path)
        for end in (ours, theirs):
            inode = os.fstat(end.fileno()).st_ino
            assert listed[inode] == asked[inode]._replace(carried_bytes=None)
        theirs.close()
        inode = os.fstat(ours.fileno()).st_ino
        wait_for(lambda: sockets.read(pid, tmp_path)[inode].is_lost, "the end to be seen")


def test_too_many_connections_are_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MOST_CONNECTIONS", 1)
    with connected():
        assert sockets.read(os.getpid(), procfs.PROC) is None
    with contextlib.ExitStack() as stack:
        for one in socket.socketpair():
            stack.enter_context(one)
        assert sockets.read_unix(os.getpid(), procfs.PROC) is None


def test_ended_process_has_no_counters_and_no_call() -> None:
    assert main_thread.read_counters(NOBODY, procfs.PROC) is None
    assert main_thread.read_call(NOBODY, procfs.PROC) is None
    assert sockets.sockets_of_process(NOBODY, procfs.PROC) is None
    assert sockets.read(NOBODY, procfs.PROC) is None
    assert sockets.read_unix(NOBODY, procfs.PROC) is None


def test_a_call_names_all_that_it_waits_for(tmp_path: Path) -> None:
    """Read the descriptors of a poll(2) call from the memory of the process."""
    code = """
import os, select
both = select.poll()
back, forth = os.pipe()
both.register(back, select.POLLIN)
both.register(0, 0)
ready()
both.poll()
"""
    with targets.python(code, tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        call = main_thread.read_call(pid, procfs.PROC)
    assert (call.kind, len(call.descriptors)) == ("receives", 2)
    assert 0 in call.descriptors


def test_accept_call_waits_for_the_listening_socket(tmp_path: Path) -> None:
    code = """
import socket
import subprocess
import sys
import threading
listening = socket.create_server(("127.0.0.1", 0))
ready()
listening.accept()
"""
    with targets.python(code, tmp_path) as pid:
        targets.wait_for_call(pid, "receives")
        call = main_thread.read_call(pid, procfs.PROC)
        table, held = sockets.read(pid, procfs.PROC), sockets.sockets_of_process(pid, procfs.PROC)
    assert call.kind == "receives"
    assert [table[held[one]].listens for one in call.descriptors] == [True]


def test_sleeping_thread_counts_voluntary_switches() -> None:
    before = main_thread.read_counters(os.getpid(), procfs.PROC)
    for _ in range(5):
        select.select([], [], [], 0.01)
    after = main_thread.read_counters(os.getpid(), procfs.PROC)
    assert after.voluntary_switches - before.voluntary_switches >= 5
    assert after.read_monotonic_seconds > before.read_monotonic_seconds


# Processes in their own network, as in a pod: its loopback is not reachable from outside.
IN_ITS_OWN_NETWORK = """
import ctypes, socket, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000):  # CLONE_NEWNET
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listening = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listening.getsockname())
theirs, _ = listening.accept()
ours.sendall(bytes(30_000))
theirs.recv(30_000, socket.MSG_WAITALL)
theirs.sendall(bytes(20_000))
ours.recv(20_000, socket.MSG_WAITALL)
pair = socket.socketpair()
open(f"{folder}/sockets", "w").write(f"{ours.fileno()} {theirs.fileno()} {pair[0].fileno()}")
ready()
time.sleep(600)
"""


@pytest.fixture
def in_its_own_network(tmp_path: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield a pid in a new network namespace, both ends of a used connection, and a Unix socket."""
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a network namespace")
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian package iproute2): brings the loopback of a network namespace up")
    with targets.python(IN_ITS_OWN_NETWORK, tmp_path) as pid:
        yield pid, [int(word) for word in (tmp_path / "sockets").read_text().split()]


def test_bytes_are_counted_in_another_network_namespace(in_its_own_network: tuple[int, list[int]]) -> None:
    pid, (ours, theirs, unix) = in_its_own_network
    before = Path("/proc/thread-self/ns/net").readlink()
    assert Path(f"/proc/{pid}/ns/net").readlink() != before

    found, held = sockets.read(pid, procfs.PROC), sockets.sockets_of_process(pid, procfs.PROC)

    carried = [found[held[end]].carried_bytes for end in (ours, theirs)]
    assert all(50_000 <= count <= 50_001 for count in carried), "the SYN that was acknowledged counts as a byte"
    assert found[held[ours]].local == found[held[theirs]].remote
    assert sockets.read_unix(pid, procfs.PROC)[held[unix]].peer is not None
    here = sockets.read(os.getpid(), procfs.PROC)
    assert held[ours] not in here, "a connection of another network"
    assert Path("/proc/thread-self/ns/net").readlink() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "setns"]


def test_connections_in_a_forbidden_network_namespace_are_listed(in_its_own_network: tuple[int, list[int]]) -> None:
    """Read as root without CAP_SYS_ADMIN, with as few capabilities as the daemon's unit has."""
    pid, (ours, theirs, _) = in_its_own_network
    inodes = {sockets.sockets_of_process(pid, procfs.PROC)[end] for end in (ours, theirs)}
    code = (
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "from hangwatch.probes.network import sockets\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "assert libc.capset(header, none) == 0\n"  # drops all capabilities, see capset(2)
        "found = sockets.read(int(sys.argv[1]), Path('/proc'))\n"
        "print(*(f'{one.inode} {one.carried_bytes}' for one in found.values()), sep=',')\n"
    )
    seen = finished(sys.executable, "-c", code, pid, check=True)
    rows = dict(row.split() for row in seen.stdout.strip().split(","))
    assert {rows.get(str(inode)) for inode in inodes} == {"None"}, rows
