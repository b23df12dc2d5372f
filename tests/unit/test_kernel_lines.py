"""Kernel log lines about a job: each row of kernel_lines.toml matches real lines, and no similar ones."""

import logging
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.capture.kernel_log import LINES_OF_A_RANK, find_lines
from hangwatch.model import EndedProcess, Job, KernelLine, ProcessId, Rank
from hangwatch.probes.base import filesystems, procfs
from hangwatch.probes.node import kmsg
from hangwatch.probes.node.journal import JournalFormatter, NonBlockingHandler, is_journal
from hangwatch.tables import kernel_lines
from tests.conftest import identity, load_table

LINES: dict[str, dict[str, str]] = load_table("log_lines.toml")["kernel"]
GPU = "GPU-00000000-0000-0000-0000-{:012d}"
FIRST = {name: next(iter(lines)) for name, lines in LINES.items()}
SEGFAULT = FIRST["segfault"].replace("14654", "{}")


@pytest.mark.parametrize("name", kernel_lines.load())
def test_a_row_is_of_its_lines(name: str) -> None:
    for line, subject in LINES[name].items():
        said = kernel_lines.find(line)
        assert said is not None, line
        assert (said.name, said.subject) == (name, subject), line


def test_the_library_is_told() -> None:
    said = kernel_lines.find(FIRST["segfault"])
    assert said is not None and said.where == "libc.so.6"


@pytest.mark.parametrize(
    "line",
    [
        "audit: comm=python3[4711]: segfault at 0 ip 0 sp 0 error 4",  # more than 15 characters before the pid
        "python3[4711]: segfault at the barrier",
        "systemd[1]: INFO: task python:4711 blocked for more than 120 seconds.",
        "x nfs: server filer not responding",
        "python3[4711]: loaded nfs: server filer not responding",
        "INFO: task python-with-a-long-name:4711 blocked for more than 120 seconds.",
        "my program: Out of memory: Killed process 1 (x)",
    ],
)
def test_what_is_no_line_of_the_kernel(line: str) -> None:
    assert kernel_lines.find(line) is None


@given(comm=st.text(min_size=1, max_size=15).filter(lambda text: "\n" not in text))
def test_no_comm_makes_a_pid_of_its_own(comm: str) -> None:
    """A process can choose only its name, the 15 bytes before the pid; the kernel writes the rest."""
    said = kernel_lines.find(f"{comm}[4242]: segfault at 0 ip 0 sp 0 error 4 in x[0+1]")
    assert said is None or said.subject == "4242"


def test_no_pattern_takes_long() -> None:
    rows = kernel_lines.load().values()
    began = time.process_time()
    for row in rows:
        for text in (row.holds * 2000, "[1" * 4000 + row.holds, f"a: {row.holds} " + "b " * 4000):
            kernel_lines.find(text)
    assert time.process_time() - began < 5


def log(folder: Path, *lines: str, boot_seconds: float | None = None) -> tuple[kmsg.LoggedLine, ...]:
    at = time.monotonic() if boot_seconds is None else boot_seconds
    path = folder / "kmsg"
    path.write_text("".join(f"4,{number},{int(at * 1e6)},-;{line}\n" for number, line in enumerate(lines)))
    events = kmsg.KernelLog().read(path)
    assert isinstance(events, kmsg.KernelEvents)
    return events.lines


