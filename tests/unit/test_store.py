"""Incident folders: complete or absent, private, bounded, and readable after any failure."""

import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import __version__, config, store
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import StoreError
from hangwatch.model import CRASHED, INCIDENT_VERSION, Frame, Incident, JobState
from hangwatch.store import Store
from hangwatch.store import incident_folders as folders
from hangwatch.store.store_lock import LOCK_FILE
from hangwatch.words import incident_name
from tests import samples
from tests.commands import finished

FILES = {"report.txt": "text", "report.html": "<p>", "dumps/20260314T031501Z-round1/rank0.txt": "Process 1: x"}
DAY = 86400.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def at(opened: float, job_id: str = "42", **changes: object) -> Incident:
    usual = {"incident_id": name_at(opened, job_id), "job": samples.job(range(2), 2, job_id=job_id)}
    return replace(samples.mismatch(), opened_unix_seconds=opened, **{**usual, **changes})


def name_at(opened: float, job_id: str = "42") -> str:
    return incident_name(samples.job(range(2), 2, job_id=job_id), opened)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Disk:
    """A record of the system calls that make files durable, in order: ("sync", path) and ("rename", old, new)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        sync, rename = os.fsync, os.rename

        def synced(descriptor: int) -> None:
            self.calls.append(("sync", _path(descriptor)))
            sync(descriptor)

        def renamed(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            place = _path(src_dir_fd)
            self.calls.append(("rename", f"{place}/{source}", f"{place}/{target}"))
            rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)


def _path(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def open_writable(root: Path, **bounds: float) -> Store:
    kept = Store(root, config.Store(**bounds))  # type: ignore[arg-type]
    kept.make_writable()
    return kept


def message_of(call: Callable[[], object]) -> str:
    """Return the error that `call` raises."""
    with pytest.raises(StoreError) as error:
        call()
    return str(error.value)


# --- saving ----------------------------------------------------------------------------------------------------------


def test_a_new_incident_is_on_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = open_writable(tmp_path / "state")
    disk = Disk(monkeypatch)
    folder = kept.save(at(0.0), FILES)
    (place,) = [number for number, call in enumerate(disk.calls) if call[0] == "rename"]
    _, temporary, final = disk.calls[place]
    assert final == str(folder)
    synced = {path: number for number, (_, path) in enumerate(disk.calls[:place])}  # the last sync of each path
    for path in folder.rglob("*"):
        written = Path(temporary, path.relative_to(folder))
        assert str(written) in synced, f"{path.name} may be empty after a power cut"
        assert synced[str(written.parent)] > synced[str(written)] or path.is_dir(), f"{path.name} may be missing"
    assert ("sync", str(folder.parent)) in disk.calls[place:]


def test_what_is_replaced_is_on_disk_before_the_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = open_writable(tmp_path / "state")
    folder = kept.save(at(0.0), FILES)
    disk = Disk(monkeypatch)
    kept.save(at(0.0), {"report.txt": "longer"})
    renames = [number for number, call in enumerate(disk.calls) if call[0] == "rename"]
    assert [disk.calls[number][2] for number in renames] == [f"{folder}/incident.json", f"{folder}/report.txt"]
    for number in renames:
        assert disk.calls[number - 1] == ("sync", disk.calls[number][1])
        assert ("sync", str(folder)) in disk.calls[number:]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    kept = open_writable(tmp_path / "state")
    for make in (*samples.SAMPLES.values(), samples.fleet):
        incident = replace(make(), incident_id=make.__name__)
        folder = kept.save(incident, FILES)
        assert incident_file.load(folder) == incident


@pytest.mark.usefixtures("no_umask")
def test_the_folder_holds_all_and_only_for_its_owner(tmp_path: Path) -> None:
    folder = open_writable(tmp_path / "state").save(samples.loader_hang(), FILES)
    assert folder == tmp_path / "state/incidents/20260314T031500Z-2180718-6d1c0f5a"
    assert set(tree(folder)) == {"incident.json", "order", "owner", *FILES}
    for path in (folder.parent, folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_saving_again_replaces_all_but_dumps(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    incident = samples.loader_hang()
    folder = kept.save(incident, FILES)
    later = replace(incident, state=JobState.RECOVERED, closed_unix_seconds=samples.OPENED + 60)
    dump = "dumps/20260314T031501Z-round1/rank0.txt"
    assert kept.save(later, {"report.txt": "new", dump: "other", "dumps/later/rank0.txt": "more"}) == folder
    assert incident_file.load(folder) == later
    found = tree(folder)
    assert (found["report.txt"], found["report.html"]) == (b"new", b"<p>")
    assert (found[dump], found["dumps/later/rank0.txt"]) == (b"Process 1: x", b"more")
    assert not list((tmp_path / "incidents").rglob(".tmp-*"))


def test_a_reader_sees_the_old_or_the_new_and_never_a_half(tmp_path: Path) -> None:
    """Replace the file instead of overwriting it: an open reader then reads the complete old file."""
    kept = open_writable(tmp_path)
    folder = kept.save(samples.loader_hang(), FILES)
    with (folder / "incident.json").open("rb") as old:
        kept.save(replace(samples.loader_hang(), state=JobState.ENDED), FILES)
        assert msgspec.json.decode(old.read(), type=Incident) == samples.loader_hang()


def test_two_incidents_of_one_name_are_two(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    here, there = samples.loader_hang(), replace(samples.loader_hang(), node="gpu-b07")
    folders = [kept.save(here, FILES), kept.save(there, FILES), kept.save(here, FILES), kept.save(there, FILES)]
    assert [folder.name for folder in folders] == [
        "20260314T031500Z-2180718-6d1c0f5a",
        "20260314T031500Z-2180718-6d1c0f5a-2",
    ] * 2
    assert [incident_file.load(folder).node for folder in folders[:2]] == ["gpu-a12", "gpu-b07"]


def test_two_owners_jobs_of_one_name_that_hang_in_one_second_are_two_incidents(tmp_path: Path) -> None:
    """Give each owner a separate folder and report name: neither may belong to another user."""
    kept = open_writable(tmp_path)
    keys = ("6d1c0f5a9e27b384", "0123456789abcdef", "0123456789abcdee")  # the last two are equal in names
    for key in keys:
        job = replace(samples.job(range(2), 2, job_id="100"), job_key=key)
        kept.save(replace(at(1e9), job=job, incident_id=incident_name(job, 1e9)), FILES)
    assert sorted(summary.job_key for summary in kept.summaries()) == sorted(keys)
    assert incident_file.load(kept.find("100-6d1c0f5a")).job.job_key == keys[0]


@given(st.text(max_size=300), st.floats(0, 4e9))
def test_names_of_incidents_are_names_of_folders(job_id: str, opened: float) -> None:
    assert folders._FOLDER.fullmatch(name_at(opened, job_id))


TEXT = st.text(st.characters(), max_size=30)  # including surrogates


@given(message=TEXT, command=TEXT, function=TEXT, facts=st.lists(st.tuples(TEXT, TEXT), max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_text_survives(tmp_path: Path, message: str, command: str, function: str, facts: list[tuple[str, str]]) -> None:
    group = replace(samples.waiting([0]), frames=(Frame(function=function, file="f.py"),))
    incident = samples.incident(groups=[group], verdict=replace(samples.mismatch().verdict, message=message), ranks=[0])
    incident = replace(incident, job=samples.job([0], 1, command=command), host_facts=tuple(facts))
    folder = open_writable(tmp_path).save(incident, {"report.txt": message})
    found = incident_file.load(folder)
    assert found.verdict.message == message.encode("utf-8", "backslashreplace").decode()
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in "".join((message, command, function, *map("".join, facts)))):
        assert found == incident


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", ".hidden", "a//b", "a/b/c/d/e", "", "a\n"])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    kept = open_writable(tmp_path)
    with pytest.raises(StoreError, match="is not a valid name for a file of an incident"):
        kept.save(samples.loader_hang(), {name: "x"})
    assert list((tmp_path / "incidents").iterdir()) == []


# --- refused data ----------------------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_incidents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state/incidents").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="does not follow links"):
        open_writable(tmp_path / "state")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_the_place_of_a_file_or_folder_is_not_written_through(tmp_path: Path) -> None:
    kept = open_writable(tmp_path / "state")
    folder = kept.save(samples.loader_hang(), FILES)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "report.txt").unlink()
    (folder / "report.txt").symlink_to(victim)
    kept.save(samples.loader_hang(), FILES)
    assert victim.read_text() == "precious"
    assert (folder / "report.txt").read_text() == "text"

    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(folder / "dumps")
    (folder / "dumps").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        kept.save(samples.loader_hang(), FILES)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: folder.chmod(0o777), "chmod o-w"),
        pytest.param(lambda folder: os.chown(folder, 12345, -1), "belongs to user 12345", marks=needs_root),
    ],
)
def test_folder_that_another_user_may_change_is_refused(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    (tmp_path / "incidents").mkdir()
    change(tmp_path / "incidents")
    assert says in message_of(lambda: open_writable(tmp_path))


def test_a_sticky_folder_such_as_tmp_is_fine(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    folder = open_writable(tmp_path / "tmp").save(samples.loader_hang(), FILES)
    assert incident_file.load(folder) == samples.loader_hang()


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    message = message_of(lambda: open_writable(tmp_path / "state"))
    assert str(tmp_path / "state") in message and "in the place of a folder" in message


def test_a_directory_without_permission_says_what_to_do(tmp_path: Path) -> None:
    """Run as user nobody if the tests run as root: root may write to every directory."""
    code = """
        import os, sys
        from pathlib import Path
        from hangwatch.formats.incident_file import StoreError
        from hangwatch.store import open_writable
        Path(sys.argv[1]).chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            open_writable(Path(sys.argv[1]) / "state")
        except StoreError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory() as place:
        ran = finished(sys.executable, "-c", textwrap.dedent(code), place)
    assert "Permission denied" in ran.stdout, ran.stderr
    assert "or run as root" in ran.stdout


