"""Objects between two ranks: what is waited for is compiled code, which leaves no Python frame."""

from __future__ import annotations

import torch
import torch.distributed as dist


def recv_object(source: int) -> int:
    """What a rank sent, a number in place of any object."""
    received = torch.zeros(1, dtype=torch.int64)
    dist.irecv(received, src=source).wait()
    return int(received)


def send_object(value: int, destination: int) -> None:
    """Hand a number on."""
    dist.isend(torch.tensor([value]), dst=destination).wait()
