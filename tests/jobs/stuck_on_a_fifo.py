"""A real job over gloo. Every step is an all_reduce; on request rank 2 does not join until a FIFO is written.

usage: torchrun ... stuck_on_a_fifo.py FOLDER

FOLDER/shard is the FIFO. FOLDER/stop-at-shard makes rank 2 read it, or do what the file says: wait for a "child", a
data-loader worker ("loader"), the answer of a "server" of its own or a "lock" of a child, or call another operation
("mismatch") or group ("cycle") than the other ranks. Before it can be killed ("gone"), it forks a child, which keeps
its connections open. Each rank writes its finished steps to FOLDER/steps-<rank>.
"""

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

ODD_RANK = 2
HOLDS_LOCK = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
time.sleep(1000)
"""


def read_shard(folder: Path) -> bytes:
    with open(folder / "shard", "rb") as shard:  # noqa: PTH123 - a builtin: the innermost frame is this function
        return shard.read()


def tell_helper(folder: Path, pid: int) -> None:
    """Write the pid of the process for which rank 2 waits to FOLDER/helper."""
    (folder / "new-helper").write_text(str(pid))
    (folder / "new-helper").rename(folder / "helper")


def get_stuck(folders: list[Path]) -> None:
    tell_helper(folders[0], os.getpid())
    time.sleep(1000)


def wait_for_helper(folder: Path, fault: str) -> None:
    ours, theirs = socket.socketpair()
    with (folder / "cache.lock").open("w") as lock, theirs:
        command = [sys.executable, "-c", HOLDS_LOCK, lock.name]
        helper = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        theirs.close()
        helper.stdout.readline()
        tell_helper(folder, helper.pid)
        match fault:
            case "child":
                helper.wait()
            case "server":
                ours.recv(1)
            case "lock":
                fcntl.flock(lock, fcntl.LOCK_EX)


def stop(folder: Path, fault: str, unused: dist.ProcessGroup) -> None:
    match fault:
        case "gone":
            if child := os.fork():
                tell_helper(folder, child)
            time.sleep(1000)
        case "child" | "server" | "lock":
            wait_for_helper(folder, fault)
        case "loader":
            next(iter(DataLoader([folder], num_workers=1, collate_fn=get_stuck)))
        case "mismatch":
            dist.broadcast(torch.ones(1), ODD_RANK)
        case "cycle":
            dist.all_reduce(torch.ones(1), group=unused)
        case _:
            read_shard(folder)


def train(folder: Path) -> None:
    step, unused = 0, dist.new_group()
    go_on = torch.ones(1)
    while go_on.item():
        if dist.get_rank() == ODD_RANK and (folder / "stop-at-shard").exists():
            fault = (folder / "stop-at-shard").read_text()
            (folder / "stop-at-shard").unlink()
            stop(folder, fault, unused)
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        step += 1
        (folder / f"steps-{dist.get_rank()}").write_text(str(step))
        time.sleep(0.01)  # replaces work on the GPU, which uses no core
        go_on[0] = 0.0 if (folder / "finish").exists() else 1.0
        dist.broadcast(go_on, 0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
