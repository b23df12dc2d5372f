"""A real job over gloo with all_reduce steps. A rank with an order file does not join the next step.

usage: LAUNCHER odd_rank.py FOLDER            with RANK and WORLD_SIZE from the launcher
       LAUNCHER odd_rank.py FOLDER served     the same in a thread, while the main thread serves HTTP
       python odd_rank.py FOLDER spawn RANKS [URL]  with ranks from torch.multiprocessing.spawn; with URL env:// each
                                                    sets its variables after the start

FOLDER/order-RANK holds the name of a fault from the list below and is removed when the fault begins. SIGUSR1 ends
`sleep` and `spin`. Text written to the FIFO FOLDER/shard ends `loader`. FOLDER/pid-RANK has the pid,
FOLDER/step-RANK the step that the rank is about to finish.
"""

import contextlib
import http.server
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset


class Released(BaseException):
    pass


def release(*_):
    raise Released


class Shards(Dataset):
    """Endless samples for a data loader. With the order `loader`, a worker reads from storage that does not respond."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.01)
        if take_order(self.folder, self.rank, "loader"):
            read_shard(self.folder / "shard")
        return torch.ones(8)


def read_shard(path):
    return path.read_bytes()


def take_order(folder, rank, *names):
    order = folder / f"order-{rank}"
    try:
        name = order.read_text()
    except FileNotFoundError:  # none was given, or the rank or its loader worker has just taken it
        return None
    if name not in names:
        return None
    order.unlink()
    return name


def poll_license_server():
    time.sleep(3600)


def search_best_split():
    while True:
        pass


def take_lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def synchronize_metrics(group):
    dist.barrier(group=group)


TROUBLES = {"sleep": poll_license_server, "spin": search_best_split, "lock": take_lock_twice}


def train(folder, rank, other_group):
    for step, sample in enumerate(DataLoader(Shards(folder, rank), num_workers=1, batch_size=1)):
        name = take_order(folder, rank, *TROUBLES, "mismatch")
        if name in TROUBLES:
            with contextlib.suppress(Released):
                TROUBLES[name]()
        (folder / f"step-{rank}").write_text(str(step))
        if name == "mismatch":
            synchronize_metrics(other_group)
        dist.all_reduce(sample)


def main(rank, folder, ranks, meet="env://"):
    torch.set_num_threads(1)
    if meet == "env://":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = (folder / "port").read_text()
    signal.signal(signal.SIGUSR1, release)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    work = (folder, rank, dist.new_group(backend="gloo"))
    if sys.argv[2:3] == ["served"]:
        threading.Thread(target=train, args=work, daemon=True).start()
        http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler).serve_forever()
    train(*work)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:3] == ["spawn"]:
        ranks = int(sys.argv[3])
        meet = sys.argv[4] if len(sys.argv) > 4 else f"file://{folder}/store"
        torch.multiprocessing.spawn(main, args=(folder, ranks, meet), nprocs=ranks)
    else:
        main(int(os.environ["RANK"]), folder, int(os.environ["WORLD_SIZE"]))
