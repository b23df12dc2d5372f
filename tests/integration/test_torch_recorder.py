"""Flight recorders of real ranks from outside: equal to the process's own dump in any state, or a fault."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.formats.bounded_read import FileError
from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import procfs
from hangwatch.probes.torch_recorder import layouts, libraries, search, symbols, symbols_child
from hangwatch.probes.torch_recorder.progress_counters import ProgressCounters
from hangwatch.report import as_json
from tests.commands import finished
from tests.conftest import wait_for
from tests.dead_mount import dying_mount
from tests.integration import targets
from tests.other_users import as_user, needs_root
from tests.recorder_memory import Group, Memory, Operation, recorder
from tests.recorder_of_other_torch import (
    RANKS,
    TURNS,
    Job,
    compare_with_own_dumps,
    identity,
    read,
    running,
    without_symbols,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

NOBODY = 65534
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


def fault(process: ProcessId) -> Fault:
    (answer,) = torch_recorder.Recorders().read(process)
    assert isinstance(answer, Fault), answer
    return answer


@pytest.mark.parametrize("turns", [8, pytest.param(TURNS, marks=pytest.mark.series)])
def test_every_row_is_that_of_the_process_itself(tmp_path: Path, turns: int) -> None:
    """Use a buffer of 500 operations, which wraps soon. A buffer of 2,000 takes three times as long."""
    with running(tmp_path, Job(RANKS, environ={"TORCH_FR_BUFFER_SIZE": "500"})) as ranks:
        seen = compare_with_own_dumps(tmp_path, ranks, turns)
    print(seen)
    assert seen.found_by == {"symbol"}


def test_a_stopped_rank_is_read_as_ever(tmp_path: Path) -> None:
    with running(tmp_path, Job(2, environ={"TORCH_FR_BUFFER_SIZE": "100"})) as ranks:
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


def test_a_capture_keeps_why_a_recorder_could_not_be_read(tmp_path: Path) -> None:
    settings = config.Capture(pause_seconds=0.0, dump_deadline_seconds=60.0)
    with targets.python(ALONE.format(more=""), tmp_path, TORCH_FR_BUFFER_SIZE="0") as pid:
        taken = targets.diagnosed(targets.job_of_pids([pid]), settings, rounds=2)
    (rank,) = taken.capture.ranks
    assert [[one.reason for one in dump.recorder_faults] for dump in rank.rounds] == [["RecorderOff"]] * 2
    notes = as_json.answer(taken.grouping, taken.verdict).notes
    assert [note for note in notes if "set TORCH_FR_BUFFER_SIZE=2000" in note]
    with targets.python(targets.SLEEPING, tmp_path) as pid:
        taken = targets.diagnosed(targets.job_of_pids([pid]), settings, rounds=1)
    assert [one.reason for one in taken.grouping.members[0].recorder.faults] == ["NoTorch"]
    assert not [note for note in as_json.answer(taken.grouping, taken.verdict).notes if "sequence numbers" in note]


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
        "from hangwatch.probes import torch_recorder\n"
        "from hangwatch.probes.base import procfs\n"
        "print(torch_recorder.SHARED.read(procfs.read_state({pid})[0]))"
    )
    with targets.python(ALONE.format(more=""), tmp_path) as pid:
        command = [*as_user(NOBODY), sys.executable, "-c", code.format(pid=pid)]
        done = finished(*command, check=True, cwd="/")
    assert "PermissionDenied" in done.stdout and "CAP_SYS_PTRACE" in done.stdout


@needs_root
@pytest.mark.machines
def test_without_symbols_it_is_found_by_its_shape(tmp_path: Path) -> None:
    import torch

    before = without_symbols(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", tmp_path / "stripped.so")
    with running(tmp_path, Job(2, before=before)) as ranks:
        seen = compare_with_own_dumps(tmp_path, ranks, 1)
    assert (seen.found_by, {version[:6] for version in seen.versions}) == ({"shape"}, {"2.13.0"})


def address_of_recorder(pid: int) -> int:
    found = libraries.parse_maps(Path(f"/proc/{pid}/maps").read_bytes())
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        layout = layouts.candidates("2.13.0")
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


AS_MUCH_AS_TORCH = procfs.FRAMEWORK_MAPPED_BYTES
REGISTRY = """
#include <string>
#include <unordered_map>

