"""Functions that pass objects between two ranks. They wait in compiled code, which has no Python frame."""

from __future__ import annotations

import torch
import torch.distributed as dist


def recv_object(source: int) -> int:
    """Receive a number from rank `source`."""
    received = torch.zeros(1, dtype=torch.int64)
    dist.irecv(received, src=source).wait()
    return int(received)


def send_object(value: int, destination: int) -> None:
    """Send a number to rank `destination`."""
    dist.isend(torch.tensor([value]), dst=destination).wait()
