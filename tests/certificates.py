"""Certificates for tests, made by openssl(1): an authority and the certificates that it signs."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

TLS = "tls_server_config:\n  cert_file: node.pem\n  key_file: node-key.pem\n"
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Pair(NamedTuple):
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def make_authority(folder: Path, name: str) -> Pair:
    """Make a self-signed authority. Write it to `name`.pem and `name`-key.pem."""
    return _make(folder, name, "-addext", "keyUsage=critical,keyCertSign,cRLSign")


def make_certificate(by: Pair, folder: Path, name: str, alternative: str) -> Pair:
    """Make a certificate by the authority `by`. `alternative` are names, e.g. "DNS:a,IP:127.0.0.1"."""
    signed = ("-CA", str(by.certificate), "-CAkey", str(by.key), "-addext", "basicConstraints=critical,CA:FALSE")
    return _make(folder, name, *signed, "-addext", f"subjectAltName={alternative}")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of certificates: `ca` signs `node`, `renewed` and `admin`, `other` signs `stranger`."""
    folder = tmp_path_factory.mktemp("pki")
    ca, other = make_authority(folder, "ca"), make_authority(folder, "other")
    make_certificate(ca, folder, "node", "DNS:localhost,IP:127.0.0.1")
    make_certificate(ca, folder, "renewed", "DNS:localhost,IP:127.0.0.1")
    make_certificate(ca, folder, "admin", "DNS:admin.example,IP:10.0.0.1")
    make_certificate(other, folder, "stranger", "DNS:admin.example")
    return folder


def client(pki: Path, authority: str = "ca", shown: str | None = None) -> ssl.SSLContext:
    """Return what a client needs that trusts `authority` and shows the certificate `shown`."""
    context = ssl.create_default_context(cafile=str(pki / f"{authority}.pem"))
    if shown is not None:
        context.load_cert_chain(pki / f"{shown}.pem", pki / f"{shown}-key.pem")
    return context


def _make(folder: Path, name: str, *options: str) -> Pair:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: apt-get install openssl")
    pair = Pair(folder / f"{name}.pem", folder / f"{name}-key.pem")
    files = ("-keyout", str(pair.key), "-out", str(pair.certificate))
    command = ["openssl", "req", "-x509", *EC, "-subj", f"/CN={name}", *files, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return pair
