"""Real torchrun ranks that raise, segfault or end normally, with cores, and artifacts of hostile owners."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hangwatch import crash
from hangwatch.capture.job_scan import JobScan
from hangwatch.crash import collection
from hangwatch.model import ENDED_STATES, EndedProcess, Job, Process, ProcessId, Rank, Verdict
from hangwatch.probes.base import procfs
from hangwatch.probes.node import kmsg
from hangwatch.probes.process import crash_artifacts, crash_artifacts_child
from hangwatch.state import steps
from hangwatch.state.board import Snapshot
from tests.commands import first_line, spawn
from tests.conftest import open_folder, wait_for
from tests.integration import targets
from tests.other_users import as_user, needs_mounts, needs_root
from tests.real_daemon import RealDaemon, TorchJob

RANKS = 2

OWNER = 61234
INITIAL = Path("pid:[4026531836]")  # the initial pid namespace, include/linux/proc_ns.h


@contextlib.contextmanager
def crashing(folder: Path, how: str, prefix: Sequence[str] = ()) -> Iterator[tuple[TorchJob, list[int]]]:
    """Start a job that waits for the file `go`. Yield the job and the pids of its ranks."""
    folder.mkdir()
    os.chown(folder, folder.parent.stat().st_uid, folder.parent.stat().st_gid)
    files = [folder / f"pid-{rank}" for rank in range(RANKS)]
    with TorchJob(folder, "crashes.py", RANKS, [how], prefix=prefix) as job:
        try:
            wait_for(lambda: all(file.exists() for file in files) or job.process.poll(), "the ranks to start", 150)
            assert job.process.poll() is None, (folder / "job.log").read_text()
            yield job, [int(file.read_text()) for file in files]
        finally:
            for path in folder.glob("pid-?"):  # torchrun starts each rank in its own session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


class Watch:
    """The daemon's scans of one job: the first at once, then one with each call."""

    def __init__(self, pids: list[int]) -> None:
        self.last_seen = crash_artifacts.RankSnapshots()
        scan = JobScan(note_ranks=self.last_seen.note)
        self._pids, self._scan, self._snapshot = set(pids), scan, Snapshot()
        self.dead: list[Job] = []
        self.discover()

    def discover(self) -> list[Job]:
        found = self._scan.find(None, "here").jobs
        jobs = [job for job in found if self._pids & {rank.id.pid for rank in job.ranks}]
        self._snapshot, actions = steps.record_scan(self._snapshot, jobs, time.monotonic(), time.time())
        self.dead += [action.job for action in actions if isinstance(action, steps.ReadCrashArtifacts)]
        return jobs

    def verdict(self, kernel_log: Path = Path("/dev/kmsg"), proc_root: Path = procfs.PROC) -> Verdict | None:
        """Wait until all ranks are gone. Return the verdict from their crash artifacts."""
        wait_for(lambda: not self.discover(), "the job to end", 120)
        job = self.dead[-1]
        assert len(job.ended) == RANKS
        return crash.judge(
            job, crash.collect_artifacts(job, "here", self.last_seen, proc_root=proc_root, kernel_log_path=kernel_log)
        )


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_rank_that_raises_is_the_root_cause(tmp_path: Path) -> None:
    """Expect an incident and a metric from the daemon, but no page. The errors of the other ranks are only evidence."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    with crashing(tmp_path / "job", "raises") as (job, _), RealDaemon(tmp_path / "hw", environ) as daemon:
        here = {"job_id": job.run_id}
        wait_for(lambda: [n for _, n in daemon.samples("hangwatch_job_ranks", **here)] == [RANKS], "its ranks")
        (tmp_path / "job" / "go").touch()
        ((labels, _),) = wait_for(
            lambda: [one for one in daemon.samples("hangwatch_job_crash_info", **here) if one[0]["named"]], "the crash"
        )
        assert "ValueError, in main (crashes.py:" in labels["summary"]
        assert daemon.samples("hangwatch_job_page", **here)[0][1] == 0
        assert daemon.samples("hangwatch_job_crashes_total")[0][1] >= 1
        wait_for(lambda: daemon.job_state(job.run_id) == "ended", "the end of the job")
        file = daemon.state / "incidents" / labels["incident"] / "incident.json"
        wait_for(file.exists, "its incident")
        incident = json.loads(file.read_text())
    verdict = incident["verdict"]
    assert verdict["kind"] == "Crashed"
    assert [rank["rank"] for rank in verdict["named"]] == [1]
    assert "ValueError, in main (crashes.py:" in verdict["message"]
    told = "ValueError: the shard of rank 1 is empty, in main (crashes.py:"
    assert any(told in vote["message"] for vote in verdict["evidence"])
    assert incident["closed_unix_seconds"] is not None


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_rank_that_segfaults_is_named_by_the_kernel(tmp_path: Path) -> None:
    """Name the rank by the line in the kernel's log. It has no error file, but the other ranks have one."""
    folder = tmp_path / "job"
    with crashing(folder, "segfaults") as (_, pids):
        watch = Watch(pids)
        (folder / "go").touch()
        wait_for(lambda: (procfs.read_state(pids[1]) or (None, "X"))[1] in ENDED_STATES, "rank 1 to die")
        log = kernel_log_with_segfault_of(pids[1], tmp_path)
        wait_for(lambda: "Root Cause" in (folder / "job.log").read_text(), "the last words of torchrun", 120)
        verdict = watch.verdict(log, counted_as_the_kernel_does(tmp_path))
    assert [rank.rank for rank in verdict.named] == [1], verdict.message
    assert "segfault in libc" in verdict.message and verdict.confidence.value == "high"
    assert any(vote.kind == "kernel_log" and f"[{pids[1]}]: segfault at 0" in vote.message for vote in verdict.evidence)
    assert any(vote.kind == "exit" and "SIGSEGV, by its launcher's log" in vote.message for vote in verdict.evidence)


