"""Cluster nodes on this machine: each has a separate network, host name and processes. A bridge connects them.

The code inside `with cluster(...)` is on the bridge, too, like the machine of an operator. It and the programs that
it starts reach only the nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.other_users import as_user
from tests.real_daemon import TorchJob
from tests.ssh_nodes import SSHD, client_config, listens, make_keys, server_config


def _may_make_namespaces() -> bool:
    command = ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "type", "bridge"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("unshare", "nsenter", "setpriv", "ip")) or not _may_make_namespaces(),
    reason="needs root, a kernel that gives network namespaces and bridges, and ip: apt install iproute2",
)

BRIDGE = "cluster"
_OPERATOR = "10.77.0.1"
_CLONE_NEWNET = 0x40000000
# First process of a node. The shell remains to reap orphans.
_INIT = 'hostname "$1" && : >"$2" && sleep infinity; exit $?'


class Node:
    """A node with a separate host name, address and processes. It shares the file systems of the machine."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        up = folder / f"{name}.up"
        own = ["--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "unshare", *own, "sh", "-c", _INIT, "sh", name, up],
            stderr=subprocess.DEVNULL,  # unshare prints an error when its child is killed
        )
        wait_for(up.exists, f"node {name}")
        self._init = int(Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text())
        _ip("link", "add", name, "master", BRIDGE, "type", "veth", "peer", "name", "eth0", "netns", str(self._init))
        _ip("link", "set", name, "up")
        self.run("sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6")
        for command in (f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            self.run("ip", *command.split())

    @property
    def inside(self) -> list[str]:
        """Return the beginning of a command that runs the rest of the command on this node."""
        return ["nsenter", f"--target={self._init}", "--mount", "--net", "--uts", "--pid", "--"]

    def run(self, *command: str) -> None:
        """Run a command on this node and wait for its end."""
        subprocess.run([*self.inside, *command], check=True, timeout=60)

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Disconnect the node from the network inside `with`. Its processes continue."""
        _ip("link", "set", self.name, "down")
        _ip("neighbour", "flush", "to", self.address)  # else packets to it are dropped until the deadline
        try:
            yield
        finally:
            _ip("link", "set", self.name, "up")

    def delete(self) -> None:
        """Delete the node as a power failure does: no connection is closed."""
        if self._holder.poll() is None:
            _ip("link", "delete", self.name)
            os.kill(self._init, signal.SIGKILL)
            self._holder.wait()


@contextlib.contextmanager
def cluster(folder: Path, names: Iterable[str]) -> Iterator[dict[str, Node]]:
    """Yield a node for each name, by name, with this thread on their network. Delete them at the end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_network())
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{_OPERATOR}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        nodes = {}
        for number, name in enumerate(names):
            nodes[name] = Node(name, f"10.77.0.{10 + number}", folder)
            stack.callback(nodes[name].delete)
        yield nodes


@contextlib.contextmanager
def sshd_on(nodes: Mapping[str, Node], folder: Path) -> Iterator[Path]:
    """Run an sshd on each node; yield an ssh options file with their addresses."""
    assert SSHD is not None
    make_keys(folder)
    config = server_config(folder, ["0.0.0.0:22"])
    with contextlib.ExitStack() as stack:
        for node in nodes.values():
            command = [*node.inside, SSHD, "-D", "-e", "-f", str(config)]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
        addresses = {name: (node.address, 22) for name, node in nodes.items()}
        wait_for(lambda: all(listens(*address) for address in addresses.values()), "sshd on all nodes")
        yield client_config(folder, addresses)


class JobOverNodes:
    """A torchrun job with one rank on each node. It runs as another user and is ended at the end of `with`."""

    def __init__(
        self, folder: Path, program: str, nodes: Iterable[Node], *, uid: int, gpu: int, run_id: str, port: int
    ) -> None:
        folder.mkdir()
        os.chown(folder, uid, uid)
        self.folder = folder
        nodes = list(nodes)
        self.parts = [
            TorchJob(
                folder,
                program,
                ranks=1,
                endpoint=f"{nodes[0].address}:{port}",
                nodes=len(nodes),
                node_rank=number,
                run_id=run_id,
                prefix=[*node.inside, *as_user(uid)],
                environ={"GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": str(gpu), "HOME": str(folder)},
            )
            for number, node in enumerate(nodes)
        ]

    def __enter__(self) -> JobOverNodes:
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has finished step `step`."""
        self.parts[0].wait_for_step(step)

    @property
    def steps(self) -> int:
        """Return the number of steps that rank 0 has finished."""
        return self.parts[0].steps(0)

    @property
    def seconds_since_step(self) -> float:
        """Return the seconds since rank 0 finished a step."""
        return time.time() - (self.folder / "steps-0").stat().st_mtime


@contextlib.contextmanager
def _own_network() -> Iterator[None]:
    """Move this thread and the programs that it starts to a new network namespace. See unshare(2), setns(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(libc.unshare(_CLONE_NEWNET))
        try:
            yield
        finally:
            _checked(libc.setns(before, _CLONE_NEWNET))
    finally:
        os.close(before)


def _checked(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)
