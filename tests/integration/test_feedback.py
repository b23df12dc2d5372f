"""Feedback on verdicts: `hangwatch verdict` and `incidents --json`."""

import json
import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from hangwatch import store
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import FEEDBACK_FILE, INCIDENT_FILE, MARKER_FILE
from hangwatch.model import Feedback
from hangwatch.store import Store
from tests import samples, schemas
from tests.commands import HANGWATCH, Finished, finished, hangwatch
from tests.other_users import as_user, needs_root

NOBODY, OWNER = 65534, 4242


class Node:
    """A state directory with the incidents of samples. `folders` are their folder names, by the name of the sample."""

    def __init__(self, root: Path) -> None:
        self.root, self.config = root, root / "hangwatch.toml"
        self.config.write_text(f'[store]\ndirectory = "{root}"\n[socket]\npath = ""\n')
        writable = store.open_writable(root)
        self.folders = {
            name: writable.save(replace(made(), opened_unix_seconds=samples.OPENED + 60 * number), {}).name
            for number, (name, made) in enumerate(samples.SAMPLES.items())
        }

    def folder(self, name: str) -> Path:
        return self.root / "incidents" / self.folders[name]

    def run(self, *arguments: str, before: tuple[str, ...] = ()) -> Finished:
        command = [*arguments, "--config", str(self.config)]
        if not before:
            return hangwatch(*command)
        command = [*before, *HANGWATCH, *command]
        return finished(*command)

    def judge(self, name: str, *arguments: str) -> None:
        done = self.run("verdict", self.folders[name], *arguments)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def node(folder_for_all: Path) -> Iterator[Node]:
    yield Node(folder_for_all)


def test_feedback_is_kept_beside_the_incident_and_shown(node: Node) -> None:
    node.judge("loader", "--right", "--cause", "an NFS server\x1b rebooted")
    folder = node.folder("loader")
    assert stat.S_IMODE((folder / FEEDBACK_FILE).stat().st_mode) == 0o600
    store.open_writable(node.root).save(samples.loader_hang(), {})
    report = " ".join(node.run("report", str(folder)).stdout.split())
    assert "Feedback the verdict was right; cause: an NFS server\\x1b rebooted; given 20" in report
    page = node.root / "page.html"
    node.run("report", node.folders["loader"], "--html", str(page))
    assert "an NFS server" in page.read_text() and "<dt>Feedback</dt>" in page.read_text()
    listed = json.loads(node.run("incidents", "--json").stdout)
    jsonschema.Draft202012Validator(json.loads(schemas.path("incidents").read_text())).validate(listed)
    given = {row["folder"]: row["feedback"] for row in listed["incidents"]}
    assert given[folder.name]["is_right"] and given[node.folders["blocked"]] is None
    assert "feedback.json" not in hangwatch("merge", str(folder)).stderr

    node.judge("loader", "--wrong", "--culprit", "2")
    report = " ".join(node.run("report", node.folders["loader"]).stdout.split())
    assert "the verdict was wrong, the culprit is rank 2 (gpu-a12" in report and "NFS" not in report


def test_contradictory_feedback_is_refused_and_changes_nothing(node: Node) -> None:
    node.judge("loader", "--right")
    before = (node.folder("loader") / FEEDBACK_FILE).read_bytes()
    for arguments, answer in (
        ([], "give either --right or --wrong"),
        (["--right", "--wrong"], "give either --right or --wrong"),
        (["--right", "--culprit", "2"], "--culprit needs --wrong"),
        (["--wrong", "--culprit", "7"], "is the rank that the verdict names\n  type --right"),
        (["--wrong", "--culprit", "8"], "the incident has no such rank\n  its ranks: 0-7"),
        (["--right", "--cause", "x" * 501], "must be at most 500"),
    ):
        done = node.run("verdict", node.folders["loader"], *arguments)
        assert (done.returncode, done.stdout) == (2, "") and answer in done.stderr
        assert (node.folder("loader") / FEEDBACK_FILE).read_bytes() == before


