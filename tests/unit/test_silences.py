"""Silences: the users and jobs, how long they last, how they end, and how they survive a restart of the daemon."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from hangwatch import cli, config
from hangwatch.detector import job_watch
from hangwatch.formats.incident_file import StoreError
from hangwatch.metrics.collector import families
from hangwatch.model import Job, ProcessId, Rank
from hangwatch.state import status, steps
from hangwatch.state.board import Board, JobEntry
from hangwatch.state.job_silences import MOST_SILENCES_OF_USER
from hangwatch.store import Store
from hangwatch.web.listener import Answer, Request
from hangwatch.web.protocol import Peer
from hangwatch.web.user_socket import UserSocket

OWNER, OTHER, ROOT = 1004, 1005, 0


def job(number: int, uid: int | None = OWNER, name: str = "train") -> Job:
    rank = Rank(id=ProcessId(pid=number, start_ticks=1), rank=0, local_rank=0)
    return Job(job_id=name, job_key=f"key{number}", launcher="torchrun", launcher_id=None, ranks=(rank,), uid=uid)


class Node:
    """The board, the store and the user socket of a daemon, without its threads. All jobs ask for a page."""

    def __init__(self, folder: Path, *jobs: Job) -> None:
        self.board, self.store = Board(), Store(folder)
        self.store.make_writable()
        entries = {one.key: JobEntry(job=one, watch=job_watch.begin_watch(one, 5.0), page=True) for one in jobs}
        self.board.set(jobs=entries, store_problem=None)
        settings = config.Settings()
        self.socket = UserSocket(settings, "n1", self.board, self.store, scan=lambda: None, diagnose=lambda *_: None)

    def ask(self, query: str, uid: int = OWNER) -> Answer:
        return asyncio.run(self.socket.answer(Request("/silence", {}, peer=Peer(7, uid, uid), query=query)))

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
        found = families(self.board.snapshot, 10.0, config.Detector())
        return [(one.labels, one.value) for family in found for one in family.samples if one.name == name]


@pytest.mark.parametrize("wanted", ["key1", "train"])
def test_owner_silences_its_job_and_ends_that(tmp_path: Path, wanted: str) -> None:
    node = Node(tmp_path, job(1), job(2, OTHER))
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
    node = Node(tmp_path, job(1), job(2, None))
    for query in ("job=key1&seconds=3600", "job=train&seconds=3600", "job=key2&seconds=3600", "job=key1&end=1"):
        assert node.ask(query, OTHER).status == 404
    assert node.silenced() == set()
    for key in ("key1", "key2"):
        assert node.ask(f"job={key}&seconds=3600", ROOT).status == 200
    assert node.silenced() == {"key1", "key2"}
    assert node.ask("job=key1&end=1", OTHER).status == 404
    assert node.ask("job=key2&end=1", OWNER).status == 404
    assert node.silenced() == {"key1", "key2"}
    assert node.ask("job=key1&end=1", OWNER).status == 200


@pytest.mark.parametrize("seconds", ["", "x", "nan", "inf", "-60", "59", "604801", "1e400"])
def test_silence_of_an_invalid_length_is_refused(tmp_path: Path, seconds: str) -> None:
    node = Node(tmp_path, job(1))
    assert node.ask(f"job=key1&seconds={seconds}").status == 400
    assert node.silenced() == set()


def test_name_of_several_jobs_is_refused_with_their_keys(tmp_path: Path) -> None:
    node = Node(tmp_path, job(1), job(2), job(3, OTHER))
    refused = node.ask("job=train&seconds=3600")
    assert refused.status == 409 and b"key1, key2" in refused.body and b"key3" not in refused.body
    assert node.silenced() == set()


def test_silence_ends_by_itself(tmp_path: Path) -> None:
    node = Node(tmp_path, job(1), job(2))
    node.ask("job=key1&seconds=60")
    node.ask("job=key2&seconds=7200")
    assert node.board.change(steps.drop_ended_silences, time.time()) == ()
    (ended,) = node.board.change(steps.drop_ended_silences, time.time() + 61)
    assert ended.job_key == "key1"
    assert node.silenced() == {"key2"}


def test_user_has_a_limited_number_of_silences_and_may_end_those_of_ended_jobs(tmp_path: Path) -> None:
    node = Node(tmp_path, *(job(number, name=f"job{number}") for number in range(MOST_SILENCES_OF_USER + 1)))
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
    node = Node(tmp_path, job(1), job(2))
    node.ask("job=key1&seconds=3600&reason=old")
    node.ask("job=key2&seconds=3600")
    node.ask("job=key2&end=1")
    later = Node(tmp_path, job(1), job(2))
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
    node = Node(tmp_path, job(1))
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
        (
            ["j", "--for", "1h30m"],
            "absent.sock: No such file or directory\n  is it running? `systemctl status hangwatch`",
        ),
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
