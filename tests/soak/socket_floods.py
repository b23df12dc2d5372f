"""Flood the daemon's unix socket and port. The daemon must still serve another user's dump, with bounded CPU time.

usage: python -m tests.soak.socket_floods [--dumps 20] [--users 12] [--seconds 5]      as root

First each flood runs alone, for `--seconds` from its first refusal on. The CPU times of the daemon and of the
flooder are printed. Then `--users` users, each with a job, flood the socket in every way at once. Meanwhile another
user runs `hangwatch dump`.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.commands import spawn
from tests.conftest import wait_for
from tests.integration.test_user_socket import Node, node_with_jobs
from tests.other_users import as_user
from tests.soak import number_options

PYTHON = "/usr/bin/python3"  # every user may run it
TICKS = os.sysconf("SC_CLK_TCK")
FLOODER = """
import contextlib, socket, sys, time
mode, where, pid = sys.argv[1:]
port = where.rpartition(":")[2] if ":" in where else ""
held = []
def connect():
    one = socket.socket(socket.AF_INET if port else socket.AF_UNIX)
    one.settimeout(20)
    one.connect(("127.0.0.1", int(port)) if port else where)
    return one
def ask(what):
    one = connect()
    with one:
        one.sendall(b"GET %s HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" % what)
        while one.recv(1 << 16): pass
while True:
    with contextlib.suppress(OSError):
        if mode == "connect": connect().close()
        elif mode == "hold":
            held.append(connect())
            if len(held) > 500: held.pop(0).close()
        elif mode == "dump": ask(b"/dump?pid=" + pid.encode())
        else: ask(mode.encode())
"""
OVER_UNIX = ("connect", "hold", "/status", "/incidents", "dump")
OVER_TCP = ("connect", "hold", "/healthz", "/metrics", "/status")


class Cost(NamedTuple):
    """CPU seconds of the daemon and of the flooder in the same period."""

    daemon: float
    flooder: float

    def __str__(self) -> str:
        return f"daemon {self.daemon:.2f} s, flooder {self.flooder:.2f} s of CPU: {self.daemon / self.flooder:.2f}"


@contextmanager
def flood(uid: int, mode: str, where: str, pid: int) -> Iterator[int]:
    """Start a process of user `uid` that sends requests without end. Yield its pid."""
    command = [*as_user(uid), PYTHON, "-SE", "-c", FLOODER, mode, where, str(pid)]
    with spawn(*command, stdin=subprocess.DEVNULL) as flooder:
        yield flooder.pid


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cheapest(seconds: float, *pids: int) -> list[float]:
    """Return the CPU seconds in that third in which the first process spent the least: others may have checks."""
    thirds = []
    for _ in range(3):
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(seconds / 3)
        thirds.append([cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)])
    return min(thirds)


def cost(node: Node, uid: int, mode: str, where: str, seconds: float) -> Cost:
    """Return the CPU seconds of daemon, less its usual ones, and flooder in the cheapest third of a flood."""
    ours = node.daemon.process.pid
    (usual,) = cheapest(seconds, ours)
    with flood(uid, mode, where, node.pids[uid]) as pid:
        if (where, mode) != (node.daemon.address, "connect"):  # this flood is closed at once, so never refused
            said = f"connections of user {uid} are refused"
            wait_for(lambda: said in node.daemon.log, "the flooder to be over its limit")
        spent, own = cheapest(seconds, ours, pid)
        return Cost(spent - usual, own)


def answered(node: Node, victim: int, users: list[int], dumps: int) -> int:
    """Flood the socket by all users, each in one way. Return the number of dumps that `victim` could take."""
    wait_for(lambda: f"job-of-{victim} " in node.daemon.log, "the scan that finds the job", 150)
    with ExitStack() as stack:
        for number, uid in enumerate(users):
            stack.enter_context(flood(uid, OVER_UNIX[number % len(OVER_UNIX)], str(node.socket), node.pids[uid]))
        wait_for(lambda: "are refused" in node.daemon.log, "the flood")
        good = 0
        for _ in range(dumps):
            began = time.monotonic()
            done = node.hangwatch(victim, "dump", "--job", f"job-of-{victim}", "--json", "--rounds", "1")
            is_good = done.returncode == 0 and f"train_of_{victim}" in done.stdout
            good += is_good
            print(f"  {time.monotonic() - began:5.1f} s {'answered' if is_good else done.stderr.strip()}", flush=True)
        return good


def main() -> None:
    options = number_options(__doc__, dumps=20, users=12, seconds=5.0)
    victim, *users = random.sample(range(1 << 20, 1 << 30), 1 + options.users)
    with node_with_jobs([victim, *users]) as node:
        for kind, where, modes in (("unix", str(node.socket), OVER_UNIX), ("tcp", node.daemon.address, OVER_TCP)):
            for mode, uid in zip(modes, users, strict=False):
                print(f"{kind:4} {mode:10} {cost(node, uid, mode, where, options.seconds)}", flush=True)
        good = answered(node, victim, users, options.dumps)
        print(f"{good} of {options.dumps} dumps answered beside {options.users} users that flood the socket")
        print(*(line for line in node.daemon.log.splitlines() if "are refused" in line), sep="\n")
    sys.exit(0 if good == options.dumps else 1)


if __name__ == "__main__":
    main()
