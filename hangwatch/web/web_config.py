"""The web configuration file in the format of Prometheus exporters (exporter-toolkit's `--web.config.file`).

hangwatch supports TLS with versions, cipher suites and client certificates, and users with bcrypt hashes. All other
keys of the format are errors: no setting is ignored silently.

Format: exporter-toolkit, docs/web-configuration.md.
"""

import os
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from hangwatch.formats import bounded_read, yaml_file
from hangwatch.formats.yaml_file import Document
from hangwatch.limits import MOST_PEM_BYTES
from hangwatch.web import passwords
from hangwatch.web.auth import Rules

MOST_USERS = 64
NOT_CARRIED = {
    ("tls_server_config", "cert"): "use cert_file: certificates are read from files",
    ("tls_server_config", "key"): "use key_file: keys are read from files",
    ("tls_server_config", "client_ca"): "use client_ca_file: certificates are read from files",
    ("tls_server_config", "curve_preferences"): "remove it: Python's ssl cannot set a list of curves",
    ("http_server_config", "headers"): "remove it: the headers of hangwatch are fixed",
    ("rate_limit",): "remove it: hangwatch has other limits ([http] max_connections)",
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_AES = {"128_GCM_SHA256": "128-GCM-SHA256", "256_GCM_SHA384": "256-GCM-SHA384", "128_CBC_SHA": "128-SHA"}
_AES["256_CBC_SHA"] = "256-SHA"
# Go's name -> OpenSSL's name, for the cipher suites that Go's crypto/tls calls secure.
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_AES_{cipher}": f"ECDHE-{key}-AES{known}"
    for key in ("ECDSA", "RSA")
    for cipher, known in _AES.items()
} | {f"TLS_ECDHE_{key}_WITH_CHACHA20_POLY1305_SHA256": f"ECDHE-{key}-CHACHA20-POLY1305" for key in ("ECDSA", "RSA")}
# Go and OpenSSL cannot turn these off.
_CIPHERS_OF_TLS13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


class _Tls(msgspec.Struct, forbid_unknown_fields=True):
    cert_file: str = ""
    key_file: str = ""
    client_auth_type: str = "NoClientCert"
    client_ca_file: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True


class _HttpServer(msgspec.Struct, forbid_unknown_fields=True):
    http2: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tls_server_config: _Tls | None = None
    http_server_config: _HttpServer | None = None
    basic_auth_users: dict[str, str] | None = None


def load(path: Path) -> Rules:
    """Read a web configuration and the files that it names. Relative paths start at the folder of `path`.

    Raises YamlError, which names file, line and key.
    """
    document = yaml_file.read(path)
    # Users of this node who may write the file could add a user and read all stacks.
    try:
        is_writable_by_all = path.stat().st_mode & stat.S_IWOTH
    except OSError as error:
        raise yaml_file.YamlError(f"{path}: {error.strerror}") from None
    if is_writable_by_all:
        raise yaml_file.YamlError(f"{path}: all users may write this file and so read all incidents: chmod o-w {path}")
    content = yaml_file.decode(document, _File, NOT_CARRIED)
    if content.http_server_config is not None and content.http_server_config.http2:
        raise document.error_at(("http_server_config", "http2"), "hangwatch supports only HTTP/1.1: set it to false")
    users = content.basic_auth_users or {}
    if len(users) > MOST_USERS:
        raise document.error_at(("basic_auth_users",), f"has more than {MOST_USERS} users")
    for user, hashed in users.items():
        keys = ("basic_auth_users", user)
        cost = passwords.cost_of(hashed)
        if not user or ":" in user:
            raise document.error_at(keys, "a user name must not be empty or contain a colon")
        if cost is None:
            raise document.error_at(keys, "is not a bcrypt hash\n  `htpasswd -nBC 10 NAME` prints one")
        if cost > passwords.MOST_COST:
            raise document.error_at(
                keys, f"bcrypt cost {cost}: must be at most {passwords.MOST_COST}: attempts would take seconds of CPU"
            )
    if content.tls_server_config is None:
        return Rules(users=users, files=(path,))
    tls, files = _tls(document, content.tls_server_config)
    return Rules(tls, users, frozenset(content.tls_server_config.client_allowed_sans), (path, *files))