@needs_root
@pytest.mark.machines
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_real_rank_of_another_user_segfaults_and_its_core_shows_where(folder_of_owner: Path, tmp_path: Path) -> None:
    """Judge while other ranks still run.

    Evidence is the line in the kernel's log, and the core if there is one. torchrun is stopped, because it would end
    the other ranks after half a minute.
    """
    folder = folder_of_owner / "job"
    prefix = ["prlimit", "--core=unlimited", "env", f"--chdir={folder}", *as_user(OWNER)]
    with crashing(folder, "lingers", prefix) as (torchrun, pids):
        watch = Watch(pids)
        targets.stop(torchrun.process.pid)
        (folder / "go").touch()
        wait_for(lambda: watch.discover() and watch.dead, "rank 1 to be found dead", 120)
        job = watch.dead[0]
        assert [one.rank for one in job.ended] == [1]
        log, root = kernel_log_with_segfault_of(pids[1], tmp_path), counted_as_the_kernel_does(folder_of_owner)
        verdict = crash.judge(
            job, crash.collect_artifacts(job, "here", watch.last_seen, proc_root=root, kernel_log_path=log)
        )
        without = crash.judge(job, crash.collect_artifacts(job, "here", watch.last_seen, cores=False, proc_root=root))
    assert without is not None and "core" not in {vote.kind for vote in without.evidence}
    assert ([rank.rank for rank in verdict.named], verdict.confidence.value) == ([1], "high"), verdict.message
    assert "segfault in libc" in verdict.message and "1 rank still running" in verdict.message
    told = {vote.kind: vote.message for vote in verdict.evidence}
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        assert "cores go to" in told["not_read"]
    else:
        assert re.search("rank 1 .* left a core, .*: gdb shows", told["core"]), told


def counted_as_the_kernel_does(folder: Path) -> Path:
    """Return a fake /proc in the initial pid namespace, like the pids of the kernel's log."""
    if Path("/proc/self/ns/pid").readlink() == INITIAL:
        return Path("/proc")
    (folder / "proc" / "self" / "ns").mkdir(parents=True)
    for place in Path("/proc").iterdir():
        if place.name != "self":
            (folder / "proc" / place.name).symlink_to(place)
    (folder / "proc" / "self" / "ns" / "pid").symlink_to(INITIAL)
    (folder / "proc" / "self" / "ns" / "mnt").symlink_to(Path("/proc/self/ns/mnt").readlink())
    return folder / "proc"


