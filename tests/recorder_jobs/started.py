"""A job of tests/data/waitfor.toml, run as plain processes, and a capture of it as the daemon takes it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture import diagnosis
from hangwatch.capture.request import CaptureRequest
from hangwatch.jobs import discovery
from hangwatch.model import Job
from hangwatch.model.flight_records import RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.base import procfs
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from hangwatch.verdict.sequence_rules import Answer, decide_by_records
from tests.conftest import load_table, wait_for
from tests.servers import free_port

KEY: dict[str, dict[str, Any]] = load_table("waitfor.toml")
PROGRAM = "tests.recorder_jobs.program"
TABLE = activity.load()


class Started(NamedTuple):
    """The processes of a job, by rank. Only the ranks in `read` are captured."""

    folder: Path
    pids: dict[int, int]
    read: tuple[int, ...]

    def job(self) -> Job:
        """Return the job as a scan of the daemon would return it."""
        ranks_of = {pid: rank for rank, pid in self.pids.items()}
        pids = [self.pids[rank] for rank in self.read]
        job = discovery.job_of_pids(ProcessScan().processes(pids), pids)
        ranks = tuple(replace(rank, rank=ranks_of[rank.id.pid], local_rank=ranks_of[rank.id.pid]) for rank in job.ranks)
        return replace(job, ranks=ranks, world_size=len(self.pids))

    def look(self, pause_seconds: float = 0.5) -> Diagnosis:
        """Capture the ranks in `read` in two rounds, `pause_seconds` apart. Return the diagnosis."""
        settings = config.Capture(pause_seconds=pause_seconds, dump_deadline_seconds=60.0)
        return diagnosis.diagnose_job(self.job(), CaptureRequest(settings=settings, node="here", rounds=2), TABLE)

    def dumps(self, ask: str) -> Path:
        """Return the folder of new dumps of all ranks in `read`. A stopped rank writes no dump."""
        (self.folder / "ask.new").write_text(ask)
        (self.folder / "ask.new").rename(self.folder / "ask")
        told = [self.folder / f"dumped-{rank}" for rank in self.read]
        wait_for(lambda: all(path.exists() and path.read_text() == ask for path in told), "the dumps", 60)
        return self.folder / "dumps"

    def recorders(self) -> dict[int, tuple[RankRecords, ...]]:
        """Return the present records of each rank, one item per recorder."""
        states = {rank: procfs.read_state(self.pids[rank]) for rank in self.read}
        read = {rank: torch_recorder.SHARED.read(state[0]) for rank, state in states.items() if state is not None}
        return {rank: tuple(one for one in found if isinstance(one, RankRecords)) for rank, found in read.items()}

    def answer(self, taken: Diagnosis) -> Answer:
        """Return the result of the sequence numbers alone, without stacks."""
        return decide_by_records(taken.grouping)


@cache
def source() -> subprocess.Popen[str]:
    """Start the process from which all jobs of this test session are forked. It ends when its stdin ends."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", PROGRAM]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=root)


def forked(name: str, folder: Path, environ: dict[str, str]) -> int:
    """Start a job. Return the pid of its first process, from which its ranks are forked."""
    stdin, stdout = source().stdin, source().stdout
    stdin.write(json.dumps({"name": name, "folder": str(folder), "environ": environ}) + "\n")
    stdin.flush()
    return int(stdout.readline())


@contextmanager
def started(name: str, folder: Path, **more: str) -> Iterator[Started]:
    """Run a job and yield it when all ranks are at their blocking call. `more` is added to its environment."""
    row = KEY[name]
    (folder / "dumps").mkdir()
    environ = {
        **more,
        **row.get("environ", {}),
        "WORLD_SIZE": str(row["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NEXT_PORT": str(free_port()),
    }
    ranks = range(row["ranks"])
    pids: dict[int, int] = {}
    parent = forked(name, folder, environ)
    try:
        wait_for(lambda: (folder / "pids").exists(), f"the ranks of {name} to be forked", 120)
        pids.update(enumerate(map(int, (folder / "pids").read_text().split())))
        wait_for(lambda: len(list(folder.glob("at-?"))) == len(ranks), f"the ranks of {name} to arrive", 120)
        yield Started(folder, pids, tuple(row.get("read", ranks)))
    finally:
        for pid in pids.values() or [parent]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{parent}").exists(), f"{name} to end")
