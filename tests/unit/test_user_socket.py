"""The user socket: its callers, their rate limits, changes and silences of jobs, the path of the socket."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import cli, config
from hangwatch.detector import job_watch
from hangwatch.formats.incident_file import StoreError
from hangwatch.model import Job, ProcessId, Rank
from hangwatch.state import status, steps
from hangwatch.state.board import Board, JobEntry
from hangwatch.state.job_silences import MOST_SILENCES_OF_USER
from hangwatch.store import Store
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.web import listener, user_socket
from hangwatch.web.incident_pages import JSON
from hangwatch.web.listener import Answer, Listener, Request, text
from hangwatch.web.protocol import Peer, peer_of
from hangwatch.web.user_socket import MAX_CONNECTIONS_OF_USER, UserSocket
from tests import samples
from tests.conftest import stopping, wait_for
from tests.other_users import as_thread_of, needs_root

UID = 1004
Look = Callable[[Job, int | None], Diagnosis | None]


def job(uid: int | None = UID, pid: int = 100, job_id: str = "42") -> Job:
    rank = Rank(id=ProcessId(pid=pid, start_ticks=1), rank=0, local_rank=0)
    return Job(job_id=job_id, job_key=f"key{pid}", launcher="torchrun", launcher_id=None, ranks=(rank,), uid=uid)


def look_at(job: Job, _rounds: int | None) -> Diagnosis:
    sample = samples.mismatch()
    taken = replace(sample.captures[0], job_key=job.key)
    return Diagnosis(
        capture=taken,
        grouping=sample.grouping,
        verdict=sample.verdict,
        judged_unix_seconds=samples.OPENED,
        uid=job.uid,
    )


def look_after(go_on: threading.Event, look: Look = look_at) -> Look:
    """Return a capture that waits for `go_on`."""

    def wait_and_look(captured_job: Job, rounds: int | None) -> Diagnosis | None:
        go_on.wait(60)
        return look(captured_job, rounds)

    return wait_and_look


class Desk:
    """A `UserSocket` that is called directly, without a socket. Its clock does not advance."""

    def __init__(
        self,
        folder: Path,
        *jobs: Job,
        scan: Callable[[], None] = lambda: None,
        look: Look = look_at,
        **settings: object,
    ) -> None:
        self.board, self.store = Board(), Store(folder, shared=True)
        self.put(*jobs)
        self.now = 100.0
        self.own_jobs = UserSocket(
            config.Settings(socket=config.Socket(**settings)),  # type: ignore[arg-type]
            "n1",
            self.board,
            self.store,
            scan=scan,
            diagnose=look,
            clock=lambda: self.now,
        )

    def put(self, *jobs: Job) -> None:
        self.board.set(jobs={one.key: JobEntry(job=one, watch=job_watch.begin_watch(one, 5.0, 0.0)) for one in jobs})

    def request(self, what: str, uid: int | None = UID) -> Request:
        path, _, query = what.partition("?")
        return Request(path, {}, peer=None if uid is None else Peer(7, uid, uid), query=query)

    def answer(self, what: str, uid: int | None = UID) -> Answer:
        return asyncio.run(self.own_jobs.answer(self.request(what, uid)))


def test_unmapped_user_gets_a_clear_error(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(65534))
    for uid in (65534, None):
        refused = desk.answer("/dump?pid=100", uid)
        assert refused.status == 403 and b"user namespace" in refused.body


def test_job_without_a_single_user_is_visible_to_root_only(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(None))
    assert desk.answer("/dump?pid=100").status == 404
    assert desk.answer("/dump?pid=100", 0).status == 200


def test_engine_is_visible_to_its_user_only(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.board.set(engines=(replace(job(), launcher="engine", program="vLLM"),))
    seen = {uid: json.loads(desk.answer("/status", uid).body)["engines"] for uid in (UID, UID + 1)}
    assert ([engine["program"] for engine in seen[UID]], seen[UID + 1]) == (["vLLM"], [])
    assert [desk.answer("/dump?pid=100", uid).status for uid in (UID, UID + 1)] == [200, 404]


NO_JOB = ("", "pid=", "job=", "pid=x", "pid=-1", "pid=1e2", "pid=%00", "job=42", f"pid={'1' * 300}")
BAD_ROUNDS = [f"pid=100&rounds={rounds}" for rounds in ("0", "4", "x", "-1", "1000000")]


@pytest.mark.parametrize("query", [*NO_JOB, *BAD_ROUNDS])
def test_what_names_no_job_finds_none_and_rounds_are_few(tmp_path: Path, query: str) -> None:
    assert Desk(tmp_path, job()).answer(f"/dump?{query}").status == (404 if query in NO_JOB else 400)


def test_request_without_rounds_uses_the_default_of_the_capture(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def look(captured_job: Job, rounds: int | None) -> Diagnosis:
        asked.append(rounds)
        return look_at(captured_job, rounds)

    desk = Desk(tmp_path, job(), look=look)
    for query in ("", "&rounds=1", "&rounds=3"):
        assert desk.answer(f"/dump?pid=100{query}").status == 200
    assert asked == [None, 1, 3]


def test_each_of_many_dumps_in_a_row_is_answered(tmp_path: Path) -> None:
    """A request that comes while the thread of the last answer still ends must not be forgotten."""
    desk = Desk(tmp_path, job(), per_minute=1000, per_minute_of_owner=1000)
    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3000):
            desk.now += 60.0 * (number % 50 == 0)
            assert desk.answer("/dump?pid=100").status == 200
    finally:
        sys.setswitchinterval(interval_seconds)


@pytest.mark.parametrize(
    "after", [(), (job(None),), (job(4711),), (replace(job(), ranks=(*job().ranks, *job(pid=101).ranks)),)]
)
def test_job_that_changed_its_owner_during_a_dump_is_refused(tmp_path: Path, after: tuple[Job, ...]) -> None:
    desk: Desk
    scans: list[int] = []

    def scan() -> None:
        scans.append(1)
        if len(scans) == 2:
            desk.put(*after)

    desk = Desk(tmp_path, job(), scan=scan)
    refused = desk.answer("/dump?pid=100")
    assert (refused.status, refused.content_type == JSON) == (409, False)


def test_one_dump_of_a_user_at_a_time_and_so_many_in_a_minute(tmp_path: Path) -> None:
    go_on = threading.Event()

    look = look_after(go_on, lambda *_: None)
    desk = Desk(tmp_path, job(), job(1005, 200), look=look, per_minute=4, per_minute_of_owner=3)

    async def at_once() -> list[int]:
        answers = [asyncio.create_task(desk.own_jobs.answer(desk.request("/dump?pid=100"))) for _ in range(2)]
        answers.append(asyncio.create_task(desk.own_jobs.answer(desk.request("/dump?pid=200", 1005))))
        second = await answers[1]
        go_on.set()
        return [(await answers[0]).status, second.status, (await answers[2]).status]

    assert asyncio.run(at_once()) == [503, 429, 503], "the daemon is stopping, and the user has a dump under way"
    assert [desk.answer("/dump?pid=100").status for _ in range(3)] == [503, 503, 429]
    assert desk.answer("/dump?pid=200", 1005).status == 503, "the user has used half of the minute's four dumps"
    refused = desk.answer("/dump?pid=200", 1005)
    assert refused.status == 429 and b"the limit is [socket] per_minute" in refused.body
    desk.now += 60.0
    assert desk.answer("/dump?pid=100").status == 503


def test_dump_of_a_new_user_precedes_one_of_a_served_user(tmp_path: Path) -> None:
    begun, go_on = {uid: threading.Event() for uid in (1, 2)}, {uid: threading.Event() for uid in (1, 2)}
    looked: list[int | None] = []

    def look(captured_job: Job, rounds: int | None) -> Diagnosis | None:
        looked.append(captured_job.uid)
        if captured_job.uid in begun:
            begun[captured_job.uid].set()
            go_on[captured_job.uid].wait(60)
        return look_at(captured_job, rounds)

    desk = Desk(tmp_path, *(job(uid, 100 + uid) for uid in range(1, 5)), look=look)

    async def dumps() -> list[int]:
        async def dump(uid: int) -> Answer:
            return await desk.own_jobs.answer(desk.request(f"/dump?pid={100 + uid}", uid))

        answers = [await dump(4)]
        under_way = [asyncio.create_task(dump(uid)) for uid in begun]
        for event in begun.values():
            assert await asyncio.to_thread(event.wait, 60)
        waiting = [asyncio.create_task(dump(uid)) for uid in (4, 3)]
        await asyncio.sleep(0)  # both have sent their request now
        go_on[1].set()
        answers += await asyncio.gather(*waiting)
        go_on[2].set()
        return [answer.status for answer in (*answers, *await asyncio.gather(*under_way))]

    assert asyncio.run(dumps()) == [200] * 5
    assert looked[-2:] == [3, 4]


def test_dump_without_a_turn_is_refused_and_says_when_to_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    monkeypatch.setattr(user_socket, "MARGIN_SECONDS", user_socket.SENDING_SECONDS + 0.5)
    monkeypatch.setattr(config.Settings, "capture_seconds", property(lambda _: 0.0))
    desk = Desk(tmp_path, *(job(uid, 100 + uid) for uid in range(1, 4)), look=look_after(go_on))

    async def dumps() -> list[Answer]:
        asked = [desk.own_jobs.answer(desk.request(f"/dump?pid={100 + uid}", uid)) for uid in range(1, 4)]
        return await asyncio.gather(*asked)

    answers = asyncio.run(dumps())
    go_on.set()
    assert [answer.status for answer in answers] == [503] * 3
    assert answers[2].body == b"dumps are refused: dumps of other users took too long; try again in 30 s\n"


def test_questions_are_bounded_for_each_user(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    answers = [desk.answer("/status").status for _ in range(130)]
    assert answers == [200] * 120 + [429] * 10
    assert desk.answer("/status", 1005).status == 200


def test_many_users_at_the_rate_limit_leave_another_user_its_part(tmp_path: Path) -> None:
    crowd = range(2000, 2012)
    desk = Desk(tmp_path, job(), *(job(uid, uid) for uid in crowd))
    answers = [desk.answer(f"/dump?pid={uid}", uid).status for _ in range(6) for uid in crowd]
    assert answers.count(200) < 48, "[socket] per_minute is 30, and each has a part of it"
    assert [desk.answer("/dump?pid=100").status for _ in range(2)] == [200] * 2
    for _ in range(121):
        for uid in crowd:
            desk.answer("/status", uid)
    assert [desk.answer("/status").status for _ in range(60)] == [200] * 60


def test_user_sees_only_incidents_of_its_own_jobs(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    kept = Store(tmp_path, shared=True)
    kept.make_writable()
    names = {}
    for uid in (UID, 1005):
        found = samples.change_parts(samples.mismatch(), incident_id=f"i-{uid}", uid=uid, job_id=f"of-{uid}")
        names[uid] = kept.save(found, {}).name
    assert names[UID].encode() in desk.answer("/incidents").body
    assert names[1005].encode() not in desk.answer("/incidents").body
    assert desk.answer(f"/incidents/{names[UID]}/incident.json").status == 200
    for name in (names[1005], "..", f"../../{names[1005]}", "%2e%2e"):
        assert desk.answer(f"/incidents/{name}/incident.json").status == 404
    assert names[1005].encode() in desk.answer("/incidents", 0).body


@contextlib.contextmanager
def served(folder: Path, look: Look = look_at) -> Iterator[tuple[Desk, Path]]:
    path = folder / "socket"
    desk = Desk(folder, job(os.geteuid()), look=look, path=str(path))
    desk.own_jobs.start()
    with stopping(desk.own_jobs):
        yield desk, path


def connected(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(60)
    one.connect(str(path))
    return one


def connected_as(uid: int, path: Path) -> socket.socket:
    """Return a connection by user `uid`, which this thread is until SO_PEERCRED has it."""
    with as_thread_of(uid):
        return connected(path)


def test_user_socket_is_open_to_all_and_removed_with_the_daemon(tmp_path: Path) -> None:
    with served(tmp_path) as (_, path):
        assert path.stat().st_mode & 0o777 == 0o666
        with connected(path) as one:
            peer = peer_of(one)
            assert peer is not None and (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
            assert asked_by(one, "/dump?pid=100").startswith(b"HTTP/1.1 200 OK")
    assert not path.exists()


def test_silent_connection_is_replaced_by_one_of_the_same_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 600.0)
    with served(tmp_path) as (_, path), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(path)) for _ in range(MAX_CONNECTIONS_OF_USER)]
        for _ in range(3):
            one = stack.enter_context(connected(path))
            assert asked_by(one, "/status").startswith(b"HTTP/1.1 200 OK")
        assert silent[0].recv(1) == b"", "the user's oldest connection was closed"


def asked_by(connection: socket.socket, what: str) -> bytes:
    connection.sendall(f"GET {what} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    return answer


@needs_root
def test_newcomer_between_idle_connections_of_many_users_is_answered(folder_for_all: Path) -> None:
    # All idle clients connect before the server accepts the first connection, as in a flood.
    async def answer(_: Request) -> Answer:
        return text(HTTPStatus.OK, "here")

    one = Listener("one", answer, max_connections=16, max_of_user=MAX_CONNECTIONS_OF_USER)
    path = folder_for_all / "socket"
    one.bind_unix(str(path))
    with contextlib.ExitStack() as stack:
        newcomer = stack.enter_context(connected_as(4000, path))
        newcomer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(2):
            for uid in range(2000, 2012):
                stack.enter_context(connected_as(uid, path))
        stack.callback(one.stop)
        one.start()
        assert newcomer.recv(1 << 10).startswith(b"HTTP/1.1 200 OK")


@needs_root
def test_user_with_most_connections_loses_one_to_newcomer(
    folder_for_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 600.0)
    monkeypatch.setattr(user_socket, "MAX_CONNECTIONS", 16)
    with served(folder_for_all) as (_, path), contextlib.ExitStack() as stack:
        singles = [stack.enter_context(connected_as(uid, path)) for uid in range(2000, 2008)]
        pairs = [stack.enter_context(connected_as(uid, path)) for uid in range(3000, 3004) for _ in range(2)]
        newcomer = stack.enter_context(connected_as(4000, path))
        assert asked_by(newcomer, "/status").startswith(b"HTTP/1.1 200 OK")
        assert pairs[0].recv(1) == b"", "the oldest connection of the users with two"
        for one in singles:
            assert asked_by(one, "/status").startswith(b"HTTP/1.1 200 OK")


@needs_root
def test_newcomer_beside_dumps_of_many_users_is_answered(folder_for_all: Path) -> None:
    go_on = threading.Event()

    users = range(2000, 2018)
    with served(folder_for_all, look=look_after(go_on)) as (desk, path), contextlib.ExitStack() as stack:
        desk.put(*(job(uid, uid) for uid in (*users, 4000)))
        dumps = [stack.enter_context(connected_as(uid, path)) for uid in users]
        for uid, one in zip(users, dumps, strict=True):
            one.sendall(f"GET /dump?pid={uid} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with connected_as(4000, path) as newcomer:
            assert asked_by(newcomer, "/status").startswith(b"HTTP/1.1 200 OK")
        go_on.set()
        with connected_as(4000, path) as newcomer:
            assert asked_by(newcomer, "/dump?pid=4000").startswith(b"HTTP/1.1 200 OK")
        for one in dumps:
            assert one.recv(1 << 10).startswith(b"HTTP/1.1 200 OK")


@needs_root
def test_user_over_its_limit_is_refused_and_logged_once(folder_for_all: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(folder_for_all) as (_, path):
        for _ in range(200):
            connected_as(2000, path).close()
        with connected_as(2000, path) as one:
            told = one.recv(1 << 10)
        assert told.startswith(b"HTTP/1.1 429") and b"too many connections within a minute" in told
        with connected_as(2001, path) as other:
            assert asked_by(other, "/status").startswith(b"HTTP/1.1 200 OK")
    (said,) = [message for message in caplog.messages if "refused" in message]
    why = "too many connections within a minute; try again in 10 s"
    assert said == f"own-jobs: connections of user 2000 are refused: {why}"


def test_third_connection_of_a_user_ends_no_running_dump(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def look(captured_job: Job, rounds: int | None) -> Diagnosis | None:
        begun.set()
        go_on.wait(60)
        return look_at(captured_job, rounds)

    with served(tmp_path, look=look) as (_, path), connected(path) as dump, connected(path) as second:
        dump.sendall(b"GET /dump?pid=100 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert begun.wait(60)
        for _ in range(3):
            with connected(path) as third:
                assert asked_by(third, "/status").startswith(b"HTTP/1.1 200 OK")
        second.close()
        go_on.set()
        assert dump.recv(1 << 10).startswith(b"HTTP/1.1 200 OK")


def test_socket_of_a_killed_daemon_alone_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "socket"))
    with served(tmp_path) as (_, path):
        with connected(path):
            pass
        second = Desk(tmp_path, path=str(path))
        with caplog.at_level(logging.WARNING):
            second.own_jobs.start()
        second.own_jobs.stop()
        assert "another hangwatch listens there" in caplog.text
        with connected(path):
            pass


@pytest.mark.parametrize("removed", ["socket", "folder"])
def test_removed_user_socket_is_opened_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    with caplog.at_level(logging.INFO), served(folder) as (desk, path):
        desk.own_jobs.restore()
        assert caplog.text == ""
        path.unlink()
        if removed == "folder":
            shutil.rmtree(folder)
        desk.own_jobs.restore()
        with connected(path) as one:
            assert asked_by(one, "/status").startswith(b"HTTP/1.1 200 OK")
        assert "was missing; it was opened again" in caplog.text
    assert not path.exists()


def test_user_socket_that_cannot_be_opened_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), served(tmp_path / "none") as (desk, path):
        for _ in range(3):
            desk.own_jobs.restore()
        assert caplog.text.count("no user socket") == 1
        path.parent.mkdir()
        desk.own_jobs.restore()
        assert path.is_socket()


def test_a_folder_where_others_write_or_none_gets_no_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o1777)
    with caplog.at_level(logging.INFO), served(tmp_path) as (_, path):
        assert not path.exists() and "other users can write to its folder" in caplog.text
    with caplog.at_level(logging.INFO), served(tmp_path / "none"):
        assert "does not exist" in caplog.text
    tmp_path.chmod(0o700)
    (tmp_path / "socket").write_text("a file")
    with caplog.at_level(logging.INFO), served(tmp_path):
        assert "exists and is not a socket" in caplog.text
    wait_for(lambda: (tmp_path / "socket").read_text() == "a file", "the file to be left alone", 1)


OTHER, ROOT = 1005, 0


class Node(Desk):
    """A desk for silences. All jobs ask for a page."""

    def __init__(self, folder: Path, *jobs: Job) -> None:
        super().__init__(folder, *jobs)
        self.store.make_writable()
        entries = {key: replace(entry, page=True) for key, entry in self.board.snapshot.jobs.items()}
        self.board.set(jobs=entries, store_problem=None)

    def ask(self, query: str, uid: int = UID) -> Answer:
        return self.answer(f"/silence?{query}", uid)

    def silenced(self) -> set[str]:
        """Return the keys of the jobs that do not page. Status and metrics must agree on them."""
        shown = status.build_status(self.board.snapshot, "n1", 10.0).jobs
        silenced = {one.job_key for one in shown if one.silenced_until_unix_seconds is not None}
        assert silenced == {one.job_key for one in shown if not one.page}
        pages = self._series("hangwatch_job_page")
        assert silenced == {labels["job_key"] for labels, value in pages if value == 0}
        ends = self._series("hangwatch_job_silence_end_timestamp_seconds")
        assert silenced == {labels["job_key"] for labels, _ in ends}
        return silenced

    def _series(self, name: str) -> list[tuple[dict[str, str], float]]:
        found = samples.metric_families(self.board.snapshot, 10.0)
        return [(one.labels, one.value) for family in found for one in family.samples if one.name == name]


@pytest.mark.parametrize("wanted", ["key1", "42"])
def test_owner_silences_its_job_and_ends_that(tmp_path: Path, wanted: str) -> None:
    node = Node(tmp_path, job(UID, 1), job(OTHER, 2))
    assert node.silenced() == set()
    answered = json.loads(node.ask(f"job={wanted}&seconds=7200&reason=I+debug+it%1b%0a").body)
    assert 7190 < answered["silence"]["until_unix_seconds"] - time.time() <= 7200
    assert answered["problem"] is None
    assert node.silenced() == {"key1"}
    (shown,) = [one for one in status.build_status(node.board.snapshot, "n1", 10.0).jobs if one.silence_reason]
    assert shown.silence_reason.startswith("I debug it") and shown.silence_reason.isprintable()
    assert node.ask(f"job={wanted}&end=1").status == 200
    assert node.silenced() == set()
    assert node.ask(f"job={wanted}&end=1").status == 404


def test_silence_of_a_foreign_job_is_refused_and_root_may(tmp_path: Path) -> None:
    node = Node(tmp_path, job(UID, 1), job(None, 2))
    for query in ("job=key1&seconds=3600", "job=42&seconds=3600", "job=key2&seconds=3600", "job=key1&end=1"):
        assert node.ask(query, OTHER).status == 404
    assert node.silenced() == set()
    for key in ("key1", "key2"):
        assert node.ask(f"job={key}&seconds=3600", ROOT).status == 200
    assert node.silenced() == {"key1", "key2"}
    assert node.ask("job=key1&end=1", OTHER).status == 404
    assert node.ask("job=key2&end=1", UID).status == 404
    assert node.silenced() == {"key1", "key2"}
    assert node.ask("job=key1&end=1", UID).status == 200


@pytest.mark.parametrize("seconds", ["", "x", "nan", "inf", "-60", "59", "604801", "1e400"])
def test_silence_of_an_invalid_length_is_refused(tmp_path: Path, seconds: str) -> None:
    node = Node(tmp_path, job(UID, 1))
    assert node.ask(f"job=key1&seconds={seconds}").status == 400
    assert node.silenced() == set()


def test_name_of_several_jobs_is_refused_with_their_keys(tmp_path: Path) -> None:
    node = Node(tmp_path, job(UID, 1), job(UID, 2), job(OTHER, 3))
    refused = node.ask("job=42&seconds=3600")
    assert refused.status == 409 and b"key1, key2" in refused.body and b"key3" not in refused.body
    assert node.silenced() == set()


def test_silence_ends_by_itself(tmp_path: Path) -> None:
    node = Node(tmp_path, job(UID, 1), job(UID, 2))
    node.ask("job=key1&seconds=60")
    node.ask("job=key2&seconds=7200")
    assert node.board.change(steps.drop_ended_silences, time.time()) == ()
    (ended,) = node.board.change(steps.drop_ended_silences, time.time() + 61)
    assert ended.job_key == "key1"
    assert node.silenced() == {"key2"}


def test_user_has_a_limited_number_of_silences_and_may_end_those_of_ended_jobs(tmp_path: Path) -> None:
    node = Node(tmp_path, *(job(UID, number, f"job{number}") for number in range(MOST_SILENCES_OF_USER + 1)))
    for number in range(MOST_SILENCES_OF_USER):
        assert node.ask(f"job=key{number}&seconds=3600").status == 200
    last = f"job=key{MOST_SILENCES_OF_USER}&seconds=3600"
    assert node.ask(last).status == 409
    assert node.ask("job=key0&seconds=60").status == 200, "a new end for a job that is silenced already"
    node.board.put(lambda snapshot: snapshot.without_job("key0"))
    assert node.ask("job=job0&end=1", OTHER).status == 404
    assert node.ask("job=job0&end=1").status == 200
    assert node.ask(last).status == 200


def test_silences_survive_a_restart_unless_a_newer_one_exists(tmp_path: Path) -> None:
    node = Node(tmp_path, job(UID, 1), job(UID, 2))
    node.ask("job=key1&seconds=3600&reason=old")
    node.ask("job=key2&seconds=3600")
    node.ask("job=key2&end=1")
    later = Node(tmp_path, job(UID, 1), job(UID, 2))
    later.board.put(steps.restore_silences, later.store.silences.read())
    assert later.silenced() == {"key1"}
    later.ask("job=key1&seconds=60&reason=new")
    later.board.put(steps.restore_silences, node.board.snapshot.silences.values())
    assert later.board.snapshot.silences["key1"].reason == "new"


@pytest.mark.parametrize("content", [b"", b"{", b'[{"job_id": 1}]', b"[" * 100_000])
def test_damaged_file_of_silences_is_a_store_error(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    assert store.silences.read() == ()
    (tmp_path / "silences.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"silences\.json"):
        store.silences.read()


def test_silence_without_a_store_holds_and_says_that_a_restart_ends_it(tmp_path: Path) -> None:
    node = Node(tmp_path, job(UID, 1))
    node.board.set(store_problem="disk full")
    assert json.loads(node.ask("job=key1&seconds=3600").body)["problem"] == "disk full"
    assert node.silenced() == {"key1"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["j"], "give either --for DURATION or --end"),
        (["j", "--for", "2h", "--end"], "give either --for DURATION or --end"),
        (["j", "--for", "2"], "--for 2: must be 1m to 7d"),
        (["j", "--for", "2 h"], "--for 2 h: must be 1m to 7d"),
        (["j", "--for", "59s"], "must be 1m to 7d"),
        (["j", "--for", "8d"], "must be 1m to 7d"),
        (["j", "--for", "-2h"], "must be 1m to 7d"),
        (["j", "--for", "2h", "--reason", "x" * 161], "--reason has 161 characters: must be at most 160"),
        (["--for", "2h"], "Missing argument 'JOB'"),
        (["j", "--for", "1h30m"], "absent.sock: No such file or directory\n  is it running? `systemctl"),
    ],
)
def test_bad_input_is_an_error_with_exit_code_2(
    tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hangwatch.toml"
    file.write_text(f'[socket]\npath = "{tmp_path}/absent.sock"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["silence", *arguments, "--config", str(file)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
