"""The end time of sleeps and timed waits of real processes."""

import time
from pathlib import Path

import pytest

from hangwatch.model import SystemCall
from hangwatch.probes.process import call_timeout, main_thread
from tests.conftest import wait_for
from tests.integration import targets

SHIFTS_CLOCK = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.unshare(0x80) == 0:  # CLONE_NEWTIME
    open("/proc/self/timens_offsets", "w").write("monotonic 100000 0")
    libc.setns(os.open("/proc/self/ns/time_for_children", os.O_RDONLY), 0x80)
"""
WAITS = {
    "time.sleep": "import time\nready()\ntime.sleep(600)",
    "select": "import select\nready()\nselect.select([], [], [], 600)",
    "poll": "import os, select\none = select.poll()\none.register(os.pipe()[0])\nready()\none.poll(600_000)",
    "event loop": "import asyncio\nready()\nasyncio.run(asyncio.sleep(600))",
    "Event.wait": "import threading\nready()\nthreading.Event().wait(600)",
    "queue.get": "import queue\nready()\nqueue.Queue().get(timeout=600)",
    "time.sleep with a shifted clock": f"{SHIFTS_CLOCK}import time\nready()\ntime.sleep(600)",
    "nanosleep of C": "import ctypes\nready()\nctypes.CDLL(None).sleep(600)",
}
FOR_EVER = {
    "lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()",
    "poll": "import os, select\none = select.poll()\none.register(os.pipe()[0])\nready()\none.poll()",
}
PROC = Path("/proc")


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
def test_end_of_a_wait_is_read(code: str, tmp_path: Path) -> None:
    with targets.python(code, tmp_path) as pid:
        wait_for(lambda: (call := _call(pid)) is not None and call.left_seconds is not None, "the wait")
        call = _call(pid)
    assert call.left_seconds is not None
    assert call.until_unix_seconds is not None
    assert 500 < call.left_seconds <= 600
    assert call.until_unix_seconds == pytest.approx(time.time() + call.left_seconds, abs=60)


@pytest.mark.parametrize("code", FOR_EVER.values(), ids=FOR_EVER)
def test_wait_without_a_timeout_has_no_end(code: str, tmp_path: Path) -> None:
    with targets.python(code, tmp_path) as pid:
        wait_for(lambda: (call := _call(pid)) is not None and call.name in {"futex", "poll"}, "the wait")
        call = _call(pid)
    assert call.left_seconds is call.until_unix_seconds is None


def _call(pid: int) -> SystemCall | None:
    return call_timeout.add_end(pid, main_thread.read_call(pid, PROC), PROC)
