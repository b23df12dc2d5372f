"""A real `hangwatch run` in a separate process, on loopback, and real torchrun jobs for it to monitor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver
from tests.servers import require_host_name
from tests.simulated.node import SimulatedNode

JOBS = Path(__file__).parent / "jobs"
QUICK = {
    "gpu": {"sample_seconds": 0.2, "deadline_seconds": 5.0},
    "jobs": {"discover_seconds": 1.0},
    "detector": {"confirming_captures": 1, "hold_seconds": 3.0, "recover_seconds": 1.0, "cooldown_seconds": 0.0},
    "capture": {"pause_seconds": 1.0},
    "http": {"listen": "127.0.0.1", "port": 0},
}


class RealDaemon:
    """`hangwatch run` with a configuration of the test, ready when `with` begins."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        *,
        prefix: Iterable[str] = (),
        python: str = sys.executable,
        **sections: Mapping[str, object],
    ) -> None:
        self.folder = folder
        self._command = [*prefix, python, "-m", "hangwatch", "run", "--config"]
        self.state = folder / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        merged = {name: {**QUICK.get(name, {}), **sections.get(name, {})} for name in {*QUICK, *sections}}
        merged["store"] = {"directory": str(self.state)} | dict(merged.get("store", {}))
        self.config = folder / "hangwatch.toml"
        self.config.write_text(_toml(merged))
        self._environ = {**environ, "PYTHONUNBUFFERED": "1"}
        self.log_file = folder / "daemon.log"
        self.port = 0
        self._host = merged["http"]["listen"]

    def __enter__(self) -> RealDaemon:
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*self._command, str(self.config)], env=self._environ, stderr=log, stdout=log
            )
        try:
            line = wait_for(self._ready_line, "hangwatch to be ready", 60)
        except BaseException:
            self.process.kill()
            raise
        self.port = int(line.rsplit(":", 1)[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log)  # pytest shows the log with the failure
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            if kind is None:
                pytest.fail(f"hangwatch did not end on SIGTERM:\n{self.log}")

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _ready_line(self) -> str | None:
        if self.process.poll() is not None:
            pytest.fail(f"hangwatch ended with {self.process.returncode}:\n{self.log}")
        return next((line for line in self.log.splitlines() if "metrics on" in line), None)

    @property
    def address(self) -> str:
        """Return HOST:PORT, as Prometheus' configuration has it."""
        return f"{self._host}:{self.port}"

    def get(self, path: str) -> str:
        with urlopen(f"http://{self.address}{path}", timeout=30) as answer:
            return answer.read().decode()

    def status(self) -> dict[str, object]:
        return json.loads(self.get("/status"))

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of all samples with at least these labels; none if the daemon does not answer."""
        text = self._scrape()
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def _scrape(self) -> str:
        """Return the metrics; "" if the daemon has ended, or refuses each attempt for ten seconds."""
        end = time.monotonic() + 10.0
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(URLError, ConnectionError, TimeoutError):
                return self.get("/metrics")
            time.sleep(0.1)
        return ""

    def job_state(self, job_id: str) -> str | None:
        lit = [row["state"] for row, value in self.samples("hangwatch_job_state", job_id=job_id) if value == 1]
        return lit[0] if lit else None

    def wait_for_state(self, job_id: str, state: str, deadline_seconds: float = 90.0) -> None:
        wait_for(lambda: self.job_state(job_id) == state, f"job {job_id} to be {state}", deadline_seconds)


def hang(daemon: RealDaemon, node: SimulatedNode, driver: FakeDriver, rank: int, how: str = "lock") -> None:
    """Block a rank of a simulated node, let the power of all GPUs fall, and wait until the job has hung."""
    node.order(rank, how)
    driver.add("gpu all power_watts 100")
    daemon.wait_for_state(node.run_id, "hung")


def stop_at_shard(folder: Path) -> None:
    """Let rank 2 of stuck_on_a_fifo.py stop at its shard."""
    (folder / "stop-at-shard").touch()
    wait_for(lambda: not (folder / "stop-at-shard").exists(), "rank 2 to reach the shard")


class TorchJob:
    """A real `torchrun` job of `ranks` ranks over gloo. All its processes are gone at the end of `with`."""

    def __init__(  # noqa: PLR0913 - an option of torchrun each
        self,
        folder: Path,
        program: str,
        ranks: int = 4,
        arguments: Iterable[str] = (),
        *,
        endpoint: str = "127.0.0.1:0",
        nodes: int = 1,
        node_rank: int | None = None,
        run_id: str = "",
        prefix: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start `ranks` ranks on one of `nodes` nodes. Without `node_rank`, torchrun assigns the numbers."""
        self.folder = folder
        self.run_id = run_id or f"test-{uuid.uuid4().hex[:8]}"
        self.ranks = ranks
        self._log_file = folder / ("job.log" if node_rank is None else f"job-{node_rank}.log")
        self._environ = environ or {}
        place = ["--rdzv-backend=c10d"] if node_rank is None else ["--rdzv-backend=static", f"--node-rank={node_rank}"]
        self._command = [
            *prefix, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *place,
            f"--nnodes={nodes}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self.run_id}", str(JOBS / program), str(folder), *arguments,
        ]  # fmt: skip

    def __enter__(self) -> TorchJob:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **self._environ}
        environ.pop("RANK", None)
        require_host_name()
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(self._command, env=environ, stdout=log, stderr=log, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        # In its own session: its process group id is the started pid. A launcher behind a `prefix` ends later than it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            end = time.monotonic() + 10
            while time.monotonic() < end:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for_step(self, step: int, deadline_seconds: float = 150.0) -> None:
        """Wait until rank 0 has finished step `step`. Fail at once if the launcher ends."""

        def finished() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"torchrun ended with {self.process.returncode}:\n{self._log_file.read_text()}")
            return self.steps(0) >= step

        wait_for(finished, f"step {step}", deadline_seconds)

    def steps(self, rank: int) -> int:
        path = self.folder / f"steps-{rank}"
        text = path.read_text() if path.exists() else ""
        return int(text or 0)


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    lines: list[str] = []
    for name, table in sections.items():
        lines += [f"[{name}]", *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
