"""Answers to users of this node about their own jobs, over a unix socket: status, stacks of all ranks, incidents.

Who asks is the kernel's word (SO_PEERCRED), and whose a job is, too: a user gets his own, root all. So a user whom
kernel.yama.ptrace_scope keeps from his own ranks has their stacks by the daemon's rights, and nobody has a stranger's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from hangwatch import config
from hangwatch.formats import incident_file
from hangwatch.model import Job, JobState
from hangwatch.schedule import MINUTE_SECONDS, Pace, Turns
from hangwatch.state import status
from hangwatch.state.board import Board, Snapshot
from hangwatch.store import Store, overflow_uid
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.web.connection_limits import Rate
from hangwatch.web.incident_pages import JSON, IncidentPages
from hangwatch.web.listener import Answer, Listener, Request, text

MAX_CONNECTIONS = 128  # they are small; what answers take is bounded by [socket] per_minute
MAX_CONNECTIONS_OF_USER = 2
REQUESTS_PER_MINUTE, REQUESTS_PER_MINUTE_OF_USER = 1200, 120
DUMP_THREADS = 2
MOST_WAITING_DUMPS = 64  # under way and waiting: a dump takes some seconds
AGAIN_SECONDS = 30  # of a user whose dump had no turn
MOST_DUMP_BYTES = 16 << 20
MOST_ROUNDS = 3
SENDING_SECONDS = 2.0  # before a connection is closed, to say why
MARGIN_SECONDS = 30.0  # over the deadlines of a capture: scans, and the wait for a thread
UNKNOWN = text(
    HTTPStatus.FORBIDDEN,
    "your user id is not known here: a user namespace of your own (a rootless container?) hides it. "
    "Ask from outside of it",
)
NOT_YOURS = text(HTTPStatus.NOT_FOUND, "no such job of yours runs on this node")

log = logging.getLogger(__name__)


class _Which(NamedTuple):
    """Which job is asked for: by a process of it, or by its key."""

    pid: str
    job: str


class _Dump(NamedTuple):
    """A dump that waits for its turn."""

    uid: int
    which: _Which
    rounds: int | None
    answer: Future[Answer]


class OwnJobs:
    """The socket of one daemon. `scan` finds the jobs anew; `look` takes and judges one in so many rounds.

    It gives None when the daemon is ending; its rounds are None where the user has asked for no number of them.
    """

    def __init__(
        self,
        settings: config.Settings,
        node: str,
        board: Board,
        store: Store,
        *,
        scan: Callable[[], None],
        look: Callable[[Job, int | None], Diagnosis | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = settings.socket.path
        self._node, self._board, self._store = node, board, store
        self._scan, self._look, self._clock, self._detector = scan, look, clock, settings.detector
        wanted = settings.socket
        self._pace = Pace(wanted.per_minute, wanted.per_minute_of_owner, clock, is_shared_out=True)
        self._requests = Pace(REQUESTS_PER_MINUTE, REQUESTS_PER_MINUTE_OF_USER, clock, is_shared_out=True)
        self._dumping: set[int] = set()
        self._turns: Turns[_Dump] = Turns(1)
        self._dumps = ThreadPoolExecutor(DUMP_THREADS, "own-dumps")
        self._reading = ThreadPoolExecutor(1, "own-reading")
        self._listener: Listener | None = None
        self._making_seconds = 2 * settings.capture_seconds + MARGIN_SECONDS

    def start(self) -> None:
        """Serve; where that cannot be, say so and go on: the daemon does its work without."""
        if not self._path:
            return
        listener = Listener(
            "own-jobs",
            self.answer,
            max_connections=MAX_CONNECTIONS,
            max_of_user=MAX_CONNECTIONS_OF_USER,
            rate=Rate(REQUESTS_PER_MINUTE_OF_USER, REQUESTS_PER_MINUTE_OF_USER / MINUTE_SECONDS),
            making_seconds=self._making_seconds,
        )
        try:
            problem = _unsafe(Path(self._path).parent)
            if problem is None:
                _remove_stale(self._path)
                listener.bind_unix(self._path)
        except FileNotFoundError:
            log.info("no socket for users: the folder of [socket] path = %r is not there", self._path)
            return
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is not None:
            log.warning("no socket for users: [socket] path = %r: %s", self._path, problem)
            return
        listener.start()
        self._listener = listener

    def stop(self) -> None:
        """Stop serving; a dump that is under way is left behind."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                Path(self._path).unlink()
            self._listener.stop()
        for pool in (self._dumps, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: Request) -> Answer:
        """/status, /dump?pid=PID&rounds=N or ?job=KEY, /incidents and /incidents/ID/NAME, of what is the asker's."""
        if request.peer is None or request.peer.uid == overflow_uid():
            return UNKNOWN
        uid = request.peer.uid
        if self._requests.begin(str(uid)):
            return text(HTTPStatus.TOO_MANY_REQUESTS, f"more than {REQUESTS_PER_MINUTE_OF_USER} requests in a minute")
        if request.path == "/status":
            return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(self._status(uid)))
        if request.path == "/dump":
            return await self._answer_dump(uid, request.query)
        if request.path == "/incidents" or request.path.startswith("/incidents/"):
            return await IncidentPages(_OwnIncidents(self._store, uid), self._reading).answer(request.path)
        return text(HTTPStatus.NOT_FOUND, "not found")

    def _status(self, uid: int) -> status.Status:
        seen = self._board.snapshot
        if uid == 0:
            return status.view(seen, self._node, self._clock(), self._detector)
        own = {key: entry for key, entry in seen.jobs.items() if entry.job.uid == uid}
        view = status.view(replace(seen, jobs=own, left_out=()), self._node, self._clock(), self._detector)
        # What a check says may name the jobs of others.
        return replace(view, checks=tuple(replace(check, message="") for check in view.checks))

    async def _answer_dump(self, uid: int, query: str) -> Answer:
        asked = {name: values[-1] for name, values in parse_qs(query[:256]).items()}
        which, rounds = _Which(asked.get("pid", ""), asked.get("job", "")), asked.get("rounds")
        if rounds is not None and rounds not in map(str, range(1, MOST_ROUNDS + 1)):
            return text(HTTPStatus.BAD_REQUEST, f"rounds={rounds}: 1 to {MOST_ROUNDS}")
        if uid in self._dumping:
            return text(HTTPStatus.TOO_MANY_REQUESTS, "a dump of yours is under way")
        if too_many := self._pace.begin(str(uid)):
            return text(HTTPStatus.TOO_MANY_REQUESTS, f"more dumps within a minute than [socket] {too_many} allows")
        if len(self._dumping) >= MOST_WAITING_DUMPS:
            return _refused_for_now(f"all {MOST_WAITING_DUMPS} places for dumps are taken")
        self._dumping.add(uid)
        wanted = _Dump(uid, which, None if rounds is None else int(rounds), Future())
        wanted.answer.add_done_callback(lambda _: self._dumping.discard(uid))
        self._turns.add(str(uid), wanted)
        self._dumps.submit(self._dump_in_turn)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(wanted.answer), self._making_seconds - SENDING_SECONDS)
        except asyncio.TimeoutError:
            return _refused_for_now("your dump had no turn: dumps of other users were before it")

    def _dump_in_turn(self) -> None:
        """The dump of the user who was served longest ago, so that a newcomer does not wait for all who ask again."""
        turn = self._turns.take()
        if turn is None:
            return
        wanted = turn.wanted
        try:
            if wanted.answer.set_running_or_notify_cancel():
                wanted.answer.set_result(self._dump(wanted.uid, wanted.which, wanted.rounds))
        except Exception as error:
            wanted.answer.set_exception(error)
        finally:
            self._turns.end(turn)  # a user has one at most, and each has a call in the pool

    def _dump(self, uid: int, which: _Which, rounds: int | None) -> Answer:
        """The incident that `hangwatch dump` would make: looked for before and after, since a process can become
        another user's."""
        self._scan()
        job = _own_job(self._board.snapshot, uid, which)
        if job is None:
            return NOT_YOURS
        look = self._look(job, rounds)
        if look is None:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "the daemon is ending")
        self._scan()
        after = self._board.snapshot.jobs.get(job.key)
        if after is None or after.job.processes != job.processes or uid not in (0, after.job.uid):
            return text(HTTPStatus.CONFLICT, "the job has changed while it was looked at")
        content = incident_file.encode(look.incident(after.job, JobState.SUSPECTED))
        log.info("%s: its stacks were given to user %d, who asked", job.name.in_log, uid)
        if len(content) > MOST_DUMP_BYTES:
            return text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_DUMP_BYTES >> 20} MiB of stacks")
        return Answer(HTTPStatus.OK, JSON, content)


