"""A fake NCCL RAS server and its responses: as JSON, and as text (before NCCL 2.28).

As a program, this module is a rank: `python -m tests.nccl_ras FOLDER PORT HOW [netns]`. The rank listens as RAS
does, writes each request into FOLDER/asked and sends the content of FOLDER/answer. Other values of `HOW` than
"answer" make it misbehave.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv")
ROOT = Path(__file__).parents[1]
MOST_SENT = 1 << 30


def rank(number: int, pid: int, host: str = "127.0.0.1", **counts: int) -> dict[str, Any]:
    """Return a rank of a communicator, in the JSON of NCCL 2.28."""
    return {
        "rank": number,
        "host": host,
        "pid": pid,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": {name: counts.get(name, 0) for name in OPERATIONS},
    }


def missing(number: int, pid: int, host: str = "127.0.0.1", *, unresponsive: bool = True) -> dict[str, Any]:
    """Return a missing rank, in the JSON of NCCL 2.28.

    It did not respond to RAS, or it responded but does not have this communicator.
    """
    status = {"unresponsive": unresponsive, "considered_dead": False}
    return {"rank": number, "host": host, "pid": pid, "cuda_dev": number, "nvml_dev": number, "status": status}


def communicator(
    ranks: Sequence[Mapping[str, Any]], lost: Sequence[Mapping[str, Any]] = (), name: str = "0x27a079b828ff1a75"
) -> dict[str, Any]:
    """Return a communicator of these ranks, in the JSON of NCCL 2.28."""
    return {
        "hash": name,
        "secondary_hash": "0x5:0x6",
        "size": len(ranks) + len(lost),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost),
        "ranks": ranks,
        "missing_ranks": lost,
    }


def as_json(*communicators: Mapping[str, Any], version: str = "2.28.9") -> str:
    """Return a complete response with these communicators."""
    answer = {
        "nccl_version": version,
        "cuda_runtime_version": 12080,
        "cuda_driver_version": 12080,
        "timestamp": "2026-11-22 16:00:00",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return json.dumps(answer, indent=2) + "\n"


def without_comma(answer: str) -> str:
    """Return the response as NCCL 2.28.9 writes it: without a comma before the status of a missing rank."""
    head, found, tail = answer.partition('"missing_ranks": [')
    return head + found + tail.replace(',\n          "status"', '\n          "status"')


# NCCL's own output with other numbers; from its user guide, "RAS", and src/ras/client_support.cc.
TEXT = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH
    1         2         1         2         2         4   RUNNING      OK

Errors
======

Warnings
========

#0-0 (0079b828ff1a7527) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 64
  Rank 3 has launched up to operation 60 -- GPU 3 managed by process {pid} on node {host}

"""


# --- the server ------------------------------------------------------------------------------------------------------


def serve(listening: socket.socket, folder: Path, how: str) -> None:
    """Serve clients one after the other, without end. `how` selects the behaviour."""
    while True:
        client, _ = listening.accept()
        with contextlib.suppress(OSError), client:
            _answer(client, folder, how)


def _answer(client: socket.socket, folder: Path, how: str) -> None:
    answers = sorted(folder.glob("answer*"))
    is_json = False
    for line in client.makefile():
        command = line.strip()
        is_json |= command == "SET FORMAT json"
        with (folder / "asked").open("a") as asked:
            asked.write(f"{command}\n")
        if how == "silent":
            continue
        if command.startswith("CLIENT PROTOCOL"):
            client.sendall(b"garbage\n" if how == "garbage" else b"SERVER PROTOCOL 2\n")
        elif command.startswith("TIMEOUT"):
            client.sendall(b"OK\n")
        elif command.startswith("SET FORMAT"):
            client.sendall(b"ERROR: Unknown command SET FORMAT json\n" if how == "text" else b"OK\n")
        elif command == "STATUS" and how == "endless":
            while True:
                client.sendall(b" ")
                threading.Event().wait(0.05)
        elif command == "STATUS" and how == "gigabyte" and is_json:
            for _ in range(MOST_SENT >> 20):
                client.sendall(bytes(1 << 20))
        elif command == "STATUS":
            number = (folder / "asked").read_text().split("\n").count("STATUS")
            client.sendall(answers[min(number, len(answers)) - 1].read_bytes())
            return


def own_network() -> None:
    """Move this process to a new network namespace and start its loopback device. See netdevice(7)."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as channel:
        fcntl.ioctl(channel, 0x8914, struct.pack("=16sh14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def listen(address: str, port: int) -> socket.socket:
    """Open a socket with the options that RAS uses."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((address, port))
    listening.listen()
    return listening


def block_forever() -> None:
    """Block forever in a lock, like the main thread of a hung rank."""
    never = threading.Lock()
    never.acquire()
    never.acquire()


def main(folder: Path, port: int, how: str, *more: str) -> None:
    """Run as a rank. If `how` is "mute", the rank does not listen."""
    if "netns" in more:
        own_network()
    if how != "mute":
        threading.Thread(target=serve, args=(listen("127.0.0.1", port), folder, how), daemon=True).start()
    (folder / "ready").write_text("")
    block_forever()


def may_make_networks() -> bool:
    """True if this user may make network namespaces. A child process tries it."""
    tried = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x40000000) != 0)"
    return subprocess.run([sys.executable, "-c", tried], check=False, timeout=60).returncode == 0


needs_networks = pytest.mark.skipif(not may_make_networks(), reason="needs root: makes network namespaces")


@contextlib.contextmanager
def process(folder: Path, how: str = "answer", *, network_of_pid: int | None = None, **environ: str) -> Iterator[int]:
    """Run this module as a rank and yield its pid.

    The rank is in a new network namespace, or in that of process `network_of_pid`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    enter = [] if network_of_pid is None else ["nsenter", f"--net=/proc/{network_of_pid}/ns/net", "--"]
    program = [*enter, sys.executable, "-m", "tests.nccl_ras", str(folder), "28028", how]
    program += [] if network_of_pid is not None else ["netns"]
    with subprocess.Popen(program, cwd=ROOT, env={**os.environ, **environ}) as child:
        try:
            wait_for((folder / "ready").exists, "the server to listen")
            yield child.pid
        finally:
            child.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
