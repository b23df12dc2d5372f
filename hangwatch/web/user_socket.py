"""The user socket: a unix socket on which users of this node get status, stacks and incidents of their own jobs.

The kernel reports the calling user (SO_PEERCRED) and the owner of each job. Root gets all jobs, and other users get
only their own. So users get the stacks of their own ranks even if kernel.yama.ptrace_scope denies py-spy.
"""

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
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec
from msgspec.structs import replace

from hangwatch import config
from hangwatch.errors import UserError
from hangwatch.formats import incident_file
from hangwatch.model import LONGEST_CAUSE, Job, JobState
from hangwatch.schedule.owner_limits import MINUTE_SECONDS, FairQueue, RateLimit
from hangwatch.state import status
from hangwatch.state.board import Board, Snapshot
from hangwatch.store import Store, overflow_uid
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.web import feedback_record
from hangwatch.web.connection_limits import Rate
from hangwatch.web.incident_pages import JSON, IncidentPages
from hangwatch.web.listener import Answer, Listener, Request, text
from hangwatch.web.protocol import MOST_ROUNDS, Peer
from hangwatch.web.silence_requests import MOST_QUERY, answer_silence

MAX_CONNECTIONS = 128  # connections are cheap; [socket] per_minute limits the cost of answers
MAX_CONNECTIONS_OF_USER = 2
REQUESTS_PER_MINUTE, REQUESTS_PER_MINUTE_OF_USER = 1200, 120
DUMP_THREADS = 2
MOST_WAITING_DUMPS = 64  # running and queued dumps; a dump takes some seconds
AGAIN_SECONDS = 30  # for a user whose dump could not start
MOST_DUMP_BYTES = 16 << 20
SENDING_SECONDS = 2.0  # time to send the reason before the listener closes the connection
# Time for scans and for the wait for a thread, in addition to the deadlines of a capture
MARGIN_SECONDS = 30.0
UNKNOWN = text(
    HTTPStatus.FORBIDDEN,
    "a user namespace (a rootless container?) hides your user id: run the command outside of it",
)
NOT_YOURS = text(HTTPStatus.NOT_FOUND, "no such job of yours runs on this node")
NOT_A_MEMBER = text(HTTPStatus.FORBIDDEN, "only root and members of [store] group may give feedback on verdicts")

log = logging.getLogger(__name__)


class _Dump(NamedTuple):
    """A queued dump of a job, by the pid of one of its processes or by its key; the other field is empty.

    If `rounds` is None, a second round is taken only if the first round may mislead.
    """

    uid: int
    pid: str
    job_key: str
    rounds: int | None
    answer: Future[Answer]


