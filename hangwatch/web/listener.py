"""A listening socket and its connections, in a thread with an event loop (tornado).

Clients may be hostile. A connection carries one request. The TLS handshake and the header of the request must arrive
within REQUEST_SECONDS after accept. The answer must be sent within ANSWER_SECONDS. A caller is a user or an address; a
TCP client on this node counts as its user. A caller with too many connections is refused at accept, which is cheap. If
no place is free, a new connection replaces a connection of the caller with the most connections: the oldest that has
not sent its request.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream, SSLIOStream

from hangwatch.formats.incident_file import PIECE_BYTES
from hangwatch.probes.network.local_client import LocalClients
from hangwatch.web.connection_limits import Caller, ConnectionLimits, OpenConnections, Rate, caller_at
from hangwatch.web.protocol import AGAIN_SECONDS, Peer, peer_of

REQUEST_SECONDS = 5.0  # from accept to the end of the header
ANSWER_SECONDS = 10.0  # from the end of the header to the last byte of the answer; Prometheus' default timeout
RENEWED_BYTES = 1 << 20  # a file gets ANSWER_SECONDS again after this many bytes: 100 kB/s at least
STOP_SECONDS = 2.0
MAX_HEADER_BYTES = 16 * 1024  # more is answered with 431, twice as much closes the connection
READ_BYTES = 4 * 1024
BACKLOG = 1024
ACCEPT_BATCH = 32  # connections accepted before open connections are served; at most a quarter of the places
REFUSED_BATCH = 32
ACCEPTS_PER_SECOND = 4000  # including refused connections
ACCEPTS_SECONDS = 0.05  # period in which accepts are counted
RATE_OF_ADDRESS = Rate(at_once=500.0, per_second=50.0)
ACCEPT_PAUSE_SECONDS = 0.5  # if no descriptor is available
SHARE_OF_FDS = 4  # a listener uses at most 1/4 of the process's descriptors

TOO_FAST = f"too many connections within a minute; try again in {AGAIN_SECONDS} s"
_REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\n\r\nconnections are refused: %b\n"
)
log = logging.getLogger(__name__)
# Do not log invalid requests: a flood of them would fill the disk.
logging.getLogger("tornado.general").setLevel(logging.ERROR)


class Request(NamedTuple):
    """A request: its path without the query, and the identity of the client. The path is not decoded.

    `certificate` is the verified client certificate in the form of the ssl module, None if there is none. `peer` is set
    only for a client of a unix socket.
    """

    path: str
    headers: Mapping[str, str]
    address: str = ""
    certificate: Mapping[str, Any] | None = None
    peer: Peer | None = None
    query: str = ""


class OpenFile(NamedTuple):
    """The first `size_bytes` of an open file. Threads of `readers` read it while it is sent. The listener closes it."""

    file: BinaryIO
    size_bytes: int
    readers: Executor


class Answer(NamedTuple):
    """An answer to a request: `body`, or the content of `file`. Many connections can share a body."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}
    file: OpenFile | None = None


def text(status: HTTPStatus, words: str) -> Answer:
    """Return an answer with one line of plain text."""
    return Answer(status, "text/plain; charset=utf-8", f"{words}\n".encode())


def resolve_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and address to bind: for `::` without IPv6, that of all IPv4 addresses.

    Raises socket.gaierror, UnicodeError or OverflowError.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - an exporter is scraped from elsewhere
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, address


