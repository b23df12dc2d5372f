"""`hangwatch check network --to`: real ports on loopback, also requested from "nodes" that are local processes."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch.probes.network import ports
from hangwatch.probes.network.ports import Port
from tests.integration.test_hostile_input import hangwatch, refused
from tests.other_users import needs_root
from tests.servers import free_port, require_host_name


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def deaf() -> Iterator[int]:
    """Yield a port with a full queue of connections: the kernel drops new connections, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def tried(*places: str, expected: int) -> dict[str, Any]:
    done = hangwatch("check", "network", "--json", "--to", *places)
    assert done.returncode == expected, (done.stdout, done.stderr)
    (check,) = json.loads(done.stdout)["checks"]
    return {fault["subject"]: fault for fault in check["faults"]}


def test_each_port_that_does_not_answer_is_said_with_what_to_type(listening: int, deaf: int) -> None:
    require_host_name("localhost")
    assert tried(f"127.0.0.1:{listening}", f"localhost:{listening}", expected=0) == {}
    closed = free_port()
    (fault,) = tried(f"127.0.0.1:{closed}", f"127.0.0.1:{listening}", expected=1).values()
    assert (fault["reason"], f"ss -ltnp 'sport = :{closed}'" in fault["remedy"]) == ("Refused", True)
    faults = tried(f"127.0.0.1:{deaf}", "no..name:80", expected=2)
    assert {subject: fault["reason"] for subject, fault in faults.items()} == {
        f"127.0.0.1:{deaf}": "NoAnswer",
        "no..name:80": "UnknownHost",
    }
    assert "getent hosts no..name" in faults["no..name:80"]["remedy"]


def test_a_name_server_that_is_silent_costs_its_name_alone(listening: int) -> None:
    never = threading.Event()

    def resolve(host: str) -> tuple[str, ...]:
        if host == "lost":
            never.wait(60)
        return ("127.0.0.1",)

    lost, here = Port("lost", listening), Port("here", listening)
    try:
        found = ports.connect_all([lost, here], 5.0, resolve)
    finally:
        never.set()
    assert found[here] is None
    assert (found[lost] or pytest.fail("a name that was never resolved")).reason == "ResolverSilent"


def test_what_is_no_port_is_refused() -> None:
    for place in ("gpu01", "gpu01:0", "gpu01:65536", "-oX:1", "a b:1", "a;b:1", "[x]:1"):
        assert ports.parse(place) is None
    assert [str(ports.parse(place)) for place in ("[fd00::1]:29500", ":80")] == ["[fd00::1]:29500", ":80"]
    refused("check", "network", "--to=-oX:1", says="must be HOST:PORT")
    for arguments in (("fabric", "--to", "a:1"), ("network", "--to", ":1")):
        done = hangwatch("check", *arguments)
        assert (done.returncode, "Usage" in done.stderr) == (2, True)


def nodes(folder: Path, *arguments: str, nodeset: str = "n[1-3]") -> subprocess.CompletedProcess[str]:
    """Run the check from the nodes of `nodeset`. The network of n3 is separate and not connected."""
    (folder / "answer").write_text(
        f"""node=$1; shift
echo "$*" >{folder}/asked-$node
case $node in n3) exec unshare --net {sys.executable} -m hangwatch "$@";; esac
exec {sys.executable} -m hangwatch "$@"
"""
    )
    how = ("--via", "local", "--deadline", "120", "--remote-command", f"sh {folder}/answer %h")
    return hangwatch("check", "network", "--nodes", nodeset, *how, *arguments)


@needs_root
def test_from_each_node_and_which_pairs_fail(tmp_path: Path, listening: int) -> None:
    closed = free_port()
    done = nodes(tmp_path, "--to", f"127.0.0.1:{listening}", f"127.0.0.2:{closed}", "--json")
    assert done.returncode == 2, done.stderr
    found = [
        (finding["nodes"], finding["status"], finding["reason"], finding["message"].partition(": ")[0])
        for finding in json.loads(done.stdout)["findings"]
        if finding["check"] == "network"
    ]
    assert sorted(found) == [
        (["n1", "n2"], "WARNING", "Refused", f"to 127.0.0.2:{closed}"),
        (["n3"], "CRITICAL", "NoRoute", f"to 127.0.0.1:{listening}"),
        (["n3"], "CRITICAL", "NoRoute", f"to 127.0.0.2:{closed}"),
    ]


def test_a_port_without_a_host_is_that_of_each_node(tmp_path: Path, listening: int) -> None:
    done = nodes(tmp_path, "--to", f":{listening}", nodeset="127.0.0.[1-2]")
    assert (tmp_path / "asked-127.0.0.2").read_text().split()[-2:] == [
        f"--to=127.0.0.1:{listening}",
        f"--to=127.0.0.2:{listening}",
    ]
    assert done.returncode == 1
    assert f"127.0.0.[1-2]: Refused: to 127.0.0.2:{listening}" in " ".join(done.stdout.split())
    refused("check", "network", "--nodes", "n[1-300]", "--via", "local", "--to", ":1", says="at most 256")