namespace c10 { struct Event {}; }
namespace c10d {
template <typename Event> struct FlightRecorder { static FlightRecorder* get(); };
template <typename Event> FlightRecorder<Event>* FlightRecorder<Event>::get() {
  static FlightRecorder<Event>* instance = nullptr;
  asm volatile("" : "+m"(instance));
  return instance;
}
FlightRecorder<c10::Event>*& getFlightRecorder(const std::string& backend) {
  static std::unordered_map<std::string, FlightRecorder<c10::Event>*> registry;
  return registry[backend];
}
}
extern "C" void add(const char* backend, void* recorder) {
  c10d::FlightRecorder<c10::Event>::get();
  c10d::getFlightRecorder(backend) = static_cast<c10d::FlightRecorder<c10::Event>*>(recorder);
}
"""
HOLDS_A_REGISTRY = """
import ctypes, mmap
more = mmap.mmap(-1, {mapped_bytes})
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
file = open(folder + "/memory", "rb")
size = file.seek(0, 2)
assert libc.mmap({address}, size, mmap.PROT_READ, mmap.MAP_PRIVATE | 0x10, file.fileno(), 0) == {address}  # MAP_FIXED
torch = ctypes.CDLL(folder + "/torch/lib/libtorch_cpu.so")
torch.add(b"nccl2", ctypes.c_void_p({recorder}))
ready()
import time
time.sleep(600)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, to compile the registry of torch 2.15")
def test_recorder_of_a_backend_in_the_registry_is_read_and_counted(tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0+cu132'\n")
    (tmp_path / "registry.cpp").write_text(REGISTRY)
    library = tmp_path / "torch" / "lib" / "libtorch_cpu.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O0", "-o", library, tmp_path / "registry.cpp"], check=True)
    memory = Memory(0x100000000000)
    operations = [Operation(name="nccl2:all_reduce", collective=number, op=number) for number in (1, 2, 3)]
    address = recorder(memory, layouts.candidates("2.15.0")[0], operations, [Group(counts=(3, -1, -1))])
    first, end = memory.range
    (tmp_path / "memory").write_bytes(memory.bytes_at(first, end - first))
    code = HOLDS_A_REGISTRY.format(mapped_bytes=AS_MUCH_AS_TORCH, address=first, recorder=address)
    with targets.python(code, tmp_path) as pid:
        recorders, process = torch_recorder.Recorders(), identity(pid)
        found = {each.library: each for each in recorders.read(process) if isinstance(each, RankRecords)}
        assert found["gloo"].capacity == 0 and found["nccl2"].torch_version == "2.15.0+cu132"
        assert [(each.operation, each.collective_seq) for each in found["nccl2"].records] == [
            ("nccl2:all_reduce", number) for number in (1, 2, 3)
        ]
        counters = ProgressCounters(recorders)
        counters.follow({process: "user"})
        counters.look()
        answer = counters.read()[process]
        assert isinstance(answer, Fault) and answer.reason == "NoCollectives", (
            "found; its thread is not of this process"
        )


MAPS_A_FILE = """
import mmap
more = mmap.mmap(-1, {mapped_bytes})
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
    code = MAPS_A_FILE.format(name="libtorch_cpu.so", more=more, mapped_bytes=AS_MUCH_AS_TORCH)
    with targets.python(code, tmp_path) as pid:
        assert fault(identity(pid)).reason in ("NoRecorder", "UnknownLayout")


def test_the_mappings_of_a_process_that_maps_less_than_torch_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "libtorch_cpu.so").write_bytes(bytes(1 << 16))
    with targets.python(MAPS_A_FILE.format(name="libtorch_cpu.so", more="", mapped_bytes=1), tmp_path) as pid:
        assert fault(identity(pid)).reason == "NoTorch"


def test_a_library_below_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "libtorch_cpu.so").write_bytes(b"x" * 65536)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "link.so").symlink_to("libtorch_cpu.so")
    symbols_child.open_below(str(tmp_path), "/real/libtorch_cpu.so").close()
    for path in ("/link/libtorch_cpu.so", "/real/link.so", "/real", "/none"):
        with pytest.raises(FileError):
            symbols_child.open_below(str(tmp_path), path)


def test_a_child_that_has_had_no_core_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python reads a library within 0.01 s, so this child still runs at its deadline."""
    with targets.python(ALONE.format(more=""), tmp_path) as pid:
        read(identity(pid))  # puts the library into the page cache: the child waits for no disk
        monkeypatch.setattr(symbols, "SHARED", symbols.SymbolTables(deadline_seconds=0.01))
        assert read(identity(pid)).found_by == "symbol"


def test_symbols_kept_in_a_folder_of_this_user_need_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "kept").mkdir(mode=0o700)
    with targets.python(ALONE.format(more=""), tmp_path) as pid:

        def found_by() -> str:
            monkeypatch.setattr(symbols, "SHARED", tables := symbols.SymbolTables())
            tables.keep_in(folder)
            return read(identity(pid)).found_by

        assert found_by() == "symbol"
        (kept,) = folder.iterdir()
        assert kept.stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr(symbols, "CHILD", tmp_path / "none.py")
        assert found_by() == "symbol"
        for path in (folder, kept):  # others could change it
            path.chmod(path.stat().st_mode | 0o022)
            assert found_by() == "shape"
            path.chmod(path.stat().st_mode & ~0o022)
        content = kept.read_text()
        for broken in (content[:-1], content.replace("[[[", "[[[[", 1), re.sub('"2[.][^"]*"', '"2\\\\n"', content)):
            kept.write_text(broken)
            assert found_by() == "shape", broken


@needs_root
def test_a_library_that_gives_no_answer_costs_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "SHARED", tables := symbols.SymbolTables(deadline_seconds=1.0))
    (tmp_path / "library").write_bytes(b"no library " * 8192)
    maps = MAPS_A_FILE.replace("r+b", "rb").format(
        name="mount/libtorch_cpu.so", more="mmap.mmap.find(kept, b'!')", mapped_bytes=AS_MUCH_AS_TORCH
    )
    with contextlib.ExitStack() as mounted:
        die = mounted.enter_context(dying_mount(tmp_path / "mount", {"libtorch_cpu.so": tmp_path / "library"}))
        with targets.python(maps, tmp_path) as pid:
            process = identity(pid)
            die()
            began = time.monotonic()
            assert fault(process).reason in ("NoRecorder", "UnknownLayout", "NoAnswer")
            assert time.monotonic() - began < 20.0
            left = tables.runner.abandoned.count()
            assert left == 1
            fault(process)
            assert tables.runner.abandoned.count() == left, "it is not asked again so soon"
            (library,) = libraries.parse_maps(Path(f"/proc/{pid}/maps").read_bytes()).libraries
            for number, share in enumerate(("uid 1", "uid 1", "uid 1", "uid 2"), 1):
                other = library._replace(inode=library.inode + number)
                assert tables.look_up(other, b"", process, share, procfs.PROC).is_late
            assert tables.runner.abandoned.count() == left + 2, "one file of each owner has been asked for"
            mounted.close()  # closed first: the process that uses it cannot end before
    wait_for(lambda: tables.runner.abandoned.count() == 0, "the child to end with the file system")