@needs_root
def test_a_read_only_file_system_says_what_to_do(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        open_writable(small_disk)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "is_told"), [("99.0", True), (__version__, False)])
def test_a_state_that_a_later_version_knows_is_told_as_such(tmp_path: Path, version: str, is_told: bool) -> None:
    content = incident_file.encode(replace(samples.loader_hang(), hangwatch_version=version))
    later = content.replace(b'"state":"hung"', b'"state":"novel"')
    assert later != content
    message = message_of(lambda: incident_file.parse(tmp_path, later))
    assert "'novel'" in message
    assert ("it was written by hangwatch 99.0" in message) is is_told


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"{", "truncated or not an incident"),
        (b"[1, 2]", "truncated or not an incident"),
        (b"\xff\xfe\x00", "truncated or not an incident"),
        (b"[" * 200_000, "truncated or not an incident"),
        (b'{"schema_version": 9, "hangwatch_version": "7.1", "whatever": 1}', "hangwatch 7.1 in form 9"),
    ],
)
def test_what_is_no_incident_is_explained(tmp_path: Path, content: bytes, says: str) -> None:
    kept = open_writable(tmp_path)
    folder = kept.save(samples.loader_hang(), FILES)
    (folder / "incident.json").write_bytes(content)
    message = message_of(lambda: incident_file.load(folder))
    assert says in message
    assert str(folder / "incident.json") in message
    assert "\n  " in message  # the advice


