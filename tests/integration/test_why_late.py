"""`hangwatch slow`, and differences of a late rank with injected causes: processes, the fake driver, cgroups."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from hangwatch.capture.rank_load import read_load
from hangwatch.collectives.rank_differences import RankLoad, find_differences
from hangwatch.model import GpuSweep, JobName, JobState, ProcessId, Rank
from hangwatch.state.status import CheckLine, JobStatus
from hangwatch.state.unseen import RECORDER, Unseen
from hangwatch.tools.commands.slow import slow
from tests import samples
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100, sampling, uuid_of
from tests.integration.test_top import SEEN, job
from tests.node_tree import NodeTree, own_start_ticks, rank
from tests.servers import served

BUSY = "while True: sum(range(1000))"
SLEEPING = "import time; time.sleep(600)"
READING = """
while True:
    with open(__import__("sys").executable, "rb") as file:
        file.read()
"""
FAULTING = """
import mmap
while True:
    memory = mmap.mmap(-1, 64 << 20)
    for at in range(0, 64 << 20, 4096):
        memory[at] = 1
    memory.close()
"""
LATE = 2


@contextmanager
def python(code: str, core: int | None = None) -> Iterator[int]:
    """Run Python code, if `core` is given only on this core. Yield the pid."""
    process = subprocess.Popen([sys.executable, "-c", code])
    with suppress(PermissionError):  # on a busy machine its share of a core may be less than what counts
        os.setpriority(os.PRIO_PROCESS, process.pid, -20)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield process.pid
    finally:
        process.kill()
        process.wait()


def made(pid: int, number: int, *workers: int) -> Rank:
    return rank(pid, number, start_ticks=own_start_ticks(pid), workers=workers, gpu_uuids=(uuid_of(number),))


def differences(
    ranks: list[Rank], is_enough: Callable[[tuple[str, ...]], bool], sweep: GpuSweep | None = None
) -> tuple[str, ...]:
    """Compare readings of the ranks from now on, until they are enough."""
    before = {each.id: read_load(each, sweep) for each in ranks}

    def compare() -> tuple[str, ...]:
        found = find_differences(before, {each.id: read_load(each, sweep) for each in ranks}, ranks[LATE].id)
        return found if is_enough(found) else ()

    return wait_for(compare, "a difference", 60)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(READING, "its main thread read and wrote"), (FAULTING, "page faults of its main thread brought in")],
)
def test_what_the_late_rank_does_is_a_difference(code: str, sentence: str) -> None:
    with ExitStack() as stack:
        ranks = [made(stack.enter_context(python(code if n == LATE else SLEEPING)), n) for n in range(4)]
        assert differences(ranks, lambda found: any(each.startswith(sentence) for each in found))


def test_another_process_on_its_core_is_a_difference() -> None:
    core = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.enter_context(python(BUSY, core))
        late = {LATE: (BUSY, core)}
        ranks = [made(stack.enter_context(python(*late.get(n, (SLEEPING,)))), n) for n in range(4)]
        differences(ranks, lambda found: any("of the time for a core" in each for each in found))


def test_busy_loader_worker_is_a_difference() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(python(BUSY if n == LATE else SLEEPING)) for n in range(4)]
        ranks = [made(stack.enter_context(python(SLEEPING)), n, workers[n]) for n in range(4)]
        differences(ranks, lambda found: any(each.startswith("its workers used") for each in found))


def test_slow_gpu_is_a_difference(fake_nvml_library: Path, tmp_path: Path) -> None:
    lines = [*h100(4), f"gpu {LATE} sm_clock_hertz 1200e6", f"gpu {LATE} clocks_event_reasons 0x20"]
    driver = FakeDriver(fake_nvml_library, tmp_path / "gpus.scenario", lines)
    with sampling(driver) as sampler:
        sweep = sampler.latest()
    with ExitStack() as stack:
        ranks = [made(stack.enter_context(python(SLEEPING)), n) for n in range(4)]
        said = "its GPU runs at 1,200 MHz, the others at 1,980 MHz or more"
        differences(ranks, lambda found: said in found, sweep)


def test_quota_and_swap_are_differences(tmp_path: Path) -> None:
    tree, ranks = NodeTree(tmp_path), [rank(100 + n, n) for n in range(4)]

    def loads(throttled_usec: int, swap_kb: int) -> dict[ProcessId, RankLoad]:
        for each in ranks:
            pid, is_late = each.id.pid, each.rank == LATE
            tree.process(pid)
            status = tmp_path / f"proc/{pid}/status"
            status.write_text(f"{status.read_text()}VmSwap:\t{swap_kb * is_late} kB\n")
            tree.write(f"proc/{pid}/cgroup", f"0::/rank-{each.rank}\n")
            tree.write(f"sys/fs/cgroup/rank-{each.rank}/cpu.stat", f"throttled_usec {throttled_usec * is_late}\n")
        return {each.id: read_load(each, None, tree.proc, tree.sys) for each in ranks}

    now = time.monotonic()
    before = {key: replace(load, read_monotonic_seconds=now - 60.0) for key, load in loads(0, 0).items()}
    after = {key: replace(load, read_monotonic_seconds=now) for key, load in loads(18_000_000, 2 << 20).items()}
    assert find_differences(before, after, ranks[LATE].id) == (
        "its CPU quota stopped it for 30% of the time, the others for at most 0%",
        "it has 2,048 MiB in swap, the others have at most 0 MiB",
    )


TRAINS = JobState.TRAINING
OFF = Unseen(
    job=JobName(job_id="off", job_key="off"), source=RECORDER, reason="RecorderOff", detail="it is off", ranks=2
)
LEVEL = replace(samples.arrival(), is_named=False, reason="NoneLate", message="No rank is late.")


def run(*jobs: JobStatus, check: str = "OK") -> Result:
    shown = CheckLine("gpu_speed", check, "GpuSlow", "GPU 3 has run at 1,200 MHz", 0.0)
    with served(replace(SEEN, jobs=jobs, checks=(shown,), unseen=(OFF,)), health_port=0) as (port, _):
        return CliRunner().invoke(slow, ["--url", f"http://127.0.0.1:{port}"], standalone_mode=False)


def test_late_rank_is_shown_with_its_table() -> None:
    done = run(job("late", TRAINS, arrival=samples.arrival()))
    assert done.return_value == 0
    assert "job late (late): Rank 7 (pid 41207) is late by 4 ms" in done.output
    assert "7\t41207\t4 ms\t10.0%\n6\t41206\t-1 ms\t-2.5%\n" in done.output


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (job("j", TRAINS, arrival=LEVEL), "No rank is late."),
        (
            job("j", TRAINS, ranks=1),
            "it has only one rank here; slow GPUs of all nodes: hangwatch check gpu_speed --nodes NODES",
        ),
        (
            job("h", JobState.HUNG, arrival=LEVEL, progress_gap_seconds=300.0),
            "no new collectives for 5 min 00 s (hung): `hangwatch status` shows why, `hangwatch dump --job h`",
        ),
        (job("j", TRAINS, arrival=LEVEL, progress_gap_seconds=300.0, usual_gap_seconds=400.0), "No rank is late."),
        (job("e", JobState.ENDED, arrival=LEVEL, progress_gap_seconds=300.0), "No rank is late."),
        (job("off", TRAINS), "not known: RecorderOff: it is off"),
        (job("j", TRAINS), "not known: compared once a minute"),
        (job("e", JobState.ENDED), "not known: it has ended"),
        (job("e", JobState.ENDED, arrival=replace(LEVEL, ranks=())), "not known: it has ended"),
    ],
)
def test_why_no_rank_is_named_is_said(shown: JobStatus, text: str) -> None:
    done = run(shown)
    assert done.return_value == 1 and f"job {shown.job_id} ({shown.job_id}): {text}" in done.output


@pytest.mark.parametrize(("check", "count"), [("WARNING", 1), ("OK", 0)])
def test_slow_gpu_is_said_beside_the_ranks(check: str, count: int) -> None:
    assert run(job("j", TRAINS), check=check).output.count("check gpu_speed: GPU 3 has run at 1,200 MHz") == count