def _has_ended(connection: socket.socket) -> bool:
    """True if the client has closed the connection without sending anything."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Listener(HTTPServerConnectionDelegate):
    """A server on a socket that `bind` or `bind_unix` opens. It calls `answer` for each request.

    `max_connections` is lowered if the process has few descriptors. `max_of_user` limits the open connections of one
    user of a unix socket. `rate` limits the connections that a caller opens. The deadline for making and sending an
    answer is ANSWER_SECONDS. With `making_seconds` there are two deadlines: this time for `answer`, then ANSWER_SECONDS
    for sending. `answer` runs in the event loop: work that takes longer than a millisecond belongs in a thread.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Request], Awaitable[Answer]],
        *,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        max_of_user: int | None = None,
        rate: Rate = RATE_OF_ADDRESS,
        making_seconds: float | None = None,
    ) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = min(max_connections, max(1, allowed // SHARE_OF_FDS))
        self._making_seconds = making_seconds
        self._answer, self._tls = answer, tls
        self._open_connections = OpenConnections(self.max_connections, max_of_user)
        self._limits = ConnectionLimits(name, rate)
        self._local_clients = LocalClients()
        self._batch = max(1, min(ACCEPT_BATCH, self.max_connections // 4))
        self._accepted = 0
        self._accepted_since = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket  # after `bind`
        self._loop: asyncio.AbstractEventLoop  # after `start`
        self._started, self._stopping = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)

    def bind(self, host: str, port: int) -> int:
        """Open the socket and return its port. If `port` is 0, the system chooses the port. `::` includes IPv4.

        Raises OSError, and socket.gaierror if `host` is not an address.
        """
        family, address = resolve_address(host, port)
        self._socket = socket.create_server(
            (str(address[0]), int(address[1])), family=family, backlog=BACKLOG, dualstack_ipv6=address[0] == "::"
        )
        return int(self._socket.getsockname()[1])

    def bind_unix(self, path: str) -> None:
        """Open a unix socket to which every user of this node may connect. Raises OSError, also if the path exists."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            Path(path).chmod(0o666)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def start(self) -> None:
        """Start serving."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Close the socket, which is bound, and all connections at once."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_SECONDS)
        else:
            self._socket.close()

    def replace_tls(self, tls: ssl.SSLContext) -> None:
        """Use another TLS context, for example with a renewed certificate, for new connections."""
        self._tls = tls

    # --- in the thread of the event loop -------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)
        self._started.set()
        await self._stopping.wait()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._local_clients.close()
        await self._open_connections.close_all()

    def _accept(self) -> None:
        opened = 0
        for _ in range(REFUSED_BATCH):
            if self._pause_at_accept_limit():
                return
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            caller = self._caller_of(connection, address)
            if caller is None:
                connection.close()
                continue
            is_too_fast = not self._limits.begin(caller, self._loop.time())
            why = TOO_FAST if is_too_fast else self._open_connections.make_place(caller)
            if why is not None:
                self._refuse(connection, caller, why)
                continue
            self._open(connection, caller)
            opened += 1
            if opened == self._batch:
                return

    def _caller_of(self, connection: socket.socket, address: Any) -> Caller | None:
        """Return the caller: a user of this node, else an address; None if the client has closed the connection."""
        if connection.family == socket.AF_UNIX:
            peer = peer_of(connection)
            return peer.uid if peer else -1
        if _has_ended(connection):
            return None
        client = self._local_clients.find(connection)
        if client is None:
            return caller_at(address[0])
        return None if client.has_closed else client.uid

    def _pause_at_accept_limit(self) -> bool:
        """Count one accepted connection. At the limit, stop accepting for a moment and return True.

        The clients wait in the kernel's queue until the listener accepts again.
        """
        now = self._loop.time()
        if now - self._accepted_since >= ACCEPTS_SECONDS:
            self._accepted, self._accepted_since = 0, now
        if self._accepted >= ACCEPTS_PER_SECOND * ACCEPTS_SECONDS:
            self._loop.remove_reader(self._socket)
            self._loop.call_at(self._accepted_since + ACCEPTS_SECONDS, self._resume)
            return True
        self._accepted += 1
        return False

    def _refuse(self, connection: socket.socket, caller: Caller, why: str) -> None:
        """Close a refused connection. A client of a unix socket gets the reason."""
        self._limits.log_refused(caller, why)
        if connection.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                connection.send(_REFUSED % (len(why) + 26, why.encode()), socket.MSG_DONTWAIT)
        connection.close()

    def _pause(self, error: OSError) -> None:
        """Stop accepting for ACCEPT_PAUSE_SECONDS, and close one connection to free a descriptor."""
        log.warning("a connection cannot be accepted: %s", error)
        self._open_connections.close_oldest()
        self._loop.remove_reader(self._socket)
        self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _open(self, connection: socket.socket, caller: Caller) -> None:
        connection.setblocking(False)
        sizes = {"max_buffer_size": 2 * MAX_HEADER_BYTES + READ_BYTES, "read_chunk_size": READ_BYTES}
        try:
            if self._tls is None:
                stream = IOStream(connection, **sizes)
            else:
                wrapped = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                stream = SSLIOStream(wrapped, ssl_options=self._tls, **sizes)
        except OSError:  # the client is gone, or its handshake is invalid
            connection.close()
            return
        self._open_connections.add(stream, caller, REQUEST_SECONDS)
        params = HTTP1ConnectionParameters(
            no_keep_alive=True, chunk_size=READ_BYTES, max_header_size=2 * MAX_HEADER_BYTES, max_body_size=0
        )
        HTTP1ServerConnection(stream, params).start_serving(self)

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:  # noqa: ARG002 - tornado's
        """Return the delegate for the request of a connection."""
        assert isinstance(request_conn, HTTP1Connection)
        return _Exchange(self, request_conn)

    def on_close(self, server_conn: object) -> None:
        """Forget a closed connection."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._open_connections.forget(server_conn.stream)
        server_conn.stream.error = None  # break the reference cycle with its traceback, to free the memory at once

    def on_request(self, connection: HTTP1Connection, start_line: RequestStartLine, headers: HTTPHeaders) -> None:
        """Start to answer a request that has arrived completely."""
        self._open_connections.begin_answer(connection.stream, self._making_seconds or ANSWER_SECONDS)
        task = self._loop.create_task(self._respond(connection, start_line, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, connection: HTTP1Connection, start_line: RequestStartLine, headers: HTTPHeaders) -> None:
        answer = await self._answer_to(connection.stream, start_line, headers)
        if self._making_seconds:
            self._open_connections.renew(connection.stream, ANSWER_SECONDS)
        try:
            if not connection.stream.closed():
                await self._send(connection, start_line, answer)
        except OSError:  # of the file, or StreamClosedError
            connection.stream.close()  # the client sees that the answer is incomplete
        finally:
            if answer.file is not None:
                answer.file.file.close()

    async def _send(self, connection: HTTP1Connection, start_line: RequestStartLine, answer: Answer) -> None:
        status = answer.status
        size_bytes = len(answer.body) if answer.file is None else answer.file.size_bytes
        sent = HTTPHeaders(
            {
                "Server": "hangwatch",
                "Content-Type": answer.content_type,
                "Content-Length": str(size_bytes),
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
                **answer.headers,
            }
        )
        connection.write_headers(ResponseStartLine("HTTP/1.1", status, status.phrase), sent)
        if start_line.method != "HEAD" and answer.file is None:
            connection.write(answer.body)  # separate from the headers: together they would be copied
        elif start_line.method != "HEAD" and answer.file is not None:
            await self._send_file(connection, answer.file)
        connection.finish()

    async def _send_file(self, connection: HTTP1Connection, body: OpenFile) -> None:
        """Send a file, which is read as fast as the client receives it. Raises OSError."""
        remaining_bytes = body.size_bytes
        while remaining_bytes:
            most_bytes = min(PIECE_BYTES, remaining_bytes)
            piece = await self._loop.run_in_executor(body.readers, body.file.read, most_bytes)
            if not piece:
                raise OSError("the file has become shorter")
            await connection.write(piece)
            if remaining_bytes // RENEWED_BYTES != (remaining_bytes - len(piece)) // RENEWED_BYTES:
                self._open_connections.renew(connection.stream, ANSWER_SECONDS)
            remaining_bytes -= len(piece)

    async def _answer_to(self, stream: IOStream, start_line: RequestStartLine, headers: HTTPHeaders) -> Answer:
        if start_line.method not in ("GET", "HEAD"):
            return text(HTTPStatus.METHOD_NOT_ALLOWED, "use GET")._replace(headers={"Allow": "GET, HEAD"})
        if sum(len(name) + len(value) + 4 for name, value in headers.get_all()) > MAX_HEADER_BYTES:
            return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers must be at most {MAX_HEADER_BYTES} bytes")
        try:
            path, _, query = start_line.path.partition("?")
            return await self._answer(Request(path, headers, *_client_of(stream), query))
        except Exception:
            log.exception("%s: the request failed; please report this bug", start_line.path[:100])
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "an error inside hangwatch; see its log")


def _client_of(stream: IOStream) -> tuple[str, Mapping[str, Any] | None, Peer | None]:
    """Return the address of the client, its verified certificate, and its process if the socket is a unix socket."""
    address, certificate, peer = "", None, None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the client is gone
        peer = peer_of(stream.socket)
        address = str(stream.socket.getpeername()[0]) if peer is None else ""
        if isinstance(stream, SSLIOStream):
            certificate = stream.socket.getpeercert() or None
    return address, certificate, peer


class _Exchange(HTTPMessageDelegate):
    """A request that tornado is reading."""

    def __init__(self, listener: Listener, connection: HTTP1Connection) -> None:
        self._listener, self._connection = listener, connection

    def headers_received(self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        assert isinstance(start_line, RequestStartLine)
        self._start_line, self._headers = start_line, headers

    def finish(self) -> None:
        self._listener.on_request(self._connection, self._start_line, self._headers)
