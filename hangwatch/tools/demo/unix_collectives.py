"""Collectives over a Unix socket to the launcher, in which ranks really block. Standard library only."""

import socket
from typing import NamedTuple

LONGEST_MESSAGE_BYTES = 4096


class ReduceResult(NamedTuple):
    """The sum over all ranks, and the launcher's next order for this rank ("go": no order, continue)."""

    total: float
    order: str


def join(peers: socket.socket) -> str:
    """Block until every rank of the job has started. Return the launcher's first order for this rank."""
    peers.send(b"join 0")
    return peers.recv(LONGEST_MESSAGE_BYTES).decode().partition(" ")[2]


def all_reduce(peers: socket.socket, value: float) -> ReduceResult:
    """Sum `value` over all ranks of the job. Block until all ranks have called this function."""
    peers.send(f"all_reduce {value}".encode())
    total, _, order = peers.recv(LONGEST_MESSAGE_BYTES).decode().partition(" ")
    return ReduceResult(float(total), order)