def _tls(document: Document, wanted: _Tls) -> tuple[ssl.SSLContext, list[Path]]:
    """Return the TLS context of the server, and the files that it was read from. Raises YamlError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[wanted.min_version], _VERSIONS[wanted.max_version]
    if context.minimum_version > context.maximum_version:
        raise _wrong(document, "max_version", "is below min_version")
    if not wanted.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _set_ciphers(document, context, wanted.cipher_suites)
    files = {name: document.path.parent / getattr(wanted, name) for name in ("cert_file", "key_file")}
    for name, path in files.items():
        if path == document.path.parent:
            raise _wrong(document, name, "must be set for TLS")
        _pem(document, name, path)
    try:
        # With an encrypted key and no password, OpenSSL would ask on the terminal.
        context.load_cert_chain(files["cert_file"], files["key_file"], password="")
    except (OSError, ValueError) as error:
        raise _wrong(document, "cert_file", f"this certificate and key cannot be used: {error}") from None
    return context, [*files.values(), *_set_clients(document, context, wanted)]


def _set_ciphers(document: Document, context: ssl.SSLContext, names: Iterable[str]) -> None:
    chosen = []
    for name in names:
        if name not in _CIPHERS and name not in _CIPHERS_OF_TLS13:
            raise _wrong(document, "cipher_suites", f"{name!r}: allowed: {', '.join((*_CIPHERS, *_CIPHERS_OF_TLS13))}")
        chosen += [_CIPHERS[name]] if name in _CIPHERS else []
    if chosen:
        try:
            context.set_ciphers(":".join(chosen))
        except ssl.SSLError as error:
            raise _wrong(document, "cipher_suites", f"this OpenSSL supports none of them: {error}") from None


def _set_clients(document: Document, context: ssl.SSLContext, wanted: _Tls) -> list[Path]:
    """Set the verification of client certificates. Return the file of the client CA in a list. Raises YamlError."""
    kind = wanted.client_auth_type
    if kind in _UNVERIFIED:
        raise _wrong(document, "client_auth_type", f"{kind} verifies no certificate: set RequireAndVerifyClientCert")
    if kind not in _CLIENTS:
        raise _wrong(document, "client_auth_type", f"{kind!r}: allowed: {', '.join(_CLIENTS)}")
    if wanted.client_allowed_sans and kind != "RequireAndVerifyClientCert":
        raise _wrong(document, "client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    if kind == "NoClientCert":
        if wanted.client_ca_file:
            raise _wrong(document, "client_ca_file", "needs client_auth_type: RequireAndVerifyClientCert")
        return []
    if not wanted.client_ca_file:
        raise _wrong(document, "client_auth_type", f"{kind} needs client_ca_file")
    path = document.path.parent / wanted.client_ca_file
    try:
        context.load_verify_locations(cadata=_pem(document, "client_ca_file", path))
    except (ssl.SSLError, ValueError) as error:
        raise _wrong(document, "client_ca_file", f"{path}: cannot be used: {error}") from None
    context.verify_mode = _CLIENTS[kind]
    return [path]


def _pem(document: Document, key: str, path: Path) -> str:
    """Return the content of a PEM file, with a size limit. OpenSSL has none. Raises YamlError."""
    try:
        return bounded_read.read(path, MOST_PEM_BYTES, flags=os.O_NONBLOCK).decode("ascii", "replace")
    except bounded_read.FileError as error:
        raise _wrong(document, key, str(error)) from None


def _wrong(document: Document, key: str, what: str) -> yaml_file.YamlError:
    return document.error_at(("tls_server_config", key), what)
