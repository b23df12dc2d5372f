"""Credentials and trusted certificates of an HTTP client, in the format of Prometheus' `http_config` (promtool).

A password is never on a command line, because all users of the machine can read command lines. Format: Prometheus,
docs/configuration/promtool.md.
"""

import base64
import os
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hangwatch.formats import bounded_read, yaml_file
from hangwatch.formats.yaml_file import Document

MAX_SECRET_BYTES = 64 << 10
MAX_PEM_BYTES = 16 << 20  # a bundle of certificate authorities
NOT_CARRIED = {
    ("oauth2",): "give basic_auth or authorization",
    ("bearer_token",): "give authorization with credentials_file",
    ("bearer_token_file",): "give authorization with credentials_file",
    ("http_headers",): "remove it",
    ("proxy_url",): "hangwatch connects to nodes directly: remove it",
    ("proxy_from_environment",): "hangwatch connects to nodes directly: remove it",
    ("proxy_connect_header",): "hangwatch connects to nodes directly: remove it",
    ("no_proxy",): "hangwatch connects to nodes directly: remove it",
    ("tls_config", "ca"): "give ca_file",
    ("tls_config", "cert"): "give cert_file",
    ("tls_config", "key"): "give key_file",
    ("tls_config", "min_version"): "remove it: the minimum is always TLS 1.2",
    ("tls_config", "max_version"): "remove it",
}


class _BasicAuth(msgspec.Struct, forbid_unknown_fields=True):
    username: str = ""
    username_file: str = ""
    password: str = ""
    password_file: str = ""


class _Authorization(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "Bearer"
    credentials: str = ""
    credentials_file: str = ""


class _TlsConfig(msgspec.Struct, forbid_unknown_fields=True):
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    insecure_skip_verify: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    basic_auth: _BasicAuth | None = None
    authorization: _Authorization | None = None
    tls_config: _TlsConfig | None = None
    follow_redirects: bool = False
    enable_http2: bool = False


class WebClient(NamedTuple):
    """The settings of an HTTP client: its Authorization header (None: no credentials), and TLS settings for https."""

    authorization: str | None
    tls: ssl.SSLContext


class _Named(ssl.SSLContext):
    """A TLS context that requires a certificate for `server_name`, if it is set, instead of the name of the host."""

    server_name: str | None = None

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Wrap a socket. If `server_name` is set, the certificate must be for that name."""
        if self.server_name is not None:
            options["server_hostname"] = self.server_name
        return super().wrap_socket(*arguments, **options)


def load(path: Path | None) -> WebClient:
    """Read an `http_config` file, and the files that it names. Relative paths start at its own folder.

    Without a file, there are no credentials, and the certificate authorities of this machine are trusted. Raises
    YamlError, which names file, line and key.
    """
    if path is None:
        return WebClient(None, ssl.create_default_context())
    document = yaml_file.read(path)
    http_config = yaml_file.decode(document, _File, NOT_CARRIED)
    for key in ("follow_redirects", "enable_http2"):
        if getattr(http_config, key):
            raise document.error_at((key,), "is not supported by hangwatch: set it to false")
    if http_config.basic_auth is not None and http_config.authorization is not None:
        raise document.error_at(("authorization",), "cannot be used together with basic_auth")
    return WebClient(_authorization(document, http_config), _tls(document, http_config.tls_config or _TlsConfig()))


def _authorization(document: Document, settings: _File) -> str | None:
    if settings.basic_auth is not None:
        basic = settings.basic_auth
        user = _secret(document, "basic_auth", "username", basic.username, basic.username_file)
        password = _secret(document, "basic_auth", "password", basic.password, basic.password_file)
        if ":" in user:
            raise document.error_at(("basic_auth", "username"), "a user name must not contain a colon")
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    if settings.authorization is not None:
        given = settings.authorization
        secret = _secret(document, "authorization", "credentials", given.credentials, given.credentials_file)
        header = f"{given.type} {secret}"
        if not (header.isascii() and header.isprintable()):
            raise document.error_at(("authorization",), "contains characters that a header must not have")
        return header
    return None


def _secret(document: Document, section: str, key: str, value: str, file: str) -> str:
    """Return `value`, or the content of `file`. Raises YamlError unless exactly one of them is set."""
    if bool(value) == bool(file):
        raise document.error_at((section, key), f"set either {key} or {key}_file")
    if value:
        return value
    try:
        return bounded_read.read(document.path.parent / file, MAX_SECRET_BYTES, flags=os.O_NONBLOCK).decode().strip()
    except (bounded_read.FileError, UnicodeDecodeError) as error:
        raise document.error_at((section, f"{key}_file"), str(error)) from None


def _tls(document: Document, wanted: _TlsConfig) -> ssl.SSLContext:
    context = _Named(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.server_name = wanted.server_name or None
    if wanted.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif wanted.ca_file:
        path = document.path.parent / wanted.ca_file
        try:
            content = bounded_read.read(path, MAX_PEM_BYTES, flags=os.O_NONBLOCK)
            context.load_verify_locations(cadata=content.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError, bounded_read.FileError) as error:
            raise document.error_at(("tls_config", "ca_file"), f"{path}: cannot be used: {error}") from None
    else:
        context.load_default_certs()
    if bool(wanted.cert_file) != bool(wanted.key_file):
        raise document.error_at(("tls_config",), "only one of cert_file and key_file is set: set both")
    if wanted.cert_file:
        try:
            # Without this empty password, OpenSSL would ask for the password of an encrypted key on the terminal.
            context.load_cert_chain(
                document.path.parent / wanted.cert_file, document.path.parent / wanted.key_file, password=""
            )
        except (OSError, ValueError) as error:
            raise document.error_at(("tls_config", "cert_file"), f"cannot be used with its key: {error}") from None
    return context
