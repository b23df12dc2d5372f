"""The HTTP server: /metrics, /healthz, /status and, for authorized clients, incidents. /healthz also has its own port.

`listener` handles the connections, and `auth` decides on access. Threads make the slow pages. Requests that arrive
while a page is made share that page.
"""

import contextlib
import errno
import gzip
import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

from hangwatch import words
from hangwatch.config import Http
from hangwatch.errors import TemporaryError, UserError
from hangwatch.formats import bounded_read
from hangwatch.metrics import collector
from hangwatch.store import Store
from hangwatch.web.auth import Admission, Rules
from hangwatch.web.cached_page import Page
from hangwatch.web.incident_pages import IncidentPages
from hangwatch.web.listener import Answer, Listener, Request, resolve_address, text

HEALTH_CONNECTIONS = 64
MAX_PORT = 65535
MAX_TOKEN_BYTES = 64 << 10
INCIDENT_THREADS = 2  # a store on a dead mount blocks only these threads
TEMPORARY = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)

INDEX = (
    b"<!doctype html><title>hangwatch</title><h1>hangwatch</h1>"
    b'<p><a href="metrics">metrics</a> <a href="healthz">healthz</a> <a href="status">status</a></p>'
)


class ServeError(UserError):
    """The error for settings with which the server cannot start. The message says why and what to change."""


class PortTakenError(TemporaryError):
    """A temporary failure to listen: the port is in use, or the address cannot be used yet."""


class Server:
    """The HTTP server of one daemon: all pages on `settings.port`, and /healthz on `health_port` without TLS.

    `status` returns the value of /status. `unhealthy` returns a sentence about the problem, or None if there is none.
    """

    def __init__(
        self,
        settings: Http,
        registry: CollectorRegistry,
        *,
        status: Callable[[], Any],
        unhealthy: Callable[[], str | None],
        incidents: Store | None = None,
    ) -> None:
        self._settings = settings
        self._unhealthy = unhealthy
        ready = prepare(settings)
        self._wanted_health_port = ready.health_port
        self._making = ThreadPoolExecutor(1, "http-pages")
        self._reading = ThreadPoolExecutor(INCIDENT_THREADS, "http-incidents")
        self._status = Page("application/json", lambda: msgspec.json.encode(status()), self._making)
        self._metrics = {is_gzipped: _metrics(registry, self._making, is_gzipped) for is_gzipped in (True, False)}
        self._incidents = IncidentPages(incidents, self._reading) if incidents is not None else None
        self._main = Listener("http", self._answer, max_connections=settings.max_connections, tls=ready.rules.tls)
        self._admission = Admission(
            ready.rules,
            lambda: rules(settings),
            token=ready.token,
            use_tls=self._main.replace_tls,
        )
        self._health = Listener("health", self._answer_health, max_connections=HEALTH_CONNECTIONS)
        self.health_port = 0

    def start(self) -> int:
        """Bind both ports and start serving. Return the main port. Raises ServeError and PortTakenError."""
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
        """Stop serving. Pages that are being made are abandoned."""
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
            return await self._metrics[_takes_gzip(request.headers.get("Accept-Encoding", ""))].get()
        if request.path == "/healthz":
            return await self._answer_health(request)
        if request.path == "/status":
            return await self._status.get()
        if request.path == "/":
            return Answer(HTTPStatus.OK, "text/html; charset=utf-8", INDEX)
        return text(HTTPStatus.NOT_FOUND, "not found")


def _takes_gzip(accept_encoding: str) -> bool:
    """True if a value of Accept-Encoding allows gzip (RFC 9110, 12.5.3)."""
    for item in accept_encoding.split(","):
        coding, _, weight = item.partition(";")
        if coding.strip().lower() in ("gzip", "x-gzip"):
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


