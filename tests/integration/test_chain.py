"""All stages on real processes, from the scan to the metrics: torchrun over gloo, the fake driver and py-spy."""

import json
import os
import re
from pathlib import Path

import pytest

from hangwatch.formats import incident_file
from hangwatch.model import JobState
from tests.commands import start
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import RealDaemon, TorchJob, stop_at_shard

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

COUNTED = ["gpu all field 138 1", "gpu all field 139 1", "gpu all field 197 2e6/s", "gpu all field 198 3e6/s"]
HUNG_POWER = ["gpu all power_watts 118", "gpu 2 power_watts 86", "gpu 2 utilization_ratio 0"]


def test_a_real_job_hangs_is_named_and_recovers(fake_driver: FakeDriver, tmp_path: Path) -> None:  # long: one story
    fake_driver.write([*h100(4), *COUNTED])
    os.mkfifo(tmp_path / "shard")
    with RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon, TorchJob(tmp_path, "stuck_on_a_fifo.py") as job:
        job.wait_for_step(3)
        daemon.wait_for_state(job.run_id, "training")
        rows = daemon.samples("hangwatch_job_gpu_info", job_id=job.run_id)
        assert sorted(row["rank"] for row, _ in rows) == ["0", "1", "2", "3"]
        assert daemon.samples("hangwatch_rank_activity", job_id=job.run_id) == []

        stop_at_shard(tmp_path)
        fake_driver.add(*HUNG_POWER)
        assert _states_until_hung(daemon, job.run_id) == ["quiet", "suspected", "hung"]

        activities = {row["rank"]: row for row, _ in daemon.samples("hangwatch_rank_activity", job_id=job.run_id)}
        assert sorted(activities) == ["0", "1", "2", "3"]
        assert activities["2"]["frame"].startswith("read_shard (")
        assert {activities[rank]["activity"] for rank in "013"} == {"collective_wait"}
        assert {row["motion"] for row in activities.values()} == {"frozen"}
        (info, _) = daemon.samples("hangwatch_incident_info", job_id=job.run_id)[0]
        assert info["named"].endswith(":2")
        assert [value for _, value in daemon.samples("hangwatch_job_page", job_id=job.run_id)] == [1.0]

        folder = daemon.state / "incidents" / info["incident"]
        whole = {"incident.json", "event.json", "order", "owner", "report.txt", "report.html", "dumps"}
        wait_for(lambda: {path.name for path in folder.iterdir()} == whole, "the incident folder, without its marker")
        incident = incident_file.load(folder)
        assert [who.rank for who in incident.verdict.named] == [2]
        assert len(incident.captures[0].ranks) == 4
        assert all(series.low_power_threshold_watts for series in incident.power)
        links = [(one.gpu.nvlink_bytes_per_second, one.gpu.pcie_bytes_per_second) for one in incident.grouping.members]
        assert all(nvlink == 0.0 and pcie == pytest.approx(5e6, rel=0.5) for nvlink, pcie in links), links

        steps = job.steps(0)
        fake_driver.write(h100(4))
        (tmp_path / "shard").write_bytes(b"shard")
        job.wait_for_step(steps + 3)
        daemon.wait_for_state(job.run_id, "recovered")
        assert daemon.samples("hangwatch_rank_activity", job_id=job.run_id) == []
        wait_for(lambda: incident_file.load(folder).closed_unix_seconds, "the incident to be closed on disk")
        assert incident_file.load(folder).state is JobState.RECOVERED

        shown = start("report", str(folder))
        assert incident.verdict.message[:40] in shown.stdout
        listed = start("incidents", "--config", str(daemon.config), "--json")
        assert json.loads(listed.stdout)["incidents"][0]["state"] == "recovered"
        status = start("status", "--url", f"http://127.0.0.1:{daemon.port}")
        assert job.run_id in status.stdout

        (tmp_path / "finish").touch()
        daemon.wait_for_state(job.run_id, "ended")
        assert job.process.wait(120) == 0