def test_every_truncation_is_told(tmp_path: Path) -> None:
    whole = incident_file.encode(samples.mismatch())
    for size in range(0, len(whole), max(len(whole) // 200, 1)):
        (tmp_path / "incident.json").write_bytes(whole[:size])
        with pytest.raises(StoreError):
            incident_file.load(tmp_path)


def test_what_is_no_file_is_told_and_does_not_stop_us(tmp_path: Path) -> None:
    for plant in (lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("/etc/hostname")):
        path = tmp_path / "incident.json"
        plant(path)
        with pytest.raises(StoreError):
            incident_file.load(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_summaries_newest_first_with_the_unreadable_among_them(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    for opened in (1e9, 3e9, 2e9):
        kept.save(at(opened), FILES)
    (kept.incidents / name_at(2e9) / "incident.json").write_text("{")
    (kept.incidents / "notes-of-somebody").mkdir()
    found = kept.summaries()
    assert [summary.folder for summary in found] == [name_at(opened) for opened in (3e9, 2e9, 1e9)]
    assert [bool(summary.problem) for summary in found] == [False, True, False]
    first = found[0]
    assert (first.node, first.job_id, first.state, first.verdict) == ("gpu-a12", "42", JobState.HUNG, "Mismatch")
    assert first.size_bytes == sum(len(content) for content in tree(kept.incidents / first.folder).values())


def test_a_store_that_was_never_written_is_empty(tmp_path: Path) -> None:
    assert Store(tmp_path / "nowhere").summaries() == ()


def test_find_takes_a_part_of_a_name(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folders = [kept.save(at(opened, job_id), FILES) for opened, job_id in ((1e9, "aa"), (2e9, "ab"))]
    assert kept.find(folders[0].name) == folders[0]
    assert kept.find("ab") == folders[1]
    for name, says in (("Z-a", "matches 2"), ("zzz", "matches no incident"), ("../x", "matches no incident")):
        assert says in message_of(lambda name=name: kept.find(name))  # type: ignore[misc]


# --- pruning ---------------------------------------------------------------------------------------------------------


def names(kept: Store) -> set[str]:
    return {summary.folder for summary in kept.summaries()}


def test_prune_by_count_oldest_first_and_never_the_open(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_incidents=3, max_age_days=1000)
    folders = [kept.save(at(1e9 + number), FILES).name for number in range(6)]
    removed = kept.prune(open_folders=frozenset({folders[0]}))
    assert set(removed) == set(folders[1:4])
    assert names(kept) == {folders[0], *folders[4:]}
    assert kept.prune(open_folders=frozenset({folders[0]})) == ()


def test_the_crashes_of_one_owner_push_out_no_hang_of_others(tmp_path: Path) -> None:
    # One owner's crashes are saved for days. At most an eighth of the limit is kept for the crashes of one owner,
    # and half for those of all owners.
    kept = open_writable(tmp_path, max_incidents=16, max_age_days=1000)

    def crash(number: int, share: str) -> str:
        return kept.save(samples.change_parts(at(1e9 + number), kind=CRASHED, share=share), {}).name

    hang = kept.save(at(1e9), FILES).name
    crashes = []
    for number in range(1, 20):
        crashes.append(crash(number, "uid 1"))
        kept.prune()
    assert names(kept) == {hang, *crashes[-2:]}
    others = [crash(100 + number, f"uid {number}") for number in range(20)]
    kept.prune()
    assert names(kept) == {hang, *others[-8:]}


def test_the_hangs_of_one_owner_push_out_no_hang_of_others(tmp_path: Path) -> None:
    """Count all jobs of a user together, although each Slurm job has a separate quota elsewhere."""
    kept = open_writable(tmp_path, max_incidents=4, max_age_days=1000)

    def hang(number: int, share: str, uid: int | None) -> str:
        return kept.save(samples.change_parts(at(1e9 + number), share=share, uid=uid), FILES).name

    theirs = [hang(0, "uid 1000, pod a", None), hang(1, "Slurm job 1", 1001)]
    ours = [hang(number, f"Slurm job {number}", 1000) for number in range(2, 12)]
    kept.prune()
    assert names(kept) == {*theirs, *ours[-2:]}


def test_prune_by_age_counts_against_other_incidents_only(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_age_days=10)
    old, young, newest = (kept.save(at(1e9 + days * DAY), FILES).name for days in (0, 2, 11))
    assert kept.prune() == ()
    assert kept.prune(by_age=3) == (old,)
    assert names(kept) == {young, newest}


def test_a_clock_that_steps_costs_a_few_incidents_an_hour_at_most(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    before = [kept.save(at(1e9 + number * DAY), FILES).name for number in range(5)]
    stepped = kept.save(at(1e9 + 36 * DAY), FILES).name
    assert kept.prune(by_age=3) == tuple(before[:3]), "the oldest first, and no more of them"
    assert names(kept) == {*before[3:], stepped}


def test_folders_dated_in_the_future_do_not_push_out_those_of_today(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_incidents=3, max_age_days=3650)
    future = [kept.save(at(3e9 + number), FILES).name for number in range(3)]
    today = kept.save(at(2e9), FILES).name
    assert kept.prune() == (future[0],)
    assert names(kept) == {*future[1:], today}


def test_prune_by_bytes_keeps_the_newest(tmp_path: Path) -> None:
    folders = [
        open_writable(tmp_path).save(at(1e9 + number), {"report.txt": "x" * 100_000}).name for number in range(4)
    ]
    kept = Store(tmp_path, config.Store(max_bytes=int(2.5 * Store(tmp_path).summaries()[0].size_bytes)))
    assert set(kept.prune()) == set(folders[:2])
    tiny = Store(tmp_path, config.Store(max_bytes=1))
    assert tiny.prune() == (folders[2],)
    assert names(kept) == {folders[3]}


def test_prune_by_bytes_never_keeps_an_older_one_instead_of_a_newer(tmp_path: Path) -> None:
    sizes = (10, 400_000, 10)
    small, big, newest = (
        open_writable(tmp_path).save(at(1e9 + number), {"report.txt": "x" * size}).name
        for number, size in enumerate(sizes)
    )
    limit = sum(summary.size_bytes for summary in Store(tmp_path).summaries()) - 400_000
    kept = Store(tmp_path, config.Store(max_bytes=limit))
    assert kept.prune() == (big, small)
    assert names(kept) == {newest}


def test_prune_removes_the_unreadable_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    kept = open_writable(tmp_path, max_incidents=1)
    old, new = (kept.save(at(opened), FILES) for opened in (1e9, 2e9))
    (old / "incident.json").write_text("{")
    (kept.incidents / "notes").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (old / "link").symlink_to(outside)
    assert kept.prune() == (old.name,)
    assert {path.name for path in kept.incidents.iterdir()} == {new.name, "notes"}
    assert (outside / "file").read_text() == "precious"


@given(
    opened=st.lists(st.integers(0, 40), max_size=12, unique=True),
    max_incidents=st.integers(1, 5),
    days=st.integers(1, 60),
    by_age=st.integers(0, 3),
    open_at=st.sets(st.integers(0, 40)),
)
@settings(max_examples=25, deadline=None)
def test_prune_keeps_the_last_saved_incidents_at_any_clock_time(
    opened: list[int],
    max_incidents: int,
    days: int,
    by_age: int,
    open_at: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    kept = open_writable(tmp_path_factory.mktemp("s"), max_incidents=max_incidents, max_age_days=days)
    name = {day: kept.save(at(day * DAY), {}).name for day in opened}
    still_open = open_at & name.keys()
    kept.prune(frozenset(name[day] for day in still_open), by_age=by_age)
    left = [day for day in opened if name[day] in names(kept)]
    assert still_open <= set(left)
    closed = [day for day in opened if day not in still_open]
    room = max(max_incidents - len(still_open), 0)
    within = closed[max(len(closed) - room, 0) :]
    gone_by_age = set(within) - set(left)
    assert set(left) - still_open <= set(within), "only the last saved stay"
    assert len(gone_by_age) <= by_age
    assert all(any(later - day > days for later in opened[opened.index(day) :]) for day in gone_by_age)


# --- markers ---------------------------------------------------------------------------------------------------------


def test_marker_without_its_incident_is_listed_with_its_verdict(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    incident = at(1e9)
    kept.mark(incident)
    (listed,) = kept.summaries()
    assert (listed.job_key, listed.verdict, listed.state) == (incident.job.job_key, incident.verdict.kind, None)
    assert incident.verdict.message in listed.problem and "hangwatch ended before" in listed.problem
    folder = kept.incidents / listed.folder
    marker = incident_file.load_marker(folder)
    assert marker is not None and marker.verdict == incident.verdict.kind
    assert (folder / "marker.json").read_text().count("\n") == 1
    assert kept.left_open(incident.node) == ()
    with pytest.raises(StoreError, match="hangwatch ended before it could write more"):
        incident_file.load(folder)


def test_incident_that_is_saved_takes_the_place_of_its_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = open_writable(tmp_path)
    kept.mark(at(1e9))
    disk = Disk(monkeypatch)
    folder = kept.save(at(1e9), FILES)
    assert Path([call[2] for call in disk.calls if call[0] == "rename"][-1]).name == "incident.json", "the last"
    assert set(tree(folder)) == {"incident.json", "order", "owner", *FILES}
    assert incident_file.load(folder) == at(1e9)
    kept.mark(at(1e9))
    assert set(tree(folder)) == {"incident.json", "order", "owner", *FILES}, "it is there already"


@pytest.mark.parametrize("opened", [-7200.0, -60.0, 60.0])
def test_marker_of_another_hang_of_the_same_job_stays(tmp_path: Path, opened: float) -> None:
    kept = open_writable(tmp_path, max_age_days=36500.0)
    other = at(1e9 + opened)
    kept.mark(other)
    kept.mark(at(1e9))
    saved = kept.save(at(1e9), FILES)
    (left,) = {path for path in kept.incidents.iterdir() if path.name != saved.name}
    marker = incident_file.load_marker(left)
    assert marker is not None and marker.opened_unix_seconds == other.opened_unix_seconds


def test_marker_is_as_private_as_an_incident(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    kept.mark(at(1e9))
    (folder,) = kept.incidents.iterdir()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o700, 0o600}


def test_marker_with_any_text_is_one_line_and_bounded(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    kept.mark(samples.change_parts(at(1e9), message="a\nb\udcff" + "x" * 1_000_000))
    (folder,) = kept.incidents.iterdir()
    content = (folder / "marker.json").read_bytes()
    assert content.count(b"\n") == 1 and len(content) < 10_000
    assert incident_file.load_marker(folder) is not None


# --- crashes and full disks ------------------------------------------------------------------------------------------


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folder = kept.save(samples.loader_hang(), FILES)
    dead = finished(sys.executable, "-c", "import os; print(os.getpid())").stdout
    for name in (f".tmp-{dead.strip()}.1-20260101T000000Z-x", f".tmp-{os.getpid()}.1-old", ".tmp-garbage"):
        (kept.incidents / name / "dumps").mkdir(parents=True)
        (kept.incidents / name / "dumps" / "a").write_text("x")
    (folder / f".tmp-{dead.strip()}.1-report.txt").write_text("half")
    open_writable(tmp_path)
    assert [path.name for path in kept.incidents.iterdir()] == [folder.name]
    assert set(tree(folder)) == {"incident.json", "order", "owner", *FILES}


def test_leftover_of_a_dead_writer_with_reused_pid_is_removed(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    folder = kept.save(at(1e9), FILES)
    parent = os.getppid()
    began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    alive = kept.incidents / f".tmp-{parent}.{began}-alive"
    for left in (
        kept.incidents / f".tmp-{parent}.{int(began) - 1}-dead",
        alive,
        folder / "dumps" / f".tmp-{parent}.1-x",
    ):
        left.mkdir()
    open_writable(tmp_path)
    assert [path.name for path in kept.incidents.rglob(".tmp-*")] == [alive.name]


CHANGES = frozenset({"mkdir", "open", "write", "flush", "fsync", "rename", "unlink"})


def is_killed_while_saving(calls: int, save: Callable[[], object]) -> bool:
    """Run `save` in a fork that sends itself SIGKILL after so many calls of `CHANGES`. False if it needs fewer calls."""
    writer = os.fork()
    if writer == 0:
        left = iter(range(calls - 1, -1, -1))

        def count(_frame: object, event: str, function: object) -> None:
            if event == "c_return" and getattr(function, "__name__", "") in CHANGES and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(writer, 0)[1]
    assert status in (0, signal.SIGKILL), "the save failed"
    return status == signal.SIGKILL


@pytest.mark.parametrize("is_update", [False, True], ids=["new", "update"])
def test_sigkill_at_any_call_of_a_save_leaves_each_file_old_or_new(tmp_path: Path, is_update: bool) -> None:
    later = replace(at(1e9), state=JobState.ENDED)
    new_files = {"report.txt": "newer", "report.html": "<b>", "dumps/20260314T031502Z-round2/rank0.txt": "Process 2: x"}
    complete = open_writable(tmp_path / "complete")
    if is_update:
        complete.save(at(1e9), FILES)
    complete.save(later, new_files)
    new = tree(complete.incidents)
    for calls in itertools.count(1):
        kept = open_writable(tmp_path / str(calls))
        if is_update:
            kept.save(at(1e9), FILES)
        before = tree(kept.incidents)
        was_killed = is_killed_while_saving(calls, lambda kept=kept: kept.save(later, new_files))  # type: ignore[misc]
        after = tree(open_writable(kept.root).incidents)
        if not was_killed:
            break
        torn = [name for name in {**before, **after} if after.get(name) not in (before.get(name), new.get(name))]
        assert not torn, f"neither old nor new after {calls} calls: {torn}"
        assert is_update or after in ({}, new), f"half a folder after {calls} calls"
    assert calls > 2 * len(new_files)


@needs_root
def test_a_full_disk_costs_the_new_incident_and_nothing_else(small_disk: Path) -> None:
    kept = open_writable(small_disk)
    old = kept.save(at(1e9), {"report.txt": "x" * 600_000})
    before = tree(kept.incidents)
    for attempt in (at(2e9), at(1e9)):  # a new folder, and an update of the old one
        with pytest.raises(StoreError, match="the disk is full"):
            kept.save(attempt, {"report.html": "y" * 1_500_000, "dumps/a/b.txt": "z" * 600_000})
    assert incident_file.load(old) == at(1e9)
    after = tree(kept.incidents)
    assert after == before
    assert not list(kept.incidents.rglob(".tmp-*"))
    kept.save(at(3e9), FILES)  # when there is space again, saving works


def test_the_file_is_plain_json_that_others_can_read(tmp_path: Path) -> None:
    folder = open_writable(tmp_path).save(samples.loader_hang(), FILES)
    found = json.loads((folder / "incident.json").read_text())
    assert found["schema_version"] == INCIDENT_VERSION
    assert found["verdict"]["named"] == [{"node": "gpu-a12", "rank": 7, "local_rank": 7, "pid": 41207, "title": None}]


def test_the_lock_follows_no_link_and_makes_none_wait(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="a link or a file is in the place") as told:
        Store(tmp_path).lock.take()
    assert not isinstance(told.value, store.StoreTakenError)
    assert not (tmp_path / "elsewhere").exists()


def test_saving_one_incident_needs_no_lock(tmp_path: Path) -> None:
    Store(tmp_path).lock.take()
    open_writable(tmp_path).save(at(1e9), FILES)


def test_what_was_left_open_is_read_back_newest_first(tmp_path: Path) -> None:
    kept = open_writable(tmp_path)
    node = at(1e9).node
    for number, changes in enumerate(
        (
            {"state": JobState.HUNG},
            {"state": JobState.STALLED},
            {"state": JobState.HUNG},
            {"state": JobState.RECOVERED, "closed_unix_seconds": 2e9},
            {"state": JobState.HUNG, "node": "another"},
            {"state": JobState.TRAINING},
        )
    ):
        kept.save(at(1e9 + number * DAY, **changes), FILES)
    (tmp_path / "incidents" / name_at(1e9 + 2 * DAY) / "incident.json").write_text("{")
    assert [found.opened_unix_seconds for found in kept.left_open(node)] == [1e9 + DAY, 1e9]


@pytest.mark.parametrize("opened", [1e12, 1e300, -1e14])
def test_open_incident_of_no_year_is_left_out(opened: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = open_writable(tmp_path)
    kept.save(at(1e9, state=JobState.HUNG), FILES)
    kept.save(at(1e9 + DAY, state=JobState.HUNG), FILES)
    path = tmp_path / "incidents" / name_at(1e9) / "incident.json"
    path.write_bytes(incident_file.encode(replace(at(1e9, state=JobState.HUNG), opened_unix_seconds=opened)))
    assert [found.opened_unix_seconds for found in kept.left_open(at(1e9).node)] == [1e9 + DAY]
    (line,) = caplog.messages
    assert str(path.parent) in line