def kernel_log_with_segfault_of(pid: int, folder: Path) -> Path:
    """Return /dev/kmsg if it has a line about the segfault of `pid`, else a file with such a line."""
    events = kmsg.KernelLog().read(Path("/dev/kmsg"))
    is_ours = Path("/proc/self/ns/pid").readlink() == INITIAL
    if is_ours and isinstance(events, kmsg.KernelEvents) and any(line.subject == str(pid) for line in events.lines):
        return Path("/dev/kmsg")
    line = f"python[{pid}]: segfault at 0 ip 00007fc2 sp 00007ffd error 6 in libc.so.6[164a15,7fc2+156000]"
    (folder / "kmsg").write_text(f"6,1,{int(time.monotonic() * 1e6)},-;{line}\n")
    return folder / "kmsg"


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_job_that_ends_in_order_is_no_crash(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with crashing(folder, "ends") as (_, pids):
        watch = Watch(pids)
        (folder / "go").touch()
        assert watch.verdict() is None


def test_exit_of_a_rank_is_read_from_the_kernel_or_from_the_launchers_log(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with (
        log.open("wb") as file,
        spawn("sleep", 600, stdout=file, stderr=file) as zombie,
        spawn("sleep", 600, stdout=file, stderr=file) as asked,
    ):
        ranks = (zombie, asked)
        known = crash_artifacts.RankSnapshots()
        found = [state[0] for one in ranks if (state := procfs.read_state(one.pid)) is not None]
        known.note([(Process(id=one, parent_pid=1, comm="sleep", state="S", uid=os.geteuid()), "") for one in found])
        for one in ranks:
            one.send_signal(signal.SIGSEGV)
        asked.wait()
        wait_for(lambda: (procfs.read_state(zombie.pid) or (None, ""))[1] == "Z", "a zombie")
        known.note([])
        file.write(b"x" * (1 << 20) + f"\nfailed (exitcode: -7) local_rank: 1 (pid: {asked.pid}) of x\n".encode())
        file.flush()
        ended = [EndedProcess(id=one, rank=n, local_rank=n, gone_unix_seconds=0.0) for n, one in enumerate(found)]
        job = Job(job_id="42", launcher="torchrun", launcher_id=None, ranks=(), ended=tuple(ended))
        left = crash.collect_artifacts(job, "here", known, kernel_log_path=tmp_path / "none")
    first, second = (one.exit for one in left)
    assert first == crash.Exit(-signal.SIGSEGV, by_kernel=True)
    assert second == crash.Exit(-signal.SIGBUS, by_kernel=False, is_first=True)


@needs_root
@needs_mounts
def test_error_file_in_a_container_is_read_through_a_live_process(tmp_path: Path) -> None:
    """Outside the namespace, the path leads to another file, which is not read."""
    folder = tmp_path / "log"
    folder.mkdir()
    file = folder / "error.json"
    told = '{"message": {"message": "ValueError: inside", "extraInfo": {}}}'
    script = 'mount -t tmpfs tmpfs "$1" && printf %s "$2" > "$1/error.json" && echo ready && exec sleep 600'
    with spawn("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", folder, told) as launcher:
        assert first_line(launcher) == "ready"
        with spawn("nsenter", f"--mount=/proc/{launcher.pid}/ns/mnt", "sleep", 600) as rank:
            wait_for(lambda: procfs.read_comm(rank.pid) == "sleep", "the rank")
            memory = crash_artifacts.RankSnapshots()
            known = seen(rank, uid=0, error_file=str(file), memory=memory)
        assert not file.exists()
        root = crash_artifacts.find_root(known.mounts, [launcher.pid])
        assert root == Path(f"/proc/{launcher.pid}/root")
        (found,) = crash_artifacts.read_error_files([(known, root)])
        assert found == crash_artifacts.ErrorFile(text=told)
    assert crash_artifacts.find_root(known.mounts, [launcher.pid]) is None
    ended = (EndedProcess(id=known.id, rank=0, local_rank=0, gone_unix_seconds=0.0),)
    job = Job(job_id="42", launcher="torchrun", launcher_id=None, ranks=(), ended=ended)
    (left,) = crash.collect_artifacts(job, "here", memory, kernel_log_path=tmp_path / "none")
    assert left.refused == (collection._CONTAINER_GONE,)


def test_of_dead_ranks_so_many_are_remembered_and_one_owner_crowds_out_no_other() -> None:
    known = crash_artifacts.RankSnapshots()

    def ranks(first: int, count: int, share: str) -> list[tuple[Process, str]]:
        ids = (ProcessId(pid=999_000_000 + first + n, start_ticks=1) for n in range(count))
        return [(Process(id=one, parent_pid=1, comm="python", state="S"), share) for one in ids]

    few, many = ranks(0, 3, "uid 1"), ranks(10, 3000, "uid 2")
    known.note(few)
    known.note(many)
    known.note([])
    assert all(known.find(process.id) for process, _ in few)
    assert sum(known.find(process.id) is not None for process, _ in many) == crash_artifacts.DEAD_KEPT_OF_A_SHARE
    assert known.find(many[-1][0].id) is not None


def test_first_of_200_ranks_that_die_together_is_named(tmp_path: Path) -> None:
    """One scan finds all of them gone, so it does not show which died first."""
    ranks = [Rank(id=ProcessId(pid=999_000_000 + n, start_ticks=1), rank=n, local_rank=n) for n in range(200)]
    job = Job(job_id="many", launcher="torchrun", launcher_id=None, ranks=tuple(ranks), share="uid 1")
    known, now = crash_artifacts.RankSnapshots(tree_of_ranks(tmp_path, ranks)), time.time()
    known.note([(left_by(rank, tmp_path, "ValueError: late", now), job.share) for rank in ranks])
    left_by(ranks[3], tmp_path, "KeyError: early", now - 30)
    known.note([])
    snapshot, _ = steps.record_scan(Snapshot(), [job], 1.0, now)
    _, actions = steps.record_scan(snapshot, [], 2.0, now)
    (dead,) = (action.job for action in actions if isinstance(action, steps.ReadCrashArtifacts))
    found = crash.collect_artifacts(dead, "here", known, proc_root=tmp_path / "proc", kernel_log_path=tmp_path / "kmsg")
    verdict = crash.judge(dead, found)
    assert verdict is not None and [rank.rank for rank in verdict.named] == [3], verdict
    assert (
        "KeyError, according to its error file" in verdict.message
        and "199 other ranks of this node ended, too" in verdict.message
    )


def test_a_rank_that_ends_just_now_is_remembered_as_it_was(tmp_path: Path) -> None:
    """The kernel removes its program, its folder and its namespaces, in this order."""
    rank = Rank(id=ProcessId(pid=999_000_000, start_ticks=1), rank=0, local_rank=0)
    known, process = (
        crash_artifacts.RankSnapshots(tree_of_ranks(tmp_path, [rank])),
        left_by(rank, tmp_path, "KeyError: early", 0.0),
    )
    known.note([(process, "uid 1")])
    whole = known.find(rank.id)
    assert whole is not None and whole.program == "/usr/bin/python3"
    for gone in ("exe", "cwd", "ns/mnt"):
        (tmp_path / "proc" / str(rank.id.pid) / gone).unlink()
        known.note([(process, "uid 1")])
        assert known.find(rank.id) == whole


def tree_of_ranks(folder: Path, ranks: Sequence[Rank]) -> Path:
    """Write a /proc with these ranks, which are in the mount namespace of the reader. Return its path."""
    for name in ("self", "1", *(str(rank.id.pid) for rank in ranks)):
        place = folder / "proc" / name
        (place / "ns").mkdir(parents=True)
        (place / "ns" / "mnt").symlink_to("mnt:[1]")
        (place / "cwd").symlink_to(folder)
        (place / "exe").symlink_to("/usr/bin/python3")
    return folder / "proc"


def left_by(rank: Rank, folder: Path, error: str, unix_seconds: float) -> Process:
    """Return a rank as a scan returns it. Its error file is in the folder of its parent, with this time."""
    path = folder / f"error-{rank.rank}.json"
    extra = {"timestamp": str(int(unix_seconds)), "py_callstack": "Traceback\n" * 300}
    path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    environ = {crash_artifacts.ERROR_FILE: path.name}
    return Process(id=rank.id, parent_pid=1, comm="python", state="S", uid=os.geteuid(), environ=environ)


@pytest.fixture
def folder_of_owner() -> Iterator[Path]:
    """Make a folder that belongs to user OWNER, not to root, and that this user can enter. Yield its path."""
    with open_folder(OWNER) as folder:
        yield folder


def seen(
    process: subprocess.Popen[Any],
    *,
    uid: int,
    error_file: str = "",
    memory: crash_artifacts.RankSnapshots | None = None,
) -> crash_artifacts.RankSnapshot:
    """Record the process as a scan does. Return its snapshot."""
    state = procfs.read_state(process.pid)
    known = memory or crash_artifacts.RankSnapshots()
    environ = {crash_artifacts.ERROR_FILE: error_file}
    known.note([(Process(id=state[0], parent_pid=1, comm="sh", state="S", uid=uid, environ=environ), "share")])
    found = known.find(state[0])
    assert found is not None
    return found


AS_OWNER = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]


def shell_that_segfaults(
    folder: Path, prefix: Sequence[str] = (), as_user: Sequence[str] = AS_OWNER
) -> crash_artifacts.RankSnapshot:
    """Start a shell of the owner and let it segfault. Return its snapshot from before the segfault."""
    command = [*prefix, "prlimit", "--core=unlimited", *as_user, "sh", "-c", "read word; kill -SEGV $$"]
    with spawn(*command, cwd=folder, text=False) as process:
        wait_for(lambda: procfs.read_comm(process.pid) == "sh", "the shell")
        known = seen(process, uid=OWNER)
        process.stdin.write(b"now\n")
        process.stdin.close()
        assert process.wait(60) == -signal.SIGSEGV
    return known


@needs_root
@needs_mounts
def test_the_core_of_a_container(folder_of_owner: Path) -> None:
    with spawn("unshare", "--mount", "--propagation", "private", *AS_OWNER, "sleep", "600") as launcher:
        wait_for(lambda: procfs.read_comm(launcher.pid) == "sleep", "the container")
        inside = ["nsenter", f"--mount=/proc/{launcher.pid}/ns/mnt", "env", f"--chdir={folder_of_owner}"]
        known = shell_that_segfaults(folder_of_owner, inside)
        root = crash_artifacts.find_root(known.mounts, [launcher.pid])
        assert root == Path(f"/proc/{launcher.pid}/root")
        is_core_of_segfault(known, root)


@needs_root
def test_the_core_of_another_user(folder_of_owner: Path) -> None:
    known = shell_that_segfaults(folder_of_owner)
    if (core := is_core_of_segfault(known, Path("/"))) is not None:
        (as_root,) = crash_artifacts.find_cores([(known._replace(uid=0), Path("/"))])
        assert (as_root.path, as_root.signal) == (core.path, "")
        assert "belongs to user 61234, not to the user of the job" in as_root.refused


def is_core_of_segfault(dead: crash_artifacts.RankSnapshot, root: Path) -> crash_artifacts.Core | None:
    """Return the core of this process; None if the kernel pipes cores to a program, and it must be said."""
    (core,) = crash_artifacts.find_cores([(dead, root)])
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        assert core.refused.startswith("cores go to")
        return None
    assert (core.refused, core.signal) == ("", "SIGSEGV")
    return core


def hostile(kind: str, folder: Path) -> Path:
    """Make an object of this kind, as the owner, and return the path at which the error file would be."""
    path = folder / "error.json"
    somebody = (os.geteuid() or OWNER, os.getegid() or OWNER)
    match kind:
        case "a FIFO without a writer":
            os.mkfifo(path)
        case "a link":
            (folder / "secret").write_text("secret")
            path.symlink_to(folder / "secret")
            os.lchown(path, *somebody)
        case "a folder that is a link":
            (folder / "real").mkdir()
            (folder / "real" / "error.json").write_text("{}")
            (folder / "linked").symlink_to(folder / "real")
            os.lchown(folder / "linked", *somebody)
            return folder / "linked" / "error.json"
        case "1 GB":
            with path.open("wb") as file:
                file.truncate(1 << 30)
        case "a folder":
            path.mkdir()
        case "a way up":
            return folder / ".." / folder.name / "error.json"
        case "a device":
            return Path("/dev/zero")
        case "another user's":
            return Path("/proc/version") if os.geteuid() else Path("/etc/hostname")
    return path


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a FIFO without a writer", "is not a regular file"),
        ("a link", "error.json in its path is a link"),
        ("a folder that is a link", "linked in its path is a link"),
        ("1 GB", "is larger than 256 KiB"),
        ("a folder", "Is a directory"),
        ("a way up", "is not an absolute path"),
        ("a device", "is not a regular file"),
        ("another user's", "not to the user of the job"),
        ("nothing", ""),
    ],
)
def test_what_is_no_error_file_of_the_owner_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    path = hostile(kind, tmp_path)
    with spawn("sleep", "60") as process:
        known = seen(process, uid=OWNER if kind == "another user's" else os.geteuid(), error_file=str(path))
    (file,) = crash_artifacts.read_error_files([(known, Path("/"))])
    assert file.text == ""
    assert why in file.refused and bool(why) == bool(file.refused)


