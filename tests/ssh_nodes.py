"""Nodes behind a real sshd on loopback, under names of their own: for what is asked over ssh and pdsh."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
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
    """An sshd with one port for each name; a file of ssh's options that leads to them.

    A program that it starts finds its port in the last word of SSH_CONNECTION; `folder`/PORT holds the name.
    """
    assert SSHD is not None
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    ports = {name: free_port() for name in names}
    for name, port in ports.items():
        (folder / str(port)).write_text(name)
    listening = "".join(f"ListenAddress 127.0.0.1:{port}\n" for port in ports.values())
    (folder / "sshd_config").write_text(
        f"{listening}HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(_client(folder, ports))
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # of its own privilege separation
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: all(map(_listens, ports.values())), "sshd")
            yield folder / "ssh_config"
        finally:
            server.terminate()


def _client(folder: Path, ports: Mapping[str, int]) -> str:
    hosts = "".join(f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n" for name, port in ports.items())
    usual = f"User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
    known = f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
    return f"{hosts}Host unreached\n  HostName 127.0.0.1\n  Port {free_port()}\nHost *\n  {usual}{known}"


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
