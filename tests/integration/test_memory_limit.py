"""The daemon within the memory limits of its systemd unit and its Helm chart, next to hostile users."""

import re
import signal
import subprocess
import sys

import pytest
import yaml

from tests import hostile_environments
from tests.conftest import wait_for
from tests.deploy.promql import ROOT
from tests.fake_driver import FakeDriver, h100
from tests.memory_cgroup import memory_cgroup
from tests.real_daemon import RealDaemon
from tests.simulated.node import SimulatedNode

pytestmark = pytest.mark.timeout(400)
MEBIBYTE = 1 << 20


def limits_bytes() -> dict[str, int]:
    """Return the memory limits of the systemd unit and of the Helm chart, in bytes, by name. Neither permits swap."""
    unit = (ROOT / "deploy/systemd/hangwatch.service").read_text()
    (megabytes,) = re.findall(r"^MemoryMax=(\d+)M$", unit, re.MULTILINE)
    values = yaml.safe_load((ROOT / "deploy/helm/hangwatch/values.yaml").read_text())
    chart = values["resources"]["limits"]["memory"]
    return {"systemd": int(megabytes) * MEBIBYTE, "helm": int(chart.removesuffix("Mi")) * MEBIBYTE}


def test_memory_limits_exceed_usage_under_hostile_users(fake_driver: FakeDriver) -> None:
    """Count the memory of the daemon and its children (NVML, py-spy), and the cached pages of files that they read."""
    folder = fake_driver.scenario.parent
    limit_bytes = min(limits_bytes().values())
    crowd = [*hostile_environments.large_environments(40), *hostile_environments.claim_world(4_000_000, "0,1")]
    with memory_cgroup(limit_bytes) as group, SimulatedNode(4) as node:
        fake_driver.write([*h100(4), *(f"gpu {index} pids {pid}" for index, pid in enumerate(node.pids))])
        with RealDaemon(folder / "hw", fake_driver.environ, prefix=group.joining()) as daemon:
            daemon.wait_for_state(node.run_id, "training")
            with hostile_environments.crowd(crowd):
                wait_for(lambda: len(daemon.samples("hangwatch_job_ranks")) >= 3, "the crowd's jobs to be seen")
                node.order(1, "loader")
                fake_driver.add("gpu all power_watts 100")
                wait_for(
                    lambda: any(on for _, on in daemon.samples("hangwatch_job_page", job_id=node.run_id)),
                    "the page",
                    90,
                )
                assert daemon.process.poll() is None
            peak_bytes, oom_kills = group.peak_bytes, group.oom_kills
    print(f"{peak_bytes / MEBIBYTE:.0f} of {limit_bytes / MEBIBYTE:.0f} MiB at most, {oom_kills} OOM kills")
    assert (oom_kills, peak_bytes < limit_bytes / 2) == (0, True), f"{peak_bytes / MEBIBYTE:.0f} MiB"


# A process ends before its memory is free. A rank that asks for more in between is killed, too, whatever its score.
RANK = """
import re, sys, time
pages, limit_bytes, events, usage = int(sys.argv[1]), int(sys.argv[2]), open(sys.argv[3], "rb", 0), sys.argv[4]
held, is_first = [], True
while len(held) < pages:
    held.append(bytes([1]) * 4096)
    events.seek(0)
    if is_first and re.search(rb"oom_kill [1-9]", events.read()):
        is_first = False
        while int(open(usage).read()) > limit_bytes - (20 << 20):
            time.sleep(0.001)
"""


def test_out_of_memory_the_kernel_kills_hangwatch_and_not_the_rank(fake_driver: FakeDriver) -> None:
    """Start the daemon with the OOM score of its unit. A rank that has most of the memory then needs the rest."""
    unit = (ROOT / "deploy/systemd/hangwatch.service").read_text()
    (score,) = re.findall(r"^OOMScoreAdjust=(\d+)$", unit, re.MULTILINE)
    fake_driver.write(h100(1))
    limit_bytes = 640 * MEBIBYTE
    with memory_cgroup(limit_bytes) as group:
        prefix = group.joining("choom", f"--adjust={score}", "--")
        with RealDaemon(fake_driver.scenario.parent / "hw", fake_driver.environ, prefix=prefix) as daemon:
            numbers = (str(590 * MEBIBYTE // 4096), str(limit_bytes))
            command = group.joining(sys.executable, "-c", RANK, *numbers, str(group.events), str(group.usage))
            rank = subprocess.run(command, check=False, timeout=300)
            assert rank.returncode == 0, "the kernel killed the rank"
            assert daemon.process.wait(60) == -signal.SIGKILL
        assert group.oom_kills > 0
