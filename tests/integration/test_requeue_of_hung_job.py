"""From a hang to the requeue, with a real Slurm, torchrun and daemon. The kernel logs an XID of the rank's GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import finished, write_program
from tests.conftest import wait_for
from tests.fake_driver import HGX_ADDRESSES, FakeDriver, h100, uuid_of
from tests.integration.test_requeue_over_slurm import SCRIPT, restarts, shown, start_now
from tests.real_daemon import JOBS, RealDaemon, stop_at_shard
from tests.slurm_nodes import ask, idle_slurm, needs_slurm

pytestmark = [needs_slurm, pytest.mark.torch, pytest.mark.timeout(600)]

ODD_RANK = 2  # of stuck_on_a_fifo.py
ADDRESS = f"0000:{HGX_ADDRESSES[ODD_RANK]}"
NAMESPACES = """
hostname "$1"
mount --bind "$2/kmsg" /dev/kmsg
mount --bind "$2/driver" /proc/driver
shift 2
exec "$@"
"""


@pytest.fixture
def slurm_conf(tmp_path: Path) -> Iterator[Path]:
    with idle_slurm(tmp_path / "slurm", with_cgroups=True) as conf:
        yield conf
        subprocess.run(["scancel", "--user=root"], check=True, timeout=30)
        wait_for(lambda: not ask("squeue", "--noheader"), "an end of all jobs")


def submit(folder: Path) -> str:
    """Submit a job of 4 ranks. Return its number when it runs."""
    os.mkfifo(folder / "shard")
    torchrun = f"exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=4"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ.pop("RANK", None)
    done = finished(
        "sbatch",
        "--parsable",
        "--requeue",
        "-N1",
        f"--output={folder}/job.log",
        "--wrap",
        f"{torchrun} {JOBS}/stuck_on_a_fifo.py {folder}",
        env=environ,
        check=True,
    )
    job = done.stdout.strip()
    wait_for(lambda: shown(job, "%T") == "RUNNING", "the job to run")
    return job


def make_driver_files(folder: Path) -> None:
    """Make the files of NVIDIA's driver with the address of the odd rank's GPU, and an empty kernel log."""
    information = folder / "driver" / "nvidia" / "gpus" / f"{ADDRESS}.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: NVIDIA H100 80GB HBM3\nGPU UUID: \t {uuid_of(ODD_RANK)}\n")
    (folder / "kmsg").touch()


def log_xid(folder: Path, sequence: int) -> None:
    microseconds = int(time.monotonic() * 1e6)
    with (folder / "kmsg").open("a") as log:
        log.write(f"4,{sequence},{microseconds},-;NVRM: Xid (PCI:{ADDRESS}): 79, GPU has fallen off the bus.\n")


def make_hook(folder: Path, slurm_conf: Path) -> list[str]:
    """Make a hook that calls the example with the configuration of this Slurm. Return its command."""
    hook = write_program(folder / "requeue.sh", f'export SLURM_CONF={slurm_conf}\nexec {SCRIPT} "$@"')
    (folder / "requeued").mkdir()
    return [str(hook), str(folder / "requeued")]


def test_hung_job_restarts_once_without_node_of_xid(slurm_conf: Path, fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.write(h100(4))
    make_driver_files(tmp_path)
    job = submit(tmp_path)
    node = shown(job, "%N")
    prefix = ("unshare", "--mount", "--uts", "sh", "-ec", NAMESPACES, "sh", node, str(tmp_path))
    hooks = {"on_hung": make_hook(tmp_path, slurm_conf)}
    with RealDaemon(tmp_path / "hw", fake_driver.environ, prefix=prefix, hooks=hooks) as daemon:

        def hang_again(times: int) -> str:
            """Let the job hang with an XID. Return the output of the hook."""
            training = {"job_id": job, "state": "training"}
            wait_for(lambda: any(value for _, value in daemon.samples("hangwatch_job_state", **training)), "training")
            log_xid(tmp_path, times)
            stop_at_shard(tmp_path)
            fake_driver.add("gpu all power_watts 118")
            printed = f"incidents/*-{job}-*/hooks/on_hung.txt"
            wait_for(lambda: len(list(daemon.state.glob(printed))) == times, "the hook", 120)
            fake_driver.write(h100(4))
            return max(daemon.state.glob(printed)).read_text()

        assert hang_again(1) == f"requeued job {job} without {node}\n"
        assert (shown(job, "%x"), restarts(job)) == (node, "1")
        start_now(job)
        assert shown(job, "%N") not in ("", node)
        assert hang_again(2) == f"job {job} is not requeued again: limit 1\n"
        assert (shown(job, "%T"), restarts(job)) == ("RUNNING", "1")
