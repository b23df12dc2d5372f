"""A real Slurm on loopback with its own munge: a controller, and three nodes. SLURM_CONF is set inside `with`."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import wait_for
from tests.servers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name, path=_PATH) is None for name in PROGRAMS),
    reason="needs root, and Slurm: apt install slurmctld slurmd slurm-client munge",
)
NODES = ("n0", "n1", "n2")
_FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[str]:
    """Start three nodes and a job that uses them all. Yield the job's number."""
    with idle_slurm(folder):
        job = ask("sbatch", "--parsable", "-N3", "-n3", "--output=/dev/null", "--wrap", "sleep 600")
        try:
            wait_for(lambda: steps(job), "the job")
            yield job
        finally:
            _end(job)


@contextlib.contextmanager
def idle_slurm(folder: Path, *, with_cgroups: bool = False) -> Iterator[Path]:
    """Start three nodes without a job. Yield the path of the configuration.

    `with_cgroups`: the control group of a process shows its job, as hangwatch needs it. Control groups v1 only.
    """
    conf = _configuration(folder)
    if with_cgroups:
        if not _FREEZER.is_dir():
            pytest.skip("needs control groups v1")
        first_job = f"FirstJobId={os.getpid()}\n"  # another Slurm on this machine has other groups
        conf.write_text(conf.read_text().replace("proctrack/linuxproc", "proctrack/cgroup") + first_job)
        with (folder / "cgroup.conf").open("a") as cgroup_conf:
            cgroup_conf.write(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={_FREEZER.parent}\n")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        if with_cgroups:
            stack.callback(_remove_groups)
        _munge(folder, stack, log)
        _start(stack, log, "slurmctld", "-D", "-f", str(conf))
        for node in NODES:
            _start(stack, log, "slurmd", "-D", "-f", str(conf), "-N", node)
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(conf)
        stack.callback(_restore, before)
        wait_for(lambda: ask("sinfo", "--noheader", "--states=idle", "--format=%D") == "3", "three idle nodes")
        yield conf


def steps(job: str) -> str:
    """Return Slurm's list of the running steps of a job."""
    return ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i")


def _configuration(folder: Path) -> Path:
    host = socket.gethostname()
    (folder / "state").mkdir(parents=True)
    lines = [
        "ClusterName=trial",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"AuthInfo=socket={folder}/munge.socket",
        "SlurmUser=root",
        f"SlurmctldPort={free_port()}",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"StateSaveLocation={folder}/state",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "SelectType=select/cons_tres",
        "GresTypes=gpu",
        *(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1" for node in NODES),
        "PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "gres.conf").write_text("")
    return folder / "slurm.conf"


def _munge(folder: Path, stack: contextlib.ExitStack, log: IO[str]) -> None:
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    _start(
        stack, log, "munged", "--foreground", "--force", *(f"--{o}={folder}/munge.{name}" for o, name in files.items())
    )
    wait_for(lambda: (folder / "munge.socket").exists(), "munge")


def _start(stack: contextlib.ExitStack, log: IO[str], name: str, *arguments: str) -> None:
    program = shutil.which(name, path=_PATH)
    assert program is not None
    process = stack.enter_context(subprocess.Popen([program, *arguments], stdout=log, stderr=log))
    stack.callback(process.terminate)


def ask(*command: str) -> str:
    """Return the output of a command of Slurm; "" if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def _end(job: str) -> None:
    subprocess.run(["scancel", job], check=True, timeout=30)
    wait_for(lambda: not steps(job), "an end of the job")


def _remove_groups() -> None:
    """Remove the control groups that slurmd leaves, unless another Slurm on this machine uses them."""
    for node in NODES:
        for folder, _, _ in os.walk(_FREEZER / f"slurm_{node}", topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _restore(before: str | None) -> None:
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before
