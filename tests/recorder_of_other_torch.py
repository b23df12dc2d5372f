"""Read the flight recorders of another torch from outside, and compare them with the dumps of the processes.

usage: python -m tests.recorder_of_other_torch [--root FOLDER] [--environ NAME=VALUE]... [--turns 50]
           [--backend gloo | fake] PYTHON

Start real ranks (jobs/recorded.py) with an interpreter that has torch. Read their recorders from outside
and compare every row with the process's own `_dump_fr_trace_json()`. Then repeat this without the symbols of the
library, which needs root. The backend `fake` has a recorder only by a hook, since torch 2.15; such a recorder is found
by symbols only. FOLDER may hold another distribution; PYTHON is then a path inside FOLDER. FOLDER becomes
the root of each rank, in a private mount namespace, as in a container.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hangwatch.model import Fault, ProcessId
from hangwatch.model.flight_records import FlightRecord, RankRecords
from hangwatch.probes import torch_recorder
from hangwatch.probes.torch_recorder import libraries
from tests.commands import spawn
from tests.conftest import identity, wait_for

PROGRAM = Path(__file__).parent / "jobs" / "recorded.py"
RANKS, TURNS = 4, 50
_MOUNTING = "unshare", "--mount", "--propagation", "private", "sh", "-euc"
_PIVOT = 'mount --rbind "$1" "$1"; cd "$1"; mount --rbind /proc proc; mkdir -p old; pivot_root . old; shift; exec "$@"'
IN_ANOTHER_ROOT = *_MOUNTING, _PIVOT, "sh"
_PASSING = "NoAnswer", "ChangedWhileRead"
VERSIONS = "import sys, torch; print(f'Python {sys.version.split()[0]}, torch {torch.__version__}')"


class Job(NamedTuple):
    """The ranks of a job, and how to start them. `before` is the beginning of their command."""

    ranks: int
    python: str = sys.executable
    root: Path = Path("/")
    before: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    backend: str = "gloo"

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs Python with these arguments."""
        inner = (*IN_ANOTHER_ROOT, str(self.root)) if self.root != Path("/") else ()
        return [*self.before, *inner, self.python, *arguments]


@contextlib.contextmanager
def running(folder: Path, job: Job) -> Iterator[list[ProcessId]]:
    """Start a job in `folder`, below the job's root. Yield its processes when all ranks have connected."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shutil.copy(PROGRAM, folder)
    inside = Path("/") / folder.relative_to(job.root)
    children = []
    with contextlib.ExitStack() as kept:
        for rank in range(job.ranks):
            place = {"WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environ = {**os.environ, **place, "RANK": str(rank), **job.environ}
            command = job.command(str(inside / PROGRAM.name), str(inside), job.backend)
            children.append(kept.enter_context(spawn(*command, env=environ, stdout=None)))
        paths = [folder / f"pid-{rank}" for rank in range(job.ranks)]
        wait_for(lambda: have_met(paths, children), "the ranks to meet", 300)
        yield [identity(int(path.read_text())) for path in paths]


def have_met(paths: Sequence[Path], ranks: Sequence[subprocess.Popen[str]]) -> bool:
    assert all(rank.poll() is None for rank in ranks), "a rank has ended"
    return all(path.exists() for path in paths)


def without_symbols(library: Path, stripped: Path) -> tuple[str, ...]:
    """Return the beginning of a command that sees the library stripped, by a mount. Needs root."""
    subprocess.run([shutil.which("strip") or "strip", "--strip-all", "-o", stripped, library], check=True)
    hide = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
    return *_MOUNTING, hide, "sh", str(stripped), str(library)


def read(process: ProcessId, backend: str = "gloo") -> RankRecords:
    """Read the recorder of a backend beside unused ones of others, again after a fault that passes by itself."""

    def answered() -> RankRecords | Fault | None:
        answers = torch_recorder.SHARED.read(process)
        (answer,) = [one for one in answers if isinstance(one, Fault) or one.library == backend]
        return None if isinstance(answer, Fault) and answer.reason in _PASSING else answer

    answer = wait_for(answered, f"an answer about {process.pid}")
    assert isinstance(answer, RankRecords), answer
    return answer


def as_row(record: FlightRecord) -> dict[str, Any]:
    """Return a record in the form of the recorder's own dump, with the fields that gloo writes."""
    return {
        "record_id": record.id,
        "pg_id": record.group_id,
        "process_group": [record.group_name, record.group_description],
        "thread_name": record.thread_name,
        "thread_id": str(record.thread_id),
        "collective_seq_id": record.collective_seq,
        "p2p_seq_id": record.p2p_seq,
        "op_id": record.op_id,
        "profiling_name": record.operation,
        "time_created_ns": record.created_unix_ns,
        "input_sizes": [list(size) for size in record.input_sizes],
        "input_dtypes": list(record.input_dtypes),
        "output_sizes": [list(size) for size in record.output_sizes],
        "output_dtypes": list(record.output_dtypes),
        "state": "scheduled",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": record.completed_unix_ns,
        "retired": record.is_retired,
        "timeout_ms": record.timeout_ms,
        "is_p2p": record.is_p2p,
    }


