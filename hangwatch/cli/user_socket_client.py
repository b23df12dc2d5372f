"""The client of the user socket: the daemon on this node answers questions of a user about the user's own jobs."""

import contextlib
import http.client
import os
import pwd
import socket
import stat
import struct
import time
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from hangwatch import config, words
from hangwatch.errors import TemporaryError, UserError
from hangwatch.formats import decoding, incident_file
from hangwatch.formats.incident_file import PIECE_BYTES
from hangwatch.model import Incident, SilenceAnswer
from hangwatch.state.status import Status
from hangwatch.web.protocol import AGAIN_SECONDS, MOST_ROUNDS, peer_of

MOST_BYTES = 64 << 20
SERVICE_USER = "hangwatch"
SHORT_SECONDS = 5.0
MARGIN_SECONDS = 60.0
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
T = TypeVar("T")


class SocketError(UserError):
    """A failed request over the user socket. The message says why: no socket, not the daemon's, or refused."""


class NoDaemonError(SocketError):
    """No daemon listens at the user socket."""


class BusyError(SocketError, TemporaryError):
    """A request that may succeed later: the daemon did not respond, or a limit of users is reached."""


def _ask_for(path: str, what: str, form: type[T]) -> T:
    """Send a request, and decode the answer. Raises SocketError."""
    try:
        return decoding.decode_json(ask(path, what), form)
    except ValueError as error:
        raise SocketError(f"the daemon's answer is not of this version of hangwatch: {error}") from None


def status(path: str) -> Status:
    """Return the daemon's status with the jobs of this user. Raises SocketError."""
    return _ask_for(path, "/status", Status)


def dump(settings: config.Settings, which: str, rounds: int | None) -> Incident:
    """Make the daemon dump a job of this user. Return its incident. Raises SocketError.

    `which` is "pid=PID" or "job=KEY". If `rounds` is None, the daemon takes one round, and a second round if the
    first may mislead.
    """
    query = f"{which}&rounds={min(rounds, MOST_ROUNDS)}" if rounds is not None else which
    content = ask(settings.socket.path, f"/dump?{query}", 2 * settings.capture_seconds + MARGIN_SECONDS)
    try:
        return incident_file.parse(Path(settings.socket.path), content)
    except incident_file.StoreError as error:
        raise SocketError(f"the daemon's answer is not an incident of this version of hangwatch: {error}") from None


def silence(path: str, query: str) -> SilenceAnswer:
    """Make the daemon silence a job of this user, or end that, see `web.silence_requests`. Raises SocketError."""
    return _ask_for(path, f"/silence?{query}", SilenceAnswer)


def verdict(path: str, query: str) -> str:
    """Make the daemon store feedback on an incident, see `web.user_socket`. Return a sentence. Raises SocketError."""
    return words.printable(ask(path, f"/verdict?{query}").decode("utf-8", "replace").strip())


def incidents(path: str) -> tuple[incident_file.Summary, ...]:
    """Return the incidents of this user's jobs, newest first. Raises SocketError."""
    return _ask_for(path, "/incidents", incident_file.Incidents).incidents


def incident(path: str, name: str) -> Incident:
    """Return an incident of this user, by its name or a unique part of it. Raises SocketError and StoreError."""
    names = [summary.folder for summary in incidents(path) if name in summary.folder]
    exact = [name] if name in names else names
    if len(exact) != 1:
        raise SocketError(f"{len(exact)} of your incidents have {name!r} in their names")
    return incident_file.parse(Path(path), ask(path, f"/incidents/{quote(exact[0])}/{incident_file.INCIDENT_FILE}"))


def ask(path: str, what: str, deadline_seconds: float = SHORT_SECONDS) -> bytes:
    """Send a request to the daemon and return its answer, at most `MOST_BYTES`. `what` is the path of the request.

    Raises SocketError: NoDaemonError if no daemon listens, BusyError if it does not respond or refuses for now.
    """
    if not path:
        raise SocketError('[socket] path = "": the user socket is turned off')
    end = time.monotonic() + deadline_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            _connect(connection, path, deadline_seconds)
            connection.settimeout(deadline_seconds)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused: the answer has the reason
                request = f"GET {what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                connection.sendall(request.encode("ascii"))
            answer = http.client.HTTPResponse(connection, method="GET")
            answer.begin()
            content = b""
            while piece := answer.read1(PIECE_BYTES):
                content += piece
                remaining_seconds = end - time.monotonic()
                if len(content) > MOST_BYTES or remaining_seconds <= 0:
                    raise SocketError(f"{path}: its answer exceeds {MOST_BYTES >> 20} MiB, or did not end in time")
                connection.settimeout(remaining_seconds)
    except (http.client.RemoteDisconnected, ConnectionResetError, TimeoutError) as error:
        raise BusyError(f"{path}: the daemon did not respond: {error}; try again in {AGAIN_SECONDS} s") from None
    except FileNotFoundError as error:
        raise NoDaemonError(f"the socket of the daemon is missing: {path}: {error.strerror}") from None
    except ConnectionRefusedError as error:
        raise NoDaemonError(f"{path}: {error.strerror}") from None
    except (OSError, http.client.HTTPException) as error:
        raise SocketError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if answer.status != HTTPStatus.OK:
        kind = BusyError if answer.status in _BUSY else SocketError
        raise kind(f"the daemon answered: {content[:500].decode('utf-8', 'replace').strip()}")
    return content


def _connect(connection: socket.socket, path: str, deadline_seconds: float) -> None:
    """Connect to the socket if it belongs to root, to the service's user or to this user.

    Raises OSError and SocketError.

    SO_SNDTIMEO makes connect(2) wait if the queue of the socket is full. With Python's own timeout, connect(2)
    would fail with EAGAIN at once.
    """
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(SERVICE_USER).pw_uid)
    status = Path(path).lstat()
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid not in trusted:
        raise SocketError(f"{path}: not used: it is not a socket of root or of the user {SERVICE_USER}")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(deadline_seconds)), 0))
    connection.connect(path)
    peer = peer_of(connection)
    if peer is None or peer.uid not in trusted:
        raise SocketError(f"{path}: not used: the listener is neither root nor the user {SERVICE_USER}")
