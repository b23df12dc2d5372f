"""The name of a job's user: by the name service of the host, never by the environment that the user writes."""

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hangwatch.capture.job_scan import JobScan
from hangwatch.model import Job
from tests.commands import rank_environ, sleeping, write_program
from tests.conftest import wait_for
from tests.other_users import needs_mounts, needs_root


def is_in_chroot() -> bool:
    with contextlib.suppress(PermissionError):
        return not Path("/proc/1/root").samefile("/")
    return False


pytestmark = [needs_root, pytest.mark.skipif(is_in_chroot(), reason="in a chroot: users are those of the host")]

rank = functools.partial(sleeping, **rank_environ("r"), USER="alice", LOGNAME="alice", SLURM_JOB_USER="alice")


def job_of(pid: int, scan: JobScan) -> Job:
    (job,) = [job for job in scan.find(None, node="gpu-07").jobs if pid in job.pids]
    return job


def test_job_is_named_by_the_name_service_not_by_its_environment() -> None:
    with rank() as pid:
        assert job_of(pid, JobScan()).user == "root"


@needs_mounts
@pytest.mark.parametrize("before", [("unshare", "--mount"), ("unshare", "--user", "--map-root-user")])
def test_job_in_another_namespace_has_its_user_id(before: Sequence[str]) -> None:
    with rank(*before) as pid:
        assert job_of(pid, JobScan()).user == "uid 0"


def test_slow_name_service_delays_no_scan_and_names_job_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "answer")
    write_program(tmp_path / "getent", f'read -r line < {tmp_path}/answer\necho "$line"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scan = JobScan()
    with rank() as pid:
        assert job_of(pid, scan).user == "uid 0"
        (tmp_path / "answer").write_text("directory-name:x:0:0::/:/bin/false\n")
        wait_for(lambda: job_of(pid, scan).user == "directory-name", "the name service to have answered")
