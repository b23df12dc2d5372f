"""Answer /metrics, /healthz, /status and, for permitted readers, incidents; health has a port of its own.

`listener` keeps the connections, `auth` decides on access. What takes time is made in threads beside the event loop,
once for all who ask meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from hangwatch.config import Http
from hangwatch.errors import TemporaryError, UserError
from hangwatch.formats import bounded_read
from hangwatch.web.auth import Admission, Rules
from hangwatch.web.cached_page import Gzipped, Page
from hangwatch.web.incident_pages import IncidentPages, Incidents
from hangwatch.web.listener import Answer, Listener, Request, resolved, text

HEALTH_CONNECTIONS = 64
MAX_PORT = 65535
MAX_PEM_BYTES = 1 << 20
MAX_TOKEN_BYTES = 64 << 10
INCIDENT_THREADS = 2  # a store on a dead mount blocks these, nothing else
OPENMETRICS = "application/openmetrics-text"
TEMPORARY = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)

INDEX = (
    b"<!doctype html><title>hangwatch</title><h1>hangwatch</h1>"
    b'<p><a href="metrics">metrics</a> <a href="healthz">healthz</a> <a href="status">status</a></p>'
)


class ServeError(UserError):
    """The server cannot start with these settings; the message says why and what to change."""


class PortTakenError(TemporaryError):
    """The server cannot start now, and may later: the port is taken, or the address is not there yet."""


class Server:
    """The HTTP server of one daemon: everything on `settings.port`, and health alone on `health_port`, without TLS.

    `status` returns the value behind /status, `unhealthy` a sentence when something is wrong, None when
    all is well.
    """

    def __init__(
        self,
        settings: Http,
        registry: CollectorRegistry,
        *,
        status: Callable[[], Any],
        unhealthy: Callable[[], str | None],
        incidents: Incidents | None = None,
    ) -> None:
        self._settings = settings
        self._unhealthy = unhealthy
        ready = prepared(settings)
        self._wanted_health_port = ready.health_port
        self._making = ThreadPoolExecutor(1, "http-pages")
        self._reading = ThreadPoolExecutor(INCIDENT_THREADS, "http-incidents")
        self._status = Page("application/json", lambda: msgspec.json.encode(status()), self._making)
        self._metrics = {wanted: _metrics(wanted, registry, self._making) for wanted in (OPENMETRICS, "")}
        self._gzipped = {wanted: Gzipped(page, self._making) for wanted, page in self._metrics.items()}
        self._incidents = IncidentPages(incidents, self._reading) if incidents is not None else None
        self._main = Listener("http", self._answer, max_connections=settings.max_connections, tls=ready.rules.tls)
        self._admission = Admission(
            ready.rules,
            lambda: rules(settings),
            token=ready.token,
            everybody_sees_incidents=settings.incidents_on_loopback,
            use_tls=self._main.replace_tls,
        )
        self._health = Listener("health", self._answer_health, max_connections=HEALTH_CONNECTIONS)
        self.health_port = 0

    def start(self) -> int:
        """Bind both ports and serve; returns the main one. Raises ServeError, and PortTakenError if it may go later."""
        wanted = self._settings
        port = _bind(self._main, wanted.listen, wanted.port, "port")
        try:
            self.health_port = _bind(self._health, wanted.listen, self._wanted_health_port, "health_port")
        except (ServeError, PortTakenError):
            self._main.stop()
            raise
        self._health.start()
        self._main.start()
        self._admission.start()
        return port

    def stop(self) -> None:
        """Stop serving; what is being made is left behind."""
        self._admission.stop()
        for listener in (self._main, self._health):
            listener.stop()
        for pool in (self._making, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _answer_health(self, request: Request) -> Answer:
        if request.path != "/healthz":
            return text(HTTPStatus.NOT_FOUND, "not found")
        problem = self._unhealthy()
        return text(HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK, problem or "ok")

    async def _answer(self, request: Request) -> Answer:
        is_of_incidents = request.path == "/incidents" or request.path.startswith("/incidents/")
        refused = await self._admission.refusal(request, is_of_incidents=is_of_incidents)
        if refused is not None:
            return refused
        if is_of_incidents and self._incidents is not None:
            return await self._incidents.answer(request.path)
        if request.path == "/metrics":
            pages = self._gzipped if _takes_gzip(request.headers.get("Accept-Encoding", "")) else self._metrics
            return await pages[OPENMETRICS if OPENMETRICS in request.headers.get("Accept", "") else ""].get()
        if request.path == "/healthz":
            return await self._answer_health(request)
        if request.path == "/status":
            return await self._status.get()
        if request.path == "/":
            return Answer(HTTPStatus.OK, "text/html; charset=utf-8", INDEX)
        return text(HTTPStatus.NOT_FOUND, "not found")


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding names gzip and does not refuse it (RFC 9110, 12.5.3)."""
    for one in accept_encoding.split(","):
        coding, _, weight = one.partition(";")
        if coding.strip().lower() in ("gzip", "x-gzip"):
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


def _metrics(wanted: str, registry: CollectorRegistry, pool: ThreadPoolExecutor) -> Page:
    """The metrics in one of two formats, whatever parameters a client adds: each variant would be made anew."""
    encoder, kind = choose_encoder(f"{wanted}; version=1.0.0" if wanted else "")
    return Page(kind, lambda: encoder(registry), pool)


