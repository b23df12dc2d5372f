"""The store at its limits: kept and removed incidents, trusted files, and the errors for users."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import __version__, config, store
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import StoreError, Summary
from hangwatch.limits import MOST_RANKS
from hangwatch.model import INCIDENT_VERSION, CheckFirst, Group, Grouping, Incident, JobState, Member, RankDump, RankId
from hangwatch.store import Store
from hangwatch.store import incident_folders as folders
from tests import samples
from tests.samples import change_parts
from tests.unit.test_store import DAY, at, open_writable


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the error that `call` raises, and the advice on the lines below it."""
    with pytest.raises(StoreError) as error:
        call()
    first, newline, rest = str(error.value).partition("\n")
    assert newline and all(line.startswith("  ") for line in rest.splitlines())
    return first, rest


def size(path: Path) -> int:
    return path.stat().st_size


def order(folder: Path) -> bytes:
    return (folder / "order").read_bytes()


def names(kept: Store) -> list[str]:
    return [summary.folder for summary in kept.summaries()]


# --- removal ---------------------------------------------------------------------------------------------------------


def test_incident_numbers_are_not_reused_after_removal(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_incidents=1)
    assert order(kept.save(at(1e9), {})) == b"1"
    assert order(kept.save(at(2e9), {})) == b"2"
    assert len(kept.prune()) == 1
    assert order(kept.save(at(0.0), {})) == b"3"


@pytest.mark.parametrize("written", [None, "", "soon", "-1"])
def test_what_was_never_counted_is_older_than_all_that_was(tmp_path: Path, written: str | None) -> None:
    kept = open_writable(tmp_path, max_incidents=1)
    late, first = kept.save(at(2e9), {}), kept.save(at(1e9), {})
    (first / "order").write_text("1")
    (late / "order").unlink() if written is None else (late / "order").write_text(written)
    assert kept.prune() == (late.name,)


def test_at_their_very_limits_all_stay(tmp_path: Path) -> None:
    for days in (0, 5, 10):
        open_writable(tmp_path).save(at(1e9 + days * DAY), {"report.txt": "x" * 1000})
    size = sum(summary.size_bytes for summary in Store(tmp_path).summaries())
    settings = config.Store(max_incidents=3, max_bytes=size, max_age_days=10)
    assert Store(tmp_path, settings).prune(by_age=9) == ()
    assert len(Store(tmp_path, replace(settings, max_bytes=size - 1)).prune()) == 1


def test_open_incidents_take_room_and_stay(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_bytes=150_000)
    big, second, third = (
        kept.save(at(1e9 + number), {"report.txt": "x" * size}) for number, size in enumerate((120_000, 60_000, 60_000))
    )
    assert kept.prune(frozenset({big.name})) == (third.name, second.name)
    assert names(kept) == [big.name]


def test_a_date_that_does_not_exist_is_older_than_all(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_age_days=1)
    folder = kept.save(at(1e9), {})
    strange = folder.rename(folder.with_name("20269999T999999Z-x"))
    newer = kept.save(at(2e9), {})
    assert kept.prune(by_age=9) == (strange.name,)
    assert names(kept) == [newer.name]


# --- listing ---------------------------------------------------------------------------------------------------------


