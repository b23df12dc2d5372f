"""A daemon that is killed and restarted during a hang, and a second daemon with the same state folder."""

import json
import re
from pathlib import Path

from hangwatch.formats import incident_file
from hangwatch.model import JobState
from tests.commands import start
from tests.conftest import wait_for
from tests.fake_driver import FakeDriver, h100
from tests.real_daemon import RealDaemon, hang
from tests.simulated.node import SimulatedNode


def test_killed_twice_in_a_hang_it_goes_on_with_the_one_incident(fake_driver: FakeDriver, tmp_path: Path) -> None:
    kept = {"directory": str(tmp_path / "kept")}
    with SimulatedNode(4) as node:
        fake_driver.write([*h100(4), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
        with RealDaemon(tmp_path / "hw0", fake_driver.environ, store=kept) as daemon:
            daemon.wait_for_state(node.run_id, "training")
            hang(daemon, node, fake_driver, 2)
            incident = _incident(daemon, node.run_id)
            folder = Path(kept["directory"]) / "incidents" / incident
            wait_for((folder / "incident.json").exists, "the incident")
            daemon.process.kill()
        kept_captures = incident_file.load(folder).captures

        for times in (1, 2):
            with RealDaemon(tmp_path / f"hw{times}", fake_driver.environ, store=kept) as daemon:
                daemon.wait_for_state(node.run_id, "hung", 30)
                assert _incident(daemon, node.run_id) == incident
                assert daemon.samples("hangwatch_job_page", job_id=node.run_id)[0][1] == 1
                looks = len(kept_captures)
                wait_for(lambda looks=looks: len(incident_file.load(folder).captures) > looks, "a look at once")
                assert incident_file.load(folder).captures[:looks] == kept_captures
                kept_captures = incident_file.load(folder).captures
                listed = start("incidents", "--config", str(daemon.config), "--json")
                ours = [one for one in json.loads(listed.stdout)["incidents"] if one["job_id"] == node.run_id]
                assert [one["state"] for one in ours] == ["hung"], "jobs of other users may crash meanwhile"
                assert start("explain", str(folder)).returncode == 0
                daemon.process.kill()

        with RealDaemon(tmp_path / "hw3", fake_driver.environ, store=kept) as daemon:
            daemon.wait_for_state(node.run_id, "hung", 30)
            fake_driver.write([*h100(4), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
            daemon.wait_for_state(node.run_id, "recovered", 30)
            wait_for(lambda: incident_file.load(folder).state is JobState.RECOVERED, "the incident to be closed")
            assert [path.name for path in folder.parent.iterdir() if node.run_id in path.name] == [incident]


def test_silence_outlives_killed_daemon_and_its_end_lets_job_page(fake_driver: FakeDriver, tmp_path: Path) -> None:
    kept, path = {"directory": str(tmp_path / "kept")}, {"path": str(tmp_path / "socket")}
    with SimulatedNode(2) as node:
        fake_driver.write([*h100(2), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])

        def pages(daemon: RealDaemon) -> bool:
            return daemon.samples("hangwatch_job_page", job_id=node.run_id)[0][1] == 1

        def is_silenced_and_hung(daemon: RealDaemon) -> bool:
            (job,) = [one for one in daemon.status()["jobs"] if one["job_id"] == node.run_id]
            is_silenced = job["silence_reason"] == "debugged" and not job["page"]
            return is_silenced and job["state"] == "hung" and not pages(daemon)

        with RealDaemon(tmp_path / "hw0", fake_driver.environ, store=kept, socket=path) as daemon:
            daemon.wait_for_state(node.run_id, "training")
            wanted = ("silence", node.run_id, "--config", str(daemon.config))
            done = start(*wanted, "--for", "2h", "--reason", "debugged")
            assert done.returncode == 0 and f"job {node.run_id} " in done.stdout, done.stdout + done.stderr
            assert "is silenced until " in done.stdout and "undoes" not in done.stderr
            hang(daemon, node, fake_driver, 1)
            assert is_silenced_and_hung(daemon)
            folders = f"incidents/*-{node.run_id}-*/incident.json"
            wait_for(lambda: list(Path(kept["directory"]).glob(folders)), "the incident")
            daemon.process.kill()
        Path(path["path"]).unlink()
        with RealDaemon(tmp_path / "hw1", fake_driver.environ, store=kept, socket=path) as daemon:
            daemon.wait_for_state(node.run_id, "hung", 30)
            assert is_silenced_and_hung(daemon)
            shown = start("status", "--url", f"http://{daemon.address}").stdout
            assert "hung (silenced)" in shown and "UTC: debugged" in shown
            assert start(*wanted[:3], str(daemon.config), "--end").returncode == 0
            wait_for(lambda: pages(daemon), "the page")
            again = start(*wanted[:3], str(daemon.config), "--end")
            assert again.returncode == 2 and "no such job of yours is silenced on this node" in again.stderr


def test_incident_without_processes_is_closed_after_a_restart(fake_driver: FakeDriver, tmp_path: Path) -> None:
    kept = {"directory": str(tmp_path / "kept")}
    with SimulatedNode(2) as node, RealDaemon(tmp_path / "hw0", fake_driver.environ, store=kept) as daemon:
        fake_driver.write([*h100(2), *(f"gpu {i} pids {pid}" for i, pid in enumerate(node.pids))])
        daemon.wait_for_state(node.run_id, "training")
        hang(daemon, node, fake_driver, 1)
        folder = Path(kept["directory"]) / "incidents" / _incident(daemon, node.run_id)
        wait_for((folder / "incident.json").exists, "the incident")
        daemon.process.kill()
    with RealDaemon(tmp_path / "hw1", fake_driver.environ, store=kept):
        wait_for(lambda: incident_file.load(folder).closed_unix_seconds, "the incident to be closed")
        last = incident_file.load(folder).timeline[-1]
        assert (last.state, last.message) == (JobState.ENDED, "its processes had ended when hangwatch restarted")


def test_second_daemon_reports_the_owner_of_the_directory_and_ends(fake_driver: FakeDriver, tmp_path: Path) -> None:
    with RealDaemon(tmp_path / "hw", fake_driver.environ) as daemon:
        second = start("run", "--config", str(daemon.config))
        assert second.returncode == 75, "systemd starts it again: the first one may be about to end"
        assert f"another hangwatch (pid {daemon.process.pid}) already uses this directory" in second.stderr
        assert "Traceback" not in second.stderr
        assert daemon.get("/healthz") == "ok\n"
    with RealDaemon(tmp_path / "hw", fake_driver.environ):
        pass


def _incident(daemon: RealDaemon, job_id: str) -> str:
    (row, _), *others = daemon.samples("hangwatch_incident_info", job_id=job_id)
    assert not others
    return row["incident"]


def test_corrupted_silences_do_not_stop_the_daemon(fake_driver: FakeDriver, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "silences.json").write_bytes(b"{")
    with RealDaemon(tmp_path, fake_driver.environ) as daemon:
        wait_for(lambda: re.search("silences.json|Traceback", daemon.log), "the file to be read")
        assert "silences.json" in daemon.log
        assert daemon.get("/healthz") == "ok\n"
