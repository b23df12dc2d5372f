"""Nodes with different names behind a real sshd on loopback, for requests over ssh and pdsh."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.servers import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or os.geteuid() != 0, reason="needs root, and sshd: apt install openssh-server"
)
needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh: apt install pdsh")


@contextlib.contextmanager
def sshd(folder: Path, names: list[str]) -> Iterator[Path]:
    """Run an sshd with one port for each name. Yield an ssh options file with these ports.

    A program started by sshd finds its port in the last word of SSH_CONNECTION. The file `folder`/PORT holds the
    name of the node.
    """
    assert SSHD is not None
    make_keys(folder)
    ports = {name: free_port() for name in names}
    for name, port in ports.items():
        (folder / str(port)).write_text(name)
    config = server_config(folder, [f"127.0.0.1:{port}" for port in ports.values()])
    addresses = {name: ("127.0.0.1", port) for name, port in ports.items()}
    nobody = {"unreached": ("127.0.0.1", free_port())}
    with subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: all(listens(*address) for address in addresses.values()), "sshd")
            yield client_config(folder, {**addresses, **nobody})
        finally:
            server.terminate()


def make_keys(folder: Path) -> None:
    """Make `folder`, with a host key and a user key, and the directory that sshd needs."""
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # for sshd's privilege separation


def server_config(folder: Path, listening: Iterable[str]) -> Path:
    """Write the configuration of an sshd on these addresses that accepts the user's key for root."""
    (folder / "sshd_config").write_text(
        "".join(f"ListenAddress {address}\n" for address in listening)
        + f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nMaxStartups 100\n"
    )
    return folder / "sshd_config"


def client_config(folder: Path, addresses: Mapping[str, tuple[str, int]]) -> Path:
    """Write an ssh options file with the address and port of each host name. Return its path."""
    hosts = (f"Host {name}\n  HostName {host}\n  Port {port}\n" for name, (host, port) in addresses.items())
    usual = f"User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
    known = f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
    (folder / "ssh_config").write_text(f"{''.join(hosts)}Host *\n  {usual}{known}")
    return folder / "ssh_config"


def listens(host: str, port: int) -> bool:
    """True if a server accepts connections at this address."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex((host, port)) == 0