@needs_root
@pytest.mark.parametrize(
    ("target", "mode", "is_read"),
    [
        ("real", 0o755, True),
        ("/real", 0o755, True),
        ("../../real", 0o755, True),
        ("/linked", 0o755, False),
        ("real", 0o775, False),
        ("real", 0o1777, False),
    ],
)
def test_link_of_root_where_only_root_writes_is_followed(tmp_path: Path, target: str, mode: int, is_read: bool) -> None:
    """Follow a link that root made for a scratch folder. Do not follow it above the root folder of the rank."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "error.json").write_text("{}")
    (tmp_path / "linked").symlink_to(target)
    tmp_path.chmod(mode)
    question = {"kind": "error", "root": str(tmp_path), "path": "/linked/error.json", "uid": 0, "most_bytes": 99}
    answer = crash_artifacts_child.answer(question)
    assert (answer.get("content"), "is a link" in answer.get("refused", "")) == (
        ("{}", False) if is_read else (None, True)
    )


@pytest.mark.parametrize("place", ["/dev/zero", "text", "notes"])
def test_what_is_no_core_of_the_process_is_none(tmp_path: Path, place: str) -> None:
    """Reject a device, a text, and a file with notes that end beyond the end of the file."""
    with spawn("sleep", "60", cwd=tmp_path) as process:
        known = seen(process, uid=os.geteuid())
    path = Path("/dev/zero") if place == "/dev/zero" else tmp_path / "core"
    if place == "text":
        path.write_text("no core " * 1000)
    elif place == "notes":
        head = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
        head[16:18], head[32:40], head[54:58] = b"\x04\0", (64).to_bytes(8, "little"), b"\x38\0\xff\xff"
        segment = (4).to_bytes(8, "little") + b"\xff" * 48
        path.write_bytes(bytes(head) + segment * 50)
    question = {"kind": "core", "root": "/", "path": str(path), "uid": os.geteuid()}
    (answer,) = crash_artifacts._ask([question], [(known, Path("/"))])
    assert answer.get("pid") is None
    assert answer["refused"]


def test_where_a_core_can_lie(tmp_path: Path) -> None:
    with spawn("sleep", "60", cwd=tmp_path) as process:
        known = seen(process, uid=1000)
    pid = process.pid
    assert crash_artifacts.core_paths("core", known, uses_pid=False) == (f"{tmp_path}/core",)
    assert crash_artifacts.core_paths("core", known, uses_pid=True) == (f"{tmp_path}/core.{pid}",)
    assert crash_artifacts.core_paths("/cores/%u-%P-%%", known, uses_pid=True) == (f"/cores/1000-{pid}-%",)
    assert len(crash_artifacts.core_paths("/cores/core.%s", known, uses_pid=False)) == 5
    assert crash_artifacts.core_paths("/cores/core.%t", known, uses_pid=False) == ()
