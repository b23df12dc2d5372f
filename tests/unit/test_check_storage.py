"""storage: every network file system responds. A dead mount (real FUSE) blocks no other check."""

import errno
import marshal
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hangwatch.checks import storage
from hangwatch.checks.storage import INCIDENTS, Answer, Sample, Settings, judge
from hangwatch.model import Fault
from hangwatch.probes.base import filesystems
from hangwatch.probes.base.filesystems import FilesystemReader, Mount, Space
from tests import pci_tree
from tests.conftest import wait_for
from tests.dead_mount import dead_mount, tmpfs
from tests.node_tree import Checked, NodeTree, expect, job, rank, run, status_and_reason, values

PLAIN = "22 1 0:21 / /proc rw - proc proc rw\n25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
MOUNTINFO = "{number} 25 0:{number} / {path} rw,relatime shared:9 - {type} {source} rw,vers=4.2\n"


@pytest.fixture
def tree(tree: NodeTree) -> NodeTree:
    tree.write("proc/self/mountinfo", PLAIN)
    return tree


def mounted(tree: NodeTree, *mounts: tuple[str, str], view: str = "self") -> None:
    """Add network mounts, given as (path below the tree, file system), to the table of `build_status`."""
    lines = []
    for number, (name, kind) in enumerate(mounts, 60):
        folder = tree.root / name
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder) if view == "self" else f"/{name}"
        lines.append(MOUNTINFO.format(number=number, path=path.replace(" ", "\\040"), type=kind, source="server:/x"))
    tree.write(f"proc/{view}/mountinfo", PLAIN + "".join(lines))


def space(seconds: float = 0.01, size: int = 1 << 40, available: int = 1 << 39, read_only: bool = False) -> Space:
    return Space(size_bytes=size, available_bytes=available, seconds=seconds, read_only=read_only)


def failed(reason: str, detail: str = "", kind: str = "nfs") -> Answer:
    return Answer(mount="/d", type=kind, fault=Fault(subject="/d", reason=reason, detail=detail))


def verdict(answer: Answer, **settings: Any) -> tuple[str, str]:
    found = judge((Sample(answers=(answer,)),), Settings(**settings))
    return found.status.name, found.reason


def test_network_file_systems_that_answer(tree: NodeTree) -> None:
    mounted(tree, ("data", "nfs4"), ("scratch and more", "lustre"))
    result = expect(("OK", "StorageAnswers"), "storage", tree.node())
    assert "2 network file systems mounted" in result.verdict.message
    answers = values(result, "storage_answers")
    assert answers == {(str(tree.root / "data"), "nfs4"): 1, (str(tree.root / "scratch and more"), "lustre"): 1}
    assert values(result, "storage_size_bytes")[str(tree.root / "data"), "nfs4"] > 0


def test_space_for_incidents_counts_even_before_the_folder_exists(tree: NodeTree) -> None:
    result = expect(("OK", "StorageAnswers"), "storage", tree.node(state_directory=tree.root / "var/lib/hangwatch"))
    assert values(result, "storage_available_bytes")[str(tree.root / "var/lib/hangwatch"), INCIDENTS] > 0


@pytest.mark.parametrize("change", ["unplugged", "dead"])
def test_an_nvme_disk_that_is_no_longer_there(tree: NodeTree, change: str) -> None:
    storage_check = Checked("storage")
    for number in range(2):
        pci_tree.add_device(tree.sys, "pci0000:80", f"0000:8{number}:00.0", vendor=0x144D)
        tree.write(f"sys/class/nvme/nvme{number}/state", "live\n")
        (tree.sys / f"class/nvme/nvme{number}/device").symlink_to(tree.sys / f"bus/pci/devices/0000:8{number}:00.0")
    result = storage_check.expect(("OK", "StorageAnswers"), tree.node())
    assert "2 NVMe disks present" in result.verdict.message
    if change == "dead":
        tree.write("sys/class/nvme/nvme1/state", "dead\n")
    else:
        shutil.rmtree(tree.sys / "class/nvme/nvme1")
    result = storage_check.expect(("CRITICAL", "Vanished"), tree.node())
    assert result.verdict.message == "no longer present: NVMe disk nvme1 at 0000:81:00.0"


def test_a_mount_that_is_gone_from_under_its_path(tree: NodeTree) -> None:
    mounted(tree, ("data", "nfs4"))
    (tree.root / "data").rmdir()
    result = expect(("CRITICAL", "StorageBroken"), "storage", tree.node())
    assert "No such file" in result.verdict.message


