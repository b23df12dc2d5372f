"""The library in which a real process sleeps. The jobs of the recorder tests cover torch's own waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.probes.process import native_stack
from tests.commands import spawn
from tests.conftest import wait_for
from tests.integration import targets

PROC = Path("/proc")
# Python calls a library with the name libtorch. The frames of that call remain in the stack memory.
STIRS = "import ctypes, sys, threading; library = ctypes.CDLL(sys.argv[1]); library.stir(); "
DEEPER = "sorted([0], key=lambda _: sorted([0], key=lambda _: lock.acquire()))"  # overwrites those frames
LIBRARY = """
#include <semaphore.h>
void stir(void) { void *volatile left[4096]; for (int at = 0; at < 4096; at++) left[at] = (char *)stir + 4; }
int in_torch(void) { static sem_t never; sem_init(&never, 0, 0); return sem_wait(&never) + 1; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.c").write_text(LIBRARY)
    made = folder / "libtorch_stirring.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-O0", "-o", made, folder / "library.c"], check=True)
    return made


@pytest.mark.parametrize(
    ("then", "is_torch"),
    [(f"lock = threading.Lock(); lock.acquire(); {DEEPER}", False), ("library.in_torch()", True)],
)
def test_wait_is_attributed_to_its_caller_not_to_earlier_frames(library: Path, then: str, is_torch: bool) -> None:
    with spawn(sys.executable, "-c", STIRS + then, library) as process:
        wait_for(lambda: targets.futex_call(process.pid), "it to sleep")
        assert native_stack.waits_in_torch(process.pid, PROC) is is_torch


@pytest.mark.parametrize(
    "program",
    ["import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", "import sys; sys.stdin.read()"],
)
def test_a_lock_or_a_pipe_of_pythons_own_is_not_torchs(program: str) -> None:
    with spawn(sys.executable, "-c", program, text=False) as process:
        wait_for(lambda: targets.state(process.pid) == "S", "it to sleep")
        assert native_stack.waits_in_torch(process.pid, PROC) is False


def test_ended_process_has_no_native_stack() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert native_stack.waits_in_torch(process.pid, PROC) is None


@pytest.mark.parametrize("text", ["", "running", "202 0x0", "202 x y z", "202 0x1 0x2 0x3 0x4 0x5 0x6 0x0 0x0"])
def test_any_text_in_syscall_file_is_no_wait_in_torch(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "syscall").write_text(text + "\n")
    assert not native_stack.waits_in_torch(7, tmp_path)
