"""Threads and children of libraries that a training program has in every rank. They decide nothing.

They are wandb without its server, the event loop of fsspec, a TensorBoard writer, and a Prometheus server.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import fsspec.asyn
import prometheus_client

KEPT: list[object] = []


def start_loop_and_server() -> None:
    """Start the event loop of fsspec and a Prometheus server, which take little time."""
    fsspec.asyn.sync(fsspec.asyn.get_loop(), asyncio.sleep, 0)
    prometheus_client.start_http_server(0, addr="127.0.0.1")


def start_all(folder: Path) -> None:
    """Start the threads of all four libraries. Their files are in `folder`."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    start_loop_and_server()
    run, writer = wandb.init(project="test", dir=folder), EventFileWriter(str(folder))
    run.log({"loss": 1.0})
    writer.add_event(Event(step=1))
    KEPT.extend((run, writer))