def test_a_line_of_the_list_says_what_the_incident_says(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    incident = at(1e9, state=JobState.RECOVERED, closed_unix_seconds=1e9 + 60, node="gpu-b07")
    folder = kept.save(incident, {"report.txt": "abc", "dumps/r1/rank0.bin": b"\xff"})
    (listed,) = kept.summaries()
    assert listed == Summary(
        folder=folder.name,
        size_bytes=len(incident_file.encode(incident)) + len("1") + len("abc") + 1 + size(folder / "owner"),
        incident_id=incident.incident_id,
        node="gpu-b07",
        job_id="42",
        job_name="llama-70b",
        job_key=incident.job.job_key,
        opened_unix_seconds=1e9,
        closed_unix_seconds=1e9 + 60,
        state=JobState.RECOVERED,
        verdict=incident.verdict.kind,
        message=incident.verdict.message,
        fingerprint=incident.verdict.fingerprint,
        uid=incident.job.uid,
        has_hung=True,
    )
    assert (incident.job.job_key, incident.verdict.message) != ("", "")
    assert (folder / "dumps/r1/rank0.bin").read_bytes() == b"\xff"


def test_of_a_broken_one_the_list_says_what_is_wrong_and_no_more(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folder = kept.save(at(1e9), {})
    (folder / "incident.json").write_text("")
    (listed,) = kept.summaries()
    small = len("1") + size(folder / "owner")
    assert listed == Summary(folder=folder.name, size_bytes=small, opened_unix_seconds=0.0, problem=listed.problem)
    assert listed.problem == f"{folder}/incident.json: is empty"
    (folder / "dumps").mkdir()
    (listed,) = kept.summaries()
    assert listed.problem == (
        f"{folder}/incident.json: is empty\n  the stacks are still there: hangwatch explain {folder}/dumps"
    )


def test_a_broken_one_is_written_again(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folder = kept.save(at(1e9), {})
    (folder / "incident.json").write_text("{")
    assert kept.save(at(1e9), {}) == folder
    assert incident_file.load(folder) == at(1e9)


def test_ten_nodes_that_write_into_one_store_are_one_too_many(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folders = [kept.save(at(1e9, node=f"node-{number}"), {}) for number in range(9)]
    first = folders[0]
    assert [folder.name for folder in folders] == [first.name, *(f"{first.name}-{number}" for number in range(2, 10))]
    what, remedy = error_of(lambda: kept.save(at(1e9, node="node-9"), {}))
    assert what == f"{first}: 9 other incidents have this name"
    assert "give each node its own [store] directory" in remedy
    assert kept.save(at(1e9, node="node-8"), {}) == folders[8]


def test_exact_incident_name_wins_over_a_longer_match(tmp_path: Path) -> None:
    """Find the incident with exactly this name, although the name of another incident contains it."""
    kept = open_writable(tmp_path)
    first, second = (kept.save(at(1e9, node=node), {}) for node in ("a", "b"))
    assert first.name in second.name
    assert (kept.find(first.name), kept.find(second.name)) == (first, second)
    what, remedy = error_of(lambda: kept.find("2001"))
    assert what == f"'2001' matches 2 incidents in {kept.incidents}"
    assert "`hangwatch incidents` lists all" in remedy


def test_the_newest_of_a_job_by_its_id_key_or_name(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    assert (kept.newest(), kept.newest("42")) == (None, None)
    mine = [kept.save(at(1e9 + hour * 3600), {}) for hour in range(2)]
    other = samples.job(range(2), 2, job_id="43")
    newest = kept.save(at(1e9 + 9e6, job=replace(other, job_key="b" * 16, job_name="")), {})
    assert kept.newest() == newest
    assert {kept.newest(name) for name in ("42", "6d1c0f5a9e27b384", "llama-70b")} == {mine[1]}
    what, remedy = error_of(lambda: kept.newest("nonsense"))
    assert "--job nonsense: no incident of such a job" in what
    assert "43 (key bbbb" in remedy
    assert "42 (key 6d1c" in remedy
    kept.save(at(1e9 + 9e7, job=replace(other, job_key="c" * 16, job_name="llama-70b")), {})
    what, remedy = error_of(lambda: kept.newest("llama-70b"))
    assert "2 jobs have this name" in what, "what a user calls a job may be chosen to be that of another"


def test_one_file_of_one_incident_and_nothing_else_is_read(tmp_path: Path) -> None:
    kept = open_writable(tmp_path / "state")
    folder = kept.save(at(1e9), {"report.html": "<p>", "dumps/r1/rank0.txt": "Process 1: x"})
    (tmp_path / "state/incidents/secret").write_text("x")
    (tmp_path / "state/incidents/notes").mkdir()
    (tmp_path / "state/incidents/notes/report.html").write_text("x")
    for name, content in (("report.html", b"<p>"), ("dumps/r1/rank0.txt", b"Process 1: x")):
        file = kept.open_file(folder.name, name)
        with file:
            assert file.read() == content
    for incident, name in (
        (folder.name, "nothing"),
        (folder.name, "../secret"),
        (folder.name, ""),
        (folder.name, "dumps"),
        ("notes", "report.html"),
        (f"{folder.name}/../notes", "report.html"),
        (f"{folder.name}-7", "report.html"),
    ):
        assert kept.open_file(incident, name) is None, (incident, name)


# --- trusted incidents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [0, INCIDENT_VERSION - 1, INCIDENT_VERSION + 1])
def test_an_incident_of_another_form_is_refused_and_kept(tmp_path: Path, form: int) -> None:
    folder = open_writable(tmp_path).save(at(1e9), {})
    path = folder / "incident.json"
    written = json.dumps({**json.loads(path.read_text()), "schema_version": form, "hangwatch_version": "0.9"})
    path.write_text(written)
    what, remedy = error_of(lambda: incident_file.load(folder))
    assert what == (
        f"{path}: was written by hangwatch 0.9 in form {form}; "
        f"this hangwatch ({__version__}) reads form {INCIDENT_VERSION}"
    )
    assert "read it with that version" in remedy
    assert path.read_text() == written
    assert [summary.folder for summary in store.Store(tmp_path).summaries()] == [folder.name]


def _of_rank(number: int) -> RankId:
    return RankId(node="n1", rank=number)


def _captured(incident: Incident, **changes: object) -> Incident:
    (taken,) = samples.mismatch().captures
    return replace(incident, captures=(replace(taken, **{"ranks": (), **changes}),))


PLACES: dict[str, Callable[[Incident, int], Incident]] = {
    "world size of the job": lambda i, n: change_parts(i, world_size=n),
    "local world size": lambda i, n: change_parts(i, local_world_size=n),
    "rank": lambda i, n: change_parts(i, ranks=(replace(i.job.ranks[0], rank=n),)),
    "local rank": lambda i, n: change_parts(i, ranks=(replace(i.job.ranks[0], local_rank=n),)),
    "world size of the grouping": lambda i, n: replace(i, grouping=replace(i.grouping, world_size=n)),
    "member": lambda i, n: replace(i, grouping=Grouping((Group("k", "unknown", (Member(id=_of_rank(n)),)),))),
    "world size of a capture": lambda i, n: _captured(i, world_size=n),
    "captured rank": lambda i, n: _captured(i, ranks=(RankDump(id=_of_rank(n)),)),
    "named": lambda i, n: change_parts(i, named=(_of_rank(n),)),
    "local rank of a named rank": lambda i, n: change_parts(i, named=(RankId(node="n1", local_rank=n),)),
    "where to begin": lambda i, n: change_parts(i, check_first=(CheckFirst(node="n1", rank=n, why="x", settle="y"),)),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_number_that_no_cluster_has_is_believed(tmp_path: Path, place: str) -> None:
    """The size of a report depends on rank numbers, which come from an environment."""
    (tmp_path / "dumps").mkdir()
    for number, sign in ((MOST_RANKS, 1), (MOST_RANKS, -1), (MOST_RANKS + 1, 1), (MOST_RANKS + 1, -1)):
        incident = PLACES[place](at(1e9), sign * number)
        (tmp_path / "incident.json").write_bytes(incident_file.encode(incident))
        if number == MOST_RANKS:
            assert incident_file.load(tmp_path) == incident
            continue
        what, remedy = error_of(lambda: incident_file.load(tmp_path))
        assert f"rank or world size is {sign * number:,}; at most {MOST_RANKS:,} ranks are" in what
        assert f"hangwatch explain {tmp_path}/dumps" in remedy


def test_text_that_is_no_unicode_is_written_escaped_and_the_rest_as_it_is(tmp_path: Path) -> None:
    incident = at(1e9, host_facts=(("Kernel", "5.15"), ("od\udcffd", "x\ud800")))
    read = incident_file.load(open_writable(tmp_path).save(incident, {"report.txt": "x\udcff"}))
    assert read == replace(incident, host_facts=(("Kernel", "5.15"), ("od\\udcffd", "x\\ud800")))


# --- errors for people -----------------------------------------------------------------------------------------------


def test_what_is_not_an_incident_or_a_folder_of_them_is_an_error(tmp_path: Path) -> None:
    file, folder = tmp_path / "incident.json", tmp_path / "incidents"
    what, remedy = error_of(lambda: incident_file.load(tmp_path))
    assert what == f"{file}: does not exist"
    assert "`hangwatch incidents` lists the incidents of this node" in remedy
    file.symlink_to("/etc/hostname")
    what, remedy = error_of(lambda: incident_file.load(tmp_path))
    assert what == f"{file}: cannot be read: Too many levels of symbolic links"
    assert "links are not followed" in remedy
    folder.write_text("")
    what, remedy = error_of(lambda: Store(tmp_path).summaries())
    assert what == f"{folder}: cannot be listed: Not a directory"
    assert "try as root" in remedy


@pytest.mark.parametrize("call", [Store.make_writable, lambda store: store.lock.take()])
def test_world_writable_directory_is_refused_and_gets_no_lock(tmp_path: Path, call: Callable[[Store], object]) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    what, remedy = error_of(lambda: call(Store(tmp_path / "state")))
    assert what.startswith(f"{tmp_path}/state: all users can write there")
    assert f"chmod o-w {tmp_path}/state" in remedy
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.usefixtures("no_umask")
def test_the_directory_may_be_passed_by_all_and_changed_by_us_alone(tmp_path: Path) -> None:
    open_writable(tmp_path / "var/hangwatch")
    assert (tmp_path / "var/hangwatch").stat().st_mode & 0o777 == 0o755


FULL = "the disk is full: free space or lower [store] max_bytes; older incidents are untouched"
IN_PLACE = "a link or a file is in the place of a folder: move it away; hangwatch does not follow links there"
MAY_NOT = "this user may not write there: set a directory of this user ([store] directory, or -o), or run as root"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, FULL),
        (errno.EDQUOT, FULL),
        (errno.EACCES, MAY_NOT),
        (errno.EPERM, MAY_NOT),
        (errno.EROFS, "the file system is read-only: set [store] directory (under systemd: StateDirectory=hangwatch)"),
        (errno.ELOOP, IN_PLACE),
        (errno.ENOTDIR, IN_PLACE),
        (errno.EEXIST, IN_PLACE),
        (errno.EIO, "set [store] directory to a local directory that works"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_what_the_system_says_comes_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, named: bool
) -> None:
    kept = open_writable(tmp_path / "state")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number), *(["/a/file"] if named else []))

    monkeypatch.setattr(os, "fsync", refuse)
    for call in (kept.make_writable, lambda: kept.save(at(1e9), {})):
        what, told = error_of(call)
        place = "/a/file: " if named else ""
        assert what == f"{kept.incidents}: incidents cannot be written: {place}{os.strerror(number)}"
        assert told.strip() == remedy
    assert list(kept.incidents.iterdir()) == [path for path in kept.incidents.iterdir() if "writable" in path.name]


# --- owner -----------------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("no_umask")
def test_the_lock_makes_the_directory_and_costs_one_descriptor_while_it_is_held(tmp_path: Path) -> None:
    kept = Store(tmp_path / "var/hangwatch")
    at_first = descriptors()
    kept.lock.take()
    kept.lock.take()
    assert descriptors() == at_first + 1
    assert kept.root.stat().st_mode & 0o777 == 0o755
    assert (kept.root / "lock").stat().st_mode & 0o777 == 0o600
    assert (kept.root / "lock").read_text() == f"{os.getpid()}\n"
    with pytest.raises(store.StoreTakenError) as error:
        Store(kept.root).lock.take()
    assert str(error.value) == (
        f"{kept.root}/lock: another hangwatch (pid {os.getpid()}) already uses this directory\n"
        "  stop it, or set a different [store] directory"
    )
    (kept.root / "lock").write_text("\u0663 is not a pid, nor is this")
    with pytest.raises(store.StoreTakenError, match="another hangwatch already uses this directory"):
        Store(kept.root).lock.take()
    assert descriptors() == at_first + 1
    kept.lock.give_back()
    kept.lock.give_back()
    assert descriptors() == at_first
    other = Store(kept.root)
    other.lock.take()
    other.lock.give_back()


def test_what_an_earlier_daemon_wrote_into_the_lock_is_gone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789 and more\n")
    kept = Store(tmp_path)
    kept.lock.take()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    kept.lock.give_back()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_refused_lock_is_said_and_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    at_first = descriptors()
    what, remedy = error_of(Store(tmp_path).lock.take)
    assert what == f"{tmp_path}/incidents: incidents cannot be written: {os.strerror(number)}"
    assert "a local directory that works" in remedy
    assert descriptors() == at_first


def test_what_was_left_open_fills_the_room_to_the_brim_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = open_writable(tmp_path)
    saved = [kept.save(at(1e9 + number), {}) for number in range(3)]
    sizes = [size(folder / "incident.json") for folder in saved]
    node = at(1e9).node

    def list_continued() -> list[float]:
        caplog.clear()
        return [incident.opened_unix_seconds - 1e9 for incident in kept.left_open(node)]

    monkeypatch.setattr(folders, "MOST_LEFT_OPEN", 3)
    monkeypatch.setattr(folders, "MOST_LEFT_OPEN_BYTES", sum(sizes))
    assert (list_continued(), caplog.messages) == ([2, 1, 0], [])
    monkeypatch.setattr(folders, "MOST_LEFT_OPEN_BYTES", sum(sizes) - 1)
    assert (list_continued(), caplog.messages) == ([2, 1], [f"{saved[0]}: not continued: too many open incidents"])
    monkeypatch.setattr(folders, "MOST_LEFT_OPEN", 1)
    assert list_continued() == [2]
    assert caplog.messages == [f"{saved[1]} and 1 more: not continued: too many open incidents"]


def test_what_one_owner_left_open_does_not_take_the_room_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = open_writable(tmp_path)
    others = at(1e9)
    kept.save(change_parts(others, share="uid 2"), {})
    for number in range(1, 4):
        kept.save(at(1e9 + number), {})
    monkeypatch.setattr(folders, "MOST_LEFT_OPEN", 2)
    assert [incident.opened_unix_seconds - 1e9 for incident in kept.left_open(others.node)] == [3, 0]
    assert len(caplog.messages) == 1


def test_unreadable_open_incident_is_said_and_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = open_writable(tmp_path)
    broken, _sound = (kept.save(at(1e9 + number), {}) for number in (1, 0))
    told = json.loads((broken / "incident.json").read_text())
    (broken / "incident.json").write_text(json.dumps({**told, "schema_version": INCIDENT_VERSION + 1}))
    assert [incident.opened_unix_seconds for incident in kept.left_open(at(1e9).node)] == [1e9]
    (said,) = caplog.messages
    assert said.startswith(f"an open incident cannot be read: {broken}/incident.json: was written by hangwatch")


def test_a_store_for_a_single_answer_is_there_at_once(tmp_path: Path) -> None:
    kept = store.open_writable(tmp_path / "answers")
    assert (tmp_path / "answers/incidents").is_dir()
    assert kept.summaries() == ()
