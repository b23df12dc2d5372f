"""A rank that waits for another rank by torch.distributed.rpc.

The rank is blocked. The job hangs only if the other rank does not progress.
"""

from pathlib import Path

import pytest

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture, job_of_pids
from hangwatch.model import Signature
from hangwatch.stacks import activity
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from tests.integration import targets

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SETTINGS = config.Capture(rounds=3, pause_seconds=1.0, dump_deadline_seconds=60.0)
# TCP as between nodes: over shared memory TensorPipe always polls in its own thread.
RANK = """
import hashlib, os, threading
import torch.distributed.rpc as rpc
lock = threading.Lock()
lock.acquire()
def locks():
    ready()
    lock.acquire()
def computes():
    ready()
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 100000)
options = rpc.TensorPipeRpcBackendOptions(
    rpc_timeout=3600, init_method="file://{meeting}", _transports=["uv"], _channels=["basic"]
)
"""
CLIENT = RANK + "ready()\nrpc.init_rpc('client', rank=0, world_size=2, rpc_backend_options=options)\n"
SERVER = RANK + "rpc.init_rpc('server', rank=1, world_size=2, rpc_backend_options=options)\nrpc.shutdown()\n"


@pytest.mark.parametrize(
    ("does", "expected"),
    [("locks", Signature.BLOCKED), ("computes", Signature.UNKNOWN)],
)
def test_rank_waiting_by_rpc_is_blocked(does: str, expected: Signature, tmp_path: Path) -> None:
    folders = tmp_path / "client", tmp_path / "server"
    for folder in folders:
        folder.mkdir()
    client = CLIENT + f"rpc.rpc_sync('server', {does})\n"
    with (
        targets.python(client.replace("{meeting}", str(tmp_path / "meeting")), folders[0]) as asks,
        targets.python(SERVER.replace("{meeting}", str(tmp_path / "meeting")), folders[1]) as asked,
    ):
        taken = capture(job_of_pids([asks, asked]), CaptureRequest(settings=SETTINGS, node="here"))
    measured = {one.id.pid: one.signature for one in group_ranks(taken, Table(()), SETTINGS).members}
    assert measured == {asks: Signature.BLOCKED, asked: expected}
    named = {group.members[0].id.pid: group for group in group_ranks(taken, activity.load(), SETTINGS).groups}
    assert (named[asks].activity, named[asks].operation) == ("rpc_wait", "rpc_sync")
