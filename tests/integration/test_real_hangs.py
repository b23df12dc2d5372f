"""Real jobs that hang, dumped by py-spy as text, as a person would do it. The verdict rules judge the text.

torchrun starts one of the jobs. The others fork their ranks, which needs one import of torch instead of five.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from hangwatch import config
from hangwatch.model import Verdict
from hangwatch.stacks import activity
from hangwatch.stacks.grouping import group_ranks
from hangwatch.tools.explain import traces
from hangwatch.verdict import judge
from tests.commands import finished
from tests.conftest import wait_for
from tests.servers import free_port, require_host_name

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

RANKS = 4  # with fewer, a rank that waits for its GPU is not named
PROGRAM = Path(__file__).parents[1] / "jobs" / "real_hang.py"
PYSPY = Path(sys.executable).with_name("py-spy")
TABLE = activity.load()


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a running job with the hang that the test requests."""
    hang, ranks = request.param if isinstance(request.param, tuple) else (request.param, RANKS)
    with started(tmp_path, ranks, [sys.executable, PROGRAM, hang, tmp_path, str(ranks)]):
        yield tmp_path


@pytest.fixture
def torchrun_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a running job that torchrun started."""
    require_host_name()
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    with started(tmp_path, RANKS, [sys.executable, *options, PROGRAM, "one_batch_more", tmp_path]):
        yield tmp_path


@contextlib.contextmanager
def started(folder: Path, ranks: int, command: Sequence[str | Path]) -> Iterator[None]:
    """Run a job until the end of `with`. It begins when all ranks have reached their blocking call."""
    environ = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **environ})
    try:
        wait_for(lambda: job.poll() is not None or len(list(folder.glob("at-?"))) == ranks, "all ranks to arrive", 120)
        assert job.poll() is None, (folder / "log").read_text()
        yield
    finally:
        pids = [job.pid, *(child.pid for child in psutil.Process(job.pid).children(recursive=True))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def explained(folder: Path, how: str = "--nonblocking") -> Verdict:
    """Dump each rank, with the prefix `[host:rank]`. Return the verdict on the dumps."""
    lines, ranks = [], sorted(folder.glob("at-?"))
    for path in ranks:
        done = finished(PYSPY, "dump", how, "--pid", path.read_text())
        prefix = f"[here:{path.name.removeprefix('at-')}]"
        lines += [prefix + line for line in (done.stdout + done.stderr).splitlines()]
    found = traces.collect([("dump.txt", lines)], world_size=len(ranks))
    return judge.judge(group_ranks(found.ranks, TABLE, config.Capture(), found.world_size))


def wait_for_verdict(folder: Path, kind: str, named: list[int]) -> Verdict:
    def settled() -> Verdict | None:
        verdict = explained(folder)
        return verdict if (verdict.kind, [rank.rank for rank in verdict.named]) == (kind, named) else None

    return wait_for(settled, f"the verdict {kind} on {named}", 60)


def test_the_verdict_on_a_real_hang_under_torchrun(torchrun_folder: Path) -> None:
    assert "backward pass" in wait_for_verdict(torchrun_folder, "OutsideCollective", [1]).message


@pytest.mark.parametrize(
    ("folder", "kind", "named", "words"),
    [
        ("checkpoint_on_rank_0", "OutsideCollective", [0], "checkpoint"),
        ("two_collectives", "Mismatch", [], "all_gather_object"),
        ("python_loop", "OutsideCollective", [2], "python_loop"),
        ("pipeline", "OutsideCollective", [0], "wait_for_file"),
        ("pickling", "OutsideCollective", [0], "storage I/O"),
    ],
    indirect=["folder"],
)
def test_the_verdict_on_a_real_hang(folder: Path, kind: str, named: list[int], words: str) -> None:
    assert words in wait_for_verdict(folder, kind, named).message


def line_of(code: str) -> int:
    """Return the number of the last line of the job's program with this code."""
    lines = PROGRAM.read_text().splitlines()
    return max(number for number, line in enumerate(lines, start=1) if line.strip() == code)


@pytest.mark.parametrize(
    ("folder", "kind", "rank", "code"),
    [
        ("lock_in_user_code", "CannotTell", 2, "with LOCK:"),
        ("another_line", "Mismatch", 3, "dist.all_reduce(torch.ones(2), group=branch)"),
    ],
    indirect=["folder"],
)
def test_real_hang_has_its_rank_to_check_first(folder: Path, kind: str, rank: int, code: str) -> None:
    def settled() -> Verdict | None:
        verdict = explained(folder)
        return verdict if (verdict.kind, [one.rank for one in verdict.check_first]) == (kind, [rank]) else None

    verdict = wait_for(settled, f"the verdict {kind} that points at {rank}", 60)
    assert verdict.named == ()
    assert f"real_hang.py:{line_of(code)}" in verdict.check_first[0].why


@pytest.mark.parametrize(
    ("folder", "ranks", "code", "words"),
    [
        (
            "save_shard",
            [0, 1],
            'torch.save(torch.ones(1 << 20), FOLDER / f"shard-{rank}")',
            [
                "are writing or reading a checkpoint",
                "both other ranks wait in barrier",
                "the file system of the checkpoint",
            ],
        ),
        (
            ("two_ranks", 2),
            [1],
            'return int(os.read(os.open(FOLDER / "steps", os.O_RDONLY), 8))',
            ["is in number_of_steps", "the other rank waits in all_reduce", "--native"],
        ),
    ],
    indirect=["folder"],
)
def test_real_hang_without_majority_names_no_rank(folder: Path, ranks: list[int], code: str, words: list[str]) -> None:
    """In one job half of the ranks write and half wait. Another job has only two ranks. On a busy machine the ranks
    that write may first be at two places, in two groups.
    """
    expected = [f"real_hang.py:{line_of(code)}", *words]

    def settled() -> bool:
        verdict = explained(folder)
        print(verdict.message)
        assert verdict.named == ()
        return [one.rank for one in verdict.check_first] == ranks and all(said in verdict.message for said in expected)

    wait_for(settled, f"the verdict that points at {ranks} and says {expected}", 60)


@pytest.mark.parametrize("folder", ["lock_in_user_code"], indirect=True)
def test_native_frames_name_the_rank_in_its_own_lock(folder: Path) -> None:
    def settled() -> Verdict | None:
        verdict = explained(folder, "--native")
        return verdict if [one.rank for one in verdict.named] == [2] else None

    assert "lock" in wait_for(settled, "the name of the rank in the lock", 60).message