class UserSocket:
    """The user socket of one daemon. `scan` searches for jobs again.

    `diagnose` diagnoses a job in a number of rounds, None if the user gave no number. It returns None if the daemon is
    stopping.
    """

    def __init__(
        self,
        settings: config.Settings,
        node: str,
        board: Board,
        store: Store,
        *,
        scan: Callable[[], None],
        diagnose: Callable[[Job, int | None], Diagnosis | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = settings.socket.path
        self._node, self._board, self._store = node, board, store
        self._scan, self._diagnose, self._clock, self._detector = scan, diagnose, clock, settings.detector
        limits = settings.socket
        self._pace = RateLimit(limits.per_minute, limits.per_minute_of_owner, clock, is_shared_out=True)
        self._requests = RateLimit(REQUESTS_PER_MINUTE, REQUESTS_PER_MINUTE_OF_USER, clock, is_shared_out=True)
        self._dumping: set[_Dump] = set()
        self._dumps = ThreadPoolExecutor(DUMP_THREADS, "own-dumps")
        self._turns: FairQueue[_Dump] = FairQueue(1, self._make_answer, self._dumps.submit)
        self._reading = ThreadPoolExecutor(1, "own-reading")
        self._listener: Listener | None = None
        self._inode, self._problem = -1, ""
        self._making_seconds = 2 * settings.capture_seconds + MARGIN_SECONDS

    def start(self) -> None:
        """Start serving. If that is impossible, log the reason: the daemon works without the socket."""
        if not self._path:
            return
        level, problem = self._serve()
        if problem and problem != self._problem:
            log.log(level, "no user socket: %s", problem)
        self._problem = problem

    def restore(self) -> None:
        """Serve again if the socket was removed (`rm -rf /run/*`), or could not be opened before."""
        with contextlib.suppress(OSError):
            if not self._path or Path(self._path).lstat().st_ino == self._inode:
                return
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
            with contextlib.suppress(OSError):
                Path(self._path).parent.mkdir(mode=0o755)
        self.start()
        if not self._problem:
            log.warning("the user socket %s was missing; it was opened again", self._path)

    def _serve(self) -> tuple[int, str]:
        """Open the socket and start to serve. Return the level and the text of a log line; "" if this succeeds."""
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
                self._inode = Path(self._path).lstat().st_ino
        except FileNotFoundError:
            return logging.INFO, f"the folder of [socket] path = {self._path!r} does not exist"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is not None:
            return logging.WARNING, f"[socket] path = {self._path!r}: {problem}"
        listener.start()
        self._listener = listener
        return logging.INFO, ""

    def stop(self) -> None:
        """Stop serving. A running dump is abandoned."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                Path(self._path).unlink()
            self._listener.stop()
        for pool in (self._dumps, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: Request) -> Answer:
        """Return the answer to /status, /dump?pid=PID&rounds=N or ?job=KEY, /silence, /verdict, /incidents[/ID/NAME].

        See `silence_requests` and `_record_feedback` for their queries.
        """
        if request.peer is None or request.peer.uid == overflow_uid():
            return UNKNOWN
        uid = request.peer.uid
        if self._requests.begin(str(uid)):
            return text(HTTPStatus.TOO_MANY_REQUESTS, f"more than {REQUESTS_PER_MINUTE_OF_USER} requests per minute")
        if request.path == "/status":
            return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(self._status(uid)))
        if request.path == "/dump":
            return await self._answer_dump(uid, request.query)
        if request.path == "/silence":
            silence_call = partial(answer_silence, self._board, self._store, uid, request.query)
            return await asyncio.get_running_loop().run_in_executor(self._reading, silence_call)
        if request.path == "/verdict":
            record = partial(_record_feedback, self._store, request.peer, request.query)
            return await asyncio.get_running_loop().run_in_executor(self._reading, record)
        if request.path == "/incidents" or request.path.startswith("/incidents/"):
            return await IncidentPages(self._store, self._reading, uid).answer(request.path)
        return text(HTTPStatus.NOT_FOUND, "not found")

    def _status(self, uid: int) -> status.Status:
        snapshot = self._board.snapshot
        if uid == 0:
            return status.build_status(snapshot, self._node, self._clock(), self._detector)
        jobs = {key: entry for key, entry in snapshot.jobs.items() if entry.job.uid == uid}
        engines = tuple(job for job in snapshot.engines if job.uid == uid)
        own = replace(snapshot, jobs=jobs, engines=engines, left_out=())
        view = status.build_status(own, self._node, self._clock(), self._detector)
        # The message of a check may name jobs of other users.
        return replace(view, checks=tuple(replace(check, message="") for check in view.checks))

    async def _answer_dump(self, uid: int, query: str) -> Answer:
        parameters = dict(parse_qsl(query[:256]))
        rounds = parameters.get("rounds")
        if rounds is not None and rounds not in map(str, range(1, MOST_ROUNDS + 1)):
            return text(HTTPStatus.BAD_REQUEST, f"rounds={rounds}: must be 1 to {MOST_ROUNDS}")
        if any(other.uid == uid and not other.answer.done() for other in tuple(self._dumping)):
            return text(HTTPStatus.TOO_MANY_REQUESTS, "your previous dump is still running")
        if limit := self._pace.begin(str(uid)):
            return text(HTTPStatus.TOO_MANY_REQUESTS, f"too many dumps per minute: the limit is [socket] {limit}")
        if len(self._dumping) >= MOST_WAITING_DUMPS:
            return _refused_for_now(f"{MOST_WAITING_DUMPS} dumps are running or queued")
        pid, job_key = parameters.get("pid", ""), parameters.get("job", "")
        wanted = _Dump(uid, pid, job_key, None if rounds is None else int(rounds), Future())
        self._dumping.add(wanted)
        wanted.answer.add_done_callback(lambda _: self._dumping.discard(wanted))
        self._turns.add(str(uid), wanted)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(wanted.answer), self._making_seconds - SENDING_SECONDS)
        except asyncio.TimeoutError:
            return _refused_for_now("dumps of other users took too long")

    def _make_answer(self, wanted: _Dump) -> None:
        try:
            if wanted.answer.set_running_or_notify_cancel():
                wanted.answer.set_result(self._dump(wanted))
        except Exception as error:
            wanted.answer.set_exception(error)

    def _dump(self, wanted: _Dump) -> Answer:
        """Dump a job. Check its owner before and after the dump, because a process can change its user."""
        self._scan()
        uid = wanted.uid
        job = _own_job(self._board.snapshot, uid, wanted.pid, wanted.job_key)
        if job is None:
            return NOT_YOURS
        diagnosis = self._diagnose(job, wanted.rounds)
        if diagnosis is None:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "the daemon is stopping")
        self._scan()
        after = _own_job(self._board.snapshot, uid, "", job.key)
        if after is None or after.processes != job.processes:
            return text(HTTPStatus.CONFLICT, "the job changed during the dump")
        content = incident_file.encode(diagnosis.incident(after, JobState.SUSPECTED))
        log.info("%s: sent its stacks to user %d on request", job.name.in_log, uid)
        if len(content) > MOST_DUMP_BYTES:
            return text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the stacks exceed {MOST_DUMP_BYTES >> 20} MiB")
        return Answer(HTTPStatus.OK, JSON, content)


def _record_feedback(store: Store, peer: Peer, query: str) -> Answer:
    """Answer /verdict?incident=NAME&right=1&cause=TEXT, or &right=0&culprit=RANK."""
    if peer.uid != 0 and not store.has_member(peer.groups):
        return NOT_A_MEMBER
    parameters = dict(parse_qsl(query[:MOST_QUERY]))
    culprit = parameters.get("culprit")
    if culprit is not None and not (culprit.isascii() and culprit.isdigit() and len(culprit) < 10):
        return text(HTTPStatus.BAD_REQUEST, "culprit: must be a rank")
    try:
        sentence = feedback_record.record(
            store,
            parameters.get("incident", ""),
            is_right=parameters.get("right") == "1",
            culprit=None if culprit is None else int(culprit),
            cause=parameters.get("cause", "")[:LONGEST_CAUSE],
            by_uid=peer.uid,
        )
    except UserError as error:
        return text(HTTPStatus.BAD_REQUEST, str(error))
    log.info("feedback of user %d on %s", peer.uid, sentence)
    return text(HTTPStatus.OK, sentence)


def _refused_for_now(why: str) -> Answer:
    return text(HTTPStatus.SERVICE_UNAVAILABLE, f"dumps are refused: {why}; try again in {AGAIN_SECONDS} s")


def _own_job(snapshot: Snapshot, uid: int, pid: str, job_key: str) -> Job | None:
    """Return the requested running job if this user owns it or is root; None if there is no such job."""
    own = (job for job in [*(entry.job for entry in snapshot.living), *snapshot.engines] if uid in (0, job.uid))
    return next((job for job in own if job_key == job.key or pid in map(str, job.pids)), None)


def _unsafe(folder: Path) -> str | None:
    """Return why another user could replace a socket in this folder; None if it is safe. Raises OSError."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "its folder is a link or not a folder"
    if status.st_uid not in (0, os.geteuid()):
        return f"its folder belongs to user {status.st_uid}"
    return "other users can write to its folder" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _remove_stale(path: str) -> None:
    """Remove a killed daemon's socket. Raises OSError if another daemon listens there, or if it is no socket."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise OSError(errno.EEXIST, "exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(1.0)
            try:
                other.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another hangwatch listens there")