def _refused_for_now(why: str) -> Answer:
    return text(HTTPStatus.SERVICE_UNAVAILABLE, f"dumps are refused: {why}; try again in {AGAIN_SECONDS} s")


def _own_job(snapshot: Snapshot, uid: int, which: _Which) -> Job | None:
    """The living job that is asked for, if its owner by the kernel is this user, or root asks."""
    own = (entry.job for entry in snapshot.living if uid in (0, entry.job.uid))
    return next((job for job in own if which.job == job.key or which.pid in map(str, job.pids)), None)


class _OwnIncidents:
    """The incidents of one user, as the store has them listed for him; all for root."""

    def __init__(self, store: Store, uid: int) -> None:
        self._store, self._uid = store, uid

    def open_file(self, incident_id: str, name: str) -> BinaryIO | None:
        """One file of one incident, None where there is no such file of his."""
        return self._store.open_file(incident_id, name) if self._is_own(incident_id) else None

    def summaries(self) -> tuple[incident_file.Summary, ...]:
        """His incidents, newest first. Raises StoreError."""
        return self._store.summaries(None if self._uid == 0 else self._uid)

    def _is_own(self, name: str) -> bool:
        return self._uid == 0 or self._store.is_listed(name, self._uid)


def _unsafe(folder: Path) -> str | None:
    """Why a socket is not put there: who can write there could put his own in its place. Raises OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "its folder is a link, or no folder"
    if found.st_uid not in (0, os.geteuid()):
        return f"its folder belongs to user {found.st_uid}"
    return "others can write in its folder" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _remove_stale(path: str) -> None:
    """Remove what a daemon left that was killed. Raises OSError where another one answers there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise OSError(errno.EEXIST, "is there, and no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(1.0)
            try:
                other.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another hangwatch answers there")
