"""Answers /metrics, /healthz, /status and, to those who hold the token, incident pages; health has a port of its own.

How connections are kept is the part of `listener`. What takes time is made in threads beside the event loop, once for
all who ask meanwhile. Stacks name code and paths of other people's jobs: without a token file no incident is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hmac
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from hangwatch import inputs
from hangwatch.config import Http
from hangwatch.errors import TemporaryError, UserError
from hangwatch.listener import Answer, Listener, Request, resolved, text

HEALTH_CONNECTIONS = 64
MAX_PORT = 65535
MAX_PEM_BYTES = 1 << 20
MAX_TOKEN_BYTES = 64 << 10
LEAST_KEPT_SECONDS = 0.25  # a page that was just made is given to whoever asks within this time
INCIDENT_THREADS = 2  # a store on a dead mount blocks these, nothing else
OPENMETRICS = "application/openmetrics-text"
TEMPORARY = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)

PAGES = {"report.html": "text/html; charset=utf-8", "report.txt": "text/plain; charset=utf-8"}

INDEX = (
    b"<!doctype html><title>hangwatch</title><h1>hangwatch</h1>"
    b'<p><a href="metrics">metrics</a> <a href="healthz">healthz</a> <a href="status">status</a></p>'
)


class ServeError(UserError):
    """The server cannot start with these settings; the message says why and what to change."""


class PortTakenError(TemporaryError):
    """The server cannot start now, and may later: the port is taken, or the address is not there yet."""


class Incidents(Protocol):
    """What the server needs of the store."""

    def read_file(self, incident_id: str, name: str) -> bytes | None:
        """One file of one incident, None where there is no such file."""


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
        self._unhealthy, self._incidents = unhealthy, incidents
        self._token, tls, self._wanted_health_port = prepared(settings)
        self._making = ThreadPoolExecutor(1, "http-pages")
        self._reading = ThreadPoolExecutor(INCIDENT_THREADS, "http-incidents")
        self._status = _Page("application/json", lambda: msgspec.json.encode(status()), self._making)
        self._metrics = {wanted: _metrics(wanted, registry, self._making) for wanted in (OPENMETRICS, "")}
        self._gzipped = {wanted: _Gzipped(page, self._making) for wanted, page in self._metrics.items()}
        self._main = Listener("http", self._answer, max_connections=settings.max_connections, tls=tls)
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
        return port

    def stop(self) -> None:
        """Stop serving; what is being made is left behind."""
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
        path = request.path
        if path == "/metrics":
            pages = self._gzipped if _takes_gzip(request.headers.get("Accept-Encoding", "")) else self._metrics
            return await pages[OPENMETRICS if OPENMETRICS in request.headers.get("Accept", "") else ""].get()
        if path == "/healthz":
            return await self._answer_health(request)
        if path == "/status":
            return await self._status.get()
        if path == "/":
            return Answer(HTTPStatus.OK, "text/html; charset=utf-8", INDEX)
        if path.startswith("/incidents/"):
            return await self._incident(path, request.headers.get("Authorization", ""))
        return text(HTTPStatus.NOT_FOUND, "not found")

    async def _incident(self, path: str, authorization: str) -> Answer:
        if self._token is None or self._incidents is None:
            return text(HTTPStatus.NOT_FOUND, "incident pages are off: set [http] incidents_token_file")
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            asked = {"WWW-Authenticate": 'Bearer realm="hangwatch incidents"'}
            return text(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")._replace(headers=asked)
        _, _, incident_id, name = (*path.split("/"), "", "")[:4]
        name = name or "report.html"
        body = None
        if name in PAGES:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._reading, self._incidents.read_file, incident_id, name)
        if body is None:
            return text(HTTPStatus.NOT_FOUND, "no such incident")
        return Answer(HTTPStatus.OK, PAGES[name], body)


class _Page:
    """What is made on demand, for all who ask meanwhile, and kept for as long as making it took.

    So a flood of requests costs half of one core at most, and clients that read slowly hold few versions in memory.
    """

    def __init__(self, content_type: str, make: Callable[[], bytes], pool: ThreadPoolExecutor) -> None:
        self._content_type, self._make, self._pool = content_type, make, pool
        self._making: asyncio.Future[bytes] | None = None
        self._kept_until = 0.0

    async def get(self) -> Answer:
        """The page; one request that is given up does not end the making of it for the others."""
        if self._making is None or (self._making.done() and time.monotonic() >= self._kept_until):
            self._making = asyncio.get_running_loop().run_in_executor(self._pool, self._timed)
        return Answer(HTTPStatus.OK, self._content_type, await asyncio.shield(self._making))

    def _timed(self) -> bytes:
        began = time.monotonic()
        try:
            return self._make()
        finally:
            now = time.monotonic()
            self._kept_until = now + max(LEAST_KEPT_SECONDS, now - began)


class _Gzipped:
    """A page for who takes it compressed, which happens once for each time that it was made."""

    def __init__(self, page: _Page, pool: ThreadPoolExecutor) -> None:
        self._page, self._pool = page, pool
        self._plain: bytes | None = None
        self._made: asyncio.Future[bytes] | None = None

    async def get(self) -> Answer:
        """The page; one request that is given up does not end the making of it for the others."""
        answer = await self._page.get()
        if self._made is None or answer.body is not self._plain:
            self._plain = answer.body
            self._made = asyncio.get_running_loop().run_in_executor(self._pool, gzip.compress, answer.body)
        headers = {**answer.headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return answer._replace(body=await asyncio.shield(self._made), headers=headers)


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding names gzip and does not refuse it (RFC 9110, 12.5.3)."""
    for one in accept_encoding.split(","):
        coding, _, weight = one.partition(";")
        if coding.strip().lower() in ("gzip", "x-gzip"):
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


def _metrics(wanted: str, registry: CollectorRegistry, pool: ThreadPoolExecutor) -> _Page:
    """The metrics in one of two formats, whatever parameters a client adds: each variant would be made anew."""
    encoder, kind = choose_encoder(f"{wanted}; version=1.0.0" if wanted else "")
    return _Page(kind, lambda: encoder(registry), pool)


class Prepared(NamedTuple):
    """What a server needs of files, read and found to be usable."""

    token: bytes | None
    tls: ssl.SSLContext | None
    health_port: int


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
    return Prepared(_read_token(settings.incidents_token_file), _tls(settings), health_port)


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
            inputs.read(path, MAX_PEM_BYTES)  # OpenSSL reads on for as long as something comes
        # Without a password here, OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")
    except (OSError, ValueError, inputs.FileError) as error:
        raise ServeError(f"[http]: the TLS certificate or key cannot be used: {error}") from None
    return context


def _read_token(path: str) -> bytes | None:
    if not path:
        return None
    try:
        token = inputs.read(path, MAX_TOKEN_BYTES).strip()
    except inputs.FileError as error:
        raise ServeError(f"[http] incidents_token_file: {error}") from None
    if len(token) < 16:
        raise ServeError(f"[http] incidents_token_file: {path}: the token is shorter than 16 characters")
    return token
