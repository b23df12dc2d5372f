"""A barrier over a Unix socket to the launcher, beside the demo's collectives. Standard library only."""

import socket

from hangwatch.tools.demo.unix_collectives import LONGEST_MESSAGE_BYTES


def barrier(peers: socket.socket) -> None:
    """Block until every rank of the job has called this function."""
    peers.send(b"barrier 0")
    peers.recv(LONGEST_MESSAGE_BYTES)
