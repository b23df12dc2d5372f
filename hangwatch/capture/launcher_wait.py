"""Measure the wait of a launcher without ranks: its duration, and the state of its sockets."""

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hangwatch.model import Job, Waiting
from hangwatch.probes.network import sockets
from hangwatch.probes.process import procfs

PEERS_LISTED = 8


def measure_wait(job: Job, proc_root: Path) -> Waiting | None:
    """Return the wait of a launcher without ranks; None for a job with ranks.

    The state of the launcher's own sockets shows if its peers respond. hangwatch never connects to the endpoint
    itself, because a user wrote that address.
    """
    if job.waiting is None or job.launcher_id is None:
        return None
    since = job.launcher_id.start_ticks / procfs.TICKS_PER_SECOND
    waiting, port = replace(job.waiting, seconds=max(0.0, time.monotonic() - since)), job.waiting.port
    held = None if port is None else sockets.sockets_at_port(port, job.launcher_id.pid, proc_root)
    return waiting if port is None or held is None else _with_sockets(waiting, port, held)


def _with_sockets(waiting: Waiting, port: int, held: Sequence[sockets.Connection]) -> Waiting:
    """Return `waiting` with the state of the sockets at the endpoint's port, and the connected peers.

    A launcher that serves the port is also its own first client, which is not listed as a peer.
    """
    use = sockets.classify_port_use(port, held)
    if use == "serving":
        own = {one.local for one in held}
        ends = {one.remote for one in held if one.local[1] == port and one.state == sockets.ESTABLISHED} - own
    else:
        state = sockets.ESTABLISHED if use == "connected" else sockets.SYN_SENT
        ends = {one.remote for one in held if one.remote[1] == port and one.state == state}
    peers = sorted({sockets.format_address(end) for end in ends})
    return replace(waiting, socket=use, peers=tuple(peers[:PEERS_LISTED]))
