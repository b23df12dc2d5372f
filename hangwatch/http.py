"""Serves /metrics, /healthz, /status and, to those who hold the token, incident pages.

A bounded number of threads (cheroot), so that a slow or hostile client can hold up other clients at most, never the
daemon. Stacks name code and paths of other people's jobs: without a token file no incident is served.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from cheroot import wsgi
from cheroot.ssl.builtin import BuiltinSSLAdapter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from hangwatch.config import Http

REQUEST_SECONDS = 10
MAX_HEADER_BYTES = 16 * 1024

PAGES = {"report.html": "text/html; charset=utf-8", "report.txt": "text/plain; charset=utf-8"}

INDEX = (
    b"<!doctype html><title>hangwatch</title><h1>hangwatch</h1>"
    b'<p><a href="metrics">metrics</a> <a href="healthz">healthz</a> <a href="status">status</a></p>'
)


class ServeError(Exception):
    """The server cannot start; the message says why and what to change."""


class Incidents(Protocol):
    """What the server needs of the store."""

    def read_file(self, incident_id: str, name: str) -> bytes | None:
        """One file of one incident, None where there is no such file."""


class Server:
    """The HTTP server of one daemon, in one background thread and `settings.threads` workers.

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
        self._app = _App(registry, status, unhealthy, incidents, _read_token(settings.incidents_token_file))
        self._server = wsgi.Server(
            (settings.listen, settings.port),
            self._app,
            numthreads=settings.threads,
            max=settings.threads,
            server_name="hangwatch",
            timeout=REQUEST_SECONDS,
            request_queue_size=32,
        )
        self._server.max_request_header_size = MAX_HEADER_BYTES
        self._server.max_request_body_size = 1
        self._server.keep_alive_conn_limit = settings.threads
        if settings.tls_certificate or settings.tls_key:
            self._server.ssl_adapter = _tls(settings)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> int:
        """Bind and serve; returns the port. Raises ServeError."""
        try:
            socket.getaddrinfo(self._settings.listen, self._settings.port)
        except (socket.gaierror, UnicodeError) as error:
            raise ServeError(f"[http] listen = {self._settings.listen!r} is no address: {error}") from None
        try:
            self._server.prepare()
        except OSError as error:
            where = f"{self._settings.listen}:{self._settings.port}"
            raise ServeError(
                f"cannot listen on {where}: {error}\n"
                "  another hangwatch, or another program, may hold the port (`ss -ltnp` shows it);\n"
                "  stop it, or choose another one: [http] port = ... in the configuration"
            ) from None
        self._thread.start()
        return int(self._server.bind_addr[1])

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def _serve(self) -> None:
        self._server.serve()


def _tls(settings: Http) -> BuiltinSSLAdapter:
    if not (settings.tls_certificate and settings.tls_key):
        raise ServeError("[http]: tls_certificate and tls_key go together; only one of them is set")
    try:
        return BuiltinSSLAdapter(settings.tls_certificate, settings.tls_key)
    except (OSError, ValueError) as error:
        raise ServeError(f"[http]: the TLS certificate or key cannot be used: {error}") from None


def _read_token(path: str) -> bytes | None:
    if not path:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ServeError(f"[http] incidents_token_file: {path}: {error.strerror}") from None
    if len(token) < 16:
        raise ServeError(f"[http] incidents_token_file: {path}: the token is shorter than 16 characters")
    return token


class _App:
    """The WSGI application."""

    def __init__(
        self,
        registry: CollectorRegistry,
        status: Callable[[], Any],
        unhealthy: Callable[[], str | None],
        incidents: Incidents | None,
        token: bytes | None,
    ) -> None:
        self._registry, self._status, self._unhealthy = registry, status, unhealthy
        self._incidents, self._token = incidents, token

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            code, kind, body = "405 Method Not Allowed", "text/plain", b"only GET\n"
        else:
            code, kind, body = self._answer(environ)
        headers = [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ]
        if code.startswith("401"):
            headers.append(("WWW-Authenticate", 'Bearer realm="hangwatch incidents"'))
        start_response(code, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, str, bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            encoder, kind = choose_encoder(environ.get("HTTP_ACCEPT", ""))
            return "200 OK", kind, encoder(self._registry)
        if path == "/healthz":
            problem = self._unhealthy()
            code = "503 Service Unavailable" if problem else "200 OK"
            return code, "text/plain; charset=utf-8", f"{problem or 'ok'}\n".encode()
        if path == "/status":
            return "200 OK", "application/json", msgspec.json.encode(self._status())
        if path == "/":
            return "200 OK", "text/html; charset=utf-8", INDEX
        if path.startswith("/incidents/"):
            return self._incident(path, environ.get("HTTP_AUTHORIZATION", ""))
        return "404 Not Found", "text/plain", b"not found\n"

    def _incident(self, path: str, authorization: str) -> tuple[str, str, bytes]:
        if self._token is None or self._incidents is None:
            return "404 Not Found", "text/plain", b"incident pages are off: set [http] incidents_token_file\n"
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            return "401 Unauthorized", "text/plain", b"a bearer token is needed\n"
        _, _, incident_id, name = (*path.split("/"), "", "")[:4]
        name = name or "report.html"
        body = self._incidents.read_file(incident_id, name) if name in PAGES else None
        if body is None:
            return "404 Not Found", "text/plain", b"no such incident\n"
        return "200 OK", PAGES[name], body