def error_answer(number: int) -> bytes:
    """Return what the child writes if the first path cannot be read."""
    answer = marshal.dumps((0, {"errno": number}))
    return len(answer).to_bytes(4, sys.byteorder) + answer


def test_mount_taken_away_while_it_is_asked_is_not_broken(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(tree, ("data", "nfs4"))
    mounts = str(tree.proc / "self" / "mountinfo")
    gives_answer = f"import os\nos.write(1, {error_answer(errno.ENOTCONN)!r})\n"
    child = tree.write("child.py", f"open({mounts!r}, 'w').write({PLAIN!r})\n{gives_answer}")
    monkeypatch.setattr(filesystems, "CHILD", child)
    expect(("OK", "NotPresent"), "storage", tree.node())


def test_the_mounts_of_a_job_in_its_own_namespace_are_asked_through_its_root(tree: NodeTree) -> None:
    tree.process(10)
    mounted(tree, ("data", "nfs4"), view="10")
    (tree.proc / "10" / "root").symlink_to(tree.root)
    result = expect(("OK", "StorageAnswers"), "storage", tree.node(job(rank(10))))
    assert values(result, "storage_answers") == {("/data", "nfs4"): 1}


def test_a_rank_that_ends_while_its_mounts_are_asked_breaks_no_storage(tree: NodeTree) -> None:
    tree.process(10)
    mounted(tree, ("data", "nfs4"), view="10")
    expect(("OK", "NotPresent"), "storage", tree.node(job(rank(10))))


def test_a_mount_that_only_a_rank_sees_is_not_for_this_node_to_unmount(tree: NodeTree) -> None:
    stale = Fault(subject="/data", reason="CannotRead", detail="Stale file handle")
    found = judge((Sample(answers=(Answer(mount="/data", type="nfs", seen_by=10, fault=stale),)),), Settings())
    assert "/data (nfs) in the mount namespace of pid 10" in found.message
    assert "umount" not in found.remedy


def test_a_slow_server_is_nothing_to_unmount() -> None:
    found = judge((Sample(answers=(Answer(mount="/d", type="nfs", space=space(seconds=2.0)),)),), Settings())
    assert "umount" not in found.remedy and "nfsstat" in found.remedy


def test_slow_state_directory_is_a_warning(tree: NodeTree) -> None:
    expect(("WARNING", "StorageSlow"), "storage", tree.node(state_directory=tree.root), slow_seconds=0.0)


def test_a_child_that_cannot_be_started_is_unknown(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(tree, ("data", "nfs4"))
    monkeypatch.setattr(filesystems.sys, "executable", str(tree.write("python", "not executable")))
    expect(("UNKNOWN", "OnlookerNotStarted"), "storage", tree.node())
    expect(("UNKNOWN", "OnlookerNotStarted"), "shared_memory", tree.node())


def test_a_real_read_only_file_system_says_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "image", "1m,ro") as image:
        answers = FilesystemReader().read_space([str(image), str(tmp_path)], 5.0).values()
        assert [answer.read_only for answer in answers if isinstance(answer, Space)] == [True, False]


def test_one_file_system_mounted_often_is_asked_once(tree: NodeTree) -> None:
    mounted(tree, ("data", "nfs4"))
    text = (tree.proc / "self" / "mountinfo").read_text()
    (tree.proc / "self" / "mountinfo").write_text(text + text.splitlines()[-1] + "\n")
    assert len(values(run("storage", tree.node()), "storage_answers")) == 1


def test_what_is_not_asked(tree: NodeTree) -> None:
    mounted(tree, ("lxcfs", "fuse.lxcfs"), ("auto", "autofs"), ("run", "tmpfs"), ("ours", "nfs"))
    assert set(values(run("storage", tree.node()), "storage_answers")) == {(str(tree.root / "ours"), "nfs")}
    expect(("OK", "NotPresent"), "storage", tree.node(), ignored_mounts=(str(tree.root / "ours"),))
    also = run("storage", tree.node(), also_types=("tmpfs",))
    assert (str(tree.root / "run"), "tmpfs") in values(also, "storage_answers")


def test_a_file_by_request_is_judged_with_its_mount(tree: NodeTree) -> None:
    """Look at real files below mounts that only the tree's mount table has, also in the namespace of a rank."""
    mounted(tree, ("data", "nfs4"), view="7")
    (tree.root / "proc/7/root").symlink_to(tree.root)
    (tree.root / "data/shard-3").write_text("x")
    os.mkfifo(tree.root / "data/fifo")
    by_rank = f"{tree.proc}/7/root/data"

    def judged(path: str) -> str:
        found = storage.judge_file(path, tree.node(), Settings())
        return f"{found.status.name} {found.reason} {found.message.replace(str(tree.root), '')}"

    on = "nfs4 of server:/x, mounted at /data"
    assert judged(f"{by_rank}/shard-3") == f"OK FileAnswers /proc/7/root/data/shard-3 is a regular file on {on}"
    assert judged(f"{by_rank}/fifo") == f"WARNING FileIsFifo /proc/7/root/data/fifo is a FIFO on {on}"
    gone = f"CRITICAL Missing /proc/7/root/data/gone: No such file or directory; it is on {on}"
    assert judged(f"{by_rank}/gone") == gone
    for name, target in (("near", "../data/fifo"), ("far", "/data/fifo"), ("loop", "loop")):
        (tree.root / "data" / name).symlink_to(target)
    for name in ("near", "far"):
        linked = f"/proc/7/root/data/{name} is a link: /proc/7/root/data/fifo is a FIFO on {on}"
        assert judged(f"{by_rank}/{name}") == f"WARNING FileIsFifo {linked}"
    assert judged(f"{by_rank}/loop").endswith(f"/proc/7/root/data/loop is a symbolic link on {on}")
    remedy = storage.judge_file(f"{by_rank}/gone", tree.node(), Settings()).remedy
    assert "umount" not in remedy and "/proc/PID/root/FILE" in remedy
    local = f"{tree.root}/data"
    assert judged(local) == "OK FileAnswers /data is a folder on /dev/sda1, ext4, local, mounted at /"
    assert judged(f"{tree.proc}/8/root/data").startswith("UNKNOWN MountsUnread")


def test_a_file_on_a_silent_mount_is_not_touched(tree: NodeTree) -> None:
    (tree.root / "dead").mkdir()
    with dead_mount(tree.root / "dead"):
        rows = ((60, tree.root / "dead", "nfs4"), (61, tree.root, "ext4"))
        lines = (MOUNTINFO.format(number=number, path=at, type=kind, source="s:/") for number, at, kind in rows)
        tree.write("proc/self/mountinfo", "\n".join(lines))
        (tree.root / "link").symlink_to("dead/shard")
        for name in ("dead/shard", "link"):
            assert storage.judge_file(f"{tree.root}/{name}", tree.node(), Settings()).reason == "StorageHung"


def test_messages_and_the_table_give_sizes_in_words() -> None:
    full = Answer(mount="/d", type="nfs", space=space(size=200 << 30, available=1 << 30))
    hung = failed("NoAnswer")
    assert "has 0.5% left" in judge((Sample(answers=(full,)),), Settings()).message
    rows = list(storage.table(Sample(answers=(full, hung))))
    assert rows[1:] == [("/d", "nfs", "0.0100", "1.0", "200.0"), ("/d", "nfs", "NoAnswer", "", "")]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(mount="/d", type="nfs", space=space(seconds=0.9)), ("OK", "StorageAnswers")),
        (Answer(mount="/d", type="nfs", space=space(seconds=1.1)), ("WARNING", "StorageSlow")),
        (Answer(mount="/d", type="nfs", space=space(available=1)), ("WARNING", "StorageFull")),
        (Answer(mount="/d", type="nfs", space=space(size=0, available=0)), ("OK", "StorageAnswers")),
        (Answer("/i", "fuse.squashfuse", space=space(size=9, available=0, read_only=True)), ("OK", "StorageAnswers")),
        (Answer(mount="/v", type=INCIDENTS, space=space(available=1 << 20)), ("WARNING", "IncidentSpaceLow")),
        (failed("NoAnswer"), ("CRITICAL", "StorageHung")),
        (failed("CannotRead", "Stale file handle"), ("CRITICAL", "StorageBroken")),
        (failed("CannotRead", "I/O error", INCIDENTS), ("WARNING", "IncidentsBlocked")),
    ],
)
def test_what_answers_mean(answer: Answer, expected: tuple[str, str]) -> None:
    assert verdict(answer) == expected


