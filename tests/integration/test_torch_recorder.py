"""The recorder of real ranks, read from outside: the same as their own dump, in any state, and a fault where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch.flight_record import FlightRecord, RankRecords
from hangwatch.model import Fault, ProcessId
from hangwatch.probes import procs, torch_recorder
from hangwatch.probes.torch_recorder import layouts, libraries, search, symbols, symbols_child
from tests.conftest import wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets
from tests.other_users import as_user, needs_root

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[1] / "jobs" / "recorded.py"
NOBODY = 65534
SNAPSHOTS_OF_EACH_RANK = 50
ALONE = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
{more}
ready()
import time
time.sleep(600)
"""


@contextlib.contextmanager
def running(folder: Path, ranks: int, before: tuple[str, ...] = (), **environ: str) -> Iterator[list[ProcessId]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [*before, sys.executable, str(PROGRAM), str(folder)]
            children.append(subprocess.Popen(command, env={**os.environ, **place, **environ}))
        paths = [folder / f"pid-{rank}" for rank in range(ranks)]
        wait_for(lambda: all(path.exists() for path in paths), "the ranks to meet", 120)
        yield [identity(int(path.read_text())) for path in paths]
    finally:
        for child in children:
            child.kill()
            child.wait(timeout=20)


def identity(pid: int) -> ProcessId:
    state = procs.read_state(pid)
    assert state is not None
    return state[0]


def read(process: ProcessId) -> RankRecords:
    (answer,) = torch_recorder.SHARED.read(process)
    assert isinstance(answer, RankRecords), answer
    return answer


def fault(process: ProcessId) -> Fault:
    (answer,) = torch_recorder.Recorders().read(process)
    assert isinstance(answer, Fault), answer
    return answer


def as_row(record: FlightRecord) -> dict[str, Any]:
    """A record as the recorder's own dump prints it, as far as gloo writes it."""
    return {
        "record_id": record.id,
        "pg_id": record.group_id,
        "process_group": [record.group_name, record.group_description],
        "thread_name": record.thread_name,
        "thread_id": str(record.thread_id),
        "collective_seq_id": record.collective_seq,
        "p2p_seq_id": record.p2p_seq,
        "op_id": record.op_id,
        "profiling_name": record.operation,
        "time_created_ns": record.created_unix_ns,
        "input_sizes": [list(size) for size in record.input_sizes],
        "input_dtypes": list(record.input_dtypes),
        "output_sizes": [list(size) for size in record.output_sizes],
        "output_dtypes": list(record.output_dtypes),
        "state": "scheduled",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": record.is_retired,
        "timeout_ms": record.timeout_ms,
        "is_p2p": record.is_p2p,
    }


def without_state(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "retired"}


def test_every_row_is_that_of_the_process_itself(tmp_path: Path) -> None:
    with running(tmp_path, 4) as ranks:
        rows = open_rows = wrapped = 0
        for turn in range(SNAPSHOTS_OF_EACH_RANK):
            running_records = [read(process) for process in ranks]
            (tmp_path / "ask").touch()
            dumps = [tmp_path / f"dump-{rank}" for rank in range(len(ranks))]
            wait_for(lambda dumps=dumps: all(path.exists() for path in dumps), "the dumps", 60)
            for rank, (process, early) in enumerate(zip(ranks, running_records, strict=True)):
                told = json.loads(dumps[rank].read_text())
                found = read(process)
                assert [as_row(record) for record in found.records] == told["entries"]
                assert {
                    str(group.group_id): {
                        "last_enqueued_collective": str(group.last_enqueued),
                        "last_started_collective": str(group.last_started),
                        "last_completed_collective": str(group.last_completed),
                    }
                    for group in found.groups
                } == told["pg_status"]
                by_id = {row["record_id"]: row for row in told["entries"]}
                both = [record for record in early.records if record.id in by_id]
                assert both, "of what was read while it ran, some is still there"
                for record in both:
                    assert without_state(as_row(record)) == without_state(by_id[record.id])
                    assert by_id[record.id]["retired"] or record.is_open, "what is done stays done"
                rows += len(found.records)
                open_rows += sum(record.is_open for record in found.records)
                wrapped += found.is_wrapped
            (tmp_path / "ask").unlink()
            for path in dumps:
                path.unlink()
            (tmp_path / "go.new").write_text(str(turn))
            (tmp_path / "go.new").rename(tmp_path / "go")
        print(f"{rows:,} rows compared, {open_rows} open, {wrapped} of {4 * SNAPSHOTS_OF_EACH_RANK} buffers wrapped")
        assert open_rows >= SNAPSHOTS_OF_EACH_RANK, "rank 0 had one open each time"
        assert wrapped > 0


def test_a_stopped_rank_is_read_as_ever(tmp_path: Path) -> None:
    with running(tmp_path, 2, TORCH_FR_BUFFER_SIZE="100") as ranks:
        wait_for(lambda: read(ranks[1]).is_wrapped, "the buffer to wrap")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        wait_for(lambda: targets.state(ranks[1].pid) == "T", "the rank to stop")
        once, again = read(ranks[1]), read(ranks[1])
        assert once.records == again.records and 98 <= len(once.records) <= 100
        wait_for(lambda: read(ranks[0]).records[-1].is_open, "the other one to wait for it")


@pytest.mark.parametrize("variable", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_recorder_that_is_off_says_what_to_set(tmp_path: Path, variable: str) -> None:
    with targets.python(ALONE.format(more=""), tmp_path, **{variable: "0"}) as pid:
        off = fault(identity(pid))
        assert off.reason == "RecorderOff" and "TORCH_FR_BUFFER_SIZE=2000" in off.remedy


def test_a_process_without_torch_or_one_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        process = identity(pid)
        assert fault(process).reason == "NoTorch"
        other = ProcessId(pid=pid, start_ticks=process.start_ticks - 1)
        assert fault(other).reason == "ProcessGone" and fault(other).about == "target"
    assert fault(process).reason == "ProcessGone"


def test_a_recorder_that_was_never_used_is_empty(tmp_path: Path) -> None:
    with targets.python("import torch, torch.distributed\nready()\nimport time\ntime.sleep(600)", tmp_path) as pid:
        found = read(identity(pid))
        assert (found.records, found.next_id, found.capacity) == ((), 0, 0)


@needs_root
def test_another_user_has_no_right_to_it(tmp_path: Path) -> None:
    code = (
        "from hangwatch.probes import procs, torch_recorder\n"
        "print(torch_recorder.SHARED.read(procs.read_state({pid})[0]))"
    )
    with targets.python(ALONE.format(more=""), tmp_path) as pid:
        command = [*as_user(NOBODY), sys.executable, "-c", code.format(pid=pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert "PermissionDenied" in done.stdout and "CAP_SYS_PTRACE" in done.stdout


@needs_root
def test_without_symbols_it_is_found_by_its_shape(tmp_path: Path) -> None:
    """The library is stripped in a mount namespace of the job, so its path leads to another file there, too."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    stripped = tmp_path / "stripped.so"
    subprocess.run([shutil.which("strip") or "strip", "--strip-all", "-o", stripped, library], check=True)
    hidden = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-euc",
        'mount --bind "$1" "$2"; shift 2; exec "$@"',
    )
    with running(tmp_path, 2, before=(*hidden, "sh", str(stripped), str(library))) as ranks:
        found = [read(process) for process in ranks]
        assert [(one.found_by, one.torch_version[:6]) for one in found] == [("shape", "2.13.0")] * 2
        (tmp_path / "ask").touch()
        wait_for(lambda: (tmp_path / "dump-0").exists(), "the dump", 60)
        told = json.loads((tmp_path / "dump-0").read_text())["entries"]
        assert [as_row(record) for record in read(ranks[0]).records] == told


def address_of_recorder(pid: int) -> int:
    found = libraries.mapped(Path(f"/proc/{pid}/maps").read_bytes())
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        layout = layouts.of("2.13.0")
        places = search.search(
            lambda wanted: [os.pread(memory.fileno(), size, at) for at, size in wanted],
            found.libraries[0].data,
            found.writable,
            layout,
        )
    return places[0][0]


def test_a_recorder_that_is_rewritten_while_it_is_read_gives_records_or_a_fault(tmp_path: Path) -> None:
    more = """
import os, sys, threading
def rewrite():
    import random
    address, size = map(int, open(folder + "/place").read().split())
    chance = random.Random(1)
    memory = os.open("/proc/self/mem", os.O_RDWR)
    good = os.pread(memory, size, address)
    while True:
        at = chance.randrange(size)
        os.pwrite(memory, bytes([chance.randrange(256)]), address + at)
        os.pwrite(memory, good, address)
def wait():
    import time
    while not os.path.exists(folder + "/place"):
        time.sleep(0.01)
    rewrite()
threading.Thread(target=wait, daemon=True).start()
"""
    with targets.python(ALONE.format(more=more), tmp_path) as pid:
        process = identity(pid)
        recorders = torch_recorder.Recorders()
        good = read(process)
        (tmp_path / "place.new").write_text(f"{address_of_recorder(pid)} 288")
        (tmp_path / "place.new").rename(tmp_path / "place")
        reasons = set()
        for _ in range(300):
            (answer,) = recorders.read(process)
            if isinstance(answer, Fault):
                reasons.add(answer.reason)
            else:
                assert [record.operation for record in answer.records] in (
                    [record.operation for record in good.records],
                    [],
                )
        print(reasons)
        assert reasons <= {"UnknownLayout", "ChangedWhileRead", "RecorderOff", "TooLarge"}


MAPS_A_FILE = """
import mmap
file = open(folder + "/{name}", "r+b")
kept = mmap.mmap(file.fileno(), 1 << 16, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
kept[:8]
{more}
ready()
import time
time.sleep(600)
"""
HEADER_OF_AN_ELF = bytes.fromhex("7f454c4602010100000000000000000003003e0001000000") + b"\xff" * 40


@pytest.mark.parametrize(
    ("raw", "more"),
    [
        (b"no library " * 8192, ""),
        (HEADER_OF_AN_ELF * 1024, ""),
        (b"\x7fELF" + b"\0" * 65536, "file.truncate(10)"),
        (b"no library " * 8192, "import os; os.unlink(folder + '/libtorch_cpu.so')"),
        (
            b"no library " * 8192,
            "import os; os.unlink(folder + '/libtorch_cpu.so'); os.mkfifo(folder + '/libtorch_cpu.so')",
        ),
        (
            b"no library " * 8192,
            "import os; os.unlink(folder + '/libtorch_cpu.so'); os.symlink('/etc/shadow', folder + '/libtorch_cpu.so')",
        ),
    ],
    ids=["no library", "an ELF of nonsense", "cut off", "deleted", "a pipe in its place", "a link in its place"],
)
def test_a_file_that_only_has_the_name_of_the_library_is_a_fault(tmp_path: Path, raw: bytes, more: str) -> None:
    (tmp_path / "libtorch_cpu.so").write_bytes(raw)
    with targets.python(MAPS_A_FILE.format(name="libtorch_cpu.so", more=more), tmp_path) as pid:
        assert fault(identity(pid)).reason in ("NoRecorder", "UnknownLayout")


def test_a_library_below_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "libtorch_cpu.so").write_bytes(b"x" * 65536)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "link.so").symlink_to("libtorch_cpu.so")
    os.close(symbols_child.opened(str(tmp_path), "/real/libtorch_cpu.so"))
    for path in ("/link/libtorch_cpu.so", "/real/link.so", "/real", "/none"):
        with pytest.raises(OSError):
            symbols_child.opened(str(tmp_path), path)


@needs_root
def test_a_library_that_gives_no_answer_costs_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "SHARED", tables := symbols.SymbolTables(deadline_seconds=1.0))
    (tmp_path / "library").write_bytes(b"no library " * 8192)
    maps = MAPS_A_FILE.replace("r+b", "rb").format(name="mount/libtorch_cpu.so", more="mmap.mmap.find(kept, b'!')")
    with contextlib.ExitStack() as mounted:
        die = mounted.enter_context(dying_mount(tmp_path / "mount", {"libtorch_cpu.so": tmp_path / "library"}))
        with targets.python(maps, tmp_path) as pid:
            process = identity(pid)
            die()
            began = time.monotonic()
            assert fault(process).reason in ("NoRecorder", "UnknownLayout", "NoAnswer")
            assert time.monotonic() - began < 20.0
            left = tables.left_behind()
            assert left == 1
            fault(process)
            assert tables.left_behind() == left, "it is not asked again so soon"
            mounted.close()  # its user cannot end before it does
    wait_for(lambda: tables.left_behind() == 0, "the child to end with the file system")