def without_state(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "retired"}


class Comparison(NamedTuple):
    """The amounts of compared data, and how often each way to find a recorder was used."""

    snapshots: int
    rows: int
    open_rows: int
    wrapped: int
    found_by: frozenset[str]
    versions: frozenset[str]
    layouts: frozenset[str]

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows equal in {self.snapshots} snapshots, {self.open_rows} of them open, {self.wrapped} "
            f"buffers wrapped; found by {self._told(self.found_by)}, version {self._told(self.versions) or 'not told'}, "
            f"layout {self._told(self.layouts)}"
        )

    @staticmethod
    def _told(words: frozenset[str]) -> str:
        return " and ".join(sorted(words))


def compare_with_own_dumps(folder: Path, ranks: Sequence[ProcessId], turns: int, backend: str = "gloo") -> Comparison:
    """Compare each rank's records with its own dump `turns` times, while it runs and while it is blocked."""
    found: list[RankRecords] = []
    still_there = 0
    for turn in range(turns):
        early = [read(process, backend) for process in ranks]
        (folder / "ask").touch()
        dumps = [folder / f"dump-{rank}" for rank in range(len(ranks))]
        wait_for(lambda dumps=dumps: all(path.exists() for path in dumps), "the dumps", 60)
        for process, path, before in zip(ranks, dumps, early, strict=True):
            found.append(read(process, backend))
            still_there += assert_same(json.loads(path.read_text()), found[-1], before)
            path.unlink()
        (folder / "ask").unlink()
        (folder / "go.new").write_text(str(turn))
        (folder / "go.new").rename(folder / "go")
    open_rows = sum(record.is_open for records in found for record in records.records)
    assert open_rows >= turns or backend == "fake", "rank 0 had one open each time; the fake backend has none"
    assert still_there >= turns, "of what was read while they ran, some is still there"
    assert turns < TURNS or any(records.is_wrapped for records in found)
    return Comparison(
        snapshots=len(found),
        rows=sum(len(records.records) for records in found),
        open_rows=open_rows,
        wrapped=sum(records.is_wrapped for records in found),
        found_by=frozenset(records.found_by for records in found),
        versions=frozenset(records.torch_version for records in found),
        layouts=frozenset(records.layout for records in found),
    )


def assert_same(own_dump: dict[str, Any], records: RankRecords, early: RankRecords) -> int:
    """Assert that `records` equal the process's own dump, and that `early` records were true.

    The early records were read while the process ran. Return the number of early rows that are still in the dump.
    It is 0 if newer rows have replaced them.
    """
    assert [as_row(record) for record in records.records] == own_dump["entries"]
    assert {
        str(group.group_id): {
            "last_enqueued_collective": str(group.last_enqueued),
            "last_started_collective": str(group.last_started),
            "last_completed_collective": str(group.last_completed),
        }
        for group in records.groups
    } == own_dump["pg_status"]
    by_id = {row["record_id"]: row for row in own_dump["entries"]}
    both = [record for record in early.records if record.id in by_id]
    for record in both:
        assert without_state(as_row(record)) == without_state(by_id[record.id])
        assert by_id[record.id]["retired"] or record.is_open, "what is done stays done"
    return len(both)


def main() -> None:
    """Run both comparisons: with and without the symbols of the library."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("python")
    options.add_argument("--root", type=Path, default=Path("/"))
    options.add_argument("--environ", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--turns", type=int, default=TURNS)
    options.add_argument("--backend", choices=("gloo", "fake"), default="gloo")
    chosen = options.parse_args()
    environ = dict(pair.split("=", 1) for pair in chosen.environ)
    job = Job(RANKS, chosen.python, chosen.root.resolve(), environ=environ, backend=chosen.backend)
    subprocess.run(job.command("-c", VERSIONS), check=True)
    with tempfile.TemporaryDirectory(dir=job.root / "tmp") as name:
        folder = Path(name)
        (folder / "whole").mkdir()
        with running(folder / "whole", job) as ranks:
            found = libraries.parse_maps(Path(f"/proc/{ranks[0].pid}/maps").read_bytes()).libraries
            (library,) = [one for one in found if one.library == "gloo"]
            comparison = compare_with_own_dumps(folder / "whole", ranks, chosen.turns, job.backend)
            print(library.path, comparison, sep=": ", flush=True)
        if job.backend != "gloo":
            return
        (folder / "stripped").mkdir()
        before = without_symbols(job.root / library.path.lstrip("/"), folder / "stripped.so")
        with running(folder / "stripped", job._replace(before=before)) as ranks:
            print("without symbols", compare_with_own_dumps(folder / "stripped", ranks, chosen.turns), sep=": ")


if __name__ == "__main__":
    main()
