"""A job with process groups, and a flight recorder of an unknown form: status, metric and check say so."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from hangwatch.probes import torch_recorder
from hangwatch.probes.base import procfs
from hangwatch.probes.node.machine import Node
from hangwatch.tools.commands.status import status
from tests.commands import rank_environ
from tests.conftest import identity, wait_for
from tests.integration import targets
from tests.node_tree import job, real_rank, run, status_and_reason
from tests.real_daemon import RealDaemon

# Maps a program without symbols of a recorder under the name of torch's library, with a thread of a process group.
RANK = """
import ctypes, mmap, threading, time
more = mmap.mmap(-1, {mapped_bytes})
library = open(folder + "/torch/lib/libtorch_cpu.so", "rb")
kept = mmap.mmap(library.fileno(), 1 << 16, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
kept[:8]
def run_loop():
    ctypes.CDLL(None).prctl(15, {thread!r})
    ready()
    time.sleep(600)
threading.Thread(target=run_loop).start()
time.sleep(600)
"""
GLOO, NO_GROUP = b"pt_gloo_runloop", b"a thread"


@contextlib.contextmanager
def ranks(folder: Path, version: str, thread: bytes = GLOO, size: int = 1) -> Iterator[list[int]]:
    """Run the ranks of a job with a torch of this version. Yield their pids."""
    with contextlib.ExitStack() as stack:
        pids = []
        for rank in range(size):
            here = folder / f"rank{rank}"
            (here / "torch" / "lib").mkdir(parents=True)
            (here / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
            program = Path("/bin/true").read_bytes()
            (here / "torch" / "lib" / "libtorch_cpu.so").write_bytes(program.ljust(1 << 17, b"\0"))
            code = RANK.format(mapped_bytes=procfs.FRAMEWORK_MAPPED_BYTES, thread=thread)
            pids.append(stack.enter_context(targets.python(code, here, **rank_environ("new", rank, size))))
        yield pids


@pytest.mark.parametrize(
    ("version", "thread", "reason", "detail"),
    [
        ("2.16.0", GLOO, "RecorderUnread", "torch 2.16.0 is unknown: no object in "),
        ("2.13.0", GLOO, "RecorderUnread", "no object in "),
        ("2.13.0", b"NCCL Service 0", "RecorderUnread", "it has process groups"),
        ("2.16.0", NO_GROUP, "NoRecorder", "torch 2.16.0 is unknown"),
        ("2.7.1", GLOO, "NoRecorder", "torch 2.7.1 has none for gloo"),
    ],
)
def test_recorder_is_unread_if_threads_show_process_groups(
    tmp_path: Path, version: str, thread: bytes, reason: str, detail: str
) -> None:
    with ranks(tmp_path, version, thread) as (pid,):
        (fault,) = torch_recorder.Recorders().read(identity(pid))
    assert (fault.reason, fault.detail[: len(detail)]) == (reason, detail)


def test_job_with_an_unknown_recorder_is_told_everywhere(tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {"jobs": {"discover_seconds": 2.0}}
    with ranks(tmp_path, "2.16.0", size=2) as (pid, _), RealDaemon(tmp_path / "hw", os.environ, **sections) as daemon:
        unseen = partial(daemon.samples, "hangwatch_unseen_ranks", job_id="new", source="flight recorder")
        series = wait_for(
            lambda: next((row for row, count in unseen() if count == 2), None), "both ranks in the metric"
        )
        assert series["reason"] == "RecorderUnread"
        assert series["detail"].startswith("torch 2.16.0 is unknown")
        printed = CliRunner().invoke(status, ["--url", f"http://{daemon.address}"]).output
        assert "no flight recorder of 2 ranks of job new: torch 2.16.0 is unknown: no object in " in printed
        result = run("flight_recorder", Node(jobs=(job(real_rank(pid), job_id="new"),)))
        assert status_and_reason(result) == ("WARNING", "RecorderUnread")
        assert "job new: RecorderUnread, torch 2.16.0 is unknown" in result.verdict.message
