"""The library in which a real process sleeps. The jobs of the recorder tests cover torch's own waits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.probes.process import native_stack
from tests.commands import spawn
from tests.integration import targets

PROC = Path("/proc")
# Python calls a library with the name libtorch. The frames of that call remain in the stack memory.
STIRS = "import ctypes, sys, threading; library = ctypes.CDLL(sys.argv[1]); library.stir(); "
DEEPER = "sorted([0], key=lambda _: sorted([0], key=lambda _: lock.acquire()))"  # overwrites those frames
OPENMP = "library.in_other(ctypes.CDLL(sys.argv[1].replace('libtorch_stirring.so', 'libgomp.so.1')).in_torch)"
LIBRARY = """
#include <semaphore.h>
void stir(void) { void *volatile left[4096]; for (int at = 0; at < 4096; at++) left[at] = (char *)stir + 4; }
int in_torch(void) { static sem_t never; sem_init(&never, 0, 0); return sem_wait(&never) + 1; }
int in_other(int (*wait)(void)) { return wait() + 1; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.c").write_text(LIBRARY)
    made = folder / "libtorch_stirring.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-O0", "-o", made, folder / "library.c"], check=True)
    shutil.copy(made, folder / "libgomp.so.1")
    return made


@pytest.mark.parametrize(
    ("then", "is_torch"),
    [
        (f"lock = threading.Lock(); lock.acquire(); {DEEPER}", False),
        ("library.in_torch()", True),
        (OPENMP, False),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", False),
        ("sys.stdin.read()", False),
    ],
)
def test_wait_is_attributed_to_its_caller_not_to_earlier_frames(library: Path, then: str, is_torch: bool) -> None:
    with spawn(sys.executable, "-c", STIRS + then, library) as process:
        targets.wait_for_call(process.pid, "read" if "stdin" in then else "futex")
        assert native_stack.read(process.pid, PROC)[0] is is_torch


def test_device_is_found_in_the_mappings(tmp_path: Path) -> None:
    def is_device(path: str) -> bool | None:
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "maps").write_text(f"7f00-7f10 rw-s 00000000 00:06 7 {path}\n")
        return native_stack.read(7, tmp_path)[1]

    assert all(map(is_device, ("/dev/nvidia0", "/dev/dri/renderD128", "/usr/lib/wsl/lib/libcuda.so.1")))
    assert not any(map(is_device, ("/dev/shm/torch_7", "/dev/zero (deleted)", "/opt/torch/lib/libtorch_cuda.so")))


def test_ended_process_has_no_native_stack() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert native_stack.read(process.pid, PROC) == (None, None)


@pytest.mark.parametrize("text", ["", "running", "202 0x0", "202 x y z", "202 0x1 0x2 0x3 0x4 0x5 0x6 0x0 0x0"])
def test_any_text_in_syscall_file_is_no_wait_in_torch(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "syscall").write_text(text + "\n")
    assert not native_stack.read(7, tmp_path)[0]
