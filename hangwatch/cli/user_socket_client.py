"""The daemon of this node, asked over its unix socket by a user about his own jobs."""

from __future__ import annotations

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
from urllib.parse import quote

import msgspec

from hangwatch import config
from hangwatch.errors import TemporaryError
from hangwatch.formats import decoding, incident_file
from hangwatch.model import Incident, JobName, JobState
from hangwatch.probes.process import dump_permissions, procfs
from hangwatch.state.status import Status
from hangwatch.web.listener import AGAIN_SECONDS, peer_of
from hangwatch.web.user_socket import MOST_ROUNDS

MOST_BYTES = 64 << 20
SERVICE_USER = "hangwatch"
SHORT_SECONDS = 5.0
MARGIN_SECONDS = 60.0
_PIECE_BYTES = 1 << 16
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class SocketError(Exception):
    """No answer over the socket: there is none, it is not the daemon's, or it refuses; the message says which."""


class BusyError(SocketError, TemporaryError):
    """The daemon refuses for now: its places, or those of this user, are taken."""


def may_not_read(pids: list[int]) -> bool:
    """Whether the kernel keeps us from the memory of one of these, which stacks are read from; see ptrace(2)."""
    return os.geteuid() != 0 and any(dump_permissions.may_attach(procfs.PROC, pid) is False for pid in pids)


def jobs(settings: config.Settings) -> list[JobName]:
    """The own jobs that the daemon watches. Raises SocketError."""
    seen = status(settings.socket.path)
    return [JobName(job_id=job.job_id, job_key=job.job_key) for job in seen.jobs if job.state is not JobState.ENDED]


def status(path: str) -> Status:
    """What the daemon sees, of jobs the own ones. Raises SocketError."""
    try:
        return decoding.json(ask(path, "/status"), Status)
    except (msgspec.ValidationError, ValueError) as error:
        raise SocketError(f"its answer is not that of this version: {error}") from None


def dump(settings: config.Settings, which: str, rounds: int | None) -> Incident:
    """What the daemon sees of one own job now; `which` is "pid=PID" or "job=KEY". Raises SocketError.

    None as `rounds`: one, and a second one where the job may stand.
    """
    wanted = f"{which}&rounds={min(rounds, MOST_ROUNDS)}" if rounds is not None else which
    content = ask(settings.socket.path, f"/dump?{wanted}", 2 * settings.capture_seconds + MARGIN_SECONDS)
    try:
        return incident_file.parse(Path(settings.socket.path), content)
    except incident_file.StoreError as error:
        raise SocketError(f"its answer is no incident of this version: {error}") from None


def incidents(path: str) -> tuple[incident_file.Summary, ...]:
    """Those of the own jobs, newest first. Raises SocketError."""
    try:
        return decoding.json(ask(path, "/incidents"), incident_file.Incidents).incidents
    except (msgspec.ValidationError, ValueError) as error:
        raise SocketError(f"its answer is not that of this version: {error}") from None


def incident(path: str, name: str) -> Incident:
    """One of them, by its name or a part of it that fits only one. Raises SocketError, StoreError."""
    names = [found.folder for found in incidents(path) if name in found.folder]
    exact = [name] if name in names else names
    if len(exact) != 1:
        raise SocketError(f"{len(exact)} incidents of yours have this in their names")
    return incident_file.parse(Path(path), ask(path, f"/incidents/{quote(exact[0])}/{incident_file.INCIDENT_FILE}"))


def ask(path: str, what: str, deadline_seconds: float = SHORT_SECONDS) -> bytes:
    """The answer to a question, of `MOST_BYTES` at most. Raises SocketError; BusyError where it is refused for now."""
    if not path:
        raise SocketError('[socket] path = "": there is none')
    end = time.monotonic() + deadline_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            _connect(ours, path, deadline_seconds)
            ours.settimeout(deadline_seconds)
            answer = _answer(ours, what)
            content = b""
            while piece := answer.read1(_PIECE_BYTES):
                content += piece
                left = end - time.monotonic()
                if len(content) > MOST_BYTES or left <= 0:
                    raise SocketError(f"{path}: its answer is longer than {MOST_BYTES >> 20} MiB, or does not end")
                ours.settimeout(left)
    except (http.client.RemoteDisconnected, ConnectionResetError, TimeoutError) as error:
        raise BusyError(f"{path}: the daemon has not answered: {error}; try again in {AGAIN_SECONDS} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise SocketError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if answer.status != HTTPStatus.OK:
        kind = BusyError if answer.status in _BUSY else SocketError
        raise kind(f"the daemon says: {content[:500].decode('utf-8', 'replace').strip()}")
    return content


def _answer(ours: socket.socket, what: str) -> http.client.HTTPResponse:
    """The head of the answer. Raises OSError, HTTPException."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has refused us, and said why
        ours.sendall(f"GET {what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("ascii"))
    answer = http.client.HTTPResponse(ours, method="GET")
    answer.begin()
    return answer


def _connect(ours: socket.socket, path: str, deadline_seconds: float) -> None:
    """Connect to a socket that root or the service's user has opened, and nobody else. Raises OSError, SocketError.

    Where the queue of the socket is full, the kernel lets us wait for our turn: a socket with Python's own timeout
    would get EAGAIN at once, see connect(2).
    """
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(SERVICE_USER).pw_uid)
    found = Path(path).lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in trusted:
        raise SocketError(f"{path}: is no socket of root or of the user {SERVICE_USER}: nothing is told to it")
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(deadline_seconds)), 0))
    ours.connect(path)
    peer = peer_of(ours)
    if peer is None or peer.uid not in trusted:
        raise SocketError(f"{path}: neither root nor the user {SERVICE_USER} listens there: nothing is told")
