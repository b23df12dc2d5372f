"""A rank with the variables of a launcher: its libraries decide if PyTorch's collective timeout applies."""

from pathlib import Path

import pytest

from hangwatch.capture.job_scan import JobScan
from hangwatch.jobs.collective_timeout import OTHER_DEFAULT_SECONDS, read_timeouts
from hangwatch.model import Job
from tests.conftest import wait_for
from tests.integration import targets

# Importing torch or jax maps gigabytes, and a file of this name.
LATE_IMPORT = """
import mmap, os, time
path = folder + "/" + library
os.makedirs(os.path.dirname(path))
ready()
open(folder + "/fifo").read()
with open(path, "w+b") as file:
    file.truncate(4096)
    kept = [mmap.mmap(file.fileno(), 4096), mmap.mmap(-1, 1 << 29)]
time.sleep(600)
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


@pytest.mark.parametrize(
    ("file", "library", "seconds"),
    [("jaxlib/libjax_common.so", "jax", None), ("torch/lib/libtorch_cpu.so", "torch", OTHER_DEFAULT_SECONDS)],
)
def test_timeout_of_pytorch_is_that_of_its_jobs(file: str, library: str, seconds: float | None, tmp_path: Path) -> None:
    with targets.python(f"library = {file!r}{LATE_IMPORT}", tmp_path, **RANK) as pid:
        scan = JobScan()

        def find() -> Job | None:
            found = scan.find(None, "here").jobs
            return next((job for job in found if job.ranks and job.ranks[0].id.pid == pid), None)

        first = wait_for(find, "the job")
        assert first is not None and not first.libraries
        first = wait_for(lambda: found if (found := find()) and found.libraries is not None else None, "its maps")
        assert first is not None and read_timeouts(first, first.environ).collective_seconds is None
        (tmp_path / "fifo").write_text("go")
        job = wait_for(lambda: found if (found := find()) and found.libraries else None, "the libraries")
    assert job is not None and job.libraries == (library,)
    assert read_timeouts(job, job.environ).collective_seconds == seconds