class Prepared(NamedTuple):
    """What a server needs of files, read and found to be usable; `has_readers` if it serves incidents to somebody."""

    token: bytes | None
    rules: Rules
    health_port: int
    has_readers: bool


def prepared(settings: Http) -> Prepared:
    """What `Server` begins with, and what `hangwatch config --check` asks. Raises ServeError, PortTakenError."""
    health_port = settings.health_port or (settings.port + 1 if settings.port else 0)
    for port, key in ((settings.port, "port"), (health_port, "health_port")):
        if port > MAX_PORT:
            raise ServeError(f"[http]: the port after {settings.port} is for health: set health_port, or a lower port")
        with _explained(settings.listen, port, key):
            resolved(settings.listen, port)
    if health_port and health_port == settings.port:
        raise ServeError(f"[http]: port and health_port are both {health_port}\n  health has a port of its own")
    if settings.incidents_on_loopback and not _is_loopback(settings.listen):
        raise ServeError(
            f"[http] incidents_on_loopback: listen = {settings.listen!r} is reached from elsewhere\n"
            "  set web_config_file or incidents_token_file, or listen on 127.0.0.1"
        )
    token, known = _read_token(settings.incidents_token_file), rules(settings)
    has_readers = token is not None or bool(known.users) or known.verifies_clients or settings.incidents_on_loopback
    return Prepared(token, known, health_port, has_readers)


def usable_url(settings: Http) -> str:
    """The `external_url`, empty where nobody may see incidents: a page leads nowhere then.

    Raises ServeError, PortTakenError.
    """
    return settings.external_url if settings.external_url and prepared(settings).has_readers else ""


def cautions(settings: Http) -> Iterator[str]:
    """What is allowed and seldom meant, each with what to type. Raises ServeError, PortTakenError."""
    from hangwatch.web import passwords

    ready = prepared(settings)
    if settings.external_url and not ready.has_readers:
        yield (
            "[http] external_url: nobody may see incidents on this port, so pages do not link to them\n"
            "  name users or client certificates in web_config_file, or set incidents_token_file"
        )
    for user, hashed in ready.rules.users.items():
        cost = passwords.cost_of(hashed) or 0
        if cost > passwords.COSTLY:
            yield (
                f"[http] web_config_file: {settings.web_config_file}: basic_auth_users.{user}: has a cost of {cost}: "
                f"each try takes {2 ** (cost - passwords.COSTLY)} times the CPU of cost {passwords.COSTLY}\n"
                f"  `htpasswd -nBC 10 {user}` prints a hash that is cheaper"
            )


def rules(settings: Http) -> Rules:
    """Who may ask over the network, read from the files that say so. Raises ServeError."""
    if not settings.web_config_file:
        files = tuple(Path(path) for path in (settings.tls_certificate, settings.tls_key) if path)
        return Rules(tls=_tls(settings), files=files)
    if settings.tls_certificate or settings.tls_key:
        raise ServeError("[http]: tls_certificate and tls_key are set in web_config_file, where there is one")
    from hangwatch.formats import yaml_file
    from hangwatch.web import web_config

    try:
        return web_config.load(Path(settings.web_config_file))
    except yaml_file.YamlError as error:
        raise ServeError(f"[http] web_config_file: {error}") from None


def _is_loopback(host: str) -> bool:
    """Whether nobody but this node reaches it."""
    try:
        _, address = resolved(host, 0)
        return ipaddress.ip_address(address[0]).is_loopback
    except (UnicodeError, OverflowError, OSError, ValueError):
        return False


def _bind(listener: Listener, host: str, port: int, key: str) -> int:
    with _explained(host, port, key):
        return listener.bind(host, port)


@contextlib.contextmanager
def _explained(host: str, port: int, key: str) -> Iterator[None]:
    where = f"{host}:{port}"
    try:
        yield
    except (UnicodeError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TEMPORARY:
            raise PortTakenError(
                f"cannot listen on {where}: {error}\n"
                "  another hangwatch, or another program, may hold the port (`ss -ltnp` shows it);\n"
                f"  stop it, or choose another one: [http] {key} = ... in the configuration"
            ) from None
        if isinstance(error, socket.gaierror | UnicodeError):
            raise ServeError(f"[http] listen = {host!r} is no address: {error}") from None
        raise ServeError(f"cannot listen on {where}: {error}\n  the keys are [http] listen and {key}") from None


def _tls(settings: Http) -> ssl.SSLContext | None:
    if not (settings.tls_certificate or settings.tls_key):
        return None
    if not (settings.tls_certificate and settings.tls_key):
        raise ServeError("[http]: tls_certificate and tls_key go together; only one of them is set")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (settings.tls_certificate, settings.tls_key):
            bounded_read.read(
                path, MAX_PEM_BYTES, flags=os.O_NONBLOCK
            )  # OpenSSL reads on for as long as something comes
        # Without a password here, OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")
    except (OSError, ValueError, bounded_read.FileError) as error:
        raise ServeError(f"[http]: the TLS certificate or key cannot be used: {error}") from None
    return context


def _read_token(path: str) -> bytes | None:
    if not path:
        return None
    try:
        token = bounded_read.read(path, MAX_TOKEN_BYTES, flags=os.O_NONBLOCK).strip()
    except bounded_read.FileError as error:
        raise ServeError(f"[http] incidents_token_file: {error}") from None
    if len(token) < 16:
        raise ServeError(f"[http] incidents_token_file: {path}: the token is shorter than 16 characters")
    return token
