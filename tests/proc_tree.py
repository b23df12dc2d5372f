"""Convert between trees like /proc and their text form (tests/data/proc/*.proc).

4711 (pt_elastic) S parent=4700 start=1000     a process; the indented lines below belong to it
  $ python3 /usr/bin/torchrun train.py         its command line, as a shell would split it
  + RANK=0 LOCAL_RANK=0                         its environment, any number of such lines
  @ uid=1004 /slurm/uid_1004/job_7/step_0       its real user id and its control group
  @ uid=1004,0 /user.slice                      as above; its effective user id is 0
  > 10.0.0.5:29500                              a TCP connection that it holds
= torchrun run-7, 2 of 4 ranks: 2/0 at 4720, 3/1 at 4721
                                                a job that must be found in it: launcher and id, number of ranks on
                                                this node and in all; for each: rank, local rank, pid
= torchrun run-7, no ranks: waits at 4711 (run-7, 2, node1:29400)
                                                a launcher without ranks: its pid and its arguments
"""

import re
import shlex
import shutil
import socket
import struct
from pathlib import Path

from hangwatch.capture.job_scan import JobScan
from hangwatch.model import GpuSample, GpuSweep, Job

FOLDER = Path(__file__).parent / "data" / "proc"
_OWNER = re.compile(r"@ uid=(\d+)(?:,(\d+))? (\S+)")
_CONNECTION = re.compile(r"> ([\d.]+):(\d+)")
_HEAD = re.compile(r"(\d+) \((.*)\) ([A-Zt]) parent=(\d+) start=(\d+)")


def lay_out(text: str, root: Path) -> Path:
    """Write the processes of `text`, and no others, as a tree like /proc below `root`. Return `root`."""
    for old in root.glob("[0-9]*"):
        shutil.rmtree(old)
    pid = 0
    environ: dict[int, list[str]] = {}
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("#", "= ")):
            continue
        if head := _HEAD.fullmatch(bare):
            pid = int(head[1])
            environ[pid] = []
            _begin(root / head[1], head)
        elif found := _OWNER.fullmatch(bare):
            real, effective = found[1], found[2] or found[1]
            (root / f"{pid}/status").write_text(f"Name:\tx\nUid:\t{real}\t{effective}\t{effective}\t{effective}\n")
            (root / f"{pid}/cgroup").write_text(f"0::{found[3]}\n")
        elif found := _CONNECTION.fullmatch(bare):
            _connect(root / str(pid), found[1], int(found[2]))
        elif bare.startswith("$ "):
            (root / f"{pid}/cmdline").write_bytes("".join(f"{a}\0" for a in shlex.split(bare[2:])).encode())
        elif bare.startswith("+ "):
            environ[pid] += shlex.split(bare[2:])
            (root / f"{pid}/environ").write_bytes("".join(f"{e}\0" for e in environ[pid]).encode())
        else:
            raise ValueError(f"not a line of a process tree: {line!r}")
    return root


def expected_jobs(text: str) -> list[str]:
    """Return the jobs that the text of a tree expects, in the format of `describe`."""
    return [line.removeprefix("= ") for line in text.splitlines() if line.startswith("= ")]


def describe(job: Job) -> str:
    """Return the line of a job as in the text of a tree."""
    if job.waiting is not None:
        told = ", ".join(filter(None, (job.waiting.run_id, job.waiting.nodes, job.waiting.endpoint)))
        return f"{job.launcher} {job.job_id}, no ranks: waits at {job.processes[0].pid} ({told})"
    ranks = ", ".join(f"{rank.rank}/{rank.local_rank} at {rank.id.pid}" for rank in job.ranks)
    absent = "".join(f", absent {number}/{local}" for number, local in job.absent_local_ranks)
    return f"{job.launcher} {job.job_id}, {job.local_world_size} of {job.world_size} ranks: {ranks}{absent}"


def _begin(folder: Path, head: re.Match[str]) -> None:
    pid, comm, state, parent, start = head.groups()
    kernel_thread = 0x00200000 if parent == "2" else 0x00400000
    fields = ["0"] * 52
    fields[:4] = [pid, f"({comm})", state, parent]
    fields[8], fields[21], fields[49] = str(kernel_thread), start, "140720000000000"
    fields[23] = "2500"  # pages; none would mean that the main thread has ended
    folder.mkdir(parents=True)
    (folder / "stat").write_text(" ".join(fields) + "\n")
    (folder / "cmdline").write_bytes(b"")
    (folder / "environ").write_bytes(b"")


def _connect(folder: Path, address: str, port: int) -> None:
    """Write an established connection to this address into the process's own network tables."""
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    inode = 90_000 + int(folder.name)
    for name in ("net", "fd", "ns"):
        (folder / name).mkdir()
    row = f"0: 0100000A:C001 {number:08X}:{port:04X} 01 00000000:00000000 00:00000000 00000000 0 0 {inode} 1"
    (folder / "net/tcp").write_text(f"  sl  local_address rem_address   st tx_queue rx_queue\n   {row}\n")
    (folder / "fd/7").symlink_to(f"socket:[{inode}]")
    (folder / "ns/net").symlink_to(f"net:[{4026532000 + int(folder.name)}]")
    (folder / "ns/user").symlink_to("user:[4026531837]")
    init = folder.parent / "1/ns"
    init.mkdir(exist_ok=True)
    if not (init / "user").is_symlink():
        (init / "user").symlink_to("user:[4026531837]")


def record(
    pids: list[int], names: str = "RANK|SIZE|TORCHELASTIC|MASTER_|SLURM_|OMPI_|PMI|MPI_LOCAL|VISIBLE_DEV"
) -> str:
    """Return the tree of these real processes as text, as the trees of real launchers were made."""
    lines = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text()
        comm, rest = re.fullmatch(r"\d+ \((.*)\) (.*)\n", stat).groups()
        fields = rest.split()
        lines.append(f"{pid} ({comm}) {fields[0]} parent={fields[1]} start={fields[19]}")
        cmdline = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        lines.append(f"  $ {shlex.join(cmdline)}")
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")[:-1]
        kept = [entry for entry in entries if re.search(names, entry.partition("=")[0])]
        lines += [f"  + {shlex.quote(entry)}" for entry in kept]
    return "\n".join(lines) + "\n"


def sweep(pids_by_gpu: dict[int, tuple[int, ...]], taken_monotonic_seconds: float = 1e9) -> GpuSweep:
    """Return a GPU sample. `pids_by_gpu` are the processes of GPU-a0, GPU-a1, ..."""
    return GpuSweep(
        taken_monotonic_seconds=taken_monotonic_seconds,
        taken_unix_seconds=0.0,
        gpus=tuple(GpuSample(index=index, uuid=f"GPU-a{index}", pids=pids) for index, pids in pids_by_gpu.items()),
    )


def jobs_in(name: str, root: Path, gpus: GpuSweep | None = None) -> tuple[Job, ...]:
    """Return the jobs that a scan finds in the tree `name`."""
    return JobScan(lay_out((FOLDER / f"{name}.proc").read_text(), root)).find(gpus, node="").jobs
