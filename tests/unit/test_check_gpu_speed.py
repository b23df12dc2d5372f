"""gpu_speed: a GPU with a lower clock than the other GPUs of its job, by the real pynvml."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model import CheckVerdict, Job
from hangwatch.probes.gpu.sampler import NvmlSampler
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100, sampling, uuid_of
from tests.node_tree import Checked, NodeTree, job, rank, run, status_and_reason, values


class Gpus:
    """A node of four GPUs, and a job with one rank for each."""

    def __init__(self, driver: FakeDriver, sampler: NvmlSampler, tree: NodeTree) -> None:
        self.driver, self.sampler, self.tree = driver, sampler, tree
        self.check = Checked("gpu_speed")

    def run(self, *lines: str, minutes: int = 0, ranks: int = 4) -> tuple[tuple[str, str], CheckVerdict]:
        """Give the driver these values, and run the check now and once a minute. Return the last verdict."""
        self.driver.write([*h100(4), *lines])
        written = time.monotonic()
        wait_for(lambda: (now := self.sampler.latest()) and now.taken_monotonic_seconds > written, "a new sample")
        for minute in range(minutes + 1):
            self.tree.time.pass_seconds(60 if minute else 0)
            result = self.check.run(self.tree.node(job_of(ranks), gpus=self.sampler))
        return status_and_reason(result), result.verdict


def job_of(ranks: int) -> Job:
    return job(*(rank(100 + number, number, gpu_uuids=(uuid_of(number),)) for number in range(ranks)))


@pytest.fixture
def gpus(fake_nvml_library: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gpus]:
    lines = getattr(request, "param", ())
    driver = FakeDriver(fake_nvml_library, tmp_path / "gpus.scenario", [*h100(4), *lines])
    with sampling(driver, sample_seconds=0.1) as sampler:
        yield Gpus(driver, sampler, NodeTree(tmp_path / "node"))


def test_gpu_with_a_low_clock_is_a_warning_after_five_minutes_with_its_reason(gpus: Gpus) -> None:
    slow = ("gpu 3 sm_clock_hertz 1200e6", "gpu 3 clocks_event_reasons 0x20")
    assert gpus.run(*slow, minutes=4)[0] == ("OK", "ClocksAlike")
    found, verdict = gpus.run(*slow, minutes=1)
    assert found == ("WARNING", "GpuSlow")
    assert verdict.message == (
        "GPU 3 of local rank 3 of job 77 has run at 1,200 MHz for 5 min 00 s (SwThermalSlowdown), "
        "the other GPUs of the job at 1,980 MHz"
    )
    assert gpus.run()[0] == ("OK", "ClocksAlike")  # it is fast again
    assert gpus.run(*slow, minutes=4)[0] == ("OK", "ClocksAlike")  # the time counts anew


def test_ratio_of_each_clock_is_exported(gpus: Gpus) -> None:
    gpus.run("gpu 1 sm_clock_hertz 990e6")
    result = gpus.check.run(gpus.tree.node(job_of(4), gpus=gpus.sampler))
    assert sorted(values(result, "gpu_clock_ratio").values()) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        (["gpu 3 sm_clock_hertz 1800e6"], 4),  # 9 % lower
        (["gpu 3 sm_clock_hertz 1200e6", "gpu 0 utilization_ratio 0.1"], 4),  # one waits on the CPU: clocks fall
        (["gpu 3 sm_clock_hertz 1200e6", "gpu 3 power_watts 660"], 4),  # it works more than the others, at 600 W
        (["gpu all sm_clock_hertz 1200e6"], 4),
        (["gpu 3 sm_clock_hertz 1200e6"], 3),  # of no job
    ],
)
def test_clocks_that_are_no_finding(gpus: Gpus, lines: list[str], ranks: int) -> None:
    assert gpus.run(*lines, minutes=10, ranks=ranks)[0][0] == "OK"


@pytest.mark.parametrize("gpus", [["gpu 3 name NVIDIA L40S"]], indirect=True)
def test_gpu_of_another_model_is_not_compared(gpus: Gpus) -> None:
    assert gpus.run("gpu 3 sm_clock_hertz 1200e6", minutes=10)[1].message == "3 busy GPUs of jobs at 1,980 MHz"


def test_jobs_with_one_gpu_are_not_compared(gpus: Gpus) -> None:
    result = run("gpu_speed", gpus.tree.node(job_of(1), gpus=gpus.sampler))
    assert result.verdict.message == "no job with several GPUs runs on this node"
