"""The same hang of four real ranks, started in several ways: the same process is named with the same confidence."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hangwatch.cli.dump import dump
from tests.conftest import wait_for
from tests.servers import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[1] / "jobs" / "fifo_before_reduce.py"
RANKS = range(4)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=4", "--master-port={port}")
WAYS = [
    # name, command of Python around the program, way and where the ranks meet, is the launcher dumped by its pid
    pytest.param(TORCHRUN, (), True, id="torchrun"),
    pytest.param((), ("spawn", "file://{folder}/store"), True, id="spawn_with_a_file"),
    pytest.param((), ("spawn", "tcp://127.0.0.1:{port}"), True, id="spawn_with_tcp", marks=pytest.mark.series),
    pytest.param((), ("forks", "tcp://127.0.0.1:{port}"), False, id="pids"),
    pytest.param((), ("vllm", "file://{folder}/store"), False, id="titles_of_vllm"),
    pytest.param((), ("ray", "{port}"), False, id="ray_actors"),
]


@pytest.mark.parametrize(("before", "way", "is_launcher"), WAYS)
def test_hang_names_the_same_process_however_it_was_started(
    before: tuple[str, ...], way: tuple[str, ...], *, is_launcher: bool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "shard")
    facts = {"folder": tmp_path, "port": free_port()}
    command = (sys.executable, *before, str(PROGRAM), str(tmp_path), *way)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen([part.format(**facts) for part in command], env=environ, start_new_session=True)
    files = [tmp_path / f"pid-{rank}" for rank in RANKS]
    try:
        wait_for(lambda: all(file.exists() for file in files), "the ranks", 150)
        pids = [int(file.read_text()) for file in files]

        def judged() -> dict[str, Any] | None:
            asked = [f"--pid={pid}" for pid in ((job.pid,) if is_launcher else pids)]
            (answer,) = json.loads(CliRunner().invoke(dump, ["--json", *asked]).stdout)["jobs"]
            print(answer["verdict"]["message"])
            return answer["verdict"] if answer["verdict"]["named"] else None

        verdict = wait_for(judged, "the verdict", 90) or {}
    finally:
        for pid in [int(file.read_text()) for file in files if file.exists()]:
            os.kill(pid, signal.SIGKILL)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    named = [rank["pid"] for rank in verdict["named"]]
    assert (verdict["kind"], named, verdict["confidence"]) == ("NotJoined", [pids[1]], "high"), verdict["message"]
    assert "open_shard" in verdict["message"]
