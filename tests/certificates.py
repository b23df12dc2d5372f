"""Certificates for tests, made by openssl(1): an authority and the certificates that it signs."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Pair(NamedTuple):
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def make_authority(folder: Path, name: str) -> Pair:
    """Make a self-signed authority. Write it to `name`.pem and `name`-key.pem."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}-key.pem")
    _openssl(
        "req", "-x509", *EC, "-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(pair.certificate),
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    return pair


def make_certificate(by: Pair, folder: Path, name: str, alternative: str) -> Pair:
    """Make a certificate by the authority `by`. `alternative` are names, e.g. "DNS:a,IP:127.0.0.1"."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}-key.pem")
    _openssl(
        "req", "-x509", *EC, "-subj", f"/CN={name}", "-keyout", str(pair.key), "-out", str(pair.certificate),
        "-CA", str(by.certificate), "-CAkey", str(by.key), "-addext", f"subjectAltName={alternative}",
        "-addext", "basicConstraints=critical,CA:FALSE",
    )  # fmt: skip
    return pair


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: apt-get install openssl")
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
