"""Read access to an incident, tried as each user: only the owner of its job and the on-call group have it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.model import Incident
from hangwatch.store import Store
from tests import samples
from tests.commands import HANGWATCH, Finished, finished, write_config
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.integration import targets
from tests.other_users import as_user, needs_root
from tests.real_daemon import RealDaemon
from tests.samples import change_parts

pytestmark = needs_root

OWNER, OTHER_OWNER, STRANGER, ON_CALL = 4001, 4002, 4003, 4010

# Attempts of a user on a store: list, read, and change files. No change may succeed.
ATTEMPT = """
import json, os, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = sys.argv[2:]
def of(what, *arguments):
    try:
        return what(*arguments)
    except OSError as error:
        return None
listed = {str(folder.relative_to(root)): sorted(of(os.listdir, folder) or ["-"])
          for folder in (root / "incidents", root / "owners", root / "owners" / str(os.getuid()))}
read, changed = [], []
own = pathlib.Path(os.environ["HOME"])
for name in names:
    folder = root / "incidents" / name
    files = [folder / "incident.json", folder / "report.txt", folder / "dumps/r1/rank0.txt"]
    if all(of(path.read_bytes) for path in files) and of(os.listdir, folder / "dumps"):
        read.append(name)
    for path in files:
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
            if of(os.open, path, flags) is not None:
                changed.append(f"open {path} {flags}")
        changed += [f"{word} {path}" for word, done in (
            ("unlink", of(os.unlink, path) is None and not of(os.lstat, path) and name in read),
            ("chmod", of(lambda: os.chmod(path, 0o777) or 1)),
            ("acl", of(lambda: os.removexattr(path, "system.posix_acl_access") or 1)),
            ("link", of(lambda: os.link(path, own / f"link-{name}") or 1)),
        ) if done]
    for place in (root, root / "incidents", root / "owners", root / "owners" / str(os.getuid()), folder, folder / "dumps"):
        if of(lambda: os.symlink("/etc/passwd", place / "planted") or 1) or of(lambda: os.mkdir(place / "20990101T000000Z-x") or 1):
            changed.append(f"planted in {place}")
    if of(lambda: os.rename(folder, root / "incidents" / "moved") or 1):
        changed.append(f"renamed {folder}")