def test_dead_mount_is_hung_and_blocks_no_other_reader(tree: NodeTree) -> None:
    onlookers = FilesystemReader()
    with dead_mount(tree.root / "dead") as dead:
        # Only this mount is listed: other mounts of this machine may change at any time.
        rows = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
        tree.write("proc/self/mountinfo", PLAIN + "".join(row for row in rows if row.split()[4] == str(dead)))
        node = tree.node(filesystems=onlookers)
        started = time.monotonic()
        result = run("storage", node, deadline_seconds=0.5)
        assert time.monotonic() - started < 30
        assert status_and_reason(result) == ("CRITICAL", "StorageHung")
        assert str(dead) in result.verdict.message
        assert values(result, "storage_answers")[str(dead), "fuse.deadfs"] == 0
        expect(("CRITICAL", "StorageHung"), "storage", node, deadline_seconds=0.5)
        assert onlookers.abandoned.count() <= 1, "it is not asked again while a child still hangs in it"
    wait_for(lambda: onlookers.abandoned.count() == 0, "the children to end once the mount is gone")


def test_the_living_answer_beside_the_dead(tmp_path: Path) -> None:
    onlookers = FilesystemReader()
    with dead_mount(tmp_path / "dead") as dead:
        answers = onlookers.read_space(["/", str(dead), "/proc"], 0.5)
        assert isinstance(answers["/"], Space) and isinstance(answers["/proc"], Space)
        fault = answers[str(dead)]
        assert isinstance(fault, Fault) and fault.reason == "NoAnswer"
        listed = onlookers.list_names([str(dead), str(tmp_path)], 0.5)
        assert listed[str(tmp_path)] == ("dead",)
    wait_for(lambda: onlookers.abandoned.count() == 0, "the children to end once the mount is gone")


