"""`hangwatch timeline`: the trace of a real torchrun job over gloo, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hangwatch.cli.usage_errors import InputError
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.tools.commands.output_files import write_new
from tests.conftest import identity, wait_for
from tests.dead_mount import tmpfs
from tests.fake_driver import FakeDriver, h100
from tests.integration import targets
from tests.integration.test_torchrun import PROGRAM, RANKS, RealJob, beside_python, launched
from tests.unit.test_trace_events import Event, check_format

pytestmark = pytest.mark.timeout(400)


def timeline(*arguments: str, environ: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "hangwatch", "timeline", *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, env=environ)


def open_by_rank(events: list[Event], job: RealJob) -> dict[int, list[str]]:
    ranks = {job.pid(rank): rank for rank in range(RANKS)}
    shown: dict[int, list[str]] = {rank: [] for rank in ranks.values()}
    for one in events:
        if one["ph"] == "X" and one["args"]["end"] == "open when read":
            shown[ranks[one["pid"]]].append(one["name"])
    return shown


def recorded(pid: int) -> int:
    """Return the number of operations that the recorder of a process holds."""
    (answer,) = (one for one in torch_recorder.SHARED.read(identity(pid)) if isinstance(one, RankRecords))
    return len(answer.records)


@pytest.mark.torch
def test_trace_shows_the_operation_that_a_rank_has_not_joined(fake_driver: FakeDriver, tmp_path: Path) -> None:
    program = f"--nproc-per-node={RANKS}", str(PROGRAM), str(tmp_path)
    with launched(tmp_path, beside_python("torchrun"), *program) as job:
        fake_driver.write([*h100(RANKS), *(f"gpu {rank} pids {job.pid(rank)}" for rank in range(RANKS))])
        job.order(2, "sleep")
        selected = "--pid", str(job.launcher.pid)

        def read_hang() -> list[Event]:
            done = timeline(*selected, environ=fake_driver.environ)
            assert done.returncode == 0, done.stderr
            events = check_format(done.stdout)
            return events if sum(map(bool, open_by_rank(events, job).values())) == RANKS - 1 else []

        events = wait_for(read_hang, "the other ranks to wait in a collective")
        path = tmp_path / "trace.json"
        written, again = (timeline(*selected, "-o", str(path)) for _ in range(2))
        operations = {rank: recorded(job.pid(rank)) for rank in range(RANKS)}
        pids = {job.pid(rank): rank for rank in range(RANKS)}
    opened = open_by_rank(events, job)
    assert opened[2] == [] and opened[0] == opened[1] == opened[3]
    (name,) = opened[0]
    assert name == f"all_reduce #{operations[0]} (open)"
    counts: dict[int, int] = dict.fromkeys(range(RANKS), 0)
    for one in events:
        if one["ph"] == "X":
            counts[pids[one["pid"]]] += 1
    assert counts == operations and operations[2] == operations[0] - 1
    names: dict[int, Any] = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {pid: f"rank {rank}" for pid, rank in pids.items()}
    power = {(pids[one["pid"]], one["name"], one["args"]["watts"]) for one in events if one["ph"] == "C"}
    assert power == {(rank, f"power of GPU {rank}", 600.0) for rank in range(RANKS)}
    assert len(check_format(path.read_bytes())) >= sum(operations.values())
    total = sum(operations.values())
    assert written.stderr.decode() == f"wrote {path}: {total:,} operations of {RANKS} ranks\n", written.stderr
    assert (written.returncode, written.stdout) == (0, b"")
    assert (again.returncode, again.stderr.decode()) == (2, f"hangwatch: {path}: exists: give a new file\n")


def test_process_without_a_recorder_has_no_trace(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        done = timeline("--pid", str(pid), "-o", str(tmp_path / "trace.json"))
    assert done.returncode == 1 and not (tmp_path / "trace.json").exists()
    assert done.stderr.decode() == (
        f"no collectives of pid {pid}: it has not loaded torch (NoTorch)\n"
        f"job pids-{pid}: no trace: no flight recorder holds a collective\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--job", "a", "--pid", "1"), "give either --job or --pid"),
        (("--job", "no-such-job"), "--job no-such-job: no such job on this node"),
        (("--pid", "4194304"), "no such process"),
        (("--pid", "1,2"), "give each pid its own option"),
    ],
)
def test_wrong_arguments_of_timeline_are_refused(arguments: tuple[str, ...], says: str) -> None:
    done = timeline(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert says in done.stderr.decode()


def test_trace_is_not_written_to_a_terminal() -> None:
    ours, theirs = os.openpty()
    try:
        command = [sys.executable, "-m", "hangwatch", "timeline"]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2 and b"a trace is not for a terminal: give -o FILE" in done.stderr


@pytest.mark.parametrize("name", ["file", "link", "dangling", "missing/file"])
def test_only_new_files_are_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("target")
    with pytest.raises(InputError, match=r"exists: give a new file|cannot be written: No such file"):
        write_new(tmp_path / name, b"trace")
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "target").exists()


def test_no_part_of_a_trace_is_left_on_a_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "64k") as disk:
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            write_new(disk / "trace", bytes(1 << 20))
        assert not list(disk.iterdir())
