"""The flight recorder of a rank in D state is read, unless the rank holds the lock of its memory map."""

import os
import signal
import time
from pathlib import Path

import pytest

from hangwatch.model import Fault
from hangwatch.probes import torch_recorder
from tests.conftest import wait_for
from tests.integration import targets
from tests.other_users import needs_root
from tests.recorder_of_other_torch import identity, read

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

ENQUEUED = """
import mmap, os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3): dist.all_reduce(torch.ones(4))
"""
SPAWNS = """
ready()
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, folder + "/fifo", os.O_RDONLY, 0)])
"""
MAPPED = "page = mmap.mmap(data, 4096)\n"
READS = {"before": MAPPED, "then": "os.pread(data, 9, 0)"}
FAULTS = {"before": MAPPED, "then": "page[0]"}
# When another mapping replaces a modified page, the kernel writes the page back and holds mmap_lock.
LOCKS = {
    "before": f"{MAPPED}import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, "
    "ctypes.c_int, ctypes.c_int, ctypes.c_long]\npage[0] = 65\nat = ctypes.addressof(ctypes.c_char.from_buffer(page))",
    "then": "libc.mmap(at, 4096, 3, 0x32, -1, 0)",
}


def test_a_rank_that_waits_like_vfork_is_read(tmp_path: Path) -> None:
    with targets.python(ENQUEUED + SPAWNS, tmp_path) as pid:
        targets.wait_for_state(pid, "D")
        assert [one.collective_seq for one in read(identity(pid)).records] == [1, 2, 3]


@needs_root
@pytest.mark.parametrize(
    ("how", "is_read"), [(READS, True), (FAULTS, True), (LOCKS, False)], ids=["reads", "faults", "locks its memory"]
)
def test_a_rank_that_waits_for_a_silent_file_system(how: dict[str, str], *, is_read: bool, tmp_path: Path) -> None:
    with targets.on_silent_mount(tmp_path, first=ENQUEUED, **how) as pid:
        wchan = Path(f"/proc/{pid}/wchan")
        wait_for(lambda: targets.state(pid) == "D" or "request_wait_answer" in wchan.read_text(), "the rank to ask")
        os.kill(pid, signal.SIGUSR1)  # FUSE waits in S until the first signal, then in D: fs/fuse/dev.c
        targets.wait_for_state(pid, "D")
        began = time.monotonic()
        (found,) = torch_recorder.Recorders().read(identity(pid))
        seconds = time.monotonic() - began
        print(f"{found.reason if isinstance(found, Fault) else len(found.records)} in {seconds:.3f} s")
    assert seconds < 10
    if is_read:
        assert not isinstance(found, Fault), found
        assert [one.collective_seq for one in found.records] == [1, 2, 3]
    else:
        assert isinstance(found, Fault) and found.reason == "NoAnswer", found
