"""Two worker groups of one Ray job, over gloo: `Actor` with three ranks, `Critic` with two.

At step 30 rank 1 of `Actor` leaves, and the task of `Critic` ends.

usage: python ray_groups.py MODE FOLDER TEMPORARY_FOLDER

MODE `train`: each actor sets all variables itself, like Ray Train. `verl`: RANK and WORLD_SIZE come from `runtime_env`,
and rank 0 sets MASTER_* itself. `environ`: all variables come from `runtime_env`. FOLDER/pid-GROUP-RANK has the pid.
"""

import os
import random
import sys
import time
from pathlib import Path

import ray


def wait_for_reward():
    time.sleep(3600)


def free_port():
    return str(random.randrange(10_000, 29_000))  # the kernel gives these to no other process


def train(folder, name, rank, variables):
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    new = folder / f"new-{name}-{rank}"
    new.write_text(str(os.getpid()))
    new.rename(folder / f"pid-{name}-{rank}")
    for step in range(1_000_000):
        if (name, step) == ("Critic", 30):
            return
        if (name, rank, step) == ("Actor", 1, 30):
            wait_for_reward()
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)


class Actor:
    def work(self, *arguments):
        train(*arguments)


class Critic(Actor):
    pass


def start(group, ranks, mode, folder):
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    actors, calls = [], []
    for rank in range(ranks):
        number = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        early = {"train": {}, "verl": number | (master if rank else {}), "environ": number | master}[mode]
        actors.append(ray.remote(group).options(num_cpus=1, runtime_env={"env_vars": early}).remote())
        calls.append(actors[-1].work.remote(folder, group.__name__, rank, number | master))
    return actors, calls


if __name__ == "__main__":
    mode, folder, temporary = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=temporary)
    groups = [start(Actor, 3, mode, folder), start(Critic, 2, mode, folder)]  # an actor ends with its last reference
    ray.get([call for _, calls in groups for call in calls])