def test_a_child_that_the_kernel_holds_is_left_behind_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon a child that SIGKILL does not end, as happens with a hard NFS mount. Start no second child."""
    stubborn = tmp_path / "child.py"
    stubborn.write_text("import os, time\nos.close(1)\ntime.sleep(600)\n")
    monkeypatch.setattr(filesystems, "CHILD", stubborn)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    onlookers = FilesystemReader()
    for _ in range(3):
        answer = onlookers.read_space(["/data"], 0.1)["/data"]
        assert isinstance(answer, Fault) and answer.reason == "NoAnswer"
    assert onlookers.abandoned.count() == 1
    monkeypatch.undo()
    assert isinstance(onlookers.read_space(["/"], 5.0)["/"], Space), "other paths are still asked"
    for one in onlookers.abandoned._abandoned:
        assert one.child.end(10.0)
    assert onlookers.abandoned.count() == 0
    assert isinstance(onlookers.read_space(["/"], 5.0)["/"], Space)


def test_child_that_ends_within_answer_has_given_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child.py"
    whole = error_answer(errno.ESTALE)
    child.write_text(f"import os\nos.write(1, {whole + whole[:-1]!r})\n")
    monkeypatch.setattr(filesystems, "CHILD", child)
    answers = FilesystemReader().read_space(["/data", "/more"], 1.0)
    reasons = [(fault.reason, fault.detail) for fault in answers.values() if isinstance(fault, Fault)]
    assert reasons == [("CannotRead", "/data: Stale file handle"), ("NoAnswer", "/more does not respond")]


def test_mountinfo_as_the_kernel_writes_it() -> None:
    text = PLAIN + "70 25 0:52 /exp /mnt/a\\040b rw shared:1 master:2 - nfs4 s:/e\\134x rw\n" + "garbage\n\n"
    assert filesystems.parse_mounts(text)[-1] == Mount(
        path="/mnt/a b", type="nfs4", source="s:/e\\x", device="0:52", id="70"
    )


SERVED = ("nfs", "nfs4", "lustre", "ceph", "fuse.ceph", "fuse.sshfs", "cifs", "gpfs", "fuse")


@pytest.mark.parametrize("kind", [*SERVED, "ext4", "tmpfs", "overlay", "fuse.lxcfs", "fusectl", "autofs", "cgroup2"])
def test_types_that_others_serve(kind: str) -> None:
    assert filesystems.is_network(Mount(path="/", type=kind, source="", device="")) == (kind in SERVED)


def test_this_machine() -> None:
    for pid in "self", os.getpid():
        found = filesystems.mounts(Path("/proc"), pid)
        assert isinstance(found, tuple) and any(mount.path == "/proc" for mount in found)
