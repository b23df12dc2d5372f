"""Pass objects between two ranks; the wait is in compiled code, which leaves no Python frame."""

from __future__ import annotations

import torch
import torch.distributed as dist


def recv_object(source: int) -> int:
    """Receive an object; in this test it is a number."""
    received = torch.zeros(1, dtype=torch.int64)
    dist.irecv(received, src=source).wait()
    return int(received)


def send_object(value: int, destination: int) -> None:
    """Send a number."""
    dist.isend(torch.tensor([value]), dst=destination).wait()