def _metrics(registry: CollectorRegistry, pool: ThreadPoolExecutor, is_gzipped: bool) -> Page:
    """Return the page of metrics in Prometheus' text format, which every scraper accepts."""
    if not is_gzipped:
        return Page(collector.CONTENT_TYPE, lambda: collector.render(registry), pool)
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    # The usual level 9 takes six times the CPU for a page that is a seventh smaller.
    return Page(collector.CONTENT_TYPE, lambda: gzip.compress(collector.render(registry), 1), pool, headers)


class Prepared(NamedTuple):
    """The valid settings and files of a server. `has_readers`: users may read incidents in a browser."""

    token: bytes | None
    rules: Rules
    health_port: int
    has_readers: bool


def prepare(settings: Http) -> Prepared:
    """Read and check the settings, for `Server` and `hangwatch config --check`.

    Raises ServeError, and PortTakenError if an address does not exist yet.
    """
    health_port = settings.health_port or (settings.port + 1 if settings.port else 0)
    for port, key in ((settings.port, "port"), (health_port, "health_port")):
        if port > MAX_PORT:
            raise ServeError(f"[http]: health_port would be {settings.port} + 1: set health_port, or a lower port")
        with _explained(settings.listen, port, key):
            resolve_address(settings.listen, port)
    if health_port and health_port == settings.port:
        raise ServeError(f"[http]: port and health_port are both {health_port}: they must differ")
    token, access = _read_token(settings.incidents_token_file), rules(settings)
    has_readers = bool(access.users) or access.verifies_clients  # no browser sends a token
    return Prepared(token, access, health_port, has_readers)


def usable_url(settings: Http) -> str:
    """Return `external_url` for links to incidents; empty if it is not set, or if no browser may read incidents.

    Raises ServeError and PortTakenError.
    """
    return settings.external_url if settings.external_url and prepare(settings).has_readers else ""


def cautions(settings: Http) -> Iterator[str]:
    """Yield warnings about settings that are valid but probably wrong. Raises ServeError and PortTakenError."""
    from hangwatch.web import passwords

    ready = prepare(settings)
    if settings.external_url and not ready.has_readers:
        yield (
            "[http] external_url: no browser may read incidents on this port, so pages do not link to them\n"
            "  set users or client certificates in web_config_file; a browser cannot send incidents_token_file"
        )
    for user, hashed in ready.rules.users.items():
        cost = passwords.cost_of(hashed) or 0
        if cost > passwords.COSTLY:
            yield (
                f"[http] web_config_file: {settings.web_config_file}: basic_auth_users.{user}: bcrypt cost {cost}: "
                f"each login attempt uses {2 ** (cost - passwords.COSTLY)} times the CPU of cost {passwords.COSTLY}\n"
                f"  `htpasswd -nBC 10 {user}` prints a cheaper hash"
            )


def rules(settings: Http) -> Rules:
    """Read the access rules from their files. Raises ServeError."""
    if not settings.web_config_file:
        return Rules()
    from hangwatch.formats import yaml_file
    from hangwatch.web import web_config

    try:
        return web_config.load(Path(settings.web_config_file))
    except yaml_file.YamlError as error:
        raise ServeError(f"[http] web_config_file: {error}") from None


def _bind(listener: Listener, host: str, port: int, key: str) -> int:
    with _explained(host, port, key):
        return listener.bind(host, port)


@contextlib.contextmanager
def _explained(host: str, port: int, key: str) -> Iterator[None]:
    where = words.place(host, port)
    try:
        yield
    except (UnicodeError, OverflowError, OSError) as error:
        if isinstance(error, socket.gaierror | UnicodeError):
            kind = PortTakenError if getattr(error, "errno", None) == socket.EAI_AGAIN else ServeError
            raise kind(f"[http] listen = {host!r}: not a valid address: {error}") from None
        if isinstance(error, OSError) and error.errno in TEMPORARY:
            raise PortTakenError(
                f"cannot listen on {where}: {error}\n"
                "  another hangwatch or another program may use the port (`ss -ltnp` shows it):\n"
                f"  stop it, or choose another port: [http] {key} = ... in the configuration"
            ) from None
        raise ServeError(f"cannot listen on {where}: {error}\n  change [http] listen or {key}") from None


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