def test_ranks_that_stand_alike_are_told_apart_by_their_numbers(fake_driver: FakeDriver, tmp_path: Path) -> None:
    """Use four equal stacks. Rank 1 calls all_reduce in another group, so ranks 0 and 1 wait for each other."""
    fake_driver.write([*h100(4), *COUNTED])
    with RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon, TorchJob(tmp_path, "wrong_group.py") as job:
        job.wait_for_step(3)
        daemon.wait_for_state(job.run_id, "training")
        (tmp_path / "part").touch()
        fake_driver.add("gpu all power_watts 118")
        daemon.wait_for_state(job.run_id, "hung")
        (info, _) = daemon.samples("hangwatch_incident_info", job_id=job.run_id)[0]
        assert len(daemon.samples("hangwatch_job_page", job_id=job.run_id)) == 1
        folder = daemon.state / "incidents" / info["incident"]
        wait_for((folder / "incident.json").exists, "the incident folder")
        verdict = incident_file.load(folder).verdict
        assert (verdict.kind, verdict.named, [one.rank for one in verdict.check_first]) == ("Cycle", (), [1])
        assert "Ranks 0-1 wait for each other" in verdict.message
        (recorder,) = incident_file.load(folder).captures[-1].ranks[1].rounds[-1].recorders
        assert [one.group_description for one in recorder.records if one.is_open] == ["tp"]
        again = json.loads(start("explain", str(folder), "--json").stdout)["verdict"]
        assert (again["kind"], [one["rank"] for one in again["check_first"]]) == ("Cycle", [1])
        assert again["message"] == verdict.message


def test_dump_shows_every_rank_of_every_launcher(fake_driver: FakeDriver, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard")
    with TorchJob(tmp_path, "stuck_on_a_fifo.py") as job:
        job.wait_for_step(3)
        stop_at_shard(tmp_path)
        took = start("dump", "--job", job.run_id, "--json", "-o", str(tmp_path / "out"))
        (dumped,) = json.loads(took.stdout)["jobs"]
        assert [who["rank"] for who in dumped["verdict"]["named"]] == [2]
        assert len(dumped["capture"]["ranks"]) == 4
        (folder,) = (tmp_path / "out" / "incidents").iterdir()
        assert (folder / "report.html").exists()
        text = start("dump", "--job", job.run_id)
        assert "read_shard" in text.stdout
        by_pid = start("dump", "--json", "--pid", str(job.process.pid))
        (dumped,) = json.loads(by_pid.stdout)["jobs"]
        assert [rank["id"]["rank"] for rank in dumped["capture"]["ranks"]] == [0, 1, 2, 3], "a launcher means its ranks"
        waiting = dumped["capture"]["ranks"][0]["id"]["pid"]
        (alone,) = json.loads(start("dump", "--json", "--pid", str(waiting)).stdout)["jobs"]
        whole = alone["verdict"]["next_step"].rpartition("`hangwatch ")[2].rstrip("`").split()
        (dumped,) = json.loads(start(*whole, "--json").stdout)["jobs"]
        assert len(dumped["capture"]["ranks"]) == 4, "the first step for a rank that waits: the whole job"
        none = start("dump", "--job", "no-such-job")
        assert (none.returncode, job.run_id in none.stderr) == (2, True)
        (tmp_path / "shard").write_bytes(b"shard")
        steps = job.steps(0)
        job.wait_for_step(steps + 3)


def _states_until_hung(daemon: RealDaemon, job_id: str) -> list[str]:
    """Return the states since the job trained last, from the log: a poll may miss a short one."""

    def look() -> list[str]:
        lines = [line for line in daemon.log.splitlines() if job_id in line]
        states = [state for line in lines for state in re.findall(r": [a-z]+ -> ([a-z]+): ", line)]
        return states[: states.index("hung") + 1] if "hung" in states else []

    daemon.wait_for_state(job_id, "hung")
    states = wait_for(look, "the log to say so")
    began = max((index for index, state in enumerate(states) if state == "training"), default=-1)
    return states[began + 1 :]
