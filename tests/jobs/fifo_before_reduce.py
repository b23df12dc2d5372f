"""Four ranks over gloo, started in several ways. Rank 1 opens a FIFO and does not join an all_reduce.

usage: torchrun ... fifo_before_reduce.py FOLDER
       python fifo_before_reduce.py FOLDER spawn URL  the ranks get their numbers as arguments
       python fifo_before_reduce.py FOLDER forks URL  the same, and the ranks are forks
       python fifo_before_reduce.py FOLDER vllm URL   the same, with titles as vLLM sets them
       python fifo_before_reduce.py FOLDER ray PORT   forks of a process with the name of a raylet, with the titles of
                                                      actors; they set their variables themselves

FOLDER/pid-RANK has the pid of a rank, FOLDER/shard is the FIFO.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS = 4
TITLES = {"forks": "", "vllm": "VLLM::Worker_TP{}", "ray": "ray::Actor.step"}


def set_title(title):
    """Replace the name and the arguments of this process, as setproctitle does."""
    ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(begin, title.encode()[: end - begin].ljust(end - begin, b"\0"), end - begin)


def open_shard(folder):
    os.open(folder / "shard", os.O_RDONLY)


def train(rank, folder, meet):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    (folder / f"new-{rank}").write_text(str(os.getpid()))
    (folder / f"new-{rank}").rename(folder / f"pid-{rank}")
    if rank == 1:
        open_shard(folder)
    dist.all_reduce(torch.ones(4))


def fork(way, folder, meet):
    if way == "ray":
        set_title("raylet")
    for rank in range(RANKS):
        if os.fork() == 0:
            if title := TITLES[way].format(rank):
                set_title(title)
            if way == "ray":
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
                os.environ.update(numbers, MASTER_ADDR="127.0.0.1", MASTER_PORT=meet)
            train(rank, folder, "env://" if way == "ray" else meet)
    os.wait()


if __name__ == "__main__":
    folder, (way, meet) = Path(sys.argv[1]), sys.argv[2:] or ("", "env://")
    if way == "spawn":
        torch.multiprocessing.spawn(train, args=(folder, meet), nprocs=RANKS)
    elif way:
        fork(way, folder, meet)
    else:
        train(int(os.environ["RANK"]), folder, meet)