def said_of(job: Job, lines: tuple[kmsg.LoggedLine, ...]) -> dict[int, tuple[KernelLine, ...]]:
    """Return the kernel lines about each pid of the job, in the initial pid namespace like the log."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "self" / "ns").mkdir(parents=True)
        (root / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
        (root / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
        return find_lines(job, lines, now=time.monotonic(), unix_now=time.time(), proc_root=root)


def own_job(*, ended: tuple[EndedProcess, ...] = ()) -> Job:
    """Return a job with the process of this test as its only rank."""
    rank = Rank(id=identity(os.getpid()), rank=0, local_rank=0)
    return Job(job_id="j", launcher="", launcher_id=None, ranks=(rank,), ended=ended)


def gone(pid: int, *, began_seconds: float, gone_seconds_ago: float = 1.0, is_worker: bool = False) -> EndedProcess:
    ticks = int(began_seconds * procfs.TICKS_PER_SECOND)
    return EndedProcess(
        id=ProcessId(pid=pid, start_ticks=ticks),
        rank=0 if is_worker else 1,
        local_rank=0 if is_worker else 1,
        gone_unix_seconds=time.time() - gone_seconds_ago,
        is_worker=is_worker,
    )


def test_a_line_speaks_of_a_rank_that_ended(tmp_path: Path) -> None:
    now = time.monotonic()
    job = own_job(ended=(gone(999_999_001, began_seconds=now - 5),))
    found = said_of(job, log(tmp_path, SEGFAULT.format(999_999_001), SEGFAULT.format(999_999_002)))
    assert [(pid, [one.name for one in lines]) for pid, lines in found.items()] == [(999_999_001, ["segfault"])]
    line = found[999_999_001][0]
    assert line.where == "libc.so.6" and abs(line.unix_seconds - time.time()) < 60


def test_a_worker_that_was_killed_is_told_of_its_rank(tmp_path: Path) -> None:
    job = own_job(ended=(gone(999_999_003, began_seconds=time.monotonic() - 5, is_worker=True),))
    line = "Memory cgroup out of memory: Killed process 999999003 (pt_data_worker) total-vm:1kB"
    assert list(said_of(job, log(tmp_path, line))) == [os.getpid()]


def test_a_pid_that_was_another_process_is_none_of_the_job(tmp_path: Path) -> None:
    """Ignore a line from before the process started, or from long after it ended."""
    now = time.monotonic()
    before = gone(999_999_004, began_seconds=now - 5)
    old = log(tmp_path, SEGFAULT.format(999_999_004), boot_seconds=max(1.0, now - 5000))
    assert said_of(own_job(ended=(before,)), old) == {}
    long_gone = gone(999_999_005, began_seconds=now - 5000, gone_seconds_ago=4000)
    assert said_of(own_job(ended=(long_gone,)), log(tmp_path, SEGFAULT.format(999_999_005))) == {}


def test_a_thread_that_is_blocked_no_more_is_not_told(tmp_path: Path) -> None:
    line = f"INFO: task python:{os.getpid()} blocked for more than 120 seconds."
    assert said_of(own_job(), log(tmp_path, line)) == {}


def test_pids_of_another_namespace_are_not_believed(tmp_path: Path) -> None:
    # The pids of this /proc may differ from the pids in the kernel's log.
    ended = gone(4711, began_seconds=time.monotonic() - 5)
    lines = log(tmp_path, SEGFAULT.format(4711))
    job = own_job(ended=(ended,))
    assert find_lines(job, lines, now=time.monotonic(), unix_now=time.time(), proc_root=tmp_path) == {}


def test_xid_is_about_the_ranks_of_its_gpu(tmp_path: Path) -> None:
    for address, uuid in (("0000:3b:00.0", GPU.format(1)), ("0000:5e:00.0", GPU.format(2))):
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n")
    alive = Rank(id=ProcessId(pid=4711, start_ticks=0), rank=0, local_rank=0, gpu_uuids=(GPU.format(1),))
    dead = EndedProcess(
        id=ProcessId(pid=4712, start_ticks=0), rank=1, local_rank=1, gone_unix_seconds=0.0, gpu_uuids=(GPU.format(2),)
    )
    job = Job(job_id="j", launcher="", launcher_id=None, ranks=(alive,), ended=(dead,))
    lines = log(tmp_path, *(f"NVRM: Xid (PCI:0000:{bus}:00): 79, lost" for bus in ("3b", "5e", "86")))
    found = find_lines(job, lines, now=time.monotonic(), unix_now=time.time(), proc_root=tmp_path / "proc")
    assert {pid: [line.subject for line in said] for pid, said in found.items()} == {
        4711: ["0000:3b:00"],
        4712: ["0000:5e:00"],
    }
    assert all(line.is_recent for said in found.values() for line in said)
    assert "has fallen off the bus" in kernel_lines.describe("xid", found[4711][0].text)


def test_records_of_programs_are_ignored_and_each_xid_of_a_gpu_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    xid = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python"
    fatal = "mlx5_core 0000:5e:00.0 ib0: device's health compromised - reached miss count"
    records = [(12, xid.format(79)), (4, xid.format(48)), (4, xid.format(45)), (4, fatal)]
    path.write_text("".join(f"{priority},{n},1000,-;{text}\n" for n, (priority, text) in enumerate(records)))
    events = kmsg.KernelLog().read(path)
    assert isinstance(events, kmsg.KernelEvents) and events.missed == 0
    assert {line.text for line in events.lines} == {text for _, text in records[1:]}
    with path.open("a") as file:
        file.write("4,4,1000,-;mlx5_core 0000:5e:00.0: mlx5_health_try_recover:9:(pid 7): health recovery succeeded\n")
    cleared = kmsg.KernelLog().read(path)
    assert isinstance(cleared, kmsg.KernelEvents) and {line.name for line in cleared.lines} == {"xid"}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0/nvme0n1", True),
        ("pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", True),
        ("pci0000:00/0000:00:02.0/virtio1/block/vda", False),
        ("platform/host3/session1/target3:0:0/3:0:0:1/block/sdb", False),
        ("virtual/nvme-fabrics/ctl/nvme1/nvme1n1", False),
        ("virtual/block/loop0", False),
    ],
)
def test_only_nvme_and_sata_disks_of_this_machine_are_local(tmp_path: Path, device: str, expected: bool) -> None:
    (tmp_path / "devices" / device).mkdir(parents=True)
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:0").symlink_to(tmp_path / "devices" / device)
    mount = filesystems.Mount(path="/scratch", type="ext4", source="/dev/x", device="8:0")
    assert filesystems.is_on_local_disk(mount, tmp_path) is expected
    assert not filesystems.is_on_local_disk(mount, tmp_path / "other")


def test_a_file_system_that_a_rank_has_mounted(tmp_path: Path) -> None:
    """Ignore lines about a file server if no process of the job has mounted a file system of this server."""
    pid = 4711
    folder = tmp_path / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "mountinfo").write_text(
        "30 1 0:40 / /data rw - nfs4 filer-03:/export rw\n31 1 0:41 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw\n"
    )
    mounts = filesystems.mounts(tmp_path / "proc", pid)
    assert isinstance(mounts, tuple) and len(mounts) == 2
    rank = Rank(id=ProcessId(pid=pid, start_ticks=0), rank=0, local_rank=0)
    job = Job(job_id="j", launcher="", launcher_id=None, ranks=(rank,))
    told = [
        "nfs: server filer-03 not responding, still trying",
        "nfs: server filer-04 not responding, still trying",
        FIRST["lustre_evicted"],
        FIRST["lustre_evicted"].replace("scratch", "home"),
        "ceph: mds0 hung",
        FIRST["mlx5_cable"],
    ]
    lines = log(tmp_path, *told)
    found = find_lines(job, lines, now=time.monotonic(), unix_now=time.time(), proc_root=tmp_path / "proc")
    assert [(one.name, one.subject) for one in found[pid]] == [
        ("nfs_server_silent", "filer-03"),
        ("lustre_evicted", "scratch"),
        ("mlx5_cable", "0000:5e:00.0"),
    ]


def test_what_is_over_is_told_no_more(tmp_path: Path) -> None:
    lines = log(
        tmp_path,
        "nfs: server filer-03 not responding, still trying",
        "nfs: server filer-04 not responding, still trying",
        "nfs: server filer-03 OK",
        FIRST["mlx5_cable"],
        "mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged",
    )
    assert [line.subject for line in lines] == ["filer-04"]


def test_lines_are_bounded(tmp_path: Path) -> None:
    now = time.monotonic()
    ended = tuple(gone(900_000_000 + n, began_seconds=now - 5, is_worker=True) for n in range(64))
    lines = log(tmp_path, *(SEGFAULT.format(900_000_000 + n) for n in range(2000)))
    assert len(lines) == kmsg.LINES_KEPT
    lines = log(tmp_path, *(SEGFAULT.format(900_000_000 + n) for n in range(64)))
    assert len(said_of(own_job(ended=ended), lines)[os.getpid()]) == LINES_OF_A_RANK


def test_a_hostile_line_is_printable(tmp_path: Path) -> None:
    job = own_job(ended=(gone(999_999_006, began_seconds=time.monotonic() - 5),))
    hostile = "\x1b[31mx\u202e[999999006]: segfault at 0 ip 0 sp 0 error 4 in \u202eevil" + "e" * 300 + "[0+1]"
    for lines in said_of(job, log(tmp_path, hostile)).values():
        for line in lines:
            assert line.text.isprintable() and line.where.isprintable()
            assert len(line.text) <= 300 and not re.search(r"[\x00-\x1f]", line.text)


def formatted(level: int, message: str, exc_info: object = None) -> list[str]:
    record = logging.LogRecord("hangwatch.daemon", level, __file__, 1, message, None, exc_info)  # type: ignore[arg-type]
    return JournalFormatter().format(record).split("\n")


@pytest.mark.parametrize(
    ("level", "prefix"),
    [
        (logging.DEBUG, "<7>"),
        (logging.INFO, "<6>"),
        (logging.WARNING, "<4>"),
        (logging.ERROR, "<3>"),
        (logging.CRITICAL, "<2>"),
    ],
)
def test_a_level_becomes_its_syslog_priority(level: int, prefix: str) -> None:
    assert formatted(level, "GPU 3 is lost") == [f"{prefix}hangwatch.daemon: GPU 3 is lost"]


def test_every_line_of_a_traceback_has_the_priority() -> None:
    try:
        raise ValueError("a bug")
    except ValueError:
        lines = formatted(logging.ERROR, "check clock raised", sys.exc_info())
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)
    assert lines[-1] == "<3>ValueError: a bug"


def test_a_log_that_nothing_reads_blocks_no_thread_and_counts_lost_lines() -> None:
    read_end, write_end = os.pipe()
    log = logging.Logger("hangwatch.daemon")
    with os.fdopen(read_end) as lines, os.fdopen(write_end, "w") as stream:
        log.addHandler(NonBlockingHandler(stream))
        writing = threading.Thread(target=lambda: [log.info("x" * 10_000) for _ in range(20)], daemon=True)
        writing.start()
        writing.join(30)
        assert not writing.is_alive(), "it waits for a reader"
        os.set_blocking(read_end, False)
        written = lines.read().count("x\n")
        log.info("again")
        assert lines.read() == f"\n{20 - written} log lines lost: nothing read the log\nagain\n"
    assert 0 < written < 20


def test_the_journal_is_known_by_device_and_inode() -> None:
    read_end, write_end = os.pipe()
    try:
        stat = os.fstat(write_end)
        assert is_journal({"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}, write_end)
        assert not is_journal({"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"}, write_end)
        assert not is_journal({}, write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert not is_journal({"JOURNAL_STREAM": "1:2"}, write_end)