print(json.dumps({"listed": listed, "read": read, "changed": changed}))
"""


@pytest.fixture
def place(folder_for_all: Path) -> Path:
    return folder_for_all


def incident_of(uid: int | None, job_id: str, job_key: str = "") -> Incident:
    return change_parts(
        samples.loader_hang(), incident_id=f"i-{job_id}", job_id=job_id, job_key=job_key or job_id, uid=uid
    )


FILES = {"report.txt": "stacks", "dumps/r1/rank0.txt": "Process 1: x"}


def kept(place: Path, *, group: str = str(ON_CALL)) -> tuple[Store, dict[int | None, str]]:
    """Return a store with an incident of each owner, saved twice, and the incident folders by owner."""
    store = Store(place / "state", config.Store(group=group), shared=True)
    store.make_writable()
    names: dict[int | None, str] = {}
    for uid in (OWNER, OTHER_OWNER, None, 0):
        for _ in range(2):
            names[uid] = store.save(incident_of(uid, f"job-of-{uid}"), FILES).name
    return store, names


def attempt(place: Path, names: dict[int | None, str], uid: int, *groups: int) -> dict[str, object]:
    home = place / f"home-{uid}"
    home.mkdir(exist_ok=True)
    os.chown(home, uid, uid)
    command = [*as_user(uid, groups=groups), sys.executable, "-c", ATTEMPT, str(place / "state"), *names.values()]
    done = finished(*command, env={**os.environ, "HOME": str(home)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("reader", [OWNER, STRANGER])
def test_only_the_owner_reads_and_lists_its_incident_and_cannot_change_it(place: Path, reader: int) -> None:
    _, names = kept(place)
    own = [names[OWNER]] if reader == OWNER else []
    listed = {"incidents": ["-"], "owners": ["-"], f"owners/{reader}": own or ["-"]}
    assert attempt(place, names, reader) == {"listed": listed, "read": own, "changed": []}


def test_the_group_reads_all_and_changes_nothing(place: Path) -> None:
    _, names = kept(place)
    found = attempt(place, names, STRANGER, ON_CALL)
    assert found["read"] == list(names.values())
    assert found["changed"] == []
    assert found["listed"] == {
        "incidents": sorted(names.values()),
        "owners": ["-"],
        f"owners/{STRANGER}": ["-"],
    }


def test_without_a_group_only_the_owner_reads(place: Path) -> None:
    _, names = kept(place, group="")
    assert attempt(place, names, STRANGER, ON_CALL)["read"] == []
    assert attempt(place, names, OWNER)["read"] == [names[OWNER]]


def test_a_store_that_is_not_shared_stays_ours(place: Path) -> None:
    """Use a store that is not shared, as `hangwatch dump -o` makes it as root."""
    store = Store(place / "state")
    store.make_writable()
    names: dict[int | None, str] = {OWNER: store.save(incident_of(OWNER, "x"), FILES).name}
    found = attempt(place, names, OWNER)
    assert (found["read"], found["changed"]) == ([], [])
    assert not (place / "state/owners").exists()


def test_what_is_removed_leaves_the_owners_list(place: Path) -> None:
    _, names = kept(place)
    store = Store(place / "state", config.Store(max_incidents=1), shared=True)
    store.make_writable()
    assert len(store.prune()) == len(names) - 1
    assert attempt(place, names, OWNER)["listed"][f"owners/{OWNER}"] == ["-"]  # type: ignore[index]
    assert not (place / "state/owners" / str(OWNER)).exists()


def test_two_jobs_of_one_name_and_second_never_share_a_folder(place: Path) -> None:
    """Use a folder per owner: a folder keeps its dumps, so the second owner could read those of the first."""
    store = Store(place / "state", shared=True)
    store.make_writable()
    first, second = (incident_of(uid, "100", f"key-{uid}") for uid in (OWNER, OTHER_OWNER))
    assert store.save(first, FILES) != store.save(second, FILES)


@pytest.mark.parametrize("uid", [0, 65534])
def test_no_list_names_root_or_the_number_of_the_unknown(place: Path, uid: int) -> None:
    store = Store(place / "state", shared=True)
    store.make_writable()
    folder = store.save(incident_of(uid, "x"), FILES)
    assert "system.posix_acl_access" not in os.listxattr(folder)
    assert not (place / "state/owners").exists()


@pytest.mark.parametrize(
    ("uid", "groups", "sees"), [(OWNER, (), [OWNER]), (STRANGER, (), []), (STRANGER, (ON_CALL,), [OWNER, OTHER_OWNER])]
)
def test_the_commands_show_what_may_be_read(place: Path, uid: int, groups: tuple[int, ...], sees: list[int]) -> None:
    _, names = kept(place)
    config = write_config(place, place / "state")
    as_this = [*as_user(uid, groups=groups), *HANGWATCH]

    def hangwatch(*arguments: str) -> Finished:
        command = [*as_this, *arguments, "--config", str(config)]
        return finished(*command, cwd="/")

    listed = hangwatch("incidents", "--json")
    assert listed.returncode == 0, listed.stderr
    folders = {row["folder"]: row["problem"] for row in json.loads(listed.stdout)["incidents"]}
    assert {names[owner] for owner in sees} <= folders.keys()
    assert len(folders) == (len(names) if groups else len(sees))
    assert not any(folders.values())
    shown = hangwatch("incidents")
    assert ("no incidents that you may read" in shown.stdout) == (not sees)
    for owner in (OWNER, OTHER_OWNER):
        report = hangwatch("report", names[owner])
        assert report.returncode == (0 if owner in sees else 2), report.stderr
        assert ("ank 7" in report.stdout) == (owner in sees)
    # A page gives the job's key. The owner of the job needs only the id.
    own = hangwatch("report", "--job", f"job-of-{OWNER}")
    assert (own.returncode == 0, "ank 7" in own.stdout) == (OWNER in sees,) * 2, own.stderr


def test_where_there_are_no_lists_the_group_alone_reads(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Use ramfs, which has no access control lists."""
    (place / "state").mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(place / "state")], check=True)
    try:
        with caplog.at_level(logging.WARNING):
            _, names = kept(place)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "job owners cannot read their incidents: no access control list: Operation not supported" in said
        assert attempt(place, names, OWNER)["read"] == []
        found = attempt(place, names, STRANGER, ON_CALL)
        assert (found["read"], found["changed"]) == (list(names.values()), [])
    finally:
        subprocess.run(["umount", str(place / "state")], check=True)


def test_unknown_group_is_logged_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, names = kept(place, group="nobody-has-this-group")
    assert [record.getMessage().count("no such group") for record in caplog.records] == [1]
    assert attempt(place, names, OWNER)["read"] == [names[OWNER]]


READ_ALL = """
import json, os, sys
found = {}
for parent, _, names in os.walk(sys.argv[1]):  # silently skips folders that it may not list
    for name in names:
        try:
            found[name] = open(os.path.join(parent, name)).read()
        except PermissionError:
            pass
print(json.dumps(found))
"""


def read_as(uid: int, folder: Path) -> dict[str, str]:
    """Return the texts that a process of this user can read in a folder, by file name."""
    return json.loads(finished(*as_user(uid), sys.executable, "-c", READ_ALL, folder, check=True).stdout)


def test_incident_of_daemon_is_readable_by_its_owner_only(place: Path, tmp_path: Path, fake_driver: FakeDriver) -> None:
    with targets.rank_of_user(OWNER, tmp_path, "his") as pid:
        fake_driver.write([*h100(1), f"gpu 0 pids {pid}"])
        with RealDaemon(place, fake_driver.environ) as daemon:
            daemon.wait_for_state("his", "training")
            fake_driver.add("gpu all power_watts 100")
            daemon.wait_for_state("his", "hung")
            (folder,) = wait_for(lambda: list((place / "state/incidents").glob("2*-his-*")), "the incident")
            wait_for((folder / "incident.json").exists, "the incident in place of its marker")
            read = read_as(OWNER, folder)
            assert read_as(STRANGER, folder) == {}
            assert not any(folder.name in text for text in read_as(STRANGER, place / "state").values())
    assert {"incident.json", "report.txt", "report.html"} <= read.keys()
    assert json.loads(read["incident.json"])["job"]["uid"] == OWNER
    assert f"train_of_{OWNER}" in read["report.txt"]
    assert any(f"train_of_{OWNER}" in text for name, text in read.items() if name.startswith("rank"))
