"""The plain rule, without a baseline, in the real daemon: power at or below a ratio of the limit for N seconds."""

from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import QUICK, RealDaemon, TorchJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

PLAIN = {"quiet_fraction": 0.0, "low_power_ratio_of_limit": 0.12}
HOLD_SECONDS = QUICK["detector"]["hold_seconds"]


def test_ranks_are_dumped_once_their_gpus_draw_12_percent_for_the_hold(fake_driver: FakeDriver, tmp_path: Path) -> None:
    fake_driver.write([*h100(2), "gpu all power_watts 68"])
    detector = {**QUICK["detector"], **PLAIN}
    with RealDaemon(tmp_path / "hw", fake_driver.environ, detector=detector) as daemon:
        wait_for(lambda: [watts for _, watts in daemon.samples("hangwatch_gpu_power_watts")] == [68, 68], "idle cards")
        fake_driver.write(h100(2))
        with TorchJob(tmp_path, "stuck_on_a_fifo.py", ranks=2) as job:
            job.wait_for_step(3)
            _draws(daemon, fake_driver, job, 600)
            assert _line_watts(daemon) == [84, 84]

            _draws(daemon, fake_driver, job, 85)
            before = job.steps(0)
            job.wait_for_step(before + int(2 * HOLD_SECONDS / 0.01))  # twice the hold: a step takes 0.01 s or more
            assert daemon.job_state(job.run_id) == "training"
            assert "quiet" not in daemon.log

            for watts in (84, 75, 72, 71):
                _draws(daemon, fake_driver, job, 600)
                dumped, suspected = _dumps(daemon), _suspicions(daemon)  # a slow machine may suspect it twice
                fake_driver.write([*h100(2), f"gpu all power_watts {watts}"])
                wait_for(lambda before=suspected: _suspicions(daemon) > before, f"a suspicion at {watts} W")
                wait_for(lambda dumped=dumped: _dumps(daemon) >= dumped + 2, f"dumps of the ranks at {watts} W")


def _draws(daemon: RealDaemon, driver: FakeDriver, job: TorchJob, watts: float) -> None:
    """Set the power of the GPUs. Wait until the daemon has seen the job at work with this power."""
    driver.write([*h100(2), f"gpu all power_watts {watts}"])
    wait_for(
        lambda: (
            [now for _, now in daemon.samples("hangwatch_gpu_power_watts")] == [watts, watts]
            and daemon.job_state(job.run_id) in ("training", "recovered")
            and bool(_line_watts(daemon))
        ),
        f"the job to draw {watts} W",
    )


def _suspicions(daemon: RealDaemon) -> int:
    return daemon.log.count(": quiet -> suspected: quiet for ")


def _line_watts(daemon: RealDaemon) -> list[float]:
    return [round(watts, 3) for _, watts in daemon.samples("hangwatch_gpu_low_power_threshold_watts")]


def _dumps(daemon: RealDaemon) -> float:
    return daemon.samples("hangwatch_dump_seconds_count")[0][1]