def test_feedback_needs_an_incident_that_can_be_read(node: Node, tmp_path: Path) -> None:
    assert "matches no incident" in node.run("verdict", "nonsense", "--right").stderr
    (node.folder("blocked") / INCIDENT_FILE).write_text("{")
    broken = node.run("verdict", node.folders["blocked"], "--right")
    assert (broken.returncode, "is truncated or not an incident" in broken.stderr) == (2, True)
    (node.folder("blocked") / INCIDENT_FILE).unlink()
    (node.folder("blocked") / MARKER_FILE).write_bytes(incident_file.encode_marker(samples.blocked_in_kernel()))
    marked = node.run("verdict", node.folders["blocked"], "--right")
    assert (marked.returncode, "ended before it could write more" in marked.stderr) == (2, True)
    node.folder("exited").rename(tmp_path / "elsewhere")
    node.folder("exited").symlink_to(tmp_path / "elsewhere")
    linked = node.run("verdict", node.folders["exited"], "--right")
    assert (linked.returncode, "does not follow links" in linked.stderr) == (2, True)
    assert not (tmp_path / "elsewhere" / FEEDBACK_FILE).exists()
    target = tmp_path / "target"
    target.write_text("mine")
    (node.folder("loader") / FEEDBACK_FILE).symlink_to(target)
    assert "Feedback" not in node.run("report", node.folders["loader"]).stdout
    node.judge("loader", "--right")
    assert target.read_text() == "mine" and not (node.folder("loader") / FEEDBACK_FILE).is_symlink()


@needs_root
def test_only_root_and_the_owner_of_the_store_give_feedback(node: Node) -> None:
    refused = node.run("verdict", node.folders["loader"], "--right", before=tuple(as_user(NOBODY)))
    assert (refused.returncode, refused.stdout) == (2, "")
    line = shlex.join(["sudo", "hangwatch", "verdict", node.folders["loader"], "--right", "--config", str(node.config)])
    assert f'[socket] path = "": the user socket is turned off\n  type: {line}\n' in refused.stderr
    assert not (node.folder("loader") / FEEDBACK_FILE).exists()
    for path in (node.root / "incidents", *(node.root / "incidents").rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    assert node.run("verdict", node.folders["loader"], "--right").returncode == 0
    given = node.folder("loader") / FEEDBACK_FILE
    assert given.stat().st_uid == NOBODY and json.loads(given.read_bytes())["by_uid"] == 0


@needs_root
def test_readers_of_an_incident_read_its_feedback(folder_for_all: Path) -> None:
    shared = Store(folder_for_all, shared=True)
    shared.make_writable()
    loader = samples.loader_hang()
    folder = shared.save(replace(loader, job=replace(loader.job, uid=OWNER)), {})
    given = Feedback(is_right=True, verdict="OutsideCollective", named=(), given_unix_seconds=0.0, by_uid=0)
    Store(folder_for_all).save_feedback(folder.name, given)
    for uid, can_read in ((OWNER, True), (OWNER + 1, False)):
        read = subprocess.run([*as_user(uid), "cat", str(folder / FEEDBACK_FILE)], capture_output=True, check=False)
        assert (read.returncode == 0, b"OutsideCollective" in read.stdout) == (can_read, can_read)


def test_feedback_stays_with_the_verdict_that_it_is_about(node: Node) -> None:
    node.judge("loader", "--wrong", "--culprit", "2")
    later = replace(samples.loader_hang(), verdict=samples.mismatch().verdict)
    store.open_writable(node.root).save(later, {})
    listed = json.loads(node.run("incidents", "--json").stdout)["incidents"]
    ((verdict, given),) = [(row["verdict"], row["feedback"]) for row in listed if row["feedback"]]
    assert (verdict, given["verdict"], given["is_right"]) == ("Mismatch", "OutsideCollective", False)
    report = " ".join(node.run("report", node.folders["loader"]).stdout.split())
    assert "about an earlier verdict: OutsideCollective, which named rank 7 (gpu-a12" in report
